"""Hunyuan: mean-flow checkpoints, projected guidance, and what is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from tests.families.case import LEAVE_OUT, TOLERANCE, Case, run_pipeline
from tests.families.cases import hunyuan_image, hunyuan_video, hunyuan_video_15
from tests.families.cases.hunyuan_image import LENGTHS, TEXTS
from tests.families.test_contract import CPU, distance, noisy, request_for, stage_of, walk
from unirl.models.base import Bundle
from unirl.models.diffusion.hunyuan import GlyphEmbedding
from unirl.models.diffusion.hunyuan_image import HunyuanImage, projected
from unirl.models.diffusion.hunyuan_video import HunyuanVideo
from unirl.models.diffusion.hunyuan_video_15 import HunyuanVideo15I2V
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.random_weights.hunyuan_image import write as write_hunyuan_image
from unirl.models.random_weights.hunyuan_video_15 import write as write_hunyuan_video_15
from unirl.sde.steps import Step
from unirl.train.export import write_export
from unirl.train.lora import LoRA, inject
from unirl.types.media import Media
from unirl.types.segment import LatentSegment


@dataclasses.dataclass(frozen=True)
class InstantVelocity(HunyuanImage):
    """The model is told that the step ends where it starts."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: GlyphEmbedding, guidance: float
    ) -> torch.Tensor:
        step = dataclasses.replace(step, sigma_next=step.sigma)
        return super().predict(bundle, latents, step, embedding, guidance)


def distilled_reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    steps, output = run_pipeline(
        bundle.processors["pipeline"],
        case.prompts.required_texts,
        latents,
        case,
        guidance_scale=LEAVE_OUT,
        distilled_guidance_scale=case.sampling.guidance,
    )
    return [*steps], Media(images=output.images)


def distilled_image(folder: Path) -> HunyuanImage:
    return HunyuanImage(str(folder), **LENGTHS, distilled=True)


MEAN_FLOW = [
    Case(
        name="image",
        write=partial(write_hunyuan_image, distilled=True),
        family=distilled_image,
        sampling=dataclasses.replace(hunyuan_image.SAMPLING, guidance=3.25),
        reference=distilled_reference,
        prompts=Media(texts=list(TEXTS)),
        wrong={"instant velocity": lambda folder: InstantVelocity(str(folder), **LENGTHS, distilled=True)},
    ),
    Case(
        name="video",
        write=partial(write_hunyuan_video_15, task="i2v", mean_flow=True),
        family=lambda folder: HunyuanVideo15I2V(str(folder), *hunyuan_video_15.LENGTHS),
        sampling=hunyuan_video_15.SAMPLING,
        reference=hunyuan_video_15.reference,
        prompts=Media(texts=list(TEXTS), sources=hunyuan_video_15.pictures()),
    ),
]


@pytest.mark.parametrize("case", MEAN_FLOW, ids=str)
def test_a_mean_flow_checkpoint_samples_as_its_pipeline_does_and_refuses_noise_and_losses_on_points(
    case: Case, tmp_path: Path
) -> None:
    folder = case.write(tmp_path / "model")
    family = case.family(folder)
    bundle = family.load(CPU, torch.float32)
    ode = dataclasses.replace(case, sampling=case.sampling.deterministic())
    assert distance(ode, family, bundle, family) < TOLERANCE
    for name, make in case.wrong.items():
        assert distance(ode, make(folder), bundle, family) > 10 * TOLERANCE, name
    with pytest.raises(ValueError, match=r"takes Euler steps without noise .*, got noise_level=0\.7"):
        family.schedule(bundle, noisy(case))
    with pytest.raises(ValueError, match="solver=dpmpp_2m"):
        family.schedule(bundle, dataclasses.replace(ode.sampling, solver="dpmpp_2m"))
    with pytest.raises(ValueError, match="a loss on single points would train another"):
        family.refuse_points(bundle)


@pytest.mark.parametrize("case", [hunyuan_video.CASES[0], *hunyuan_video_15.CASES, hunyuan_image.CASES[0]], ids=str)
def test_in_bfloat16_a_prompt_encodes_alike_beside_one_that_quotes_and_replay_is_exact(
    case: Case, tmp_path: Path
) -> None:
    family = case.family(case.write(tmp_path / "model"))
    stage = dataclasses.replace(stage_of(family, family.load(CPU, torch.bfloat16)), compute_dtype=torch.bfloat16)
    with torch.no_grad():
        whole = DiffusionPipeline(stage).encode(case.prompts, case.sampling)
        alone = DiffusionPipeline(stage).encode(case.prompts.select([1]), case.sampling)
        part = DiffusionPipeline(stage)(request_for(case.prompts, noisy(case)), version=0).frontier
        assert isinstance(part.segment, LatentSegment)
        replays = [stage.replay(part, part.segment.sde_indices[[row]]).log_probs for row in (0, 1)]
    for name, value in vars(alone.positive).items():
        assert value is None or value.dtype == vars(whole.positive)[name].dtype, name
    assert alone.positive.tokens.dtype == torch.bfloat16
    assert torch.equal(torch.cat(replays, dim=1), part.segment.log_probs)


