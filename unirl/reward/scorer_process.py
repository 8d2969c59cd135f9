"""The program of a scorer process: one sample in, one outcome out, until the connection closes. See time_limit.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from unirl.reward.outcome import BrokenScorerError, isolate
from unirl.reward.scorer import Scorer, ScorerInput

_MARGIN = 5.0  # seconds over the time limit after which the process ends by itself, its parent being gone


def serve(connection: Connection) -> None:
    """Reads (name, scorer, seconds), answers when it is ready, then reads a sample and answers its outcome."""
    try:
        name, scorer, seconds = connection.recv()
        scorer.prepare()
    except Exception:  # noqa: BLE001 - told to the parent, which raises it
        _answer(connection, failure=traceback.format_exc())
        return
    _answer(connection)
    while True:
        try:
            sample = connection.recv()
        except EOFError:
            return
        # No handler: Python runs one between two instructions only, the system ends a process at once.
        signal.setitimer(signal.ITIMER_REAL, seconds + _MARGIN)
        answer = _judged(name, scorer, sample)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(connection, **answer)


def _judged(name: str, scorer: Scorer, sample: ScorerInput) -> dict[str, float | str]:
    try:
        (outcome,) = isolate(name, scorer, [sample])
    except BrokenScorerError as error:
        return {"failure": str(error)}
    raised = "" if outcome.error is None else "".join(traceback.format_exception(outcome.error))
    return {"value": outcome.value, "cause": outcome.cause, "raised": raised}


def _answer(connection: Connection, **answer: float | str) -> None:
    connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)  # the end of this process must close it, whatever the scorer starts
    serve(Connection(int(sys.argv[1])))
