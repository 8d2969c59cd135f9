"""The contract of a model family, over all families that ship."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unirl.models.diffusion
from tests.families.case import TOLERANCE, Case
from tests.families.conftest import ALL
from unirl.models.base import Bundle, DiffusionFamily
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.diffusion_stage import DiffusionStage
from unirl.sde.elements import Elements
from unirl.sde.noise import initial_noise
from unirl.sde.strategy import euler_step
from unirl.train.export import write_export
from unirl.train.lora import LoRA, inject
from unirl.types.condition import Conditions
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment
from unirl.types.steps import ListedSteps

CPU = torch.device("cpu")
STOCHASTIC = ListedSteps((0, 2))


def stage_of(family: DiffusionFamily, bundle: Bundle) -> DiffusionStage:
    return DiffusionStage(family, bundle, guidance_gradient=True, compute_dtype=torch.float32)


def request_for(prompts: Media, sampling: DiffusionSamplingParams, group: int = 1) -> Sample:
    ids = [root_id(0, row) for row in range(len(prompts))]
    return Sample((Part(ids=ids, metadata=[{} for _ in ids], media=prompts),)).fork(group, sampling)


def noisy(case: Case) -> DiffusionSamplingParams:
    return dataclasses.replace(case.sampling, noise_level=0.7, sde=STOCHASTIC)


@dataclasses.dataclass(frozen=True)
class Walk:
    """sigmas `(T + 1,)`, latents after each step, and the media at the end."""

    sigmas: torch.Tensor
    latents: list[torch.Tensor]
    media: Media


def walk(family: DiffusionFamily, bundle: Bundle, case: Case) -> Walk:
    """The ODE, by the stage's predict and the family's schedule."""
    stage, sampling = stage_of(family, bundle), case.sampling
    with torch.no_grad():
        conditions = DiffusionPipeline(stage).encode(case.prompts, sampling)
        schedule = family.schedule(bundle, sampling)
        elements = Elements(conditions.positive.weights, conditions.positive.given)
        x = elements.pin(start(family, bundle, case))
        latents = []
        for index in range(len(schedule)):
            step = schedule.at(torch.full((len(x),), index))
            velocity = stage.predict(x, step, conditions, sampling.guidance, rollout=True)[0]
            x = elements.pin(euler_step(x, velocity, step))
            latents.append(x)
        return Walk(schedule.sigmas, latents, family.decode(bundle, x, sampling))


def start(family: DiffusionFamily, bundle: Bundle, case: Case) -> torch.Tensor:
    ids = [f"r0.p{row}/0" for row in range(len(case.prompts))]
    return initial_noise(ids, family.latent_shape(bundle, case.sampling), seed=3)


def content(media: Media) -> Iterator[torch.Tensor]:
    yield from (part for part in (media.images, media.videos, media.audio) if part is not None)


def distance(case: Case, family: DiffusionFamily, bundle: Bundle, own: DiffusionFamily) -> float:
    """Largest difference to the library's pipeline, relative to the largest value, over steps and media."""
    mine = walk(family, bundle, case)
    steps, media = case.reference(bundle, start(own, bundle, case), case)
    pairs = [(a, b) for a, b in zip(mine.latents, steps, strict=True) if b is not None]
    pairs += list(zip(content(mine.media), content(media), strict=True))
    assert len(pairs) >= 2
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def test_every_step_and_the_media_equal_the_librarys_own_pipeline(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    bundle = family.load(CPU, torch.float32)
    assert distance(case, family, bundle, family) < TOLERANCE


def test_a_sample_is_made_of_the_kinds_that_the_family_names(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    bundle = family.load(CPU, torch.float32)
    with torch.no_grad():
        media = family.decode(bundle, start(family, bundle, case), case.sampling)
    assert media.kinds == family.made(case.sampling)


def test_a_wrong_formula_misses_by_far(case: Case, checkpoint: Path) -> None:
    own = case.family(checkpoint)
    bundle = own.load(CPU, torch.float32)
    assert case.wrong, "a tolerance says nothing until something misses it"
    for name, make in case.wrong.items():
        assert distance(case, make(checkpoint), bundle, own) > 10 * TOLERANCE, name


def test_a_row_alone_equals_the_row_beside_a_longer_prompt(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    stage = stage_of(family, family.load(CPU, torch.float32))
    with torch.no_grad():
        both = DiffusionPipeline(stage)(request_for(case.prompts, case.sampling), version=0).frontier
        alone = DiffusionPipeline(stage)(request_for(case.prompts.select([0]), case.sampling), version=0).frontier
    assert isinstance(both.segment, LatentSegment)
    assert isinstance(alone.segment, LatentSegment)
    a, b = both.segment.final[:1], alone.segment.final
    assert float((a - b).abs().max() / b.abs().max()) < case.row_tolerance


def test_replay_equals_the_rollout_and_a_batch_of_steps_equals_step_by_step(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    stage = stage_of(family, family.load(CPU, torch.float32))
    with torch.no_grad():
        part = DiffusionPipeline(stage)(request_for(case.prompts, noisy(case)), version=0).frontier
        assert isinstance(part.segment, LatentSegment)
        apart = [stage.replay(part, part.segment.sde_indices[[row]]) for row in range(2)]
        together = stage.replay(part, part.segment.sde_indices)
    one_by_one = torch.cat([replay.log_probs for replay in apart], dim=1)
    assert torch.isfinite(one_by_one).all()
    # The same geometry: the same forwards, the same bits, a ratio of exactly 1.
    assert torch.equal((one_by_one - part.segment.log_probs).exp(), torch.ones(2, 2))
    torch.testing.assert_close(together.log_probs, one_by_one, rtol=0, atol=2e-5)


def test_conditions_split_and_join_without_a_trace(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    stage = stage_of(family, family.load(CPU, torch.float32))
    with torch.no_grad():
        whole = DiffusionPipeline(stage).encode(case.prompts, case.sampling)
        joined = Conditions.concat(whole.split([1, 1]))
        x, schedule = start(family, stage.bundle, case), family.schedule(stage.bundle, case.sampling)
        step = schedule.at(torch.tensor([1, 1]))
        a, b = (stage.predict(x, step, own, case.sampling.guidance)[0] for own in (whole, joined))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_lora_wraps_every_target_and_each_gets_a_gradient(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    bundle = family.load(CPU, torch.float32)
    inject(bundle.trained, LoRA(rank=2, alpha=4), family.lora_targets, seed=0)
    replayed(case, stage_of(family, bundle)).sum().backward()
    without = [
        name
        for name, parameter in bundle.trained.named_parameters()
        # A is multiplied by a B that starts at 0: only B has a gradient at first.
        if "lora_B" in name and (parameter.grad is None or not parameter.grad.any())
    ]
    assert all(any(ending in name for ending in case.silent) for name in without), without
    assert any("lora_B" in name for name, _ in bundle.trained.named_parameters())


def test_gradient_checkpointing_changes_no_gradient(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    found = []
    for recompute in (False, True):
        bundle = family.load(CPU, torch.float32)
        bundle.trained.requires_grad_(True)
        if recompute:
            family.recompute_blocks(bundle)
        replayed(case, stage_of(family, bundle)).sum().backward()
        found.append({n: p.grad for n, p in bundle.trained.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)


def test_the_exported_folder_gives_the_same_output(case: Case, checkpoint: Path, tmp_path: Path) -> None:
    family = case.family(checkpoint)
    bundle = family.load(CPU, torch.float32)
    with torch.no_grad():
        for parameter in bundle.transformer.parameters():
            parameter.mul_(1.01)
    write_export(stage_of(family, bundle), None, tmp_path / "export")
    again = case.family(tmp_path / "export")
    a, b = (walk(own, found, case) for own, found in ((family, bundle), (again, again.load(CPU, torch.float32))))
    assert torch.equal(a.latents[-1], b.latents[-1])
    for mine, theirs in zip(content(a.media), content(b.media), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_sizes_and_facts_are_stated(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    bundle = family.load(CPU, torch.float32)
    names = {type(module).__name__ for module in bundle.transformer.modules()}
    assert set(family.block_names) <= names, f"{family.block_names} are not all in {sorted(names)}"
    assert family.facts.checkpoints
    assert family.facts.licence
    odd = dataclasses.replace(case.sampling, height=case.sampling.height + 1)
    with pytest.raises(ValueError, match="nearest"):
        family.latent_shape(bundle, odd)


def test_every_family_that_ships_has_a_case() -> None:
    shipped = set()
    for found in pkgutil.iter_modules(unirl.models.diffusion.__path__):
        module = __import__(f"unirl.models.diffusion.{found.name}", fromlist=["_"])
        shipped |= {
            cls
            for _, cls in inspect.getmembers(module, inspect.isclass)
            if issubclass(cls, DiffusionFamily) and "facts" in vars(cls) and cls.__module__ == module.__name__
        }
    sampled = {vars(inspect.getmodule(case.family) or object).get(cls.__name__) for case in ALL for cls in shipped}
    assert shipped <= sampled, f"no case for {sorted(cls.__name__ for cls in shipped - sampled)}"


def replayed(case: Case, stage: DiffusionStage) -> torch.Tensor:
    """Log-probs of a short stochastic rollout, with their graph."""
    with torch.no_grad():
        part = DiffusionPipeline(stage)(request_for(case.prompts, noisy(case)), version=0).frontier
    assert isinstance(part.segment, LatentSegment)
    return stage.replay(part, part.segment.sde_indices).log_probs
