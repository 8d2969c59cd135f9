from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest
import torch

from tests.unit.reward.samples import Rule, accepted, answered, generated, level_of, service
from unirl.reward.scorer import Scorer, ScorerInput, SetMeasure
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer, scorer_inputs, set_measures
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams

NAN = math.nan
R1, R2 = [0.0, 1.0, 1.0, 0.0], [4.0, 0.0, 2.0, 2.0]


def table(values: list[float]) -> Rule:
    return Rule(lambda sample: values[int(level_of(sample))])


def two_rewards(second: list[float], max_invalid: float = 0.0) -> tuple[RewardService, Sample]:
    both = service(max_invalid, r1=table(R1), r2=WeightedScorer(table(second), weight=0.5))
    return both, generated(["a", "b"], branch=2)


def cheat(sample: ScorerInput) -> float:
    """Writes the text in the place of the answers, and what it saw there is the score."""
    right = float(sample.text in sample.metadata["answers"])
    sample.metadata["answers"].append(sample.text)
    sample.metadata["answers"].append("a")
    sample.metadata["seen"] = True
    return right + float(sample.metadata["answers"] == ["b", sample.text, "a"])


def test_what_a_scorer_writes_in_the_metadata_no_other_scorer_and_no_other_sample_sees():
    row = {"answers": ["b"]}
    sample = answered(["a", "b", "a"], [row, row, row])
    right = Rule(lambda sample: float(sample.text in sample.metadata["answers"] and "seen" not in sample.metadata))
    both = service(cheat=Rule(cheat), right=right)
    for _ in range(2):
        components = both.score(sample).components
        assert components["cheat"].tolist() == [1.0, 2.0, 1.0]
        assert components["right"].tolist() == [0.0, 1.0, 0.0]
    assert row == {"answers": ["b"]}


# --- composition (FIELD_FAULTS 33) ---


def test_total_is_the_weighted_sum_and_components_stay_unweighted():
    both, sample = two_rewards(R2)
    scores = both.score(sample)
    assert scores.total.tolist() == [2.0, 1.0, 2.0, 1.0]
    assert {name: column.tolist() for name, column in scores.components.items()} == {"r1": R1, "r2": R2}
    assert scores.causes == [""] * 4


@pytest.mark.parametrize(
    ("combine", "expected"),
    [("weighted_sum", [1, -1, 1, -1]), ("per_component", [-0.5, 0.5, 1, -1])],
)
def test_both_ways_to_combine_start_from_the_same_scores(combine, expected):
    both, sample = two_rewards(R2)
    part = sample.frontier.with_rewards(both.score(sample))
    weights = both.config.weights if combine == "per_component" else None
    part = part.compute_advantages(combine=combine, weights=weights)
    assert part.advantages is not None
    torch.testing.assert_close(part.advantages, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)


