<<<<<<< HEAD
"""From samples with advantages to new weights: structure (LoRA, EMA), optimizer, batch geometry, checkpoints."""
=======
"""One update of the policy: backend, optimizer, batch geometry, checkpoints."""
>>>>>>> dist
