"""The loops: a trainer introduces stages to each other and reads like the lifecycle it runs."""
