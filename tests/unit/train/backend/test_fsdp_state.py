"""The backend's state: saved and loaded it is the same run, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import state_in, stored
from tests.ranks import RankPool
from tests.tiny_policy import SMALL, Slope, policy, rewarded, rollout, rows_of, saved, train, weights_of
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.distributed.group.rank_info import RankInfo
from unirl.models.base import Bundle
from unirl.models.tiny import TinySD3
from unirl.sde.steps import Step
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.state import refuse_misfit, tensors_of
from unirl.train.dtensor import whole
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.rng import rng_state, set_rng_state
from unirl.types.condition import Embedding
from unirl.types.metric import values

FAST = AdamW(lr=1e-2, schedule="cosine")
ADAPTER = LoRA(rank=2, alpha=4)
GRPO = FlowGRPO(kl_coef=0.1)


def made(lora: LoRA | None = None, family: TinySD3 = SMALL) -> FSDPBackend:
    return policy(family, lora=lora, optimizer=FAST, ema=EMA(0.9), reference=True, total_steps=12, max_grad_norm=1.0)


def trained(backend: FSDPBackend, numbers: range, prompts: tuple[str, ...] = ("one", "two")) -> list[dict[str, float]]:
    """Reports of rollouts `numbers`, two updates each."""
    parts = ((number, rewarded(rollout(backend, number=number, prompts=prompts))) for number in numbers)
    return [values(train(backend, GRPO, part, num_updates_per_batch=2)) for _, part in parts]


def assert_equal(a: Any, b: Any) -> None:
    """The same bits, in tensors and counters; the global random state is not looked at."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert set(a) == set(b)
        for key in set(a) - {"rng"}:
            assert_equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    else:
        assert a == b


@dataclasses.dataclass(frozen=True)
class TwoBranches(TinySD3):
    """SMALL with a bias that only prompts of the word nine use."""

    layers: int = SMALL.layers
    heads: int = SMALL.heads
    head_dim: int = SMALL.head_dim
    embedding_dim: int = SMALL.embedding_dim

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        bundle = TinySD3.load(self, device, dtype, frozen_dtype=frozen_dtype)
        bundle.transformer.register_parameter("branch", torch.nn.Parameter(torch.zeros(1, self.size, self.size)))
        return bundle

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        velocity = TinySD3.predict(self, bundle, latents, step, embedding, guidance)
        nine = (embedding.tokens == self.vocabulary.index("nine") + 1).any(1)
        if not nine.any():
            return velocity
        branch = bundle.transformer.get_parameter("branch")
        return velocity + branch * nine[:, None, None, None]


# Round trips


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_a_state_comes_back_bit_for_bit_from_disk(lora: LoRA | None, background: bool, tmp_path: Path) -> None:
    backend = made(lora)
    trained(backend, range(2))
    before, fresh = saved(backend), made(lora)
    folder = stored(backend, tmp_path / "saved", background=background)
    streams = torch.rand(3)
    fresh.load(folder)
    assert torch.equal(torch.rand(3), streams)
    assert_equal(fresh.state(), before)
    assert_equal(state_in(folder), before)
    assert (before["steps"], before["ema_updates"], before["version"]) == (4, 4, 2)
    assert all(bool(moments["exp_avg_sq"].any()) for name, moments in before["optimizer"].items() if "to_v" in name)


def test_training_goes_on_while_a_state_is_written_and_changes_nothing_of_it(tmp_path: Path) -> None:
    straight, backend = made(), made()
    reports = trained(straight, range(4))
    trained(backend, range(2))
    before = saved(backend)
    backend.save(tmp_path, background=True)
    assert trained(backend, range(2, 4)) == reports[2:]
    assert set(backend.finish_save()) == {".metadata", "__0_0.distcp", "rank_0.pt"}
    assert not backend.saving()
    assert_equal(state_in(tmp_path), before)
    resumed = made()
    resumed.load(tmp_path)
    assert trained(resumed, range(2, 4)) == reports[2:]
    assert_equal(resumed.state(), straight.state())


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_stopped_and_loaded_a_run_goes_on_bit_for_bit(lora: LoRA | None, tmp_path: Path) -> None:
    straight = made(lora)
    reports = trained(straight, range(6))
    stopped = made(lora)
    trained(stopped, range(3))
    resumed = made(lora)
    resumed.load(stored(stopped, tmp_path / "saved"))
    assert trained(resumed, range(3, 6)) == reports[3:]
    assert_equal(resumed.state(), straight.state())


