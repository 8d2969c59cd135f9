"""The cases: one file a family, each with `CASES`. The contract test finds them."""
