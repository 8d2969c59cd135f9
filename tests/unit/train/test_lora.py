"""Adapters: what they wrap, how they start, and that switching them off and on leaves no trace."""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import AbstractContextManager

import pytest
import torch

from tests.unit.models.rollouts import CPU, gradients
from unirl.models.diffusion_stage import DiffusionStage
from unirl.models.tiny import TinySD3
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.lora import LoRA, inject, switched_off
from unirl.types.condition import Conditions
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

GUIDED = DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5)

TINY = TinySD3(layers=2, head_dim=8, embedding_dim=16)
LORA = LoRA(rank=4, alpha=8)


def backend_of(lora: LoRA | None = LORA, *, seed: int = 0, ema: EMA | None = None, **settings: object) -> FSDPBackend:
    config = DiffusionBackendConfig(lora=lora, ema=ema, **settings)  # type: ignore[arg-type]
    return FSDPBackend(TINY, config, device=CPU, seed=seed, total_steps=10, with_reference=True)


def trained(backend: FSDPBackend) -> FSDPBackend:
    """The backend as if it had trained: no trainable weight is 0."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable(backend.stage.bundle.transformer).values():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.2)
    return backend


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def state_of(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    return {
        name: (parameter.detach().clone(), parameter.requires_grad) for name, parameter in module.named_parameters()
    }


def same(a: dict[str, tuple[torch.Tensor, bool]], b: dict[str, tuple[torch.Tensor, bool]]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n][0], b[n][0]) and a[n][1] == b[n][1] for n in a)


def velocity(policy: FSDPBackend | DiffusionStage) -> torch.Tensor:
    """Of three fixed points."""
    stage = policy.stage if isinstance(policy, FSDPBackend) else policy
    conditions = Conditions(positive=TINY.encode(stage.bundle, Media(texts=["a handwritten seven"]), GUIDED))
    latents = torch.randn(1, 3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([[0.2, 0.5, 0.9]])
    return stage.velocity(conditions, latents, sigma=sigma, time=sigma * 1000, guidance=1.0)


def base_velocity(*, trainable: bool = False) -> torch.Tensor:
    """Of the weights as they are loaded. torch multiplies by a weight that wants a gradient in another order."""
    bundle = TINY.load(CPU, torch.float32)
    bundle.transformer.requires_grad_(trainable)
    return velocity(DiffusionStage(TINY, bundle, guidance_gradient=True, compute_dtype=torch.float32))


def six_layers() -> torch.nn.Module:
    return torch.nn.Sequential(OrderedDict((f"{kind}_proj", torch.nn.Linear(4, 4)) for kind in "qkvoud"))


def test_a_new_adapter_is_the_identity() -> None:
    assert torch.equal(velocity(backend_of()), base_velocity())


def test_an_adapter_adds_alpha_over_rank_times_b_a() -> None:
    module = torch.nn.Sequential(OrderedDict(q=torch.nn.Linear(3, 2, bias=False)))
    base = module.get_parameter("q.weight").detach().clone()
    inject(module, LoRA(rank=4, alpha=10), ("q",), seed=0)
    a, b = trainable(module).values()
    b.data.normal_()
    x = torch.randn(5, 3)
    torch.testing.assert_close(module(x), x @ (base + 10 / 4 * b @ a).T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_depends_on_its_seed_alone(dtype: torch.dtype) -> None:
    def drawn(seed: int, *, base: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        bundle = TINY.load(CPU, base)
        before = torch.get_rng_state()
        inject(bundle.transformer, LORA, TINY.lora_targets, seed)
        assert torch.equal(torch.get_rng_state(), before)
        return {name: parameter.detach() for name, parameter in trainable(bundle.transformer).items()}

    torch.manual_seed(1)
    first = drawn(7)
    torch.manual_seed(2)
    again = drawn(7, base=dtype)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = drawn(8)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    matrices = [value for name, value in first.items() if "lora_A" in name]
    assert len({value.sum().item() for value in matrices}) == len(matrices)
    for value in matrices:  # Kaiming with a = sqrt(5): uniform within 1 / sqrt(fan in)
        assert 0.9 < float(value.abs().max()) * math.sqrt(value.shape[1]) <= 1


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [LORA, None])
def test_everything_that_trains_is_float32(lora: LoRA | None, compute_dtype: str) -> None:
    module = backend_of(lora, compute_dtype=compute_dtype).stage.bundle.transformer
    assert {parameter.dtype for parameter in trainable(module).values()} == {torch.float32}
    frozen = {parameter.dtype for parameter in module.parameters() if not parameter.requires_grad}
    assert frozen == ({getattr(torch, compute_dtype)} if lora else set())


def test_a_thousand_small_steps_arrive() -> None:
    module = torch.nn.Sequential(OrderedDict(q=torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)))
    inject(module, LoRA(rank=1, alpha=1), ("q",), seed=0)
    b = trainable(module)["q.lora_B.default.weight"]
    b.data.fill_(1.0)
    optimizer = torch.optim.SGD([b], lr=1e-3)
    for _ in range(1000):
        b.grad = torch.ones_like(b)
        optimizer.step()
    assert abs(b.item()) < 1e-4  # in bfloat16 it would still be 1


def test_only_adapters_train_and_each_of_them_gets_a_gradient() -> None:
    backend = trained(backend_of())
    module = backend.stage.bundle.transformer
    velocity(backend).square().sum().backward()
    grads = gradients(module)
    wrapped = [name for name, layer in module.named_modules() if "lora_A" in dict(layer.named_children())]
    assert len(wrapped) == 7 + 7  # to_add_out is not among this family's targets
    assert set(grads) == {f"{name}.lora_{side}.default.weight" for name in wrapped for side in "AB"}
    silent = {name for name, gradient in grads.items() if not gradient.any()}
    # The text stream ends in the last block: what makes its queries there reaches nothing.
    assert silent == {name for name in grads if "transformer_blocks.1.attn.add_q_proj" in name}


def test_a_target_that_matches_no_layer_is_named() -> None:
    with pytest.raises(ValueError, match=r"\['gate', 'up.0'\] match no Linear layer; layers here end in \['d_proj',"):
        inject(six_layers(), LoRA(targets=("q_proj", "gate", "v_proj", "up.0")), (), seed=0)


def test_a_suffix_is_whole_names_only() -> None:
    with pytest.raises(ValueError, match=r"\['proj'\]"):
        inject(six_layers(), LoRA(targets=("proj",)), (), seed=0)


def test_targets_that_match_wrap_these_layers_and_no_other() -> None:
    module = six_layers()
    inject(module, LoRA(targets=("q_proj", "v_proj")), ("o_proj",), seed=0)
    assert {name.split(".")[0] for name in trainable(module)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("lora", [{"rank": 0}, {"alpha": 0}, {"targets": ()}])
def test_settings_without_meaning_are_refused(lora: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|targets is empty"):
        LoRA(**lora)  # type: ignore[arg-type]


@pytest.mark.parametrize("lora", [LORA, None])
def test_the_reference_is_the_base_model_bit_for_bit(lora: LoRA | None) -> None:
    backend = trained(backend_of(lora))
    live = velocity(backend)
    with backend.reference():
        assert torch.equal(velocity(backend), base_velocity(trainable=lora is None))
    assert torch.equal(velocity(backend), live)
    assert (live - base_velocity()).abs().max() > 1e-2


@pytest.mark.parametrize("lora", [LORA, None])
@pytest.mark.parametrize("which", ["reference", "ema"])
def test_other_weights_leave_no_trace_even_after_an_exception(lora: LoRA | None, which: str) -> None:
    backend = trained(backend_of(lora, ema=EMA()))
    module = backend.stage.bundle.transformer
    before, output = state_of(module), velocity(backend)

    def other() -> AbstractContextManager[None]:
        return backend.reference() if which == "reference" else backend.ema()

    def fail() -> None:
        with other():
            assert not torch.equal(velocity(backend), output)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert same(state_of(module), before)
    assert torch.equal(velocity(backend), output)


def test_a_forward_under_the_reference_changes_no_gradient() -> None:
    backend = trained(backend_of())
    module = backend.stage.bundle.transformer
    velocity(backend).sum().backward()
    plain = gradients(module)
    live = velocity(backend)
    with torch.no_grad(), backend.reference():
        reference = velocity(backend)
    (live + reference).sum().backward()
    mixed = gradients(module)
    assert plain.keys() == mixed.keys()
    assert all(torch.equal(plain[name], mixed[name]) for name in plain)


def test_a_step_after_a_reference_forward_moves_the_adapters_alone() -> None:
    backend = trained(backend_of(ema=EMA(decay=0.5, warmup="constant")))
    module = backend.stage.bundle.transformer
    before = state_of(module)
    with torch.no_grad(), backend.reference():
        velocity(backend)
    velocity(backend).square().sum().backward()
    backend.step()
    moved = {name for name, (value, _) in state_of(module).items() if not torch.equal(value, before[name][0])}
    assert moved == {name for name in trainable(module) if "transformer_blocks.1.attn.add_q_proj" not in name}


def test_switching_off_needs_an_adapter() -> None:
    with pytest.raises(AssertionError, match="no adapter"), switched_off(six_layers()):
        pass