def test_right_after_loading_the_shadow_is_the_saved_one_and_the_reference_is_the_initial_policy(
    tmp_path: Path,
) -> None:
    backend = made()
    initial = weights_of(backend)
    trained(backend, range(2))
    shadow, fresh = saved(backend)["ema"], made()
    fresh.load(stored(backend, tmp_path / "saved"))
    assert any(not torch.equal(shadow[name], initial[name]) for name in shadow)
    with fresh.ema():
        assert_equal(weights_of(fresh), shadow)
    with fresh.reference():
        assert_equal(weights_of(fresh), initial)


def test_a_saved_state_can_be_loaded_twice(tmp_path: Path) -> None:
    backend = made()
    trained(backend, range(1))
    before, folder = saved(backend), stored(backend, tmp_path / "saved")
    for _ in range(2):
        fresh = made()
        fresh.load(folder)
        assert_equal(fresh.state(), before)
        trained(fresh, range(1, 2))
    assert_equal(state_in(folder), before)


def test_the_count_of_bad_gradients_in_a_row_survives(tmp_path: Path) -> None:
    backend = policy(max_skipped_steps=2)
    for _ in range(2):
        train(backend, Slope(), rows_of([float("inf")]))
    fresh = policy(max_skipped_steps=2)
    fresh.load(stored(backend, tmp_path / "saved"))
    with pytest.raises(FloatingPointError, match="not finite 3 times in a row"):
        train(fresh, Slope(), rows_of([float("inf")]))


def test_a_cosine_saved_at_its_half_is_at_its_half_after_loading(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": AdamW(lr=1.0, schedule="cosine"), "total_steps": 200}
    backend, fresh = policy(**settings), policy(**settings)
    for _ in range(100):
        train(backend, Slope(), rows_of([1.0]))
    fresh.load(stored(backend, tmp_path / "saved"))
    assert values(train(fresh, Slope(), rows_of([1.0])))["train/lr"] == pytest.approx(0.5, rel=1e-9)


# A parameter that never got a gradient


def test_a_branch_without_gradients_has_no_moments_until_it_is_used_after_a_resume_too(tmp_path: Path) -> None:
    family = TwoBranches()
    straight, stopped, resumed = (made(family=family) for _ in range(3))
    trained(straight, range(3))
    reports = trained(straight, range(3, 5), prompts=("nine", "nine"))
    trained(stopped, range(3))
    state = saved(stopped)
    assert "branch" in state["parameters"]
    assert "branch" not in state["optimizer"]
    resumed.load(stored(stopped, tmp_path / "saved"))
    assert_equal(resumed.state(), state)
    assert trained(resumed, range(3, 5), prompts=("nine", "nine")) == reports
    assert_equal(resumed.state(), straight.state())
    assert float(resumed.state()["optimizer"]["branch"]["step"]) == 4.0
    assert bool(resumed.state()["parameters"]["branch"].any())


def test_moments_of_a_branch_that_is_no_longer_used_are_kept(tmp_path: Path) -> None:
    backend = made(family=TwoBranches())
    trained(backend, range(1), prompts=("nine", "nine"))
    moments = saved(backend)["optimizer"]["branch"]
    trained(backend, range(1, 2))
    fresh = made(family=TwoBranches())
    fresh.load(stored(backend, tmp_path / "saved"))
    assert_equal(fresh.state()["optimizer"]["branch"], moments)


# What does not fit


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {**state, "parameters": {key: value for key, value in state["parameters"].items() if key != name}}


def with_parameter(state: dict[str, Any], name: str, value: torch.Tensor) -> dict[str, Any]:
    return {**state, "parameters": {**state["parameters"], name: value}}


def fit(state: dict[str, Any], backend: FSDPBackend, *, ema: bool = True) -> None:
    refuse_misfit(state, backend.stage.bundle.trainable, ema=ema)


def test_missing_and_unexpected_names_are_refused_by_name() -> None:
    state, backend = saved(made()), made()
    fit(state, backend)
    with pytest.raises(ValueError, match=r"1 missing \['words.weight'\], 0 unexpected \[\]"):
        fit(without(state, "words.weight"), backend)
    with pytest.raises(ValueError, match=r"0 missing \[\], 1 unexpected \['branch'\]"):
        fit(with_parameter(state, "branch", torch.zeros(1)), backend)


def test_another_shape_is_refused_even_one_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"words.weight was saved with the shape \(1, 16\), here it has \(13, 16\)"):
        fit(with_parameter(saved(made()), "words.weight", torch.zeros(1, 16)), made())


def test_an_ema_on_one_side_alone_is_refused() -> None:
    for one, other in ((made(), policy()), (policy(), made())):
        with pytest.raises(ValueError, match="disagree on whether there is an EMA"):
            fit(saved(one), other, ema=other.state()["ema"] is not None)


