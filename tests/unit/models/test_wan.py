"""Wan: which expert trains and what stays as it is, sizes, pictures and adapters that diffusers loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import WanPipeline
from peft import PeftModel

from tests.tiny_policy import policy, rewarded, train, trajectory, weights_of
from tests.unit.models.rollouts import CPU
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.models.base import DiffusionFamily, Point
from unirl.models.diffusion.wan import Wan21, Wan21ImageToVideo, Wan22A14B, Wan22TI2V5B
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.random_weights import wan as random_wan
from unirl.sde.steps import Step
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.export import write_export
from unirl.train.lora import LoRA
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.metric import values
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.steps import ListedSteps

Expert = Literal["high", "low", "both"]
NAMES = {"high": "transformer.", "low": "transformer_2."}
SIZE = DiffusionSamplingParams(steps=4, height=32, width=32, frames=5)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_wan.write_experts(tmp_path_factory.mktemp("wan") / "experts")


@pytest.fixture(scope="module")
def token_times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_wan.write_token_times(tmp_path_factory.mktemp("wan") / "ti2v")


def videos(backend: FSDPBackend, **sampling: Any) -> Part:
    """Two videos of one prompt, with advantages. Of four steps the first is the high-noise expert's."""
    settings = dataclasses.replace(SIZE, **sampling)
    roots = Part(ids=[root_id(0, 0)], metadata=[{}], media=Media(texts=["a red cat"]))
    part = DiffusionPipeline(backend.stage)(Sample((roots,)).fork(2, settings), version=0).frontier
    return rewarded(part, [0.0, 1.0])


def all_weights(backend: FSDPBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in backend.stage.bundle.transformer.named_parameters()}


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)], ids=["full", "lora"])
@pytest.mark.parametrize("trained", ["high", "low", "both"])
def test_only_the_trained_expert_moves(experts: Path, trained: Expert, lora: LoRA | None) -> None:
    backend = policy(Wan22A14B(str(experts), trained=trained), lora=lora)
    before = all_weights(backend)
    report = values(train(backend, FlowGRPO(kl_coef=0.0), videos(backend)))
    moved = {name for name, value in all_weights(backend).items() if not torch.equal(value, before[name])}
    prefixes = [prefix for expert, prefix in NAMES.items() if trained in (expert, "both")]
    assert report["train/grad_norm"] > 0
    for prefix in prefixes:
        assert any(name.startswith(prefix) for name in moved)
    assert all(name.startswith(tuple(prefixes)) for name in moved)
    wanting = {name for name, p in backend.stage.bundle.transformer.named_parameters() if p.requires_grad}
    assert all(name.startswith(tuple(prefixes)) for name in wanting)
    assert len(weights_of(backend)) == len(wanting)


def test_the_expert_that_is_not_trained_comes_in_the_frozen_dtype(experts: Path) -> None:
    family = Wan22A14B(str(experts), trained="low")
    module: Any = family.load(CPU, torch.float32, frozen_dtype=torch.bfloat16).transformer
    assert module.transformer_2.proj_out.weight.dtype == torch.float32
    assert module.transformer.proj_out.weight.dtype == torch.bfloat16


def test_steps_of_the_frozen_expert_add_no_gradient(experts: Path) -> None:
    """Step by step and all at once: the same update, though three of four forwards have no trained weight in them."""
    moved = []
    for replay_batch in (1, None):
        backend = policy(Wan22A14B(str(experts), trained="high"))
        before = weights_of(backend)
        part = videos(backend, sde=ListedSteps((0, 1, 2)))
        train(backend, FlowGRPO(kl_coef=0.0), part, replay_batch=replay_batch)
        moved.append({name: value - before[name] for name, value in weights_of(backend).items()})
    assert any(change.any() for change in moved[0].values())
    for name, change in moved[0].items():
        torch.testing.assert_close(change, moved[1][name], rtol=1e-3, atol=1e-6)


def test_nft_trains_one_expert_of_two(experts: Path) -> None:
    backend = policy(Wan22A14B(str(experts), trained="high"), reference=True, ema=EMA())
    before = all_weights(backend)
    train(backend, DiffusionNFT(), videos(backend, noise_level=0.0))
    moved = {name for name, value in all_weights(backend).items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith(NAMES["high"]) for name in moved)


