from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from unirl.data.records import ImageFolder, LatentFolder, Records, RecordSampler
from unirl.types.media import Media
from unirl.types.segment import CleanLatents

RED = (255, 0, 0)


def records(count: int) -> Records:
    """Picture i is uniformly i / 255 and its caption says so."""
    levels = torch.arange(count) / 255
    return Records(levels.reshape(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous(), [f"level {i}" for i in range(count)])


def media(sampler: RecordSampler, batch: int) -> Media:
    found = sampler.draw(batch).media
    assert found is not None
    return found


def captions(sampler: RecordSampler, batch: int) -> list[str]:
    found = media(sampler, batch).texts
    assert found is not None
    return found


def record_file(folder: Path, *lines: str) -> Path:
    Image.new("RGB", (6, 4), RED).save(folder / "red.png")
    path = folder / "records.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# Files


def test_a_picture_is_read_as_floats_in_0_1_and_resized_to_a_square(tmp_path: Path) -> None:
    found = ImageFolder(record_file(tmp_path, '{"image": "red.png", "caption": "a red one"}'), size=8).load()
    assert found.captions == ["a red one"]
    assert found.images is not None
    assert found.images.dtype == torch.float32
    assert torch.equal(found.images, torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1).expand(1, 3, 8, 8))


def test_an_image_path_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    path = record_file(inner, '{"image": "../outer.png", "caption": ""}')
    Image.new("RGB", (2, 2)).save(tmp_path / "outer.png")
    images = ImageFolder(path, size=2).load().images
    assert images is not None
    assert images.max() == 0.0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"image": "red.png", "caption": ', "not valid JSON"),
        ("[]", "a row must be a JSON object, got list"),
        ("", "the line is blank"),
        ('{"image": "red.png"}', "a row is an object with strings 'image' and 'caption'"),
        ('{"image": "red.png", "caption": null}', "a row is an object with strings 'image' and 'caption'"),
        ('{"image": "red.png", "caption": "a", "caption": "b"}', "a key stands twice"),
        ('{"image": "red.png", "caption": "a", "weight": NaN}', "not a JSON number"),
        ('{"image": "blue.png", "caption": "a"}', "there is no image "),
    ],
)
def test_a_malformed_record_is_an_error_with_path_and_physical_line(tmp_path: Path, line: str, said: str) -> None:
    path = record_file(tmp_path, '{"image": "red.png", "caption": "a"}', line)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        ImageFolder(path, size=8)
    assert str(caught.value).startswith(f"{path}:2: {said}")


def test_an_empty_file_a_missing_one_and_an_impossible_size_are_refused(tmp_path: Path) -> None:
    path = record_file(tmp_path)
    with pytest.raises(ValueError, match=f"{path} is empty"):
        ImageFolder(path, size=8)
    with pytest.raises(ValueError, match="there is no record file"):
        ImageFolder(tmp_path / "none.jsonl", size=8)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        ImageFolder(path, size=0)


def test_records_are_pairs_of_picture_and_caption() -> None:
    with pytest.raises(ValueError, match="2 images and 1 captions"):
        Records(torch.zeros(2, 3, 4, 4), ["one"])
    with pytest.raises(ValueError, match="0 images and 0 captions"):
        Records(torch.zeros(0, 3, 4, 4), [])
    with pytest.raises(ValueError, match="1 latents and 0 captions"):
        Records(None, [], torch.zeros(1, 4))
    for images, latents in ((None, None), (torch.zeros(1, 3, 4, 4), torch.zeros(1, 4))):
        with pytest.raises(ValueError, match="records are either pictures or latents"):
            Records(images, ["one"], latents)


# Latents


def latent_file(folder: Path, *latents: torch.Tensor, name: str = "latents") -> Path:
    for number, one in enumerate(latents):
        save_file({name: one}, folder / f"{number}.safetensors")
    path = folder / "records.jsonl"
    rows = [f'{{"latents": "{number}.safetensors", "caption": "number {number}"}}' for number in range(len(latents))]
    path.write_text("\n".join(rows))
    return path