def test_a_folder_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    full = made()
    trained(full, range(1))
    folder = stored(full, tmp_path / "full")
    cases = [(made(ADAPTER), "does not fit the trainable weights"), (policy(), "disagree on whether there is an EMA")]
    wider = dataclasses.replace(SMALL, embedding_dim=32)
    cases.append((made(family=wider), r"was saved with the shape \(\d+, 16\), here it has \(\d+, 32\)"))
    for backend, message in cases:
        before, streams = saved(backend), rng_state()["torch"]
        with pytest.raises(ValueError, match=message):
            backend.load(folder)
        assert_equal(backend.state(), before)
        assert torch.equal(rng_state()["torch"], streams)


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path) -> None:
    folder = stored(made(ADAPTER), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"was saved with the shape \(2, 16\), here it has \(3, 16\)"):
        made(LoRA(rank=3, alpha=4)).load(folder)


def test_a_folder_without_moments_is_refused(tmp_path: Path) -> None:
    backend = made()
    trained(backend, range(1))
    backend._optimizer.state.clear()
    with pytest.raises(ValueError, match="taken 2 optimizer steps and holds no optimizer state"):
        made().load(stored(backend, tmp_path / "saved"))


# Several ranks


def on_rank(info: RankInfo) -> FSDPBackend:
    alone = made()
    return FSDPBackend.on_rank(
        info,
        SMALL,
        alone._config,
        device=torch.device("cpu"),
        seed=0,
        total_steps=12,
        with_reference=True,
    )


def draw() -> list[float]:
    return torch.rand(4).tolist()


def saved_on_a_rank(info: RankInfo, folder: Path) -> list[float]:
    """What the rank would have drawn next."""
    backend = on_rank(info)
    torch.manual_seed(100 + info.rank)
    draw()
    backend.save(folder, background=True)
    backend.finish_save()
    return draw()


def loaded_on_a_rank(info: RankInfo, folder: Path) -> list[float]:
    torch.manual_seed(1)
    on_rank(info).load(folder)
    return draw()


def test_every_rank_goes_on_with_its_own_stream_and_a_new_rank_gets_a_keyed_one(
    ranks: RankPool, tmp_path: Path
) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    alone.mkdir()
    both.mkdir()
    before = rng_state()
    try:
        first = saved_on_a_rank(RankInfo(0, 1), alone)
        streams = ranks(2, saved_on_a_rank, both)
        assert loaded_on_a_rank(RankInfo(0, 1), both) == first
    finally:
        set_rng_state(before)
    assert streams[0] == first != streams[1]
    assert ranks(2, loaded_on_a_rank, both) == streams
    joined, again = (ranks(2, loaded_on_a_rank, alone) for _ in range(2))
    assert joined == again
    assert joined[0] == first
    assert joined[1] not in streams


def stepped(info: RankInfo, folder: Path) -> dict[str, torch.Tensor]:
    """The whole state after a step along the sign of each weight, saved by two ranks that shard it."""
    backend = on_rank(info)
    for parameter in backend.stage.bundle.trainable.values():
        parameter.grad = parameter.detach().sign()
    backend.step()
    backend.save(folder, background=True)
    saved = {name: whole(value).clone() for name, value in tensors_of(backend.state()).items()}
    backend.finish_save()
    return saved


def reloaded(info: RankInfo, folder: Path) -> dict[str, torch.Tensor]:
    backend = on_rank(info)
    backend.load(folder)
    return {name: whole(value).clone() for name, value in tensors_of(backend.state()).items()}


def test_a_sharded_backend_is_loaded_by_one_rank_and_by_two(ranks: RankPool, tmp_path: Path) -> None:
    saved, _ = ranks(2, stepped, tmp_path)
    assert any(bool(value.any()) for name, value in saved.items() if name.endswith("exp_avg"))
    before = rng_state()
    try:
        assert_equal(reloaded(RankInfo(0, 1), tmp_path), saved)
    finally:
        set_rng_state(before)
    for found in ranks(2, reloaded, tmp_path):
        assert_equal(found, saved)


def fails_on_one(info: RankInfo, folder: Path) -> str:
    backend = on_rank(info)
    with pytest.raises(ValueError, match="is missing") as refused:
        backend.load(folder if info.rank == 0 else folder / "elsewhere")
    return str(refused.value.__notes__)


def test_a_load_that_fails_on_one_rank_fails_on_all(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, saved_on_a_rank, tmp_path)
    assert ranks(2, fails_on_one, tmp_path) == ["['on rank 1 of 2']"] * 2
