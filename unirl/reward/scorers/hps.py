"""HPSv2 and HPSv2.1 (arXiv 2306.09341): CLIP trained on which of several pictures people prefer for a prompt."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
import transformers

from unirl.models.pretrained import check_checkpoint, resolve
from unirl.reward.clip import MEAN, STD, Clip
from unirl.reward.model_scorer import Card, ModelScorer
from unirl.reward.prompts import PromptTokens
from unirl.reward.scorer import ScorerInput
from unirl.reward.weights import check_file, file_of, fill, read_weights

_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
# Names of open_clip: the towers, then what is in a block of them.
_NAMES = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_PROJECTIONS = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)")
_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HPSv2(ModelScorer):
    """`cos(prompt, picture)`: 0.15 to 0.35 as a rule, higher is better; papers print 100 times that.

    Compares pictures of one prompt by one release only. A picture is scaled, as a tensor, until its longer side fits,
    and padded with black; a prompt is cut after 77 tokens. CLIP ViT-H/14, 986 M parameters, Apache-2.0.

    release:    of the weights
    antialias:  of that scaling: True as with torchvision from 0.17; False as before, when the tables were made
    checkpoint: hub id or folder of the release's file, with the names of open_clip
    clip:       hub id or folder of the architecture and its tokenizer, of which no weights are used
    """

    reads = frozenset({"picture"})

    card = Card(
        looks_at="image with prompt",
        range="about 0.15 to 0.35",
        unit="cosine",
        licence="Apache-2.0",
        checkpoints=("xswu/HPSv2",),
        preprocessing="tensor-bicubic-pad",
    )

    release: Literal["v2.0", "v2.1"] = "v2.1"
    antialias: bool = True
    checkpoint: str = "xswu/HPSv2"
    clip: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_file(self.checkpoint, _FILES[self.release])
        check_checkpoint(self.clip, "CLIPModel", index="config.json")

    @property
    def variant(self) -> str:
        return f"{self.card.preprocessing}-{'antialiased' if self.antialias else 'aliased'}"

    def load(self, device: torch.device, dtype: torch.dtype) -> Clip:
        folder, file = resolve(self.clip), file_of(self.checkpoint, _FILES[self.release])
        config: Any = transformers.CLIPConfig.from_pretrained(folder)
        if {config.text_config.hidden_act, config.vision_config.hidden_act} != {"gelu"}:
            raise ValueError(f"{self.clip} is not the CLIP of HPSv2: its activation must be gelu")
        model: Any = transformers.CLIPModel(config)
        fill(model, clip_names(read_weights(file)), str(file))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        length = config.text_config.max_position_embeddings
        return Clip(model.to(device, dtype).eval(), PromptTokens(tokenizer, length))

    def modules(self, loaded: Clip) -> Iterable[torch.nn.Module]:
        return [loaded.model]

    def judge(self, loaded: Clip, samples: list[ScorerInput]) -> list[float]:
        side, device = loaded.model.config.vision_config.image_size, loaded.model.device
        values = [padded_pixels(sample.picture, side, device, antialias=self.antialias) for sample in samples]
        prompts = [html.unescape(html.unescape(sample.prompt)) for sample in samples]  # as open_clip does
        return (loaded.embed_pixels(torch.cat(values)) * loaded.embed_prompts(prompts)).sum(-1).tolist()


def padded_pixels(picture: np.ndarray, side: int, device: torch.device, *, antialias: bool) -> torch.Tensor:
    """A picture `(H, W, 3)` uint8 -> `(1, 3, side, side)`, in its aspect, normalised after padding with black."""
    values = torch.tensor(picture, device=device).permute(2, 0, 1)[None].float() / 255
    height, width = picture.shape[:2]
    scale = side / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    if size != (height, width):
        # No clamp: bicubic overshoots by up to 8 levels, and so it was trained.
        values = torch.nn.functional.interpolate(values, size, mode="bicubic", align_corners=False, antialias=antialias)
    left, top = (side - size[1]) // 2, (side - size[0]) // 2
    values = torch.nn.functional.pad(values, (left, side - size[1] - left, top, side - size[0] - top))
    mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (MEAN, STD))
    return (values - mean) / std


def clip_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of an open_clip model under the names of transformers' CLIPModel; unknown names stay as they are."""
    renamed: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        block = _BLOCK.fullmatch(name)
        if block is not None:
            tower, layer, part, kind = block.groups()
            stem = f"{'vision_model' if tower else 'text_model'}.encoder.layers.{layer}"
            if part == "attn.in_proj":
                for axis, rows in zip("qkv", value.chunk(3), strict=True):
                    renamed[f"{stem}.self_attn.{axis}_proj.{kind}"] = rows
            else:
                renamed[f"{stem}.{_PARTS.get(part, part)}.{kind}"] = value
        elif name in _PROJECTIONS:
            renamed[_PROJECTIONS[name]] = value.T
        else:
            renamed[_NAMES.get(name, name)] = value
    return renamed
