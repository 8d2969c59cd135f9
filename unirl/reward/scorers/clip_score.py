"""CLIPScore (arXiv 2104.08718): does the picture fit the prompt, to a CLIP that was trained on nothing else?"""

from __future__ import annotations

import dataclasses

from unirl.reward.clip import Clip, ClipScorer
from unirl.reward.model_scorer import Card
from unirl.reward.scorer import ScorerInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPScore(ClipScorer):
    """`cos(prompt, picture)`: 0.2 to 0.35 as a rule, higher is better.

    The cosine itself: CLIP's logit is 100 times it, the paper's score 2.5 times, what others divide by 30 is the logit.
    A prompt is cut after 77 tokens; none is put before it. CLIP ViT-L/14 at 224 pixels, 428 M parameters, MIT.
    """

    card = Card(
        looks_at="image with prompt",
        range="about 0.2 to 0.35",
        unit="cosine",
        licence="MIT",
        checkpoints=("openai/clip-vit-large-patch14", "openai/clip-vit-base-patch32", "openai/clip-vit-base-patch16"),
        preprocessing="pil-bicubic-crop",
    )

    checkpoint: str = "openai/clip-vit-large-patch14"

    def judge(self, loaded: Clip, samples: list[ScorerInput]) -> list[float]:
        pictures = loaded.embed_pictures([sample.picture for sample in samples])
        return (pictures * loaded.embed_prompts([sample.prompt for sample in samples])).sum(-1).tolist()
