"""`python -m benchmarks.model_sizes`: memory of a rank for four published models, as docs/scaling.md shows it.

Their weights are counted on the library's own classes, on the meta device: nothing is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from unirl.models.base import Family
from unirl.models.diffusion.qwen_image import QwenImage
from unirl.models.diffusion.sd3 import SD3
from unirl.models.diffusion.wan import Wan21
from unirl.models.language.causal_lm import CausalLM
from unirl.train.memory import COMPUTE, MASTER, ModelSize, rank_memory

GIB = 2**30
SHARDS = (1, 8, 64)


@dataclasses.dataclass(frozen=True)
class Published:
    """A model as its checkpoint describes it. blocks: class names; rank: of LoRA in the recipe."""

    name: str
    transformer: Callable[[], torch.nn.Module]
    frozen: tuple[Callable[[], torch.nn.Module], ...]
    family: type[Family]
    blocks: tuple[str, ...]
    rank: int

    def size(self) -> ModelSize:
        """Its weights, counted."""
        with torch.device("meta"):
            transformer, frozen = self.transformer(), [build() for build in self.frozen]
        blocks = [count(module) for module in transformer.modules() if type(module).__name__ in self.blocks]
        targets = tuple(f".{target}" for target in self.family.lora_targets)
        linear = [
            layer
            for name, layer in transformer.named_modules()
            if isinstance(layer, torch.nn.Linear) and f".{name}".endswith(targets)
        ]
        return ModelSize(
            transformer=count(transformer),
            adapters=sum(self.rank * (layer.in_features + layer.out_features) for layer in linear),
            block=max(blocks),
            outside=count(transformer) - sum(blocks),
            frozen=sum(map(count, frozen)),
        )


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def memory_table(models: tuple[Published, ...]) -> str:
    """GiB of a rank in an optimizer step and in a rollout, in Markdown."""
    heads = [f"{shards} {'ranks share' if shards > 1 else 'rank alone'}" for shards in SHARDS]
    lines = [f"| model | trained | frozen | {' | '.join(heads)} |", "|---|---|---|" + "---|" * len(SHARDS)]
    for model in models:
        size = model.size()
        for lora in (True, False):
            cells = []
            for shards in SHARDS:
                memory = rank_memory(size, lora=lora, shards=shards)
                cells.append(f"{memory.training / GIB:.1f} / {memory.rollout / GIB:.1f}")
            trained = (
                f"LoRA {model.rank}, {size.adapters / 1e6:.0f} M" if lora else f"all, {size.transformer / 1e9:.1f} B"
            )
            lines.append(f"| {model.name} | {trained} | {size.frozen * COMPUTE / GIB:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def traffic_table(models: tuple[Published, ...], shards: int = 8) -> str:
    """GiB that each of `shards` ranks receives, in Markdown."""
    share = (shards - 1) / shards / GIB
    lines = [
        "| model | weights for a rollout | weights for a forward and backward | gradients, LoRA | gradients, all |"
    ]
    lines.append("|---|---|---|---|---|")
    for model in models:
        size = model.size()
        gathered = COMPUTE * size.transformer * share
        cells = (gathered, 2 * gathered, MASTER * size.adapters * share, MASTER * size.transformer * share)
        lines.append(f"| {model.name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def sample_table() -> str:
    """MiB that one sample leaves with the rank that made it, in Markdown."""
    samples = {  # latents (positions x latent) and what is seen are float32, encoded prompts (two branches) bfloat16
        "SD3.5-M, 512 x 512, 10 steps": (11 * 16 * 64**2, 2 * (77 + 128) * 4096, 3 * 512**2),
        "Qwen-Image, 512 x 512, 2 of 10 steps": (5 * 16 * 64**2, 2 * 64 * 3584, 3 * 512**2),
        "Wan 2.1 14B, 33 x 480 x 832, 20 steps": (21 * 16 * 9 * 60 * 104, 2 * 512 * 4096, 33 * 3 * 480 * 832),
    }
    lines = ["| sample | latents | encoded prompts | what a person sees |", "|---|---|---|---|"]
    for name, (latents, prompts, seen) in samples.items():
        cells = (MASTER * latents, COMPUTE * prompts, MASTER * seen)
        lines.append(f"| {name} | {' | '.join(f'{cell / 2**20:.1f}' for cell in cells)} |")
    lines.append(
        f"| Qwen3-8B, 512 + 3000 tokens | 0 | {512 * 8 / 2**20:.3f} | {3000 * 13 / 2**20:.3f}, on the driver |"
    )
    return "\n".join(lines)


def _sd3() -> torch.nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=128,
        num_layers=24,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    )


def _clip(width: int, layers: int, heads: int) -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        projection_dim=width,
    )
    return CLIPTextModelWithProjection(config)


_T5_XXL: dict[str, Any] = {
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


def _t5() -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=32128, **_T5_XXL))


def _umt5() -> torch.nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(vocab_size=256384, **_T5_XXL))


def _picture_autoencoder() -> torch.nn.Module:
    from diffusers import AutoencoderKL

    settings: dict[str, Any] = {
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return AutoencoderKL(**settings)


def _video_autoencoder() -> torch.nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan()


def _qwen_image() -> torch.nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel()


def _qwen2_5_vl() -> torch.nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    vision = {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _wan() -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel()


def _qwen3() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


MODELS = (
    Published(
        "SD3.5-M",
        _sd3,
        (_t5, lambda: _clip(768, 12, 12), lambda: _clip(1280, 32, 20), _picture_autoencoder),
        SD3,
        ("JointTransformerBlock",),
        rank=32,
    ),
    Published("Qwen-Image", _qwen_image, (_qwen2_5_vl, _video_autoencoder), QwenImage, QwenImage.block_names, rank=64),
    Published("Wan 2.1 14B", _wan, (_umt5, _video_autoencoder), Wan21, Wan21.block_names, rank=32),
    Published("Qwen3-8B", _qwen3, (), CausalLM, ("Qwen3DecoderLayer",), rank=32),
)


def tables() -> str:
    """What docs/scaling.md holds."""
    return "\n\n".join((memory_table(MODELS), traffic_table(MODELS), sample_table()))


if __name__ == "__main__":
    print(tables())
