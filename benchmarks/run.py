"""`python -m benchmarks.run`: every benchmark as a table; each side of a row runs in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import tempfile
from pathlib import Path
from typing import Literal

import torch

from benchmarks.ar_step import SideName, TextCost, TextWorkload, measure_text
from benchmarks.bare_loop import Workload
from benchmarks.diffusion_step import Cost, measure
from benchmarks.driver import PICTURES, TEXTS
from benchmarks.driver import table as driver_table
from benchmarks.ray_step import measure_ray_step
from benchmarks.reward_wire import measure_wire, served
from benchmarks.scored_rollout import measure_overlap
from benchmarks.scorer_speed import scorer_speeds
from benchmarks.shared_questions import shared_questions
from benchmarks.transports import Name, measure_transport
from unirl.distributed.group.placement import Placement
from unirl.models.language.packaged import from_package
from unirl.models.random_weights.sd3 import write as write_sd3
from unirl.models.tiny_language import TinyLM

REPEATS = 3
SORTED = tuple(f"sort {digits} upwards:" for digits in ("41023", "20481", "99120", "31337"))
QUESTIONS = (
    "What is the capital of France? Answer in one word.",
    "Name a colour and a fruit that has it.",
    "Is seven a prime number? Say why in one sentence.",
    "Write a sentence about the sea.",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        diffusion(Path(folder))
        language(Path(folder))
        scores(Path(folder))
    rewards()
    transports()
    ray_step()
    scorers()
    questions()
    driver()


def diffusion(folder: Path) -> None:
    """The product and a bare loop with the same mathematics."""
    checkpoint = write_sd3(folder / "sd3", layers=4, width=128, head_dim=64)
    both = Workload()
    print("One Flow-GRPO step of an SD3 of 2.3M weights, LoRA r32, one thread: CPU seconds and peak memory (MiB)")
    print(f"{'workload':<46} {'ours':>6} {'bare':>6} {'ratio':>6} {'outside model':>14} {'ours':>6} {'bare':>6}")
    row("16 x 10, 9 trained, guidance 4.5, no gradient", checkpoint, both)
    row("16 x 10, 9 trained, guidance 4.5, gradient", checkpoint, dataclasses.replace(both, guidance_gradient=True))
    small = dataclasses.replace(both, guidance=1.0, trained=3)
    row("16 x 10, 3 trained, guidance 1", checkpoint, small)
    for group, steps in ((4, 10), (16, 10), (8, 20)):
        grown = dataclasses.replace(small, group=group, steps=steps)
        row(f"{2 * group} x {steps}, 3 trained, guidance 1", checkpoint, grown)


def language(folder: Path) -> None:
    """The product, TRL's GRPOTrainer and a bare loop."""
    family = TinyLM()
    family.save(family.load(torch.device("cpu"), torch.float32), folder / "qwen3")
    fixed = TextWorkload(folder / "qwen3", SORTED, group=8, max_new_tokens=32, lora=None, endless=True)
    smollm2 = Path(from_package("HuggingFaceTB/SmolLM2-135M-Instruct"))
    prompts = tuple(rendered(smollm2, question) for question in QUESTIONS)
    uneven = TextWorkload(smollm2, prompts, group=8, max_new_tokens=64, lora=16, endless=False)
    print("\nOne GRPO step of a language model, one thread: CPU seconds; tokens/s of the rollout; MiB beside the model")
    print(
        f"{'':<24} {'step':>8} {'tokens':>7} {'ms/token':>9} {'of TRL':>7} {'tokens/s':>9} {'memory':>7} {'model':>6}"
    )
    text_rows("Qwen3 of 0.6M, 32 x 32", fixed, repeats=2 * REPEATS)
    text_rows("SmolLM2, LoRA, 32 x <= 64", uneven, repeats=1)


def scores(folder: Path) -> None:
    """Rollouts that are scored whole, and in chunks, in this process and by a rank of Ray."""
    checkpoint = write_sd3(folder / "small_sd3")
    print("\nA rollout and its scores, by a process that takes as long for a chunk as its generation: seconds")
    print(f"{'':<26} {'rollout':>8} {'scores':>8} {'chunked':>8} {'ratio':>6} {'best':>6}")
    here, one_rank = Placement(device="cpu"), Placement(launcher="ray", device="cpu", devices=1)
    for name, placement, chunks in (("", here, 2), ("", here, 8), (", Ray", one_rank, 8)):
        cost = measure_overlap(checkpoint, placement, chunks=chunks, group=4, steps=10, repeats=REPEATS)
        print(
            f"{f'{chunks} chunks of 4 pictures{name}':<26} {cost.rollout:8.2f} {cost.reward:8.2f} {cost.chunked:8.2f}"
            f" {cost.ratio:6.2f} {cost.best:6.2f}",
            flush=True,
        )


