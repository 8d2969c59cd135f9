"""A scorer with weights over HTTP: one load, the local numbers, and a version that is that of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tests.unit.reward.http.live import live, remote
from tests.unit.reward.samples import entry
from unirl.reward.model_scorer import Card, ModelScorer
from unirl.reward.scorer import ScorerInput, Unscored


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dot(ModelScorer):
    """The product of the first pixel with three weights of a file."""

    card: ClassVar[Card] = Card("image", "any", "none", "none", ("nobody/dot",), "first pixel")
    checkpoint: Path
    loads: list[Path] = dataclasses.field(default_factory=list, init=False)

    def load(self, device: torch.device, dtype: torch.dtype) -> torch.nn.Linear:
        self.loads.append(self.checkpoint)
        model = torch.nn.Linear(3, 1, bias=False)
        model.load_state_dict(torch.load(self.checkpoint, weights_only=True))
        return model.to(device, dtype).eval()

    def modules(self, loaded: Any) -> Iterable[torch.nn.Module]:
        return [loaded]

    def judge(self, loaded: Any, samples: list[ScorerInput]) -> list[float]:
        pixels = np.stack([sample.picture[0, 0] for sample in samples])
        return loaded(torch.from_numpy(pixels).float())[:, 0].tolist()


def weights(folder: Path, first: float) -> Path:
    torch.save({"weight": torch.tensor([[first, -0.7, 1.3]])}, folder / f"{first}.pt")
    return folder / f"{first}.pt"


def test_one_load_serves_the_local_numbers_and_other_weights_serve_none(tmp_path):
    rng = np.random.default_rng(0)
    samples = [entry(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)) for _ in range(20)]
    one, two = Dot(checkpoint=weights(tmp_path, 0.1)), Dot(checkpoint=weights(tmp_path, 0.2))
    with live({"dot": one}) as url:
        scorer = remote(url, "dot")
        assert scorer.score(samples) == Dot(checkpoint=one.checkpoint).score(samples)
        assert scorer.score(samples[3:4]) == Dot(checkpoint=one.checkpoint).score(samples[3:4])
    assert one.loads == [one.checkpoint]
    with live({"dot": two}, port=int(url.rpartition(":")[2])):
        (refused,) = scorer.score(samples[:1])
    assert isinstance(refused, Unscored)
    assert refused.cause.startswith(
        f"{url}: scorer 'dot' is now version '{two.version()}', and was '{one.version()}' (try "
    )
