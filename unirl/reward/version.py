"""Which function a scorer is."""

from __future__ import annotations

import hashlib
import json

from unirl.config.load import dump
from unirl.reward.model_scorer import ModelScorer
from unirl.reward.scorer import Scorer


def version_of(scorer: Scorer) -> str:
    """Which function it is; of a scorer without weights, its class and settings. Loads the scorer."""
    scorer.prepare()
    return scorer.version() if isinstance(scorer, ModelScorer) else by_settings(scorer)


def by_settings(scorer: Scorer) -> str:
    """The class and a hash of the settings. Loads nothing."""
    settings = json.dumps(dump(scorer), sort_keys=True, default=str)
    return f"{type(scorer).__name__}/{hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()}"
