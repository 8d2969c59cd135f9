"""SD3 against diffusers' own pipeline, on tiny random weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.attention_processor import Attention

from tests.unit.models.rollouts import CPU, PROMPTS, inputs_of, request_for, stage_of
from unirl.models.base import Bundle, Point
from unirl.models.diffusion.sd3 import SD3
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.sde.noise import initial_noise
from unirl.types.media import Media
from unirl.types.sample import Sample
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment

GUIDED = DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5)

TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class SwappedBranches(SD3):
    """Wrong on purpose."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return super().guide(unconditional, conditional, at)


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(SD3):
    """Wrong on purpose."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


@dataclasses.dataclass(frozen=True)
class Walk:
    """latents: `(N, 4, H, W)` after each step; images: `(N, 3, H, W)`."""

    latents: list[torch.Tensor]
    images: torch.Tensor

    def distance(self, other: Walk) -> float:
        """The largest difference of any latent or pixel."""
        pairs = zip([*self.latents, self.images], [*other.latents, other.images], strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)


def ours(family: SD3, bundle: Bundle, sample: Sample) -> Walk:
    with inputs_of(bundle.transformer) as seen:
        part = DiffusionPipeline(stage_of(family, bundle))(sample, version=0).frontier
    assert isinstance(part.segment, LatentSegment)
    assert part.media is not None
    assert part.media.images is not None
    return Walk([*(latents[: len(part)] for latents in seen[1:]), part.segment.final], part.media.images)


def theirs(bundle: Bundle, sample: Sample, **arguments: Any) -> Walk:
    pipeline, part = bundle.processors["pipeline"], sample.frontier
    sampling, texts = part.diffusion_sampling, sample.roots.media
    assert texts is not None
    latents: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: float, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents.append(state["latents"].clone())
        return {}

    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        prompt=texts.texts,
        negative_prompt=[sampling.negative_prompt] * len(part),
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance,
        latents=initial_noise(part.ids, (4, sampling.height // 2, sampling.width // 2), sampling.seed),
        max_sequence_length=48,
        callback_on_step_end=keep,
        output_type="pt",
        **arguments,
    ).images
    return Walk(latents, images)


@pytest.mark.parametrize("name", ["sd3", "sd3_without_t5"])
@pytest.mark.parametrize(("guidance", "negative_prompt"), [(4.5, ""), (4.5, "blurry"), (1.0, "")])
def test_every_step_and_the_images_equal_the_pipelines_own(
    request: pytest.FixtureRequest, name: str, guidance: float, negative_prompt: str
) -> None:
    family: SD3 = request.getfixturevalue(name)
    bundle = family.load(CPU, torch.float32)
    sample = request_for(PROMPTS, guidance=guidance, negative_prompt=negative_prompt, noise_level=0.0)
    walk, reference = ours(family, bundle, sample), theirs(bundle, sample)
    assert len(walk.latents) == 4
    assert walk.distance(reference) < TOLERANCE


def test_a_picture_that_is_not_square_equals_the_pipelines_own(sd3: SD3, bundle: Bundle) -> None:
    sample = request_for(PROMPTS, guidance=4.5, noise_level=0.0, height=24, width=48)
    assert ours(sd3, bundle, sample).distance(theirs(bundle, sample)) < TOLERANCE


@pytest.mark.parametrize(
    ("wrong", "settings"), [(SD3, {"schedule_table": "shifted"}), (SwappedBranches, {}), (TimeIsSigma, {})]
)
def test_a_wrong_formula_misses_the_pipeline(
    sd3: SD3, bundle: Bundle, wrong: type[SD3], settings: dict[str, Any]
) -> None:
    family = wrong(checkpoint=sd3.checkpoint, max_sequence_length=48, **settings)
    sample = request_for(PROMPTS, guidance=4.5, noise_level=0.0)
    assert ours(family, bundle, sample).distance(theirs(bundle, sample)) > 100 * TOLERANCE


def test_the_shifted_table_is_what_the_pipeline_makes_of_given_sigmas(sd3: SD3, bundle: Bundle) -> None:
    family = dataclasses.replace(sd3, schedule_table="shifted")
    sample = request_for(PROMPTS, guidance=4.5, noise_level=0.0)
    assert ours(family, bundle, sample).distance(theirs(bundle, sample, sigmas=[1.0, 0.75, 0.5, 0.25])) < TOLERANCE


@pytest.mark.parametrize("steps", [1, 4, 10, 28])
@pytest.mark.parametrize("shift", [None, 1.0, 5.0])
def test_the_schedule_is_the_schedulers_table(sd3: SD3, bundle: Bundle, steps: int, shift: float | None) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift or 3.0)
    scheduler.set_timesteps(steps)
    sampling = request_for(["a"], steps=steps, shift=shift, noise_level=0.0).frontier.diffusion_sampling
    schedule = sd3.schedule(bundle, sampling)
    torch.testing.assert_close(schedule.sigmas, scheduler.sigmas, rtol=0, atol=2e-7)
    torch.testing.assert_close(schedule.times, scheduler.timesteps, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("table", "sigmas"),
    [("shifted", [1.0, 0.9, 0.75, 0.5, 0.0]), ("pipeline", [1.0, 0.9004, 0.7511, 0.5030, 0.0089, 0.0])],
)
def test_four_and_five_steps_of_the_two_tables_at_shift_three(
    sd3: SD3, bundle: Bundle, table: Literal["pipeline", "shifted"], sigmas: list[float]
) -> None:
    family = dataclasses.replace(sd3, schedule_table=table)
    sampling = request_for(["a"], steps=len(sigmas) - 1).frontier.diffusion_sampling
    torch.testing.assert_close(family.schedule(bundle, sampling).sigmas, torch.tensor(sigmas), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("height", "width", "nearest"),
    [(30, 32, "32 x 32"), (32, 37, "32 x 36"), (64, 48, "48 x 48"), (1, 32, "4 x 32"), (500, 3, "48 x 4")],
)
def test_a_size_that_it_cannot_make_is_refused_with_the_nearest(
    sd3: SD3, bundle: Bundle, height: int, width: int, nearest: str
) -> None:
    sampling = request_for(["a"], height=height, width=width).frontier.diffusion_sampling
    with pytest.raises(ValueError, match=f"multiples of 4 pixels up to 48, .* {height} x {width}.* is {nearest}"):
        sd3.latent_shape(bundle, sampling)


def test_latents_are_in_the_autoencoders_scale(sd3: SD3, bundle: Bundle) -> None:
    images = torch.rand(3, 3, 32, 48)
    latents = sd3.encode_media(bundle, Media(images=images), GUIDED)
    assert latents.shape == (3, 4, 16, 24)
    vae = bundle.frozen["vae"]
    raw = vae.encode(images * 2 - 1).latent_dist.mean  # type: ignore[operator]
    torch.testing.assert_close(latents, (raw - 0.0609) * 1.5305)
    torch.testing.assert_close(sd3.encode_media(bundle, Media(images=images[1:2]), GUIDED), latents[1:2])
    decoded = sd3.decode(bundle, latents, GUIDED).images
    expected = (vae.decode(raw).sample / 2 + 0.5).clamp(0, 1)  # type: ignore[operator]
    assert decoded is not None
    assert decoded.dtype == torch.float32
    torch.testing.assert_close(decoded, expected)


def test_half_precision_spares_the_autoencoder(sd3: SD3) -> None:
    bundle = sd3.load(CPU, torch.bfloat16)
    modules = {"transformer": bundle.transformer, **bundle.frozen}
    dtypes = {name: {p.dtype for p in module.parameters()} for name, module in modules.items()}
    assert dtypes.pop("vae") == {torch.float32}
    assert list(dtypes) == ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"]
    assert all(kinds == {torch.bfloat16} for kinds in dtypes.values())
    assert sd3.encode(bundle, Media(texts=PROMPTS), GUIDED).tokens.dtype == torch.bfloat16


def test_nothing_trains_and_nothing_drops_out_after_loading(bundle: Bundle) -> None:
    modules = [bundle.transformer, *bundle.frozen.values()]
    assert not any(p.requires_grad for module in modules for p in module.parameters())
    assert not any(part.training for module in modules for part in module.modules())


def test_saved_and_loaded_it_is_the_same_model(sd3: SD3, bundle: Bundle, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in bundle.transformer.parameters():
            parameter.mul_(1.5)
    sd3.save(bundle, tmp_path / "saved")
    saved = dataclasses.replace(sd3, checkpoint=str(tmp_path / "saved"))
    again = saved.load(CPU, torch.float32)
    modules = {"transformer": bundle.transformer, **bundle.frozen}
    for name, module in {"transformer": again.transformer, **again.frozen}.items():
        for key, value in module.state_dict().items():
            assert torch.equal(value, modules[name].state_dict()[key]), (name, key)
    sample = request_for(PROMPTS, guidance=4.5, noise_level=0.0)
    assert ours(saved, again, sample).distance(ours(sd3, bundle, sample)) == 0


def test_lora_targets_are_all_projections_of_all_attentions(sd3: SD3, bundle: Bundle) -> None:
    linears = {name for name, layer in bundle.transformer.named_modules() if isinstance(layer, torch.nn.Linear)}
    attentions = [name for name, layer in bundle.transformer.named_modules() if isinstance(layer, Attention)]
    inside = {name for name in linears if any(name.startswith(f"{owner}.") for owner in attentions)}
    targeted = {name for name in linears if any(name.endswith(f".{target}") for target in sd3.lora_targets)}
    assert targeted == inside
    assert len(targeted) == 19  # 8 + 4 of attn2 in the first block, 7 in the last: no to_add_out
    assert "transformer_blocks.0.attn2.to_q" in targeted


@pytest.mark.parametrize("checkpoint", ["/nowhere/model", "./model", "a/b/c", "~/model", "model"])
def test_a_checkpoint_that_is_no_folder_and_no_hub_id_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match=r"neither a folder nor a hub id \(owner/name\)") as error:
        SD3(checkpoint=checkpoint)
    assert checkpoint in str(error.value)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model_index.json"):
        SD3(checkpoint=str(tmp_path))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="holds a FluxPipeline"):
        SD3(checkpoint=str(tmp_path))


def test_a_folder_without_t5_must_be_asked_for(sd3_without_t5: SD3) -> None:
    with pytest.raises(ValueError, match="saved without its T5 encoder: set t5=false"):
        dataclasses.replace(sd3_without_t5, t5=True)


def test_t5_can_be_left_out_of_a_pipeline_that_has_it(sd3: SD3, bundle: Bundle) -> None:
    family = dataclasses.replace(sd3, t5=False)
    small = family.load(CPU, torch.float32)
    assert list(small.frozen) == ["text_encoder", "text_encoder_2", "vae"]
    tokens, whole = (
        family.encode(small, Media(texts=PROMPTS), GUIDED).tokens,
        sd3.encode(bundle, Media(texts=PROMPTS), GUIDED).tokens,
    )
    assert torch.equal(tokens[:, :77], whole[:, :77])
    assert not tokens[:, 77:].any()
    assert tokens.shape == whole.shape


@pytest.mark.parametrize("length", [0, 513])
def test_a_length_that_the_pipeline_refuses_is_refused_before_loading(length: int) -> None:
    with pytest.raises(ValueError, match=rf"max_sequence_length must be in 1..512, got {length}"):
        SD3(checkpoint="owner/name", max_sequence_length=length)


def test_a_scheduler_with_another_table_is_refused(sd3: SD3, tmp_path: Path) -> None:
    folder = shutil.copytree(sd3.checkpoint, tmp_path / "dynamic")
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    with pytest.raises(ValueError, match=r"its shift alone, .* with \['use_dynamic_shifting'\]"):
        SD3(checkpoint=str(folder)).load(CPU, torch.float32)
