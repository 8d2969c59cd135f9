"""How often a run that loses workers goes on."""

from __future__ import annotations

import dataclasses
import logging

from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.group.placement import Slab

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Restarts:
    """limit:     restarts from one checkpoint
    done:      restarts since the program was started
    lost_slab: what the next slab takes the place of; None at first
    """

    limit: int
    done: int = 0
    lost_slab: Slab | None = None
    _step: int | None = None
    _from_step: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """`run/restarts`, after the first one."""
        return {"run/restarts": float(self.done)} if self.done else {}

    def count(self, lost: WorkerLostError, step: int) -> None:
        """One more restart, from the checkpoint of `step`; the loss is raised where there were `limit` already."""
        self._from_step = self._from_step if step == self._step else 0
        self._step = step
        if self._from_step == self.limit:
            times = f"after {self.limit} restarts from step {step}" if self.limit else "and run.max_restarts is 0"
            raise WorkerLostError(f"{lost}; the run ends here, {times}") from lost
        self._from_step += 1
        self.done += 1
        logger.warning("%s; restart %d of %d from step %d", lost, self._from_step, self.limit, step)
