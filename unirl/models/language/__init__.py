"""Diffusion families, one file each: what is a family's own, and nothing else."""