def test_stochastic_steps_that_train_nothing_are_refused(experts: Path) -> None:
    backend = policy(Wan22A14B(str(experts), trained="high"))
    with pytest.raises(ValueError, match=r"trained=high: that expert makes the steps \[0\].* are \[1, 2\]"):
        videos(backend, sde=ListedSteps((1, 2)))
    assert len(trajectory(videos(backend, noise_level=0.0)).sde_indices) == 0


def test_rows_at_different_steps_have_the_guidance_of_their_expert(experts: Path) -> None:
    family = Wan22A14B(str(experts), low_guidance=3.0)
    times = torch.tensor([1000.0, 875.0, 874.9, 10.0])
    step = Step(torch.arange(4), sigma=times / 1000, sigma_next=times / 1000, sigma_star=times / 1000, time=times)
    zeros = torch.zeros(4, 1, 1, 1, 1)
    guided = family.guide(zeros + 1, zeros, Point(zeros, step, Embedding(tokens=zeros), guidance=5.0))
    assert guided.flatten().tolist() == [5.0, 5.0, 3.0, 3.0]
    assert family.guided(1.0)
    assert not dataclasses.replace(family, low_guidance=None).guided(1.0)


@pytest.mark.parametrize("trained", ["high", "low", "both"])
def test_adapters_load_into_the_pipeline_expert_by_expert(experts: Path, tmp_path: Path, trained: Expert) -> None:
    lora = LoRA(rank=2, alpha=4)
    backend = policy(Wan22A14B(str(experts), trained=trained), lora=lora)
    draws = torch.Generator().manual_seed(0)
    for parameter in backend.stage.bundle.trained.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws)
    write_export(backend.stage, lora, tmp_path / "adapter")
    pipeline: Any = WanPipeline.from_pretrained(experts)
    module: Any = backend.stage.bundle.transformer
    files = {"high": "pytorch_lora_weights.safetensors", "low": "pytorch_lora_weights_2.safetensors"}
    for expert, own in files.items():
        assert (tmp_path / "adapter" / own).is_file() == (trained in (expert, "both"))
        if trained in (expert, "both"):
            into = {"load_into_transformer_2": True} if expert == "low" else {}
            pipeline.load_lora_weights(tmp_path / "adapter", weight_name=own, adapter_name=expert, **into)
    for mine, theirs in ((module.transformer, pipeline.transformer), (module.transformer_2, pipeline.transformer_2)):
        torch.testing.assert_close(velocity(theirs), velocity(mine), rtol=1e-5, atol=1e-6)
    if trained != "both":
        base: Any = WanPipeline.from_pretrained(experts)
        own = {"high": base.transformer, "low": base.transformer_2}[trained]
        expected = velocity({"high": module.transformer, "low": module.transformer_2}[trained])
        assert (velocity(own) - expected).abs().max() > 1e-3
        torch.testing.assert_close(velocity(PeftModel.from_pretrained(own, tmp_path / "adapter")), expected)


def velocity(transformer: Any) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 4, 2, 4, 4, generator=draws), torch.randn(1, 5, 32, generator=draws)
    with torch.no_grad():
        return transformer(
            hidden_states=latents, timestep=torch.tensor([500.0]), encoder_hidden_states=text, return_dict=False
        )[0]


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ({"frames": 8}, "9 of 32 x 32"),
        ({"frames": 2}, "1 of 32 x 32"),
        ({"height": 40}, "5 of 32 x 32"),
        ({"width": 4}, "5 of 32 x 16"),
    ],
)
def test_sizes_that_do_not_fit_name_the_nearest(experts: Path, size: dict[str, int], nearest: str) -> None:
    with pytest.raises(ValueError, match=f"the nearest is {nearest}$"):
        Wan22A14B(str(experts)).refuse([], dataclasses.replace(SIZE, **size))


def test_one_frame_is_a_picture_and_latents_of_given_media_are_the_inverse(experts: Path) -> None:
    family = Wan22A14B(str(experts))
    bundle = family.load(CPU, torch.float32)
    single = dataclasses.replace(SIZE, frames=1)
    media = family.decode(bundle, torch.zeros(2, *family.latent_shape(bundle, single)), single)
    assert media.images is not None
    assert media.images.shape == (2, 3, 32, 32)
    assert media.videos is None
    assert family.encode_media(bundle, media, single).shape[1:] == family.latent_shape(bundle, single)
    video = family.decode(bundle, torch.zeros(1, *family.latent_shape(bundle, SIZE)), SIZE)
    assert video.videos is not None
    assert (video.videos.shape, video.fps) == ((1, 5, 3, 32, 32), 16.0)
    # The autoencoder is causal: the first latent of a video is that of its first frame.
    still = Media(images=video.videos[:, 0])
    torch.testing.assert_close(
        family.encode_media(bundle, video, SIZE)[:, :, :1], family.encode_media(bundle, still, single)
    )


