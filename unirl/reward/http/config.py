"""What `unirl serve-reward` reads: scorers, address, limits."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
from pathlib import Path
from typing import Any

from unirl.config.environment import secret
from unirl.reward.scorer import Scorer
from unirl.reward.time_limit import check_time_limit


@dataclasses.dataclass(frozen=True)
class Example:
    """A sample that a scorer is tried on before it is served.

    image: a picture file
    score: what it must get, within `tolerance`; None leaves it to the order of the examples
    """

    prompt: str = ""
    text: str | None = None
    image: Path | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    score: float | None = None
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.image is not None and not self.image.is_file():
            raise ValueError(f"image: there is no file {self.image}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {self.tolerance}")


@dataclasses.dataclass(frozen=True)
class ServedScorer:
    """A scorer.

    time_limit, processes: as of a scorer in a run: the scorer then has processes of its own
    python: another Python, in whose environment unirl[serve] is installed too; the scorer then runs there
    examples: the best first; every one must get a lower score than the one before it, or the server does not start
    """

    scorer: Scorer
    time_limit: float | None = None
    processes: int = 1
    examples: tuple[Example, ...] = ()
    python: Path | None = None

    def __post_init__(self) -> None:
        if self.python is not None and not (self.python.is_file() and os.access(self.python, os.X_OK)):
            raise ValueError(f"python: {self.python} is no program")
        check_time_limit(self.scorer, self.time_limit, self.processes)

    @property
    def apart(self) -> bool:
        """Whether it has processes of its own."""
        return self.python is not None or self.limit is not None

    @property
    def limit(self) -> float | None:
        """The time limit in force."""
        return self.scorer.time_limit if self.time_limit is None else self.time_limit


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """A reward server.

    scorers:        by the names that clients ask for; those without a time limit share one thread, and so one device
    host, port:     where it listens; 0 takes a free port
    token_variable: environment variable that holds the bearer token; needed on any host but this machine's own
    max_batch:      samples that a scorer is given at once; they may come from several requests
    max_wait_ms:    how long a sample waits for others to share its batch, while a request is on its way in
    batch_seconds:  that scorers without processes of their own may be at one batch; what waits then gets 504, and what
                    comes 503 as long as the batch lasts, for nothing stops a thread: a time_limit does. Clients must
                    have more patience
    load_seconds:   for a scorer to be loaded, and for all of them to move
    max_items:      of a request
    max_body_mb:    of a request, in 2^20 bytes, and of what its picture files decode to; more is refused with 413
    max_queue:      samples waiting, above which requests are refused with 429
    max_replies:    so many replies are kept for clients that ask again because theirs got lost
    """

    scorers: dict[str, ServedScorer]
    host: str = "127.0.0.1"
    port: int = 8080
    token_variable: str | None = None
    max_batch: int = 16
    max_wait_ms: float = 5.0
    batch_seconds: float = 100.0
    load_seconds: float = 1800.0
    max_items: int = 256
    max_body_mb: int = 256
    max_queue: int = 4096
    max_replies: int = 1024

    def __post_init__(self) -> None:
        if not self.scorers:
            raise ValueError("scorers: name at least one")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must be in 0..65535, got {self.port}")
        for name in ("max_batch", "max_items", "max_body_mb", "max_queue", "max_replies"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {vars(self)[name]}")
        if self.max_items > self.max_queue:
            raise ValueError(f"max_items={self.max_items} never fit in a queue of max_queue={self.max_queue}")
        if not 0 <= self.max_wait_ms <= 1000:
            raise ValueError(f"max_wait_ms must be in 0..1000, got {self.max_wait_ms}")
        for name in ("batch_seconds", "load_seconds"):
            if not 0 < vars(self)[name] < math.inf:
                raise ValueError(f"{name} must be positive seconds, got {vars(self)[name]}")
        if self.token_variable is not None:
            secret(self.token_variable)
        elif not _is_loopback(self.host):
            raise ValueError(f"host {self.host} lets other machines in: name a token_variable, or listen on 127.0.0.1")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
