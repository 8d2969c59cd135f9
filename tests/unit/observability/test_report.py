"""The report: one page, drawn from the run's files alone."""

from __future__ import annotations

import base64
import copy
import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from tests.unit.observability.runs import RL, write_run
from unirl.observability.grids import before_after, save_grid
from unirl.observability.metrics import MetricsLog
from unirl.observability.report import write_report
from unirl.observability.run_folder import RunFolder
from unirl.observability.texts import write_texts

VOID = {"meta", "img", "br", "wbr", "circle", "line", "path", "rect"}


class Page(HTMLParser):
    """Everything a browser would fetch, the visible text, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "poster")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def verdict(report: Path) -> str:
    found = re.search(r'<p class="verdict">(.*?)\n', report.read_text())
    assert found is not None
    return html.unescape(found[1])


def test_the_verdict_tells_the_numbers_of_the_run(tmp_path: Path) -> None:
    assert verdict(write_report(write_run(tmp_path).path)) == (
        "FlowGRPO trained 4 steps. On the evaluation prompts the trained reward (svm) rose from 0.500 to 0.900 "
        "(+0.400). Judges outside of the reward agree: knn rose from 0.480 to 0.875 (+0.395). "
        "Digits/diversity fell from 0.800 to 0.680 (-0.120), 85% of what it was. All 9 health checks are fine."
    )


def test_the_warning_appears_exactly_when_the_gap_opens(tmp_path: Path) -> None:
    # Before training the gap is 0.02; it may grow by 0.05.
    within = {0: (0.5, 0.48), 4: (0.9, 0.831)}
    beyond = {0: (0.5, 0.48), 4: (0.9, 0.829)}
    good = write_report(write_run(tmp_path / "good", evaluations=within).path)
    bad = write_report(write_run(tmp_path / "bad", evaluations=beyond).path)
    assert "parts from the trained reward" not in Page(good.read_text()).text
    assert "agree: knn rose from 0.480 to 0.831" in verdict(good)
    told = "knn parts from the trained reward: the trained reward went from 0.500 to 0.900 (+0.400) while knn went from"
    assert Page(bad.read_text()).text.count(told) == 2, "above the curves and in the health table"
    assert "part from it, so the gain may be a hacked one: knn rose from 0.480 to 0.829 (+0.349)" in verdict(bad)
    assert verdict(bad).endswith("1 of 9 health checks warn: knn.")


def test_a_collapse_is_told(tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path, diversity=(0.8, 0.5, 0.2)).path)
    assert "samples collapse: digits/diversity fell from 0.800 to 0.200, 25% of what" in Page(report.read_text()).text
    assert verdict(report).endswith("1 of 9 health checks warn: digits/diversity.")


def test_grids_are_inside_the_page_byte_for_byte(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    paths = [save_grid(images, folder.samples / f"eval_{step:06}.png", columns=2) for step in (0, 2, 4)]
    page = Page(write_report(folder.path).read_text())
    inside = [base64.b64decode(source.split(",", 1)[1]) for source in page.sources if source.startswith("data:")]
    first, middle, last = (path.read_bytes() for path in paths)
    # Before and after are the first and the last evaluation; then all of them in order.
    assert inside == [first, last, first, middle, last]
    assert "before (step 0)" in page.text
    assert "after (step 4)" in page.text


def test_a_grid_made_for_before_and_after_comes_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    images = torch.zeros(2, 3, 8, 8)
    made = before_after(images, images + 1, folder.before_after, prompts=["a", "b"])
    page = Page(write_report(folder.path).read_text())
    data = base64.b64encode(made.read_bytes()).decode()
    assert [source for source in page.sources if source.startswith("data:")] == [f"data:image/png;base64,{data}"]


def test_many_grids_are_thinned_to_eight(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    for step in range(20):
        save_grid(torch.zeros(1, 3, 8, 8), folder.samples / f"step_{step:06}.png", columns=1)
    page = Page(write_report(folder.path).read_text())
    assert len([source for source in page.sources if source.startswith("data:")]) == 8
    assert "12 more in" in page.text
    assert "step 0 " in page.text
    assert "step 19" in page.text


def test_nothing_is_fetched_from_outside(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    save_grid(torch.zeros(1, 3, 8, 8), folder.samples / "eval_000000.png", columns=1)
    text = write_report(folder.path).read_text()
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in Page(text).sources)


def test_the_page_tells_what_it_takes_to_repeat_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    text = Page(write_report(folder.path).read_text()).text
    assert "unirl train demo" in text
    assert "kl_coef: 0.2" in text
    for name, version in folder.read_info()["versions"].items():
        assert f"{name} {version}" in text


def test_text_of_others_cannot_become_markup(tmp_path: Path) -> None:
    config = copy.deepcopy(RL)
    config["data"] = {"prompts": ["<script>alert(1)</script>"]}
    text = write_report(write_run(tmp_path, config=config).path).read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_texts_before_and_after_stand_side_by_side_with_their_rewards(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    long = "word " * 60
    for step, texts, rewards in ((0, ["<b>Lyon</b>", long], [0.0, 0.25]), (4, ["Paris", ""], [1.5, math.nan])):
        write_texts(folder.samples / f"eval_{step:06}.jsonl", ["The capital of France?"], texts, rewards)
    text = write_report(folder.path).read_text()
    shown = Page(text).text
    assert "&lt;b&gt;Lyon&lt;/b&gt;" in text
    assert "before (step 0) after (step 4) The capital of France? 0 <b>Lyon</b> 0.250 word word" in shown
    assert shown.count("word") == 60, "what is folded away is on the page, once"
    assert "<details><summary>word" in text
    assert "1.5 Paris none empty" in shown


def test_pass_at_k_is_told_by_its_least_and_largest_k_and_drawn_whole(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, "demo", config=RL, seed=7)
    log = MetricsLog(folder.metrics)
    for step, (one, four, sixteen) in {0: (0.25, 0.5, 0.75), 4: (0.5, 0.75, 0.75)}.items():
        log.append(step, {"eval/pass@16": sixteen, "eval/pass@1": one, "eval/pass@4": four})
    report = write_report(folder.path)
    assert "pass@1 rose from 0.250 to 0.500 (+0.250); pass@16 stayed at 0.750." in verdict(report)
    assert "step pass@1 pass@4 pass@16 0 0.250 0.500 0.750 4 0.500 0.750 0.750" in Page(report.read_text()).text


def test_an_interrupted_run_says_how_far_it_came(tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path, steps=3).path)
    assert verdict(report).startswith("FlowGRPO has trained 3 of 4 steps; the same command continues it. ")


def test_a_run_without_evaluation_is_told_by_its_training_reward(tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path, evaluations={}).path)
    assert verdict(report) == (
        "FlowGRPO trained 4 steps. The reward of the training rollouts rose from 1.25 to 2 (+0.750). "
        "All 7 health checks are fine."
    )


def test_fine_tuning_is_told_by_its_loss(tmp_path: Path) -> None:
    config = {"domain": "sft", "run": {"name": "demo", "steps": 20}}
    folder = RunFolder.open(tmp_path, "demo", config=config, seed=0)
    lines = [f'{{"step": {step}, "train/loss": {2 - step / 20}}}\n' for step in range(1, 21)]
    lines[9] = '{"step": 10, "eval/loss": 1.75, "train/loss": 1.5}\n'
    lines[19] = '{"step": 20, "eval/loss": 1.25, "train/loss": 1.0}\n'
    folder.metrics.write_text("".join(lines))
    assert verdict(write_report(folder.path)) == (
        "Supervised fine-tuning trained 20 steps. The held-out loss fell from 1.75 to 1.25 (-0.500). "
        "The training loss (mean of the first and of the last 2 steps) fell from 1.925 to 1.025 (-0.900). "
        "The health check is fine."
    )


def test_a_run_that_has_only_begun_has_a_report_too(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, "demo", config=RL, seed=7)
    report = write_report(folder.path)
    Page(report.read_text())
    assert verdict(report) == "FlowGRPO has not finished a step yet."


def test_the_report_is_drawn_from_the_files_alone_and_is_the_same_every_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    first = write_report(folder.path).read_bytes()
    moved = tmp_path / "elsewhere" / "demo"
    moved.parent.mkdir()
    folder.path.rename(moved)
    assert write_report(moved).read_bytes() == first


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run: .*config\.yaml does not exist"):
        write_report(tmp_path)