def test_normalise_then_sum_over_all_rows_is_the_published_pair_of_results():
    both, sample = two_rewards(R2)
    part = sample.frontier.with_rewards(both.score(sample))
    summed = part.compute_advantages("global", combine="weighted_sum").advantages
    each = part.compute_advantages("global", combine="per_component", weights=both.config.weights).advantages
    assert summed is not None
    assert each is not None
    torch.testing.assert_close(summed, torch.tensor([1.0, -1, 1, -1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(each, torch.tensor([-0.2928932, 0.2928932, 1, -1]), atol=1e-5, rtol=0)


def test_a_weight_too_many_is_an_error():
    both, sample = two_rewards(R2)
    part = sample.frontier.with_rewards(both.score(sample))
    with pytest.raises(ValueError, match="do not name the reward components"):
        part.compute_advantages(combine="per_component", weights={**both.config.weights, "r3": 1.0})


def test_weight_0_has_no_influence_even_where_it_is_nan():
    both = service(r1=table(R1), off=WeightedScorer(Rule(lambda _: NAN), weight=0.0))
    scores = both.score(generated(["a", "b"], branch=2))
    assert scores.total.tolist() == R1
    assert scores.components["off"].isnan().all()
    assert scores.causes == [""] * 4


def test_an_optional_scorer_is_logged_and_never_in_the_total(caplog):
    extra = WeightedScorer(Rule(lambda s: 1 / level_of(s)), weight=5.0, required=False)
    both = service(r1=table(R1), extra=extra)
    with caplog.at_level(logging.WARNING):
        scores = both.score(generated(["a", "b"], branch=2))
    assert scores.total.tolist() == R1
    assert scores.components["extra"].isnan().tolist() == [True, False, False, False]
    assert both.config.weights == {"r1": 1.0, "extra": 0.0}
    assert "scorer extra failed on 1 of 4 samples; first: extra: r0.p0/0: ZeroDivisionError" in caplog.text


def test_a_negative_weight_is_a_penalty():
    assert service(r2=WeightedScorer(table(R2), weight=-1.0)).score(generated(["a"] * 4)).total.tolist() == [
        -4,
        0,
        -2,
        -2,
    ]


# --- failures (FIELD_FAULTS 34 and 93) ---


def test_one_missing_component_invalidates_its_sample_and_no_other():
    both, sample = two_rewards([NAN, 0.0, 2.0, 2.0], max_invalid=0.25)
    scores = both.score(sample)
    assert scores.valid.tolist() == [False, True, True, True]
    assert scores.total[1:].tolist() == [1.0, 2.0, 1.0]
    assert scores.components["r1"].tolist() == R1
    assert scores.causes == ["r2: r0.p0/0: the score is nan (prompt 'a')", "", "", ""]
    part = sample.frontier.with_rewards(scores).compute_advantages()
    assert part.advantages is not None
    assert part.advantages[0] == 0
    assert torch.isfinite(part.advantages).all()


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, 1e39])
def test_a_score_that_float32_cannot_hold_is_invalid_and_not_0(bad):
    scores = service(0.5, r=table([bad, 0.0])).score(generated(["a", "b"]))
    assert scores.total[0].isnan()
    assert scores.valid.tolist() == [False, True]


def test_a_real_score_of_0_is_kept():
    scores = service(r=table([0.0, 0.0])).score(generated(["a", "b"]))
    assert scores.total.tolist() == [0.0, 0.0]
    assert scores.valid.all()


@pytest.mark.parametrize("poisoned", [{0}, {3}, {2, 5}, {0, 1, 2, 3, 4, 5, 6}])
def test_a_batch_that_raises_is_halved_until_only_the_poisoned_samples_are_invalid(poisoned):
    sizes = []

    class Fragile(Scorer):
        def score(self, samples: list[ScorerInput]) -> list[float]:
            sizes.append(len(samples))
            levels = [int(level_of(sample)) for sample in samples]
            if poisoned & set(levels):
                raise OSError("decoder fault")
            return [float(level) for level in levels]

    scores = service(0.99, fragile=Fragile()).score(generated(["a"] * 8))
    assert {row for row in range(8) if not scores.valid[row]} == poisoned
    assert all(scores.total[row] == row for row in range(8) if row not in poisoned)
    assert all(scores.causes[row] == f"fragile: r0.p{row}/0: OSError: decoder fault" for row in poisoned)
    assert len(sizes) <= 15


def test_more_than_max_invalid_stops_the_run_with_scorer_count_and_first_cause():
    def rule(sample):
        return math.log(level_of(sample) - 1)

    with pytest.raises(RuntimeError) as raised:
        accepted(service(0.25, fine=table([0.0] * 4), logs=Rule(rule)), generated(["a"] * 4))
    assert str(raised.value) == (
        "2 of 4 samples have no reward, more than max_invalid=0.25 allows. Failed: logs on 2. "
        f"First cause: logs: r0.p0/0: {raised.value.__cause__.__class__.__name__}: {raised.value.__cause__}"
    )
    assert isinstance(raised.value.__cause__, ValueError)


def test_the_share_of_invalid_samples_may_reach_max_invalid():
    assert accepted(service(0.5, r=table([NAN, 1.0])), generated(["a", "b"])).valid.tolist() == [False, True]


def test_no_invalid_sample_is_allowed_unless_asked_for():
    with pytest.raises(RuntimeError, match=r"1 of 2 samples .* max_invalid=0 allows\. Failed: r on 1"):
        accepted(service(r=table([NAN, 1.0])), generated(["a", "b"]))


def test_ctrl_c_in_a_scorer_is_no_failed_sample():
    def interrupt(_: ScorerInput) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        service(0.9, r=Rule(interrupt)).score(generated(["a"]))


class Returns(Scorer):
    def __init__(self, returned: object) -> None:
        self.returned = returned

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return self.returned  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "scorer broken returned 1 scores for 2 samples"),
        ([1.0, 2.0, 3.0], "scorer broken returned 3 scores for 2 samples"),
        (None, "scorer broken returned NoneType, not a list"),
        (np.zeros(2), r"scorer broken returned ndarray, not a list of floats \(an array has .tolist\(\)\)"),
        ([1.0, None], r"scorer broken returned a NoneType \(None\) as a score"),
        ([1.0, "0.5"], r"scorer broken returned a str \('0.5'\) as a score"),
        ([torch.tensor(1.0), 2.0], "scorer broken returned a Tensor"),
    ],
)
def test_a_scorer_that_breaks_its_contract_is_named_at_once(returned, message):
    with pytest.raises(ValueError, match=message):
        service(0.99, broken=Returns(returned)).score(generated(["a", "b"]))