def test_latents_come_from_files_as_they_are_and_keep_their_captions(tmp_path: Path) -> None:
    given = [torch.full((4, 2, 2), float(number)).to(torch.bfloat16) for number in range(3)]
    source = LatentFolder(latent_file(tmp_path, *given))
    assert source.count() == 3
    drawn = RecordSampler(source.load(), count=3, seed=0).draw(0)
    assert isinstance(drawn.segment, CleanLatents)
    assert drawn.segment.latents.dtype == torch.float32
    assert drawn.media is not None
    assert drawn.media.images is None
    assert drawn.media.texts == [f"number {int(level)}" for level in drawn.segment.latents[:, 0, 0, 0]]


def test_latents_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    def loaded(*latents: torch.Tensor, name: str = "latents") -> Records:
        return LatentFolder(latent_file(tmp_path, *latents, name=name)).load()

    with pytest.raises(
        ValueError, match=r"all latents must be of one shape: .*1\.safetensors has \(4, 3\), the first .* \(4, 2\)"
    ):
        loaded(torch.zeros(4, 2), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"must hold one tensor named 'latents', it holds \['x'\]"):
        loaded(torch.zeros(4, 2), name="x")
    with pytest.raises(ValueError, match="holds values that are not finite"):
        loaded(torch.full((4,), torch.nan))
    (tmp_path / "0.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        LatentFolder(tmp_path / "records.jsonl").load()
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(ValueError, match=r":1: there is no latents .*0\.safetensors"):
        LatentFolder(tmp_path / "records.jsonl")
    with pytest.raises(ValueError, match="there is no record file"):
        LatentFolder(tmp_path / "none.jsonl")


# Batches


def test_pictures_keep_their_captions() -> None:
    sampler = RecordSampler(records(10), count=4, seed=0)
    for batch in range(5):
        drawn = media(sampler, batch)
        assert drawn.images is not None
        levels = (drawn.images[:, 0, 0, 0] * 255).round().long().tolist()
        assert drawn.texts == [f"level {level}" for level in levels]


def test_every_record_is_drawn_once_an_epoch_and_each_epoch_has_its_own_order() -> None:
    sampler = RecordSampler(records(10), count=4, seed=0)
    drawn = [caption for batch in range(5) for caption in captions(sampler, batch)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(records(10).captions)
    assert drawn[:10] != drawn[10:]


def test_batch_b_does_not_depend_on_the_batches_before_it() -> None:
    straight, resumed = (RecordSampler(records(10), 4, seed=3, caption_dropout=0.5) for _ in range(2))
    before = [captions(straight, batch) for batch in range(12)]
    assert [captions(resumed, batch) for batch in range(7, 12)] == before[7:]


def test_ids_carry_the_batch() -> None:
    sampler = RecordSampler(records(3), count=2, seed=0)
    assert [sampler.draw(batch).ids for batch in (0, 1)] == [["r0.p0", "r0.p1"], ["r1.p0", "r1.p1"]]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_the_share_of_dropped_captions_is_the_one_asked_for(share: float) -> None:
    """12,800 draws: five standard deviations of the share are at most 0.022."""
    sampler = RecordSampler(records(64), count=64, seed=1, caption_dropout=share)
    empty = sum(caption == "" for batch in range(200) for caption in captions(sampler, batch))
    assert empty / 12_800 == pytest.approx(share, abs=5 * (share * (1 - share) / 12_800) ** 0.5)


def test_dropping_captions_hits_every_record_and_changes_no_order() -> None:
    dropping = RecordSampler(records(8), 8, seed=1, caption_dropout=0.5)
    plain = RecordSampler(records(8), 8, seed=1)
    dropped = Counter[str]()
    for batch in range(20):
        for kept, own in zip(captions(dropping, batch), captions(plain, batch), strict=True):
            assert kept in ("", own)
            dropped[own] += kept == ""
    assert set(dropped) == set(records(8).captions)
    assert all(0 < count < 20 for count in dropped.values())


@pytest.mark.parametrize("count", [0, 4])
def test_a_batch_larger_than_the_data_is_refused_at_the_start(count: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={count} does not fit the 3 records"):
        RecordSampler(records(3), count=count, seed=0)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_caption_dropout_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"caption_dropout must be in .0, 1., got {share}"):
        RecordSampler(records(3), count=1, seed=0, caption_dropout=share)
