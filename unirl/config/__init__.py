"""From a recipe to typed settings, before any weight loads.

recipes.py      which recipes are shipped, and which config class reads a domain
compose.py      recipe + overrides -> one resolved plain dict (the only file that knows Hydra and OmegaConf)
load.py         plain dict -> frozen dataclasses, strictly; and back
target.py       `_target_: module.Class` -> the class
imports.py      modules that users write, and what is wrong with them
error.py        what is wrong with a recipe, all of it at once
lazy.py         torch and its kin are imported when first used, so that a recipe is checked in a second
environment.py  every environment variable that UniRL reads or sets
run.py          what all entrypoints do first: the lines above in order
"""
