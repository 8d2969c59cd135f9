"""Supervised fine-tuning: `python -m unirl.train_sft sft/digits run.steps=10`."""

from __future__ import annotations

import sys

from unirl.config.run import load_run


def main() -> None:
    config = load_run("sft", sys.argv[1:])  # sets the environment, which must be done before torch loads
    from unirl.trainer.base import run
    from unirl.trainer.domains import trainer_of

    raise SystemExit(run(trainer_of(config)))


if __name__ == "__main__":
    main()
