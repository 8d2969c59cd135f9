"""The trainer of each kind of run."""

from __future__ import annotations

from unirl.trainer.ar import ARConfig, ARTrainer
from unirl.trainer.base import Trainer
from unirl.trainer.diffusion import DiffusionConfig, DiffusionTrainer
from unirl.trainer.sft import SFTConfig, SFTTrainer

RunnableConfig = ARConfig | DiffusionConfig | SFTConfig


def trainer_of(config: RunnableConfig) -> Trainer:
    """The trainer that a configuration is for."""
    match config:
        case ARConfig():
            return ARTrainer(config)
        case DiffusionConfig():
            return DiffusionTrainer(config)
        case SFTConfig():
            return SFTTrainer(config)
