"""What a model family must say for itself. Everything else is written once, in the stage and the loops."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, final

import torch

from unirl.models import split
from unirl.models.language.attention import DecodeLayout, Layout, PackedLayout
from unirl.models.language.trained import TrainedTokens
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding, PromptTokens
from unirl.types.conversation import Conversation, Turns
from unirl.types.kinds import Kind
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams, SamplingParams

Tensors = TypeVar("Tensors")


@dataclasses.dataclass
class Bundle:
    """A loaded model: a container without a life of its own.

    transformer: the module that predicts
    frozen:      the other modules by name (text encoders, autoencoder)
    processors:  what is no module: tokenizers, a scheduler's config, the pipeline that encodes and saves
    part:        the part of the transformer that is trained, where the rest of it stays as it is; None for all of it
    critic:      a value head, trained whole and in float32 beside the transformer; no part of what is exported
    root:        around all work with weights that are spread over ranks; None where they are whole
    works_on:    the device of forwards, where weights may be kept on another one; None for where the transformer is
    agreed:      counts of this rank to the highest among ranks that gather weights together, all of which ask; the
                 counts themselves while nobody waits for this rank: one that forwards by group does as many as others

    All modules are put in eval mode and stay there: rollout, replay and reference share one dropout policy, none.
    """

    transformer: torch.nn.Module
    frozen: dict[str, torch.nn.Module] = dataclasses.field(default_factory=dict)
    processors: dict[str, Any] = dataclasses.field(default_factory=dict)
    part: torch.nn.Module | None = None
    critic: torch.nn.Module | None = None
    root: torch.nn.Module | None = None
    works_on: torch.device | None = None
    agreed: Callable[[Sequence[int]], list[int]] = list

    def __post_init__(self) -> None:
        for module in (self.transformer, *self.frozen.values()):
            module.eval()
            module.requires_grad_(False)

    @property
    def trained(self) -> torch.nn.Module:
        """What optimizer, adapters and exports see of the transformer."""
        return self.transformer if self.part is None else self.part

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer changes, by name."""
        own = dict(self.trained.named_parameters())
        head = {} if self.critic is None else dict(self.critic.named_parameters(prefix="critic"))
        assert not own.keys() & head.keys(), "the transformer has a critic of its own"
        return {name: parameter for name, parameter in (own | head).items() if parameter.requires_grad}

    def run(self, work: Callable[[], Tensors]) -> Tensors:
        """`work()` with the weights of the transformer and the critic at hand: one forward, as FSDP sees it.

        It returns a tensor or a tuple of tensors, and may use the modules in any way.
        """
        return work() if self.root is None else self.root(work)

    @property
    def device(self) -> torch.device:
        """Where the transformer works."""
        return self.works_on or next(self.transformer.parameters()).device

    @property
    def pipeline(self) -> Any:
        """The diffusers pipeline of a published model, which annotates less than it takes and gives."""
        return self.processors["pipeline"]


