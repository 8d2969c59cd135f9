"""Scorers, one file each. None of these modules loads a model library before its first score."""