def rewards() -> None:
    """A reward server beside the same scorer in the process."""
    print("\nMilliseconds for a picture, from a scorer that reads its bytes: in the process, and over HTTP (loopback)")
    print(f"{'':<24} {'local':>8} {'HTTP':>8} {'on the way':>11}")
    with served() as url:
        for size, count in ((512, 1), (512, 64), (1024, 1), (1024, 32)):
            cost = measure_wire(url, size, count)
            name = f"{count} of {size} x {size}"
            print(f"{name:<24} {cost.local:8.2f} {cost.remote:8.2f} {cost.remote - cost.local:11.2f}", flush=True)


def transports() -> None:
    """Rows between two ranks on this machine."""
    print("\nSeconds for 256 MiB in rows of 1 MiB between two ranks, for a memcpy of them, and for an empty call")
    print(f"{'':<14} {'kept':>8} {'fetched':>8} {'by driver':>10} {'memcpy':>8} {'call':>8}")
    packages: dict[Name, str] = {"object_store": "ray", "direct": "nixl", "transfer_queue": "transfer_queue"}
    for name, package in packages.items():
        if importlib.util.find_spec(package) is None:
            continue
        cost = measure_transport(name, 256)
        print(
            f"{name:<14} {cost.keep:8.3f} {cost.fetch:8.3f} {cost.driver:10.3f} {cost.memcpy:8.3f} {cost.call:8.4f}",
            flush=True,
        )


def ray_step() -> None:
    """A step of the quickstart's pictures by each launcher."""
    cost = measure_ray_step(3 * REPEATS)
    print("\nA Flow-GRPO step of the digits recipe: seconds in this process, and on one and two ranks of Ray")
    print(
        f"  in process {cost.local:.3f}, one rank {cost.one:.3f} ({cost.one / cost.local:.2f} x), two ranks "
        f"{cost.two:.3f} ({cost.two / cost.local:.2f} x)",
        flush=True,
    )


def scorers() -> None:
    """What scorers do beside their model: reading, scaling and batching."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        speeds = pool.apply(scorer_speeds)
    print("\nScorers with models of a few layers, pictures of 512 pixels, one thread: samples a CPU second")
    for name, speed in speeds.items():
        print(f"  {name:<16} {speed:7.0f}", flush=True)


def questions() -> None:
    """GenEval 2 on one picture, its questions in one row and each in its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        cost = pool.apply(shared_questions)
    print("\nGenEval 2, a picture of 512 pixels with 7 questions, random Qwen3-VL, one thread: CPU milliseconds")
    print(
        f"  in one row {1000 * cost.shared:.0f}, apart {1000 * cost.apart:.0f} ({cost.apart / cost.shared:.1f} x); "
        f"probabilities differ by {cost.difference:.0e} at most",
        flush=True,
    )


def driver() -> None:
    """The driver of many ranks, which only answer."""
    for what, load in (("pictures", PICTURES), ("responses of 512 tokens", TEXTS)):
        print(f"\nThe driver's CPU seconds in a step, {load.prompts} x {load.group} {what} on each rank, by phase")
        driver_table(load, (8, 64, 512, 1024))


def rendered(checkpoint: Path, question: str) -> str:
    """`question` in the chat template of a checkpoint."""
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": question}]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def text_rows(name: str, work: TextWorkload, repeats: int) -> None:
    """Measure one workload on all sides, by the token: where lengths are drawn, steps differ in their tokens."""
    print(name)
    peer = text_in_process("trl", work, repeats)
    for side, cost in (
        ("TRL", peer),
        ("bare loop", text_in_process("bare", work, repeats)),
        ("ours", text_in_process("product", work, repeats)),
    ):
        model = f"{cost.model / cost.total:.0%}" if cost.model else ""
        ratio = cost.seconds_per_token / peer.seconds_per_token
        print(
            f"  {side:<22} {cost.total:8.3f} {cost.tokens:7.0f} {1000 * cost.seconds_per_token:9.2f} {ratio:7.2f}"
            f" {cost.tokens_per_second:9.0f} {cost.used_mib:7.0f} {model:>6}",
            flush=True,
        )


def text_in_process(side: SideName, work: TextWorkload, repeats: int) -> TextCost:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_text, (side, work, repeats))


def row(name: str, checkpoint: Path, work: Workload) -> None:
    """Measure one workload and print its line."""
    ours, bare = (in_process(side, checkpoint, work) for side in ("product", "bare"))
    print(
        f"{name:<46} {ours.total:6.2f} {bare.total:6.2f} {ours.total / bare.total:6.2f} {ours.overhead:14.1%}"
        f" {ours.peak_mib:6.0f} {bare.peak_mib:6.0f}",
        flush=True,
    )


def in_process(side: Literal["product", "bare"], checkpoint: Path, work: Workload) -> Cost:
    """A process of its own: the peak of its memory is the peak of this workload."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (side, checkpoint, work, REPEATS))


if __name__ == "__main__":
    main()
