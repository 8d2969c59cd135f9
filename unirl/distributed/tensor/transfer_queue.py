"""The transport through TransferQueue: rows lie in the storage units of one that runs in the cluster already.

UniRL starts none of its servers: they unpickle what anybody sends to their ports, and write to any path that it names.
"""

# Where the package is not installed, pyright takes this file for it:
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import numpy as np
import ray
import torch
import transfer_queue as queue
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.tensor.buffer import Buffer
from unirl.distributed.tensor.layout import laid_out, put_together
from unirl.distributed.tensor.ray_objects import objects_of
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows

T = TypeVar("T")

logger = logging.getLogger(__name__)
# It would say at each call that the machine has fewer cores than it would like.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)

_BACKEND = "TRANSFER_QUEUE"  # what Ray calls the transport of the keys
_FIELD = "rows"
_CLEARING = 30.0  # seconds that clearing rows may take
_ONE_AT_A_TIME = threading.Lock()  # a process connects in its first call, and in two at once would do so twice


@dataclasses.dataclass(frozen=True)
class TransferQueue(Transport):
    """Rows leave the rank that made them, and arrive on the CPU.

    partition: what holds the rows of one slab in the queue
    timeout:   seconds that a call may take: TransferQueue itself waits for its controller without a limit
    """

    partition: str
    timeout: float = 300.0
    name: ClassVar[str] = "transfer_queue"
    counted_in_ranks: ClassVar[bool] = True

    def put(self, rows: Rows) -> ray.ObjectRef[Any]:
        layout, tensors = laid_out(rows)
        buffers = [Buffer.of(tensor) for tensor in tensors]
        forms = [(buffer.dtype, buffer.shape) for buffer in buffers]
        content = torch.from_numpy(np.concatenate([buffer.data for buffer in buffers]))
        key = uuid.uuid4().hex
        if len(content):
            _within(self.timeout, lambda: queue.kv_put(key, self.partition, {_FIELD: content}))
        return ray.put((layout, forms, _written(self.partition, key)), _tensor_transport=_BACKEND)

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        rows: list[Rows] = []
        for parcel, (layout, forms, key) in zip(parcels, objects_of(parcels, self.timeout), strict=True):
            sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in forms]
            pieces = (self._content(key, parcel) if any(sizes) else torch.empty(0, dtype=torch.uint8)).split(sizes)
            buffers = [Buffer(piece.numpy(), *form) for piece, form in zip(pieces, forms, strict=True)]
            rows.append(put_together(layout, [buffer.tensor() for buffer in buffers]))
        return rows

    def _content(self, written: torch.Tensor, parcel: Parcel) -> torch.Tensor:
        partition, key = _read(written)
        try:
            return _within(self.timeout, lambda: queue.kv_batch_get(key, partition))[_FIELD][0]
        except ValueError as error:  # how it says that it has no such key
            raise WorkerLostError(f"rows made {parcel.origin} are lost: TransferQueue has them no more") from error


@contextlib.contextmanager
def joined(timeout: float) -> Iterator[TransferQueue]:
    """The transport through the TransferQueue of the cluster. ValueError where none runs.

    What ranks that died have left in it goes with the block.
    """
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError as error:
        raise ValueError(
            "placement.transport is transfer_queue, and none runs in this cluster: call `transfer_queue.init()` there, "
            "in a program that outlasts the run"
        ) from error
    _registered()
    transport = TransferQueue(f"unirl-{uuid.uuid4().hex}", timeout)
    try:
        yield transport
    finally:
        try:
            _within(_CLEARING, lambda: _clear(transport.partition))
        except (TimeoutError, RuntimeError) as error:  # no reason for a run that is done to fail
            logger.warning("rows of %s may still be in TransferQueue: %s", transport.partition, error)


def _clear(partition: str) -> None:
    for keys in filter(None, queue.kv_list(partition).values()):
        queue.kv_clear(list(keys), partition)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """What `call()` returns; TimeoutError where it takes longer."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            with _ONE_AT_A_TIME:
                answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"TransferQueue did not answer within {seconds:g} s: is its controller alive?") from error


def _written(partition: str, key: str) -> torch.Tensor:
    return torch.tensor(list(f"{partition}/{key}".encode()), dtype=torch.uint8)


def _read(written: torch.Tensor) -> tuple[str, str]:
    partition, _, key = bytes(written.tolist()).decode().partition("/")
    return partition, key


@dataclasses.dataclass
class _KeyMetadata(TensorTransportMetadata):
    """keys: those of an object, of which there is one, as `_written`"""

    keys: list[torch.Tensor] = dataclasses.field(default_factory=list)


class _Keys(TensorTransportManager):
    """Ray's tensor transport for the key of rows: nobody needs to send it, and Ray counts who refers to it.

    TransferQueue counts nothing: where nobody refers to a key any more, the rank that has put the rows clears them.
    """

    def tensor_transport_backend(self) -> str:
        return _BACKEND

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> _KeyMetadata:
        return _KeyMetadata([(key.shape, key.dtype) for key in rdt_object], "cpu", rdt_object)

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[torch.Tensor]:
        assert isinstance(tensor_transport_metadata, _KeyMetadata)
        return tensor_transport_metadata.keys

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        raise NotImplementedError("keys are not sent")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[torch.Tensor]
    ) -> None:
        for written in tensors:
            partition, key = _read(written)
            _within(_CLEARING, lambda key=key, partition=partition: queue.kv_clear(key, partition))

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Nothing is under way."""


@functools.cache
def _registered() -> None:
    """Ray's table of transports belongs to the process and takes a name once; actors made afterwards get it."""
    register_tensor_transport(_BACKEND, ["cpu"], _Keys, torch.Tensor)
