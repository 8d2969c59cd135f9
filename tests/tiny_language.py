"""Language models of a few thousand weights, of several architectures, and rollouts of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from unirl.algorithms.base import AlgorithmOutput, Needs, Progress
from unirl.algorithms.token_base import ARContext, TokenAlgorithm, TokenAnchors, responses
from unirl.algorithms.token_losses import per_token
from unirl.data.prompts import PromptRow, as_roots
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.ar_stage import ARStage
from unirl.models.base import Bundle
from unirl.models.tiny_language import TinyLM
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import ARBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.optim import AdamW
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import TokenGeometry
from unirl.types.condition import PromptTokens
from unirl.types.metric import Metrics
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

CPU = torch.device("cpu")
SMALL = TinyLM(layers=2, width=32, heads=4)
PROMPTS = ("ab", "12+3=", "a longer prompt: ")
# With beta1 = 0 the first moment of AdamW is the gradient of the last step.
PLAIN = AdamW(lr=1e-3, betas=(0.0, 0.999))


@dataclasses.dataclass(frozen=True)
class OtherLM(TinyLM):
    """A random model of another architecture with the tokenizer of TinyLM; logits spread as those of a trained one.

    kind, settings: the model type of transformers, and what its config says beside the shape
    """

    block_names: ClassVar[tuple[str, ...]] = ()

    kind: str = "llama"
    key_heads: int = 2
    layers: int = 2
    width: int = 32
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {
            "vocab_size": len(self.characters) + 1,
            "hidden_size": self.width,
            "intermediate_size": 2 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.width // self.heads,
            "max_position_embeddings": self.context,
            "initializer_range": 0.3,
            "eos_token_id": len(self.characters),
            "bos_token_id": None,
            "pad_token_id": None,
        }
        config: Any = AutoConfig.for_model(self.kind, **{**shape, **self.settings})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.init_seed)
            model: Any = AutoModelForCausalLM.from_config(config)
        return self.bundled(model.to(device, dtype), self._tokenizer())


def plain(bundle: Bundle, attention: str = "sdpa") -> Any:
    """The model of `bundle` with the library's own attention: weights are shared, the config is its own."""
    model: Any = bundle.transformer
    config = copy.deepcopy(model.config)
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation(attention)
    return other.to(model.dtype).eval().requires_grad_(False)


def stage_of(family: TinyLM, compute_dtype: torch.dtype = torch.float32) -> ARStage:
    return ARStage(family, family.load(CPU, torch.float32), compute_dtype)


def rows_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[Sequence[int]]], **sampling: Any) -> Part:
    """A filled part of given tokens: `responses[p]` are those to `prompts[p]`."""
    flat = [list(response) for siblings in responses for response in siblings]
    asked = [prompt for prompt, siblings in zip(prompts, responses, strict=True) for _ in siblings]
    return Part(
        ids=[f"r0.p{p}/{row}" for p, siblings in enumerate(responses) for row in range(len(siblings))],
        metadata=[{} for _ in flat],
        sampling=ARSamplingParams(max_new_tokens=max(map(len, flat)), **sampling),
        segment=TextSegment(
            tokens=torch.tensor([token for row in flat for token in row]),
            log_probs=torch.zeros(sum(map(len, flat))),
            loss_mask=torch.ones(sum(map(len, flat)), dtype=torch.bool),
            lengths=torch.tensor([len(row) for row in flat]),
            truncated=torch.zeros(len(flat), dtype=torch.bool),
        ),
        conditions=PromptTokens(
            tokens=torch.tensor([token for prompt in asked for token in prompt]),
            lengths=torch.tensor([len(prompt) for prompt in asked]),
        ),
    )


def request(
    prompts: Sequence[str] = PROMPTS, group: int = 2, *, number: int = 0, max_new_tokens: int = 12, **sampling: Any
) -> Sample:
    """`group` unfilled rows to each prompt."""
    roots = as_roots([PromptRow(prompt) for prompt in prompts], number)
    return Sample((roots,)).fork(group, ARSamplingParams(max_new_tokens=max_new_tokens, **{"seed": 3, **sampling}))


def written(stage: ARStage, sample: Sample, batch_size: int | None = None) -> Part:
    """What the stage makes of a request."""
    return ARPipeline(stage, batch_size)(sample, version=0).frontier


