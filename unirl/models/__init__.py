"""Model families, and the stages that roll them out and replay them. Modules come from diffusers and transformers."""
