"""Remotes, their handles, and the slab of ranks they live in. See README.md in this folder."""