@dataclasses.dataclass(frozen=True)
class Point:
    """Where the branches of guidance were predicted.

    latents:   `(B, *latent)`
    embedding: of the conditional branch
    guidance:  that was asked for
    """

    latents: torch.Tensor
    step: Step
    embedding: Embedding
    guidance: float


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a person wants to know before choosing a family; `unirl models` prints it.

    makes:            image, video, ...
    checkpoints:      hub ids
    parameters:       of the transformer, in the order of the checkpoints
    licence:          of the weights; gated: the hub asks for consent first
    guidance:         of a diffusion model, which form in a few words
    needs:            packages beside ours that the family cannot do without
    plans:            parallel axes (tp, sp, ep) with a plan in the library, for some checkpoint, that training can use
    advice:           recommended RL settings, or what to know
    """

    makes: str
    checkpoints: tuple[str, ...]
    parameters: str
    licence: str
    guidance: str = ""
    gated: bool = False
    needs: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    advice: str = ""


class Family(ABC):
    """A family of models. A subclass is a frozen dataclass of its settings and keeps no state.

    facts:        for people
    kinds:        of media, together, that a sample is made of
    lora_targets: module name suffixes that LoRA wraps unless a recipe names others
    block_names:  class names of the transformer blocks (sharding)
    tp_devices:   where the library runs its plan of tensor parallelism, of cpu and cuda
    """

    facts: ClassVar[Facts]
    kinds: ClassVar[frozenset[Kind]]
    lora_targets: ClassVar[tuple[str, ...]]
    block_names: ClassVar[tuple[str, ...]]
    tp_devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def blocks(self, bundle: Bundle) -> tuple[str, ...]:
        """`block_names`, unless the checkpoint decides."""
        return self.block_names

    @abstractmethod
    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The model on `device`. dtype: of the transformer's weights; frozen_dtype: of the rest, None for the same."""

    @abstractmethod
    def save(self, bundle: Bundle, folder: Path) -> None:
        """Write what `load` (and, for a published family, its library) reads back: the whole model."""

    @abstractmethod
    def recompute_blocks(self, bundle: Bundle) -> None:
        """Gradient checkpointing: from now on a backward recomputes the transformer's blocks."""

    def split_refusal(self, axis: str, size: int) -> str | None:
        """Why the checkpoint cannot be split over `size` ranks of an axis of `facts.plans`; None where it can.

        By its config, before weights are loaded.
        """
        return None

    def split(self, bundle: Bundle, axis: str, mesh: torch.distributed.DeviceMesh) -> frozenset[str]:
        """Split the model, adapters included, over the ranks of `mesh`, which have the same rows.

        Over sp, what a rank then has of each gradient is that of its own tokens: the whole is their sum. Over tp and ep
        it has the whole, but of the trained parameters whose names are returned.
        """
        raise AssertionError(f"{type(self).__name__} is never split")

    def made(self, sampling: SamplingParams) -> frozenset[Kind]:
        """`kinds`, where they do not depend on the sampling."""
        return self.kinds

    def adapter_files(self, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """The adapter of the trained module as the files that diffusers loads, by name: one for each transformer."""
        return {"pytorch_lora_weights.safetensors": weights}

    def adapter_excludes(self) -> str | None:
        """Modules of the whole model that the targets of an adapter name too and it does not wrap, as a pattern."""
        return None


class TokenStep(Protocol):
    """Hidden states `(N, D)` of one token of each row, `(N,)`, at positions `(N, C)`."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, layout: DecodeLayout) -> torch.Tensor: ...


class LanguageFamily(Family):
    """A family of causal language models; T tokens of one forward, in packed rows or one to a row.

    reads_pictures: whether a prompt may come with pictures
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"text"})
    reads_pictures: ClassVar[bool] = False

    @abstractmethod
    def tokenize(self, bundle: Bundle, prompts: Media) -> PromptTokens:
        """One row a prompt, as the model is asked for a response: chat template, placeholders of pictures expanded."""

    @abstractmethod
    def conversation(self, bundle: Bundle, messages: Conversation, turns: Turns) -> TrainedTokens:
        """A conversation for supervised training: what `tokenize` makes of its start, and the turns to learn.

        turns: of the assistant, which ones. ValueError where the model cannot be shown the conversation as it is.
        """

    @abstractmethod
    def positions(self, bundle: Bundle, prompts: PromptTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the packed tokens, `(sum P, C)` int64 with C axes (1 for text), and what follows in each row `(N,)`."""

    @abstractmethod
    def hidden_states(
        self,
        bundle: Bundle,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: Layout,
        *,
        pictures: list[dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """What the head reads. tokens: `(B, T)`; positions: `(B, T, C)`; pictures: of the prompts in `tokens`.

        Returns `(B, T, D)`.
        """

    @final
    def read_tokens(
        self,
        bundle: Bundle,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: Layout,
        *,
        pictures: list[dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """`hidden_states` of tokens as they stand, on any device: tokens `(T,)`, positions `(T, C)`; `(T, D)`."""
        device, shape = bundle.device, layout.shape(len(tokens))
        tokens, positions = tokens.to(device).view(shape), positions.to(device).view(*shape, -1)
        return self.hidden_states(bundle, tokens, positions, layout.to(device), pictures=pictures).flatten(0, 1)

    def token_step(self, bundle: Bundle) -> TokenStep:
        """`read_tokens` of one token of each row, while weights and adapters stay as they are: made once a rollout."""
        return lambda tokens, positions, layout: self.read_tokens(bundle, tokens, positions, layout)

    @final
    def packed_positions(self, bundle: Bundle, prompts: PromptTokens, layout: PackedLayout) -> torch.Tensor:
        """Of all tokens of `layout`, `(T, C)`: those of `prompts`, then those of their responses."""
        own, following = self.positions(bundle, prompts)
        places = following[layout.parents].repeat_interleave(layout.responses) + layout.places
        return torch.cat([own, places[:, None].expand(-1, own.shape[-1])])

    @abstractmethod
    def logits(self, bundle: Bundle, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., D)` to `(..., V)`."""

    @abstractmethod
    def vocabulary(self, bundle: Bundle) -> int:
        """V."""

    @abstractmethod
    def hidden_size(self, bundle: Bundle) -> int:
        """D."""

    @abstractmethod
    def context_length(self, bundle: Bundle) -> int:
        """The most tokens of prompt and response together."""

    @abstractmethod
    def end_tokens(self, bundle: Bundle) -> tuple[int, ...]:
        """The tokens that end a response."""

    @abstractmethod
    def special_tokens(self, bundle: Bundle) -> dict[str, int]:
        """The tokens that `decode` leaves out, by their names."""

    @abstractmethod
    def decode(self, bundle: Bundle, tokens: list[int]) -> str:
        """What a person reads of a response, without special tokens."""


class DiffusionFamily(Family):
    """A family of flow-matching models: of pictures, unless `kinds` says otherwise."""

    kinds: ClassVar[frozenset[Kind]] = frozenset({"picture"})
    tp_devices: ClassVar[tuple[str, ...]] = ("cuda",)

    @final
    def refuse(self, prompts: Iterable[str], sampling: DiffusionSamplingParams) -> None:
        """ValueError for what is asked of the model and it cannot do, as far as that is known before it is loaded."""
        if self.kinds == {"picture"} and sampling.frames != 1:
            raise ValueError(
                f"{type(self).__name__} makes single images: sampling.frames must be 1, got {sampling.frames}"
            )
        if sampling.negative_prompt and not self.guided(sampling.guidance):
            raise ValueError(
                f"sampling.negative_prompt={sampling.negative_prompt!r} has no effect: at guidance {sampling.guidance} "
                f"{type(self).__name__} has no unconditional branch"
            )
        self.check(prompts, sampling)

    def check(self, prompts: Iterable[str], sampling: DiffusionSamplingParams) -> None:
        """ValueError for prompts, or a size, that the model cannot take; a family without such limits leaves it out."""

    def split(self, bundle: Bundle, axis: str, mesh: torch.distributed.DeviceMesh) -> frozenset[str]:
        if axis == "tp":
            return split.over_tensors(bundle, mesh)
        split.over_sequence(bundle.transformer, mesh)
        return frozenset()

    @abstractmethod
    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        """Shape of one sample's latent. ValueError, with the nearest sizes, for a size that the model cannot make."""

    @abstractmethod
    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        """The sigmas and model times of `sampling.steps` steps."""

    @abstractmethod
    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Model time of arbitrary noise levels `(B,)` of latents `(B, *shape)`."""

    def refuse_points(self, bundle: Bundle) -> None:
        """ValueError where the model has no velocity at a point, for losses on the forward process to train.

        Models that predict the mean velocity of a whole step say so; others leave it out.
        """

    @abstractmethod
    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """One row a prompt, on the device: texts, and where the family takes them source pictures.

        The caller passes distinct rows, and the negative prompt (beside the same pictures) to `encode_negative`.
        """

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """`encode` for the unconditional branch; another one where prompts get an instruction that it lacks."""
        return self.encode(bundle, prompts, sampling)

    def guided(self, guidance: float) -> bool:
        """Whether this guidance needs an unconditional branch: any but 1, unless the family says otherwise."""
        return guidance != 1

    @abstractmethod
    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        """Velocity `eps - x0` of one guidance branch, the shape of `latents` `(B, *latent)`.

        guidance: for models that take it as an input
        """

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        """The velocity that guidance makes of the two branches: classifier-free, unless the family says otherwise."""
        return classifier_free(conditional, unconditional, at.guidance)

    @abstractmethod
    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        """What a person sees of x_0, on the CPU."""

    @abstractmethod
    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """x_0 of given media, for supervised training: the inverse of `decode`."""

    def recompute_blocks(self, bundle: Bundle) -> None:
        """Gradient checkpointing: from now on a backward recomputes the transformer's blocks."""
        bundle.transformer.enable_gradient_checkpointing()  # type: ignore[operator]

    def save(self, bundle: Bundle, folder: Path) -> None:
        """Write what `load` (and, for a published family, diffusers) reads back: the whole pipeline."""
        bundle.pipeline.save_pretrained(folder)


def classifier_free(conditional: torch.Tensor, unconditional: torch.Tensor, guidance: float) -> torch.Tensor:
    """`v_u + g (v_c - v_u)` (arXiv 2207.12598)."""
    return unconditional + guidance * (conditional - unconditional)
