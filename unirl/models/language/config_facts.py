"""What the config of a transformers model says that its forward on a few short rows does not show."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def context_length(config: Any) -> int:
    """The most tokens of a row, by a text config.

    Longrope takes other frequencies for the whole forward where one row passes its original length, so that a row would
    depend on those beside it and keys that are cached on what comes later: rows end there.
    """
    rope = _rope_parameters(config)
    bounds = [each["original_max_position_embeddings"] for each in rope if each["rope_type"] == "longrope"]
    return min([config.max_position_embeddings, *bounds])


def refuse_unshown(config: Any, windows: Collection[int | None]) -> None:
    """ValueError where a text config asks for more than packed attention does. windows: that its layers asked for."""
    settings: dict[str, Any] = config.to_dict()
    caps = {name: value for name, value in settings.items() if name.endswith("softcapping") and value is not None}
    if caps:
        raise ValueError(f"model type {config.model_type} caps its scores or logits ({caps}), which is not supported")
    kinds = settings.get("layer_types")
    other = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    if other:
        raise ValueError(f"model type {config.model_type} has layers of {other}, which are not supported")
    window = settings.get("sliding_window")
    slides = window is not None if kinds is None else "sliding_attention" in kinds
    if slides and window not in windows:
        raise ValueError(
            f"model type {config.model_type} has a window of {window} tokens in its mask and does not tell its "
            "attention layers, so that it would be left out; with sliding_window=null in its config it runs"
        )


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of the model, or of each kind of its layers."""
    parameters: dict[str, Any] = config.to_dict().get("rope_parameters") or {}
    return [parameters] if "rope_type" in parameters else [kind for kind in parameters.values() if kind]
