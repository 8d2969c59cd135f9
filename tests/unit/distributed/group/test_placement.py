from __future__ import annotations

import copy
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosted import HostedLauncher
from tests.rank_workers import Aside
from unirl.distributed.group.axes import Axes
from unirl.distributed.group.dispatch import Call, Dispatch
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Placement, Slab
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote, remote
from unirl.types.media import Media
from unirl.types.metric import Metrics, total, values

README = Path(__file__).parents[4] / "unirl/distributed/group/README.md"


class Backend(Remote):
    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset
        self.at_birth = self.rank_info

    @remote(Dispatch.RANK_ZERO)
    def born(self) -> RankInfo:
        """Where it was made."""
        return self.at_birth

    @remote(Dispatch.BROADCAST)
    def shift(self, by: float) -> Metrics:
        self.offset += by
        return {"ranks": total(1)}

    @remote(Dispatch.BROADCAST)
    def fail_on(self, rank: int) -> None:
        if self.rank_info.rank == rank:
            raise FloatingPointError("loss is NaN")

    def undeclared(self) -> str:
        return "seen by siblings only"


class Stack(Remote):
    def __init__(self, backend: Backend, *others: Any, extra: Any = None) -> None:
        self.backend = backend
        self.others = others
        self.extra = extra

    @remote(Dispatch.DP_SCATTER)
    def brighten(self, batch: Media) -> Media:
        assert batch.texts is not None
        assert batch.images is not None
        return Media(
            texts=[f"{t} @{self.rank_info.rank}" for t in batch.texts], images=batch.images + self.backend.offset
        )

    @remote(Dispatch.RANK_ZERO)
    def siblings(self) -> bool:
        return self.others[0][0] is self.backend and self.extra["backend"] is self.backend

    @remote(Dispatch.DP_SCATTER)
    def count(self, batch: Media) -> int:
        return len(batch)


class Engine(Remote, ABC):
    @remote(Dispatch.RANK_ZERO)
    @abstractmethod
    def name(self) -> str: ...


class TinyEngine(Engine):
    def name(self) -> str:
        return "tiny"


class Closing(Remote):
    def __init__(self, name: str, log: list[str], *, broken: bool = False) -> None:
        self.name, self.log, self.broken = name, log, broken

    def close(self) -> None:
        self.log.append(self.name)
        if self.broken:
            raise OSError(f"{self.name} cannot be closed")


def media(count: int) -> Media:
    return Media(texts=[str(row) for row in range(count)], images=torch.zeros(count, 3, 1, 1))


def notes(error: BaseException) -> list[str]:
    return error.__notes__


def test_a_worker_in_this_process_is_rank_0_of_1_and_knows_it_in_its_constructor():
    with Placement().slab() as slab:
        assert slab.spawn(Backend).born() == RankInfo(rank=0, world_size=1)
    assert Backend().at_birth == RankInfo(rank=0, world_size=1)


def test_each_rank_knows_its_place_before_its_constructor_runs():
    launcher = HostedLauncher("train", 4, dp=2, tp=2)
    stack = Slab(launcher).spawn(Backend)
    assert [host.call(stack.key, "born", Call((), {})) for host in launcher.hosts] == list(launcher.ranks)


def test_a_scattered_call_runs_on_the_rows_of_each_rank():
    slab = Slab(HostedLauncher("train", 4, dp=4))
    backend = slab.spawn(Backend, 1.0)
    out = slab.spawn(Stack, backend).brighten(media(6))
    assert out.texts == ["0 @0", "1 @0", "2 @1", "3 @1", "4 @2", "5 @3"]
    assert slab.spawn(Stack, backend).brighten(batch=media(2)).texts == ["0 @0", "1 @1"]
    assert values(backend.shift(2.0)) == {"ranks": 4}
    assert slab.spawn(Stack, backend).brighten(media(2)).images.flatten().tolist() == [3.0] * 6


def test_a_handle_becomes_the_instance_on_the_same_rank_also_inside_containers():
    with Placement().slab() as slab:
        backend = slab.spawn(Backend)
        assert slab.spawn(Stack, backend, [backend], extra={"backend": backend}).siblings()


def test_a_handle_of_another_slab_is_refused_with_the_reason():
    here, there = Placement().slab("train"), Placement().slab("rollout")
    backend = there.spawn(Backend)
    with pytest.raises(
        ValueError, match="Stack in slab train was given a handle of Backend in slab rollout: only workers"
    ):
        here.spawn(Stack, backend)
    with pytest.raises(ValueError, match="only workers of one slab share their ranks"):
        here.spawn(Stack, here.spawn(Backend), extra=[backend])


def test_a_worker_that_is_beside_is_refused_a_sibling_that_is_not() -> None:
    with Placement(device="cpu").slab() as slab:
        aside = slab.spawn(Aside)
        with pytest.raises(ValueError, match="Aside in slab main was given a handle of Backend, which is not `beside`"):
            slab.spawn(Aside, aside, slab.spawn(Backend))
        assert slab.spawn(Aside, aside).order() == ()


def test_an_undeclared_name_is_an_attribute_error_that_lists_the_declared_ones():
    handle = Placement().slab().spawn(Backend)
    with pytest.raises(AttributeError, match=r"Backend\.undeclared is not a remote method.*born, shift, fail_on"):
        handle.undeclared()
    with pytest.raises(AttributeError, match=r"declared are: none"):
        Placement().slab().spawn(Closing, "a", []).run()


def test_a_handle_can_be_copied():
    handle = Placement().slab().spawn(Backend)
    assert copy.copy(handle).born() == RankInfo(rank=0, world_size=1)


