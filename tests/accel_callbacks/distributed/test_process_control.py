"""Which process does what, on one process and as it looks to a process of another rank."""

from __future__ import annotations

import pytest
import torch

import accel_callbacks
from accel_callbacks import (
    Accelerator,
    PartialState,
    RemoteError,
    ResumeError,
    Topology,
    last_process_only,
    local_main_process_first,
    local_main_process_only,
    main_process_first,
    main_process_only,
    on_local_process,
    on_process,
    synchronize,
)
from accel_callbacks.distributed import topology as state

DECORATORS = {
    "main": main_process_only,
    "local main": local_main_process_only,
    "last": last_process_only,
    "process 2": on_process(process_index=2),
    "local 1": on_local_process(local_process_index=1),
}


@main_process_only
def decorated_at_import(value: int, *, more: int = 0) -> int:
    """Adds."""
    return value + more


@pytest.fixture
def at_rank(monkeypatch):
    """Makes this process one of four, two on each of two machines (without a group)."""

    def place(rank: int) -> None:
        topology = Topology(
            torch.device("cpu"),
            rank=rank,
            world_size=4,
            local_rank=rank % 2,
            local_world_size=2,
        )
        monkeypatch.setattr(state, "_current", topology)

    return place


@pytest.mark.parametrize(
    ("rank", "runs"),
    [
        (0, {"main", "local main"}),
        (1, {"local 1"}),
        (2, {"local main", "process 2"}),
        (3, {"last", "local 1"}),
    ],
)
def test_each_decorator_chooses_its_process(at_rank, rank, runs):
    guarded = {name: decorate(lambda: True) for name, decorate in DECORATORS.items()}
    at_rank(rank)
    assert {name for name, function in guarded.items() if function()} == runs
    for function in guarded.values():
        assert function() in (True, None)


def test_a_function_decorated_at_import_decides_at_each_call(at_rank):
    assert decorated_at_import(1, more=2) == 3
    at_rank(1)
    assert decorated_at_import(1, more=2) is None
    at_rank(0)
    assert decorated_at_import(1) == 1
    assert decorated_at_import.__name__ == "decorated_at_import"
    assert decorated_at_import.__doc__ == "Adds."


def test_methods_can_be_decorated():
    class Reporter:
        name = "reporter"

        @main_process_only
        def report(self) -> str:
            return self.name

        @synchronize
        def work(self) -> str:
            return self.name

    assert Reporter().report() == "reporter"
    assert Reporter().work() == "reporter"


@pytest.mark.parametrize("make", [Accelerator, PartialState])
def test_the_decorators_are_methods_too(make, at_rank):
    handle = make(cpu=True)
    for name in (
        "main_process_only",
        "on_main_process",
        "local_main_process_only",
        "on_local_main_process",
        "on_last_process",
        "on_process",
        "on_local_process",
    ):
        assert getattr(handle, name)(lambda: "ran")() == "ran", name
    assert handle.on_process(process_index=1)(lambda: "ran")() is None
    assert handle.on_local_process(local_process_index=1)(lambda: "ran")() is None
    at_rank(2)
    assert handle.on_main_process(lambda: "ran")() is None


def test_print_is_for_the_first_process_of_each_machine(at_rank, capsys):
    accel = Accelerator(cpu=True)
    for rank in range(4):
        at_rank(rank)
        accel.print(rank, end=";")
    assert capsys.readouterr().out == "0;2;"


def test_synchronize_is_a_context_and_a_decorator_with_or_without_a_name():
    ran = []
    with synchronize():
        ran.append("block")
    with synchronize("named"):
        ran.append("named")

    @synchronize
    def bare(value: int) -> int:
        return value

    @synchronize("fetch")
    def named(value: int) -> int:
        return value

    assert (bare(1), named(2), bare(3)) == (1, 2, 3)
    assert (bare.__name__, named.__name__) == ("bare", "named")
    assert ran == ["block", "named"]


def test_synchronize_can_be_nested_and_used_after_an_error():
    with pytest.raises(KeyError), synchronize("outer"), synchronize("inner"):
        raise KeyError("x")

    @synchronize
    def works(fail: bool) -> str:
        if fail:
            raise OSError("disk full")
        return "done"

    with pytest.raises(OSError, match="disk full"):
        works(True)
    assert works(False) == "done"


@pytest.mark.parametrize("first", [main_process_first, local_main_process_first])
def test_going_first_raises_what_the_block_raises(first):
    with pytest.raises(ValueError, match="mine"), first():
        raise ValueError("mine")
    with first():
        pass


def test_going_first_works_as_a_method():
    accel, ran = Accelerator(cpu=True), []
    with accel.main_process_first():
        ran.append(1)
    with accel.local_main_process_first():
        ran.append(2)
    accel.wait_for_everyone()
    assert ran == [1, 2]


def test_errors_of_others_and_of_checkpoints_are_told_apart():
    remote = RemoteError(rank=3, where="download", details="ValueError: no")
    assert (remote.rank, remote.where) == (3, "download")
    assert str(remote) == "rank 3 failed in download: ValueError: no"
    assert issubclass(RemoteError, RuntimeError)
    assert not issubclass(ResumeError, RemoteError)
    assert not issubclass(RemoteError, ResumeError)


def test_every_public_name_is_there_and_no_other():
    for name in accel_callbacks.__all__:
        assert getattr(accel_callbacks, name) is not None
    assert set(accel_callbacks.__all__) <= set(dir(accel_callbacks))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = accel_callbacks.nonsense
