"""The trainer of each kind of run."""

from __future__ import annotations

from unirl.trainer.ar import ARConfig, ARTrainer
from unirl.trainer.base import Trainer
from unirl.trainer.diffusion import DiffusionConfig, DiffusionTrainer
from unirl.trainer.flow_sft import FlowSFTTrainer, SFTConfig
from unirl.trainer.text_sft import TextSFTConfig, TextSFTTrainer

RunnableConfig = ARConfig | DiffusionConfig | SFTConfig | TextSFTConfig


def trainer_of(config: RunnableConfig) -> Trainer:
    """The trainer that a configuration is for."""
    match config:
        case ARConfig():
            return ARTrainer(config)
        case DiffusionConfig():
            return DiffusionTrainer(config)
        case SFTConfig():
            return FlowSFTTrainer(config)
        case TextSFTConfig():
            return TextSFTTrainer(config)