def test_a_declared_method_that_hides_a_part_of_the_handle_is_refused():
    class Hidden(Remote):
        @remote(Dispatch.RANK_ZERO)
        def key(self) -> str:
            return "never reached"

    with pytest.raises(ValueError, match=r"Hidden declares \['key'\]"):
        Placement().slab().spawn(Hidden)


def test_an_override_keeps_the_dispatch_of_the_contract_and_an_abstract_worker_cannot_be_spawned():
    slab = Placement().slab()
    assert slab.spawn(TinyEngine).name() == "tiny"
    with pytest.raises(TypeError, match="abstract") as caught:
        slab.spawn(Engine)
    assert notes(caught.value) == ["in Engine.__init__ on rank 0 of slab main"]


def test_on_an_instance_a_remote_method_is_the_plain_method():
    backend = Backend(1.0)
    backend.shift(2.0)
    assert backend.offset == 3.0
    assert Backend.born.__doc__ == "Where it was made."
    dispatches = {"born": Dispatch.RANK_ZERO, "shift": Dispatch.BROADCAST, "fail_on": Dispatch.BROADCAST}
    assert Backend.declared() == dispatches


def test_a_failure_keeps_type_and_traceback_and_names_remote_method_rank_and_slab():
    with pytest.raises(FloatingPointError) as caught:
        Placement().slab("train").spawn(Backend).fail_on(0)
    assert str(caught.value) == "loss is NaN"
    assert notes(caught.value) == ["in Backend.fail_on on rank 0 of slab train"]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail_on"
    with pytest.raises(FloatingPointError) as caught:
        Slab(HostedLauncher("wide", 4, dp=4)).spawn(Backend).fail_on(2)
    assert notes(caught.value) == ["in Backend.fail_on on rank 2 of slab wide"]


def test_failures_of_constructor_arguments_and_results_say_where():
    slab = Placement().slab()
    backend = slab.spawn(Backend)
    stack = slab.spawn(Stack, backend)
    with pytest.raises(TypeError) as caught:
        slab.spawn(Stack)
    assert notes(caught.value) == ["in Stack.__init__ on rank 0 of slab main"]
    with pytest.raises(ValueError, match="needs an argument that is a Sample or Rows") as caught:
        stack.brighten(3)
    assert notes(caught.value) == ["in the arguments of Stack.brighten for slab main"]
    with pytest.raises(ValueError, match="must return a Sample, Rows, Metrics or None, got int") as caught:
        stack.count(media(2))
    assert notes(caught.value) == ["in the results of Stack.count from slab main"]


def test_close_runs_once_in_reverse_order_even_when_one_of_them_fails():
    log: list[str] = []
    slab = Placement().slab()
    for name in ("first", "second", "third"):
        slab.spawn(Closing, name, log, broken=name == "second")
    with pytest.raises(OSError, match="second cannot be closed") as caught:
        slab.close()
    assert log == ["third", "second", "first"]
    assert notes(caught.value) == ["in Closing.close on rank 0 of slab main"]
    slab.close()
    assert log == ["third", "second", "first"]


def test_a_closed_slab_takes_no_worker_and_no_call():
    with Placement().slab("train") as slab:
        handle: Handle[Backend] = slab.spawn(Backend)
    with pytest.raises(ValueError, match="slab train is closed: Backend cannot be spawned"):
        slab.spawn(Backend)
    with pytest.raises(ValueError, match=r"slab train is closed.*born"):
        handle.born()


def test_an_unset_device_is_what_the_machine_has():
    assert Placement().device_type() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert Placement(device="cpu").device_type() == "cpu"


def test_a_device_that_is_not_there_or_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device; use device=cpu"):
        Placement(device="cuda").device_type()
    with pytest.raises(ValueError, match="must be cpu, cuda or null, got 'gpu'"):
        Placement(device="gpu")
    with pytest.raises(ValueError, match=r"placement\.launcher must be local or ray, got 'slurm'"):
        Placement(launcher="slurm")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 4}, r"placement\.devices=4 needs placement\.launcher=ray \(local is one device\)"),
        ({"tp": 2}, r"placement\.tp=2 needs placement\.launcher=ray"),
        ({"deadline": 5.0}, r"placement\.deadline=5\.0 needs placement\.launcher=ray"),
        ({"launcher": "ray", "devices": 6, "tp": 4}, r"devices=6 cannot be shared out to tp=4: .* is 4 or 8"),
        ({"launcher": "ray", "devices": 3, "tp": 2, "sp": 2}, r"cannot be shared out to tp=2 x sp=2: .* is 4$"),
        ({"launcher": "ray", "devices": 0}, r"placement\.devices=0 .* the nearest that works is 1"),
        ({"launcher": "ray", "tp": 0}, r"placement\.tp must be at least 1, got 0"),
        ({"launcher": "ray", "deadline": 0.0}, r"placement\.deadline must be positive, got 0"),
        ({"launcher": "ray", "address": "ray://head:10001"}, r"Ray Client is not supported"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_when_it_is_written_down(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(**settings)


def test_devices_make_ranks_with_tp_fastest_and_the_rest_data_parallel() -> None:
    ranks = Axes(tp=2, pp=2).ranks(8)
    assert [(info.pp_rank, info.dp_rank, info.tp_rank) for info in ranks] == [
        (pp, dp, tp) for pp in range(2) for dp in range(2) for tp in range(2)
    ]


def test_the_example_of_the_readme_runs():
    code = README.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, str(README), "exec"), names)
    assert names["loud"].texts == ["A CAT!", "A DOG!"]