def test_the_shift_follows_the_size_unless_it_is_given(experts: Path) -> None:
    family = Wan22A14B(str(experts))
    bundle = family.load(CPU, torch.float32)
    sizes = [
        dataclasses.replace(SIZE, steps=2, height=height, width=width) for height, width in ((480, 832), (720, 1280))
    ]
    seconds = [float(family.schedule(bundle, own).sigmas[1]) for own in sizes]
    own_shift = dataclasses.replace(sizes[1], shift=3.0)
    assert seconds[0] == float(family.schedule(bundle, own_shift).sigmas[1])
    assert seconds[1] > seconds[0]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Wan21, "another kind than Wan21: .*Wan22A14B"),
        (Wan21ImageToVideo, "another kind than Wan21ImageToVideo: .*Wan22A14B"),
        (Wan22TI2V5B, "another kind than Wan22TI2V5B: .*Wan22A14B"),
        (lambda folder: Wan22A14B(folder, boundary=0.9), "boundary=0.9, but the experts of .* meet at 0.875"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(experts: Path, family: Any, message: str) -> None:
    own: DiffusionFamily = family(str(experts))
    with pytest.raises(ValueError, match=message):
        own.load(CPU, torch.float32)


def test_settings_that_cannot_be_are_refused(experts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"boundary must be in \(0, 1\), got 875"):
        Wan22A14B(str(experts), boundary=875)
    with pytest.raises(ValueError, match=r"low_guidance must be at least 1 .* got 0\.5"):
        Wan22A14B(str(experts), low_guidance=0.5)
    with pytest.raises(ValueError, match="it is not a diffusers pipeline"):
        Wan21(str(tmp_path))
    with pytest.raises(ValueError, match="'wan' is neither a folder nor a hub id"):
        Wan21("wan")


def test_pictures_are_asked_for_and_refused_by_name(experts: Path, token_times: Path, tmp_path: Path) -> None:
    picture = torch.rand(3, 8, 8)
    text = Wan22A14B(str(experts))
    with pytest.raises(ValueError, match="makes videos of text alone, and the prompts come with pictures"):
        text.encode(text.load(CPU, torch.float32), Media(texts=["a"], sources=[[picture]]), SIZE)
    either = Wan22TI2V5B(str(token_times))
    bundle = either.load(CPU, torch.float32)
    with pytest.raises(ValueError, match=r"one picture a prompt, its first frame, got \[0, 1\]"):
        either.encode(bundle, Media(texts=["a", "b"], sources=[[picture], []]), SIZE)
    assert either.encode(bundle, Media(texts=["a"], sources=[[]]), SIZE).given is None
    image = Wan21ImageToVideo(str(random_wan.write_image_to_video(tmp_path / "i2v")))
    with pytest.raises(ValueError, match="give each prompt a picture"):
        image.encode(image.load(CPU, torch.float32), Media(texts=["a"]), SIZE)


def test_a_given_first_frame_stays_through_an_sde_rollout(token_times: Path) -> None:
    backend = policy(Wan22TI2V5B(str(token_times)))
    sources = [[torch.rand(3, 32, 32)], [torch.rand(3, 32, 32)]]
    ids = [root_id(0, row) for row in range(2)]
    roots = Part(ids=ids, metadata=[{}, {}], media=Media(texts=["a", "b"], sources=sources))
    part = DiffusionPipeline(backend.stage)(Sample((roots,)).fork(1, SIZE), version=0).frontier
    given = part.guidance_branches.positive.given
    assert given is not None
    assert not torch.equal(given[0], given[1])
    for latents in trajectory(part).latents.unbind(1):
        assert torch.equal(latents[:, :, 0], given[:, :, 0])
    report = values(train(backend, FlowGRPO(kl_coef=0.0), rewarded(part, [0.0, 1.0]), replay_batch=1))
    assert report["train/ratio_deviation"] == 0.0
