"""The global random streams of a process, for code that is not ours: everything here draws from keyed generators."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unirl.types.seed import derive_seed

logger = logging.getLogger(__name__)


def seed_rngs(seed: int) -> None:
    """Start the streams of torch (all devices), numpy and Python at `seed`."""
    torch.manual_seed(derive_seed(seed, "torch"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    random.seed(derive_seed(seed, "python"))


@contextmanager
def isolated_rngs(seed: int) -> Iterator[None]:
    """Streams of their own inside the block, started at `seed`; outside nothing has been drawn."""
    outside = rng_state()
    seed_rngs(seed)
    try:
        yield
    finally:
        set_rng_state(outside)


def rng_state() -> dict[str, Any]:
    """The global random streams of this process: torch (CPU, and the current CUDA device if in use), numpy, Python."""
    numpy = np.random.get_state(legacy=False)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": {
            **numpy,
            "state": {**numpy["state"], "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64))},
        },
        "python": {"version": version, "internal": list(internal), "gauss_next": gauss_next},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on with the streams of `rng_state`. A CUDA stream that cannot be continued here is logged."""
    # A checkpoint loaded onto a GPU has put these there; torch and numpy take them from the CPU only.
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    elif state["cuda"] is not None or torch.cuda.is_initialized():
        logger.warning(
            "the CUDA random stream starts afresh: it was saved, or is used now, on a machine of another kind"
        )
    numpy, python = state["numpy"], state["python"]
    keys = numpy["state"]["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": keys}})
    random.setstate((python["version"], tuple(python["internal"]), python["gauss_next"]))