def segment_of(part: Part) -> TextSegment:
    assert isinstance(part.segment, TextSegment)
    return part.segment


def prompts_of(part: Part) -> PromptTokens:
    assert isinstance(part.conditions, PromptTokens)
    return part.conditions


def responses_of(part: Part) -> list[list[int]]:
    """The tokens of each row."""
    segment = segment_of(part)
    return [row.tolist() for row in segment.tokens.split(segment.lengths.tolist())]


def questions_of(part: Part) -> list[list[int]]:
    """The prompt tokens of each row."""
    prompts = prompts_of(part)
    return [row.tolist() for row in prompts.tokens.split(prompts.lengths.tolist())]


def row_by_row(model: Any, part: Part, temperature: float = 1.0) -> torch.Tensor:
    """`(T,)` log-probs by the model's own forward, a row at a time, nothing shared and nothing packed."""
    columns = []
    for prompt, response in zip(questions_of(part), responses_of(part), strict=True):
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].float() / temperature
        scored = logits[len(prompt) - 1 : -1].log_softmax(-1)
        columns.append(scored.gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(columns)


def policy(family: TinyLM = SMALL, *, reference: bool = False, total_steps: int = 100, **settings: Any) -> FSDPBackend:
    """A backend on the CPU that does not clip; `settings` are those of ARBackendConfig."""
    config = ARBackendConfig(**{"optimizer": PLAIN, "max_grad_norm": None, **settings})
    return FSDPBackend(family, config, device=CPU, seed=0, total_steps=total_steps, with_reference=reference)


def rollout(backend: FSDPBackend, *args: Any, engine: Trainside | None = None, **settings: Any) -> Part:
    """What the policy makes of a `request` with these settings, without rewards."""
    return TrainsideEngine(backend, engine or Trainside(), ARPipeline).generate(request(*args, **settings)).frontier


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSlope(TokenAlgorithm):
    """A loss of known numbers: each token of a row has the value A, and d/dw = A for every weight."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def anchors(self, context: ARContext, part: Part) -> TokenAnchors | None:
        return None

    def loss(self, context: ARContext, part: Part, anchors: TokenAnchors | None) -> AlgorithmOutput:
        weights = [w.sum() for w in context.stage.bundle.transformer.parameters() if w.requires_grad]
        total = torch.stack(weights).sum()
        assert part.advantages is not None
        segment = responses(part)
        advantages = per_token(part.advantages, segment.lengths, len(segment.tokens))
        return AlgorithmOutput(advantages * (1 + total - total.detach()))


def lengths_of(
    lengths: Sequence[int],
    advantages: Sequence[float],
    *,
    rewards: Sequence[float] | None = None,
    masked: Sequence[int] = (),
) -> Part:
    """Rows of one group with so many tokens, for TokenSlope; the tokens of the rows `masked` are not trained."""
    part = rows_of([[1, 2]], [[[3] * length for length in lengths]])
    kept = torch.tensor([float(row not in masked) for row in range(len(lengths))])
    segment = dataclasses.replace(segment_of(part), loss_mask=kept.repeat_interleave(torch.tensor(lengths)).bool())
    return dataclasses.replace(
        part,
        segment=segment,
        rewards=torch.zeros(len(lengths)) if rewards is None else torch.tensor(list(rewards)),
        advantages=torch.tensor(list(advantages)),
    )


def train(backend: FSDPBackend, algorithm: TokenAlgorithm, part: Part, **geometry: Any) -> Metrics:
    """All updates on one rollout; `geometry` are the settings of TokenGeometry."""
    return TrainStack(backend, algorithm, TokenGeometry(**geometry), seed=0).train(part, Progress(step=0, total=10))


def rewarded(part: Part, rewards: Sequence[float] | None = None) -> Part:
    """`part` with rewards (the share of digits in the text unless given) and advantages relative to the group."""
    total = digits(part) if rewards is None else torch.tensor(list(rewards), dtype=torch.float32)
    return part.with_rewards(Scores(total, {}, [""] * len(part))).compute_advantages("group", "none")


def digits(part: Part) -> torch.Tensor:
    """The share of digits in each text, `(N,)`."""
    assert part.media is not None
    shares = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in part.media.required_texts]
    return torch.tensor(shares, dtype=torch.float32)
