"""From samples with advantages to new weights: structure (LoRA, EMA), optimizer, batch geometry, checkpoints."""
