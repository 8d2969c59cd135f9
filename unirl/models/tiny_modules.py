"""The module of TinySD3; apart, because defining an nn.Module loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import nn

if TYPE_CHECKING:
    from unirl.models.tiny import TinySD3


class WordConditionedSD3(nn.Module):
    """SD3Transformer2DModel whose text condition is a learned embedding of word ids."""

    def __init__(self, settings: TinySD3) -> None:
        super().__init__()
        self.words = nn.Embedding(len(settings.vocabulary) + 1, settings.embedding_dim)
        width = settings.heads * settings.head_dim
        self.backbone = SD3Transformer2DModel(
            sample_size=settings.size,
            patch_size=settings.patch,
            in_channels=settings.channels,
            out_channels=settings.channels,
            num_layers=settings.layers,
            num_attention_heads=settings.heads,
            attention_head_dim=settings.head_dim,
            joint_attention_dim=settings.embedding_dim,
            caption_projection_dim=width,
            pooled_projection_dim=settings.embedding_dim,
            pos_embed_max_size=settings.size // settings.patch,
        )

    def enable_gradient_checkpointing(self) -> None:
        """As diffusers' modules name it."""
        self.backbone.enable_gradient_checkpointing()

    def forward(self, latents: torch.Tensor, time: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """latents `(B, C, H, W)`, model time `(B,)`, word ids `(B, L)` -> the shape of latents."""
        embedded = self.words(tokens)
        return self.backbone(latents, embedded, embedded.mean(1), time, return_dict=False)[0]
