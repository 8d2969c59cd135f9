"""Whole pipelines of every family, tiny and random, for `checkpoint: random:NAME`: one module a family."""
