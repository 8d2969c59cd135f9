"""Reinforcement learning of a language model: `python -m unirl.train_ar ar/sort run.steps=10`."""

from __future__ import annotations

import sys

from unirl.config.run import load_run


def main() -> None:
    config = load_run("ar", sys.argv[1:])  # sets the environment, which must be done before torch loads
    from unirl.trainer.ar import ARTrainer
    from unirl.trainer.base import run

    raise SystemExit(run(ARTrainer(config)))


if __name__ == "__main__":
    main()
