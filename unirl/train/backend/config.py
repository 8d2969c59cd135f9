"""Settings of a backend: what all share, and what belongs to the stage that it holds."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Generic, Literal, TypeVar

import torch

from unirl.models.ar_stage import ARStage
from unirl.models.base import Bundle, DiffusionFamily, Family, LanguageFamily
from unirl.models.diffusion_stage import DiffusionStage
from unirl.models.language.value_head import value_head
from unirl.models.policy import Trainable
from unirl.train.backend.sharding import Sharding
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW

FamilyT = TypeVar("FamilyT", bound=Family)
StageT = TypeVar("StageT", bound=Trainable)


@dataclasses.dataclass(frozen=True)
class BackendConfig(ABC, Generic[FamilyT, StageT]):
    """optimizer:              AdamW and its schedule
    lora:                   adapters; None trains all weights of what the family trains
    ema:                    a moving average of the trainable weights
    max_grad_norm:          clip to this norm; None only measures it
    max_skipped_steps:      non-finite gradients skip the step; more than this many in a row stop the run
    compute_dtype:          of the forward; auto is bfloat16 on CUDA and float32 on a CPU. Masters are always float32
    gradient_checkpointing: recompute the blocks in backward
    sharding:               how weights are spread over several ranks
    """

    optimizer: AdamW = dataclasses.field(default_factory=AdamW)
    lora: LoRA | None = None
    ema: EMA | None = None
    max_grad_norm: float | None = 1.0
    max_skipped_steps: int = 10
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool = False
    sharding: Sharding = dataclasses.field(default_factory=Sharding)

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or null, got {self.max_grad_norm}")
        if self.max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps must not be negative, got {self.max_skipped_steps}")

    @abstractmethod
    def stage(self, family: FamilyT, bundle: Bundle, compute_dtype: torch.dtype) -> StageT:
        """The trainable unit that the backend holds."""


@dataclasses.dataclass(frozen=True)
class DiffusionBackendConfig(BackendConfig[DiffusionFamily, DiffusionStage]):
    """guidance_gradient: whether the unconditional branch carries gradient"""

    guidance_gradient: bool = True

    def stage(self, family: DiffusionFamily, bundle: Bundle, compute_dtype: torch.dtype) -> DiffusionStage:
        return DiffusionStage(family, bundle, guidance_gradient=self.guidance_gradient, compute_dtype=compute_dtype)


@dataclasses.dataclass(frozen=True)
class ARBackendConfig(BackendConfig[LanguageFamily, ARStage]):
    """critic: whether the model gets a value head"""

    critic: bool = False

    def stage(self, family: LanguageFamily, bundle: Bundle, compute_dtype: torch.dtype) -> ARStage:
        if self.critic:
            bundle.critic = value_head(family.hidden_size(bundle), bundle.device)
        return ARStage(family, bundle, compute_dtype=compute_dtype)
