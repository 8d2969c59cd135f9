"""One update of the policy: backend, optimizer, batch geometry, checkpoints."""
