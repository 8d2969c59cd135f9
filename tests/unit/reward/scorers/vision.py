"""Tiny vision-language models whose tokenizer knows a few words, and transformers' own answers to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from unirl.models.random_weights.parts import qwen_tokenizer, redraw
from unirl.models.random_weights.qwen_image import qwen2_5_vl_config
from unirl.models.random_weights.qwen_image_2_1 import qwen3_vl_config

NAMES = ("qwen2_5_vl", "qwen3_vl")
WORDS = ("Yes", "yes", "one", "One", "two", "Two")
_MODELS = {
    "qwen2_5_vl": (qwen2_5_vl_config, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (qwen3_vl_config, transformers.Qwen3VLForConditionalGeneration),
}


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, and each of WORDS as one token, with a blank before it and without."""
    from tokenizers import Tokenizer

    whole = qwen_tokenizer(padding_side="left")
    state = json.loads(whole.backend_tokenizer.to_str())
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    for word in WORDS:
        pairs = [(word[:end], word[end]) for end in range(1, len(word))] + [("Ġ", word)]
        for left, right in pairs:
            merges += [] if [left, right] in merges else [[left, right]]
            vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=whole.eos_token,
        pad_token=whole.pad_token,
        model_max_length=2048,
        padding_side="left",
    )
    tokenizer.chat_template = whole.chat_template
    return tokenizer


def write_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    """A checkpoint with random weights."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_config, kind = _MODELS[name]
    config: Any = make_config()
    tokenizer = word_tokenizer()
    config.text_config.vocab_size, config.text_config.max_position_embeddings = len(tokenizer), 2048
    model: Any = kind(config)
    redraw([model], seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    patch = config.vision_config.patch_size
    size = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    Qwen2VLImageProcessorPil(patch_size=patch, size=size).save_pretrained(folder)
    return folder


def noise(height: int, width: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


class Own:
    """The checkpoint as transformers loads it, asked as its documentation says."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._pictures: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def inputs(self, picture: np.ndarray, text: str) -> dict[str, torch.Tensor]:
        """One question about one picture, a placeholder for each of its features."""
        cut = self._pictures(images=[picture], return_tensors="pt")
        marks = "<|image_pad|>" * (int(cut["image_grid_thw"].prod()) // 4)
        prompt = f"<|im_start|>user\n<|vision_start|>{marks}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
        tokens = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        kinds = (tokens == self.model.config.image_token_id).int()
        return {"input_ids": tokens, "mm_token_type_ids": kinds, **cut}

    @torch.no_grad()
    def generated(self, picture: np.ndarray, text: str) -> torch.Tensor:
        """`(V,)` probabilities of the first token that `generate` writes."""
        inputs = self.inputs(picture, text)
        written = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return written.logits[0][0].softmax(-1)

    @torch.no_grad()
    def padded(self, picture: np.ndarray, texts: list[str]) -> torch.Tensor:
        """`(Q, V)` float64 probabilities of the token after each question, from one batch padded on the left."""
        rows = [self.inputs(picture, text) for text in texts]
        longest = max(row["input_ids"].shape[1] for row in rows)
        batch = {
            name: torch.cat(
                [torch.nn.functional.pad(row[name], (longest - row[name].shape[1], 0), value=pad) for row in rows]
            )
            for name, pad in {"input_ids": 0, "mm_token_type_ids": 0}.items()
        }
        real = [torch.arange(longest) >= longest - row["input_ids"].shape[1] for row in rows]
        pictures = {name: torch.cat([row[name] for row in rows]) for name in ("pixel_values", "image_grid_thw")}
        logits = (
            self.model(**batch, **pictures, attention_mask=torch.stack(real).long(), logits_to_keep=1, use_cache=False)
            .logits[:, 0]
            .double()
        )
        return (logits - logits.logsumexp(-1, keepdim=True)).exp()
