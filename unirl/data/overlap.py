"""What an evaluation has in common with training."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)


def warn_of_overlap(name: str, evaluated: Mapping[str, str], trained: Collection[str]) -> None:
    """Log how much of an evaluation is trained on as well.

    Nothing is said where both are the same as a whole: who evaluates on exactly what is trained means to.

    evaluated: what is shown of each row, by the key that tells it apart; trained: such keys
    """
    seen = set(trained)
    shared = [shown for key, shown in evaluated.items() if key in seen]
    if shared and evaluated.keys() != seen:
        logger.warning(
            "%s: %d of %d are trained on as well, such as %s: figures of these are not held out",
            name,
            len(shared),
            len(evaluated),
            reprlib.repr(shared[0]),
        )
