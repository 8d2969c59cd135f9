"""Reinforcement learning of a diffusion model: `python -m unirl.train_diffusion diffusion/digits run.steps=10`."""

from __future__ import annotations

import sys

from unirl.config.run import load_run


def main() -> None:
    config = load_run("diffusion", sys.argv[1:])  # sets the environment, which must be done before torch loads
    from unirl.trainer.base import run
    from unirl.trainer.diffusion import DiffusionTrainer

    raise SystemExit(run(DiffusionTrainer(config)))


if __name__ == "__main__":
    main()
