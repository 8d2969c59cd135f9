"""UniRL: reinforcement learning for generative models, from a laptop to a cluster with one recipe."""

__version__ = "0.1.0"
