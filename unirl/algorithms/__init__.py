"""Losses (pure functions) and algorithms (one estimator a file)."""