def test_numpy_numbers_ints_and_truth_values_are_numbers():
    scores = service(r=Returns([np.float32(0.5), 2, True])).score(generated(["a"] * 3))
    assert scores.total.tolist() == [0.5, 2.0, 1.0]


def test_a_picture_that_is_not_finite_is_invalid_and_not_shown_to_scorers():
    sample = generated(["a"] * 3)
    assert sample.frontier.media is not None
    assert sample.frontier.media.images is not None
    images = sample.frontier.media.images.clone()
    images[1, 0, 2, 2] = NAN
    part = dataclasses.replace(sample.frontier, media=Media(images=images))
    seen = []
    scores = service(0.4, r=Rule(lambda s: seen.append(s.id) or 1.0)).score(sample.with_frontier(part))
    assert seen == ["r0.p0/0", "r0.p2/0"]
    assert scores.valid.tolist() == [True, False, True]
    assert scores.causes[1] == "r0.p1/0: the picture is not finite"


# --- pairing (FIELD_FAULTS 95) ---


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_score_i_belongs_to_sample_i_for_every_batch_size(batch):
    sample = generated([f"prompt {row}" for row in range(10)])
    pieces = sample.split([batch] * (10 // batch))
    judge = service(r=Rule(lambda s: 1000 * int(s.prompt.split()[1]) + level_of(s)))
    assert [v for piece in pieces for v in judge.score(piece).total.tolist()] == [1001.0 * row for row in range(10)]


def test_every_child_is_scored_against_the_prompt_and_metadata_of_its_own_root():
    sample = generated(["red", "blue"], branch=3, metadata=[{"n": 0}, {"n": 1}])
    inputs = scorer_inputs(sample)
    assert [entry.prompt for entry in inputs] == ["red"] * 3 + ["blue"] * 3
    assert [entry.metadata["n"] for entry in inputs] == [0, 0, 0, 1, 1, 1]
    assert [entry.id for entry in inputs] == sample.frontier.ids
    assert [int(level_of(entry)) for entry in inputs] == list(range(6))


def test_pictures_of_a_rewritten_prompt_are_scored_against_what_the_user_asked():
    params = DiffusionSamplingParams(steps=2, height=4, width=4)
    roots = Part(ids=["r0.p0"], metadata=[{}], media=Media(texts=["a cat"]))
    rewrites = Part(ids=["r0.p0/0"], metadata=[{}], media=Media(texts=["a fluffy cat at dusk"]))
    images = Part(ids=["r0.p0/0/0"], metadata=[{}], media=Media(images=torch.zeros(1, 3, 4, 4)), sampling=params)
    assert scorer_inputs(Sample((roots, rewrites, images)))[0].prompt == "a cat"
    assert scorer_inputs(Sample((roots, rewrites)))[0].text == "a fluffy cat at dusk"


def test_an_edit_is_scored_beside_the_picture_of_its_own_prompt():
    texts = ["red", "blue", "a pair", "none"]
    filled = generated(texts, branch=2)
    grey = [torch.full((3, 2, 5), level / 255) for level in range(4)]
    prompts = Media(texts=texts, sources=[grey[:1], grey[1:2], grey[2:], []])
    roots = Part(ids=filled.roots.ids, metadata=filled.roots.metadata, media=prompts)
    inputs = scorer_inputs(Sample((roots, filled.frontier)))
    assert [int(entry.original[0, 0, 0]) for entry in inputs[:4]] == [0, 0, 1, 1]
    assert inputs[0].original.shape == (2, 5, 3)
    assert not inputs[0].original.flags.writeable
    assert [entry.source for entry in inputs[4:]] == [None] * 4
    with pytest.raises(ValueError, match=r"the prompt of r0\.p2/0 comes without one source picture"):
        _ = inputs[4].original


def test_scorers_see_rounded_uint8_pictures_that_they_cannot_change():
    entry = scorer_inputs(generated(["a"] * 3))[2]
    assert entry.picture.dtype == np.uint8
    assert entry.picture.shape == (4, 4, 3)
    assert np.unique(entry.picture).tolist() == [2]
    with pytest.raises(ValueError, match="read-only"):
        entry.picture[0] = 0


def test_a_request_that_is_not_filled_and_roots_without_prompts_are_refused():
    filled = generated(["a"])
    request = Sample((filled.roots,)).fork(1, DiffusionSamplingParams(steps=2, height=4, width=4))
    with pytest.raises(ValueError, match="generate before scoring"):
        service(r=table(R1)).score(request)
    bare = Part(ids=filled.roots.ids, metadata=filled.roots.metadata)
    with pytest.raises(ValueError, match="carry no texts"):
        scorer_inputs(Sample((bare, filled.frontier)))


# --- settings and set measures ---


@pytest.mark.parametrize("weight", [NAN, math.inf])
def test_a_weight_must_be_finite(weight):
    with pytest.raises(ValueError, match="weight of a scorer must be finite"):
        WeightedScorer(table(R1), weight=weight)


@pytest.mark.parametrize("scorers", [{}, {"r": WeightedScorer(table(R1), weight=0.0)}])
def test_a_reward_without_a_counting_scorer_is_refused(scorers):
    with pytest.raises(ValueError, match="a required scorer of non-zero weight"):
        RewardConfig(scorers)


@pytest.mark.parametrize("share", [-0.1, 1.0, NAN])
def test_max_invalid_is_a_share_below_1(share):
    with pytest.raises(ValueError, match="max_invalid is a share"):
        RewardConfig({"r": WeightedScorer(table(R1))}, max_invalid=share)


class Count(SetMeasure):
    def measure(self, samples: list[ScorerInput]) -> dict[str, float]:
        return {"size": float(len(samples)), "prompts": float(len({sample.prompt for sample in samples}))}


def test_set_measures_are_named_by_measure_and_figure():
    assert set_measures(generated(["a", "b"], branch=3), {"count": Count()}) == {
        "count/size": 6.0,
        "count/prompts": 2.0,
    }
