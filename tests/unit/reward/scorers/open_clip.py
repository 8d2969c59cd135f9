"""CLIP with the names and the arithmetic of open_clip, out of torch's own attention: what HPSv2's weights belong to."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from tests.unit.reward.scorers.tiny_clip import SIDE, WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        layers = {"c_fc": nn.Linear(WIDTH, 2 * WIDTH), "gelu": nn.GELU(), "c_proj": nn.Linear(2 * WIDTH, WIDTH)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(WIDTH))
        self.positional_embedding = nn.Parameter(torch.empty((SIDE // 8) ** 2 + 1, WIDTH))
        self.ln_pre, self.transformer, self.ln_post = nn.LayerNorm(WIDTH), Transformer(), nn.LayerNorm(WIDTH)
        self.proj = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(patches), 1, -1), patches], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """Random, with the tokens of `clip_tokenizer`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.visual, self.transformer, self.ln_final = Visual(), Transformer(), nn.LayerNorm(WIDTH)
        self.token_embedding = nn.Embedding(258, WIDTH)
        self.positional_embedding = nn.Parameter(torch.empty(77, WIDTH))
        self.text_projection = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(4.6))
        draws = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draws) / 3

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf, dtype=self.text_projection.dtype).triu(1)
        x = self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]
        return self.ln_final(self.transformer(x, mask))[:, -1] @ self.text_projection
