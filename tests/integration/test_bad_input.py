"""What a user can get wrong is refused by `unirl check`, with what was received and what helps, before torch loads."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.config.load import dump
from unirl.config.run import load_recipe
from unirl.observability.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
DIGITS, DPPO, NFT, SFT, MIX = (
    "diffusion/digits",
    "diffusion/digits_flow_dppo",
    "diffusion/digits_nft",
    "sft/digits",
    "diffusion/sd3_mix_grpo",
)
STEPS = "unirl.types.steps"
LISTED = "_target_: unirl.data.prompts.ListedPrompts"
FUNCTION = "_target_: unirl.reward.scorers.function.FunctionScorer"
JUDGE = "_target_: unirl.reward.scorers.digits.DigitJudge"

# Every command in one process, which then tells what it has loaded.
SESSION = """
import contextlib, io, json, runpy, sys
from unirl import cli

def outcome(words):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            code = cli.main(words)
        except SystemExit as stop:
            code = stop.code
    return code, error.getvalue()

outcomes = [outcome(words) for words in json.load(sys.stdin)]
known = ("torch._C", "sklearn.base", "diffusers.utils", "transformers.utils", "jaxtyping._array_types")
heavy = [name for name in known if name in sys.modules]
json.dump({"outcomes": outcomes, "heavy": heavy}, sys.stdout)
"""


@dataclasses.dataclass(frozen=True)
class Bad:
    """A recipe with overrides, FILES standing for the folder of bad files, and what the error must say."""

    recipe: str
    overrides: tuple[str, ...]
    told: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.recipe, *self.overrides])


def bad(recipe: str, *overrides: str, told: tuple[str, ...]) -> Bad:
    return Bad(recipe, overrides, told)


def unknown(recipe: str, key: str, known: str, received: str = "1 (int)") -> Bad:
    """A key nobody knows, and the one that was meant."""
    return bad(
        recipe, f"{key}=1", told=(f"error: {key}: unknown key of ", f"(got {received})", f"did you mean {known}")
    )


def records(file: str, size: int = 8) -> tuple[str, ...]:
    """Other records in the place of the shipped ones."""
    image_folder = "_target_: unirl.data.records.ImageFolder"
    return "~data.records", f"+data.records={{{image_folder}, path: FILES/{file}, size: {size}}}"


def prompts(file: str) -> tuple[str, ...]:
    return "prompts@data.prompts=file", f"data.prompts.path=FILES/{file}"


UNKNOWN_KEYS = [
    unknown(DIGITS, "rum", "run"),
    unknown(DIGITS, "evals", "eval"),
    unknown(DIGITS, "run.step", "steps"),
    unknown(DIGITS, "placement.devise", "device"),
    unknown(DIGITS, "model.layer", "layers"),
    unknown(DIGITS, "data.prompt_per_step", "prompts_per_step"),
    unknown("diffusion/sd3_flow_grpo", "data.prompts.prompt", "prompts"),
    unknown(DIGITS, "sampling.guidence", "guidance"),
    unknown(MIX, "sampling.sde.sise", "size"),
    unknown(DIGITS, "rollout.batchsize", "batch_size"),
    unknown(DIGITS, "reward.max_invald", "max_invalid"),
    unknown(DIGITS, "reward.scorers.digit.wieght", "weight"),
    unknown(DIGITS, "reward.scorers.digit.scorer.knid", "kind"),
    unknown(DIGITS, "advantage.scal", "scale"),
    unknown(DIGITS, "algorithm.clip_hgih", "clip_high"),
    unknown(DPPO, "algorithm.kl_treshold", "kl_threshold"),
    unknown(NFT, "algorithm.advantage_mx", "advantage_max"),
    unknown(DIGITS, "train.backends", "backend"),
    unknown(DIGITS, "train.backend.max_gradnorm", "max_grad_norm"),
    unknown(DIGITS, "train.backend.optimizer.lrr", "lr"),
    unknown("diffusion/sd3_flow_grpo", "train.backend.lora.rnk", "rank"),
    unknown(NFT, "train.backend.ema.decya", "decay"),
    unknown(DIGITS, "train.geometry.microbatch_size", "micro_batch_size"),
    unknown(DIGITS, "eval.evry", "every"),
    unknown(DIGITS, "eval.scorers.own.outptu", "output"),
    unknown(DIGITS, "logging.tracker", "trackers"),
    unknown(SFT, "data.records.wrong_shar", "wrong_share"),
    unknown(SFT, "algorithm.timestep", "timesteps"),
    unknown(SFT, "eval.reward.scorers.digit.requird", "required"),
    # of another trainer
    bad(
        SFT, "data.samples_per_prompt=8", told=("data.samples_per_prompt: unknown key of SFTDataConfig (got 8 (int))",)
    ),
    bad(SFT, "rollout.weights=ema", told=("rollout: unknown key of SFTConfig",)),
]

WRONG_TYPES = [
    bad(DIGITS, "run.steps=ten", told=("run.steps: expected an int, got 'ten' (str); write a whole number",)),
    bad(DIGITS, "run.steps=1.5", told=("run.steps: expected an int, got 1.5 (float)",)),
    bad(DIGITS, "run.steps=true", told=("run.steps: expected an int, got True (bool)",)),
    bad(DIGITS, "run.steps=null", told=("run.steps: expected an int, got null",)),
    bad(DIGITS, "train.backend.optimizer.lr=nan", told=("train.backend.optimizer.lr: nan is not a finite number",)),
    bad(DIGITS, "train.backend.optimizer.lr=inf", told=("train.backend.optimizer.lr: inf is not a finite number",)),
    bad(DIGITS, "train.backend.optimizer.lr=fast", told=("expected a number, got 'fast' (str); write it as 0.1",)),
    bad(DIGITS, "train.backend.lora=true", told=("expected a section of LoRA, got True (bool); write key: value",)),
    bad(DIGITS, "data=3", told=("data: expected a section of DataConfig, got 3 (int)",)),
    bad(DIGITS, "model=null", told=("model is a group and takes the name of an option, got null",)),
    bad(DIGITS, "reward.scorers=[a]", told=("reward.scorers=[a]; Cannot merge a mapping with a list",)),
    bad(DIGITS, "logging.trackers=tensorboard", told=("got 'tensorboard' (str); write [a, b]",)),
    bad(DIGITS, "train.backend.optimizer.betas=[0.9]", told=("expected 2 values, got 1: [0.9] (list)",)),
    bad(DIGITS, "advantage.scale=group-std", told=("unknown value 'group-std' (str); did you mean group_std?",)),
    bad(DIGITS, "run.steps=1,2", told=("override 'run.steps=1,2': one run takes one value; write a list as [a,b]",)),
    bad(DIGITS, "run.steps=${nothing}", told=("run.steps: Interpolation key 'nothing' not found",)),
]

WRONG_NUMBERS = [
    bad(DIGITS, "train.backend.optimizer.lr=0", told=("lr must be positive, got 0.0",)),
    bad(DIGITS, "train.backend.optimizer.eps=0", told=("eps must be positive, got 0.0",)),
    bad(DIGITS, "train.backend.optimizer.final_ratio=2", told=("a share of lr in [0, 1], got 2.0",)),
    bad(DIGITS, "train.backend.max_grad_norm=0", told=("max_grad_norm must be positive or null, got 0.0",)),
    bad(DIGITS, "train.backend.lora={rank: 0}", told=("rank and alpha must be at least 1, got rank=0",)),
    bad(NFT, "train.backend.ema.decay=1", told=("decay must be in [0, 1), got 1.0",)),
    bad(DIGITS, "advantage.eps=-1", told=("eps must not be negative, got -1.0",)),
    bad(DIGITS, "algorithm.clip_low=2", told=("clip_low must be in (0, 1) and clip_high positive, got 2.0",)),
    bad(DIGITS, "run.save_every=0", told=("save_every must be at least 1, got 0",)),
    bad(DIGITS, "run.name=..", told=("name must be a plain folder name, got '..'",)),
    bad(DIGITS, "run.name=a/b", told=("name must be a plain folder name, got 'a/b'",)),
    bad(DIGITS, "eval.every=0", told=("every must be at least 1, got 0",)),
    bad(DIGITS, "sampling.guidance=0.5", told=("guidance must be at least 1 (1 = none), got 0.5",)),
    bad(DIGITS, "sampling.height=16", told=("this model makes 8 x 8 pixels, asked for 16 x 8",)),
    bad(DIGITS, "sampling.frames=4", told=("TinySD3 makes single images: sampling.frames must be 1, got 4",)),
    bad(DIGITS, "model.patch=0", told=("patch must be at least 1, got 0",)),
    bad(DIGITS, "model.head_dim=3", told=("heads x head_dim must be a multiple of 4", "got 2 x 3")),
    bad(DIGITS, "model.vocabulary=[a,a]", told=("vocabulary must be distinct words, at least one, got ['a', 'a']",)),
    bad(DIGITS, "placement.device=gpu", told=("placement.device must be cpu, cuda or null, got 'gpu'",)),
    bad(SFT, "data.caption_dropout=1", told=("caption_dropout must be in [0, 1), got 1.0",)),
    bad(SFT, "data.records.wrong_share=-1", told=("wrong_share must be in [0, 1), got -1.0",)),
]

GEOMETRY = [
    bad(DIGITS, "data.samples_per_prompt=1", told=("samples_per_prompt=1: a group of one has no", "use at least 2")),
    bad(DIGITS, "data.samples_per_prompt=1", "advantage.scope=prompt", told=("a group of one has no baseline",)),
    bad(
        DIGITS, "data.samples_per_prompt=1", "data.prompts_per_step=1", "advantage.scope=global",
        "train.geometry.num_updates_per_batch=1", told=("a group of one has no baseline",),
    ),
    bad(DIGITS, "data.samples_per_prompt=0", told=("data: samples_per_prompt must be at least 1, got 0",)),
    bad(DIGITS, "data.prompts_per_step=0", told=("data: prompts_per_step must be at least 1, got 0",)),
    bad(DIGITS, "data.prompts_per_step=11", told=("prompts_per_step=11 does not fit the 10 prompts", "take 1 to 10")),
    bad(
        DIGITS, "train.geometry.num_updates_per_batch=3",
        told=("80 samples a step do not divide into num_updates_per_batch=3", "the nearest that does is 2"),
    ),
    bad(
        DIGITS, "train.geometry.micro_batch_size=7",
        told=("an update of 40 samples does not divide into micro_batch_size=7", "the nearest that does is 8"),
    ),
    bad(
        SFT, "data.batch_size=65", "train.geometry.micro_batch_size=4",
        told=("65 samples does not divide into micro_batch_size=4", "the nearest that does is 5"),
    ),
    bad(SFT, "data.batch_size=0", told=("batch_size=0 does not fit the 898 records: take 1 to 898",)),
    bad(SFT, "data.batch_size=899", told=("batch_size=899 does not fit the 898 records: take 1 to 898",)),
    bad(SFT, "train.geometry.num_updates_per_batch=2", told=("train.geometry.num_updates_per_batch at 1, got 2",)),
]  # fmt: skip

STOCHASTIC_STEPS = [
    bad(
        DIGITS, f"sampling.sde={{_target_: {STEPS}.ListedSteps, steps: [3, 7]}}",
        told=("SDE step 7 is the last of 8 steps", "always deterministic; choose from 0..6"),
    ),
    bad(DIGITS, f"sampling.sde={{_target_: {STEPS}.ListedSteps, steps: [8]}}", told=("SDE step 8 is outside 0..6",)),
    bad(DIGITS, f"sampling.sde={{_target_: {STEPS}.ListedSteps, steps: [-1]}}", told=("SDE step -1 is outside 0..6",)),
    bad(
        DIGITS, f"sampling.sde={{_target_: {STEPS}.WindowSteps, size: 2, start: 6}}",
        told=("a window of 2 steps from step 6 does not fit the 7 stochastic steps", "the last step is deterministic"),
    ),
    bad(
        DIGITS, f"sampling.sde={{_target_: {STEPS}.RandomSteps, count: 2, pool: [6, 7]}}",
        told=("SDE step 7 is the last of 8 steps",),
    ),
    bad(MIX, "sampling.steps=4", told=("a window of 4 steps from step 0 does not fit the 3 stochastic steps",)),
    bad(DIGITS, "sampling.noise_level=0", told=("FlowGRPO trains on stochastic steps", "picks none (noise_level=0.0")),
    bad(DPPO, "sampling.noise_level=0", told=("FlowDPPO trains on stochastic steps", "picks none (noise_level=0.0")),
    bad(DIGITS, f"sampling.sde={{_target_: {STEPS}.NoSteps}}", told=("picks none", "sde=NoSteps()")),
    bad(DIGITS, "rollout.weights=ema", told=("FlowGRPO samples with the live weights", "got ema")),
    bad(DPPO, "rollout.weights=ema", told=("FlowDPPO samples with the live weights", "got ema")),
    bad(NFT, "rollout.weights=live", told=("DiffusionNFT samples with the ema weights: set rollout.weights=ema",)),
    bad(NFT, "train.backend.ema=null", told=("DiffusionNFT samples with EMA weights: set train.backend.ema",)),
    bad(NFT, "sampling.same_initial_noise=true", told=("all samples of a group one picture", "set it to false")),
]  # fmt: skip

FILES_AND_DATA = [
    bad(DIGITS, "model.checkpoint=FILES/none", told=("checkpoint FILES/none holds no config.json",)),
    bad(DIGITS, "model.checkpoint=FILES/model", told=("holds a model of another shape: layers=5 there, 2 here",)),
    bad("diffusion/sd3_nft", "model.checkpoint=FILES/model", told=("FILES/model holds no model_index.json",)),
    bad("diffusion/sd3_nft", "model.checkpoint=FILES", told=("FILES holds no model_index.json",)),
    bad("diffusion/sd3_nft", "model.checkpoint=no/such/folder", told=("'no/such/folder' is neither a folder nor",)),
    bad(DIGITS, "prompts@data.prompts=file", told=("data.prompts.path: missing; give a path",)),
    bad(DIGITS, *prompts("none.txt"), told=("data.prompts: there is no prompt file FILES/none.txt",)),
    bad(
        DIGITS, *prompts("rows.jsonl"),
        told=(
            "FILES/rows.jsonl:2: not valid JSON", "FILES/rows.jsonl:3: a row must be a JSON object",
            "FILES/rows.jsonl:4: the row has no 'prompt'", "FILES/rows.jsonl:5: the prompt must be a string",
            "FILES/rows.jsonl:6: the line is blank", "FILES/rows.jsonl:7: a key stands twice (['prompt'])",
            "FILES/rows.jsonl:8: not a JSON number (NaN)", "FILES/rows.jsonl:9: the prompt is empty",
            "8 bad rows in all",
        ),
    ),
    bad(DIGITS, *prompts("blank.txt"), told=("FILES/blank.txt:2: the prompt is empty",)),
    bad(DIGITS, *prompts("bytes.txt"), told=("FILES/bytes.txt:2: not valid UTF-8",)),
    bad(DIGITS, *prompts("empty.jsonl"), told=("FILES/empty.jsonl holds no usable prompt",)),
    bad(DIGITS, f"data.prompts={{{LISTED}, prompts: []}}", told=("data.prompts: prompts is empty; give at least one",)),
    bad(DIGITS, f"eval.prompts={{{LISTED}, prompts: [a, ' ']}}", told=("prompts[1] is an empty prompt (' ')",)),
    bad(
        DIGITS, f"eval.prompts={{{LISTED}, prompts: [a handwritten eleven]}}",
        told=("'a handwritten eleven' uses ['eleven'], this model knows the words",),
    ),
    bad(SFT, *records("none.jsonl"), told=("there is no record file FILES/none.jsonl",)),
    bad(SFT, *records("empty.jsonl"), told=("FILES/empty.jsonl is empty",)),
    bad(SFT, *records("lost.jsonl"), told=("FILES/lost.jsonl:2: there is no image FILES/lost.png",)),
    bad(SFT, *records("rows.jsonl"), told=("FILES/rows.jsonl:1: a row is an object with strings 'image' and",)),
    bad(SFT, *records("lost.jsonl", size=0), told=("size must be at least 1, got 0",)),
]  # fmt: skip

NAMES = [
    bad(DIGITS, "reward=dgits", told=("reward has no option 'dgits'; did you mean digits?",)),
    bad(
        DIGITS, "reward.scorers.digit.scorer._target_=unirl.reward.scorers.digits.DigitJudg",
        told=("has no class 'DigitJudg'; did you mean DigitJudge?",),
    ),
    bad(
        DIGITS, "reward.scorers.digit.scorer._target_=unirl.reward.scorers.digit.DigitJudge",
        told=("package unirl.reward.scorers has no module 'digit'; did you mean digits?",),
    ),
    bad(
        DIGITS, f"reward.scorers.digit.scorer._target_={STEPS}.AllSteps",
        told=("AllSteps is not a Scorer; name a subclass of unirl.reward.scorer.Scorer",),
    ),
    bad(
        DIGITS, f'reward.scorers.f={{scorer: {{{FUNCTION}, function: "no_module:f"}}}}',
        told=("function 'no_module:f': there is no module 'no_module'",),
    ),
    bad(
        DIGITS, f'reward.scorers.f={{scorer: {{{FUNCTION}, function: "math:sqrtt"}}}}',
        told=("function 'math:sqrtt': math has no 'sqrtt' (nearest: sqrt, isqrt)",),
    ),
    bad(
        DIGITS, f'reward.scorers.f={{scorer: {{{FUNCTION}, function: "./my_rewards:f"}}}}',
        told=("reward.scorers.f.scorer: function must read 'module:name', got './my_rewards:f'",),
    ),
    bad(DIGITS, f"eval.scorers.digit={{{JUDGE}}}", told=("eval.scorers ['digit'] carry the name of a reward scorer",)),
    bad(DIGITS, f"reward.scorers.mean={{scorer: {{{JUDGE}}}}}", told=("scorers named ['mean']", "names of their own")),
    bad(DIGITS, f"eval.scorers.reward={{{JUDGE}}}", told=("scorers named ['reward']", "names of their own")),
    bad(DIGITS, "logging.trackers=[tensorbord]", told=("unknown tracker 'tensorbord'; known are tensorboard, wandb",)),
    bad(
        DIGITS, "run.keep_best=1", "run.best_metric=eval/digt",
        told=("run.best_metric=eval/digt is no figure of the evaluation; did you mean eval/digit",),
    ),
    bad(DIGITS, "run.keep_best=1", "eval=null", told=("run.keep_best=1 compares checkpoints by eval/reward",)),
    bad(SFT, "run.keep_best=2", "eval=null", told=("by eval/reward, a figure of the evaluation: set eval, or",)),
    bad(DIGITS, "run.keep_best=1", "run.save_every=30", told=("run.save_every=30 and eval.every=20 most are not",)),
    bad("diffusion/digit", told=("recipe diffusion/digit: not a shipped one", "did you mean diffusion/digits")),
    bad("none.yaml", told=("recipe none.yaml: there is no such file; shipped ones: ",)),
    bad(DIGITS, "domain=vr", told=("domain: unknown value 'vr' (str);",)),
]  # fmt: skip

FOLDERS = [
    bad(
        DIGITS, "run.output=FILES", "run.name=taken", "run.seed=3", "train.backend.optimizer.lr=0.5",
        told=("train.backend.optimizer.lr: 0.001 there, 0.5 here", "choose another run.name"),
    ),
    bad(SFT, "run.output=FILES", "run.name=taken", told=('domain: "diffusion" there, "sft" here',)),
    bad(DIGITS, "run.output=FILES", "run.name=model", told=("FILES/model exists and is no run", "config.json")),
]  # fmt: skip

RANKS = [
    bad(DIGITS, "placement={launcher: ray, pp: 2}", told=("TinySD3 cannot be split with pp=2", "set placement.pp=1")),
    bad(SFT, "placement={launcher: ray, tp: 2}", told=("TinySD3 cannot be split with tp=2: its library ships",)),
    bad(
        "diffusion/qwen_image_flow_grpo", "placement={launcher: ray, device: cpu, tp: 2}",
        told=("QwenImage cannot be split with tp=2: its library ships no such plan for cpu. It can be split with sp",),
    ),
    bad(
        "ar/sort", "placement={launcher: ray, devices: 4, tp: 2, pp: 2}", told=("TinyLM cannot be split with pp=2",),
    ),
    bad(
        DIGITS, "placement={launcher: ray, devices: 4}", "train.backend.sharding={mode: hybrid, group: 3}",
        told=("sharding.group=3 does not divide the 4 ranks that share weights: choose one of [2, 4]",),
    ),
]  # fmt: skip

BAD = [
    *UNKNOWN_KEYS, *WRONG_TYPES, *WRONG_NUMBERS, *GEOMETRY, *STOCHASTIC_STEPS, *FILES_AND_DATA, *NAMES, *FOLDERS, *RANKS
]  # fmt: skip
# Commands beside `check`, and what they say.
OTHER_DOMAIN = {
    ("-m", "unirl.train_sft", DIGITS): f"run `python -m unirl.train_diffusion {DIGITS}`",
    ("-m", "unirl.train_diffusion", SFT, "run.seed=1"): f"run `python -m unirl.train_sft {SFT} run.seed=1`",
}
GOOD = ("check", DIGITS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that cannot be used, and one run."""
    folder = tmp_path_factory.mktemp("bad_input")
    rows = ['{"prompt": "a"}', '{"prompt"', "[]", "{}", '{"prompt": null}', "", '{"prompt": "a", "prompt": "b"}']
    rows += ['{"prompt": "a", "weight": NaN}', '{"prompt": " "}']
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "blank.txt").write_text("a\n\nb\n")
    (folder / "bytes.txt").write_bytes(b"a\n\xff\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "here.png").write_bytes(b"")
    lost = [{"image": f"{name}.png", "caption": "a"} for name in ("here", "lost")]
    (folder / "lost.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lost))
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"")
    shape = {"size": 8, "channels": 1, "patch": 4, "layers": 5, "heads": 2, "head_dim": 48, "embedding_dim": 64}
    config = dump(load_recipe(DIGITS, [f"run.output={folder}", "run.name=taken", "run.seed=3"]))
    shape |= {"words": 3, "predicts": "x0", "vocabulary": config["model"]["vocabulary"]}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    RunFolder.open(folder, "taken", config=config, seed=3).metrics.write_text('{"step": 0}\n')
    return folder


@dataclasses.dataclass(frozen=True)
class Session:
    """(exit code, standard error) of each command, and which heavy packages were loaded at the end."""

    outcomes: dict[tuple[str, ...], tuple[int, str]]
    heavy: list[str]


@pytest.fixture(scope="module")
def session(files: Path) -> Session:
    commands = [("check", entry.recipe, *entry.overrides) for entry in BAD] + [*OTHER_DOMAIN, GOOD]
    words = [[word.replace("FILES", str(files)) for word in command] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", SESSION], input=json.dumps(words), capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    outcomes = {command: (code, error) for command, (code, error) in zip(commands, result["outcomes"], strict=True)}
    return Session(outcomes, result["heavy"])


@pytest.mark.parametrize("entry", BAD, ids=str)
def test_it_is_refused_with_what_was_received_and_what_helps(entry: Bad, session: Session, files: Path) -> None:
    code, error = session.outcomes["check", entry.recipe, *entry.overrides]
    assert code == 2
    assert error.startswith("error: ")
    for told in entry.told:
        assert told.replace("FILES", str(files)) in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", OTHER_DOMAIN, ids=" ".join)
def test_a_recipe_of_another_domain_is_refused_with_its_command(command: tuple[str, ...], session: Session) -> None:
    code, error = session.outcomes[command]
    assert code == 2
    assert OTHER_DOMAIN[command] in error


def test_a_good_recipe_passes_and_none_of_the_checks_has_loaded_torch(session: Session) -> None:
    assert session.outcomes[GOOD] == (0, "")
    assert session.heavy == []