def test_projected_guidance_is_orthogonal_to_the_conditional_and_shortened_to_the_threshold() -> None:
    draws = torch.Generator().manual_seed(0)
    conditional, unconditional = torch.randn(2, 3, 4, 5, 6, generator=draws)
    update = (projected(conditional, unconditional, 10.0, 2.0) - unconditional).flatten(1) / 10
    torch.testing.assert_close((update * conditional.flatten(1)).sum(1), torch.zeros(3), rtol=0, atol=1e-4)
    difference = (conditional - unconditional).flatten(1)
    unit = conditional.flatten(1) / conditional.flatten(1).norm(dim=1, keepdim=True)
    cosine = (difference * unit).sum(1) / difference.norm(dim=1)
    torch.testing.assert_close(update.norm(dim=1), 2.0 * (1 - cosine**2).sqrt())


def test_projected_guidance_of_equal_branches_has_a_finite_gradient() -> None:
    velocity = torch.ones(1, 4, requires_grad=True)
    projected(velocity, velocity.detach(), 10.0, 1.0).sum().backward()
    assert velocity.grad is not None
    assert torch.isfinite(velocity.grad).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HunyuanImage("tencent/image", apg_momentum=-0.5), "apg_momentum=-0.5 sums"),
        (lambda: HunyuanImage("tencent/image", apg_below=1.5), "two branches: 1.5"),
        (lambda: HunyuanImage("tencent/image", distilled=True, apg_below=0.5), "two branches: 0.5"),
        (lambda: HunyuanImage("tencent/image", max_glyphs=0), "max_glyphs must be at least 1, got 0"),
        (lambda: HunyuanVideo("tencent/video", 0), "max_sequence_length must be at least 1, got 0"),
        (lambda: HunyuanVideo("tencent"), "neither a folder nor a hub id"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    image = write_hunyuan_image(tmp_path / "image")
    with pytest.raises(ValueError, match="set distilled=False"):
        distilled_image(image).load(CPU, torch.float32)
    with pytest.raises(ValueError, match="holds a HunyuanImagePipeline"):
        HunyuanVideo(str(image))


def test_image_to_video_wants_one_picture_a_prompt(tmp_path: Path) -> None:
    family = HunyuanVideo15I2V(str(write_hunyuan_video_15(tmp_path / "model", task="i2v")), *hunyuan_video_15.LENGTHS)
    with pytest.raises(ValueError, match=r"one picture a prompt, got \[0, 0\]"):
        family.encode(family.load(CPU, torch.float32), Media(texts=list(TEXTS)), hunyuan_video_15.SAMPLING)


def test_frames_that_the_model_cannot_make_are_refused_with_the_nearest(tmp_path: Path) -> None:
    case = hunyuan_video.CASES[0]
    family = case.family(case.write(tmp_path / "model"))
    bundle = family.load(CPU, torch.float32)
    assert family.latent_shape(bundle, case.sampling) == (4, 3, 4, 6)
    with pytest.raises(ValueError, match="asked for 10 of 32 x 48; the nearest is 9 of 32 x 48"):
        family.latent_shape(bundle, dataclasses.replace(case.sampling, frames=10))


@pytest.mark.parametrize("case", [hunyuan_video.CASES[0], *hunyuan_video_15.CASES, hunyuan_image.CASES[0]], ids=str)
def test_the_latent_of_what_was_decoded_has_the_shape_of_a_sample(case: Case, tmp_path: Path) -> None:
    family = case.family(case.write(tmp_path / "model"))
    bundle = family.load(CPU, torch.float32)
    latents = torch.randn(2, *family.latent_shape(bundle, case.sampling), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        media = family.decode(bundle, latents, case.sampling)
        encoded = family.encode_media(bundle, media, case.sampling)
    if media.videos is not None:
        assert media.videos.shape == (2, case.sampling.frames, 3, case.sampling.height, case.sampling.width)
        assert media.fps == 24
    assert encoded.shape == latents.shape
    assert encoded.dtype == torch.float32


@pytest.mark.parametrize(
    ("case", "loads_adapters"),
    [(hunyuan_video.CASES[0], True), (hunyuan_video_15.CASES[0], False), (hunyuan_image.CASES[0], False)],
    ids=str,
)
def test_an_adapter_loads_into_peft_and_where_the_pipeline_takes_one_there(
    case: Case, loads_adapters: bool, tmp_path: Path
) -> None:
    family = case.family(case.write(tmp_path / "model"))
    lora = LoRA(rank=2, alpha=4)
    bundle = family.load(CPU, torch.float32)
    inject(bundle.transformer, lora, family.lora_targets, seed=0)
    for parameter in bundle.transformer.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    expected = walk(family, bundle, case).latents[-1]
    write_export(stage_of(family, bundle), lora, tmp_path / "adapter")
    assert loads_adapters == (tmp_path / "adapter" / "pytorch_lora_weights.safetensors").exists()
    for way in ("nothing", "peft", "diffusers")[: 2 + loads_adapters]:
        fresh = family.load(CPU, torch.float32)
        if way == "peft":
            PeftModel.from_pretrained(fresh.transformer, tmp_path / "adapter")
        elif way == "diffusers":
            fresh.processors["pipeline"].load_lora_weights(tmp_path / "adapter")
        gap = float((walk(family, fresh, case).latents[-1] - expected).abs().max() / expected.abs().max())
        assert (gap < 1e-5) == (way != "nothing"), (way, gap)
