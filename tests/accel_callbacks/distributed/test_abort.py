"""How communicators of devices are aborted: together, on a thread, with a limit."""

from __future__ import annotations

import threading

import pytest
import torch

from accel_callbacks import collectives
from accel_callbacks.distributed import abort
from accel_callbacks.distributed.heartbeat import Heartbeat


class Communicator:
    """Stands for the NCCL backend of a group; notes the calls."""

    def __init__(self, name: str, calls: list[str], *, grouped: bool = True) -> None:
        self.label, self.calls = name, calls
        if grouped:
            self._group_start = lambda: calls.append("start")
            self._group_end = lambda: calls.append("end")

    def abort(self) -> None:
        self.calls.append(f"abort {self.label}")

    def name(self) -> str:
        return "nccl"


class Group:
    """Stands for a process group whose collectives run on a device."""

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def __init__(self, backend: object) -> None:
        self.backend = backend

    def _get_backend(self, kind: torch.device) -> object:
        assert kind.type == "cuda", "gloo is not aborted as a device is"
        return self.backend


def test_several_communicators_are_aborted_as_one_group():
    calls: list[str] = []
    first, second = (Group(Communicator(name, calls)) for name in "ab")
    assert abort.abort_devices([first, second, first])
    assert calls == ["start", "abort a", "abort b", "end"]


def test_a_torch_that_cannot_group_them_aborts_one_after_the_other():
    calls: list[str] = []
    groups = [Group(Communicator(name, calls, grouped=False)) for name in "ab"]
    assert abort.abort_devices(groups)
    assert calls == ["abort a", "abort b"]


def test_one_that_cannot_be_aborted_leaves_the_others_aborted_and_the_group_closed():
    class Fails(Communicator):
        def abort(self) -> None:
            raise RuntimeError("NCCL says no")

    calls: list[str] = []
    assert abort.abort_devices([Group(Fails("a", calls)), Group(Communicator("b", calls))])
    assert calls == ["start", "abort b", "end"]


class Hangs(Communicator):
    """Its abort waits for a rank that does not abort."""

    def __init__(self) -> None:
        super().__init__("a", [])
        self.goes_on, self.thread = threading.Event(), None

    def abort(self) -> None:
        self.thread = threading.current_thread()
        self.goes_on.wait()


@pytest.fixture
def hangs():
    backend = Hangs()
    yield backend
    backend.goes_on.set()
    if backend.thread is not None:
        backend.thread.join()


def test_an_abort_that_hangs_is_left_behind_and_said(hangs, monkeypatch, capfd):
    monkeypatch.setattr(abort, "_ABORT_TIMEOUT", 0.1)
    assert not abort.abort_devices([Group(hangs)])
    assert hangs.thread.daemon, "the process could not end"
    said = "[accel] the abort of the device's collectives has not ended within 0 s"
    assert said in capfd.readouterr().err


def test_only_a_backend_that_is_not_gloo_runs_on_a_device():
    class Gloo(Communicator):
        def name(self) -> str:
            return "gloo"

    assert collectives.has_device_backend(Group(Communicator("a", [])))
    assert not collectives.has_device_backend(Group(Gloo("a", [])))


class OfLivingRanks:
    """A heartbeat that knows of no error and of no loss."""

    report = None
    timed_out = staticmethod(Heartbeat.timed_out)

    def find_lost(self, error: BaseException) -> None:
        return None

    def last_seen(self, ranks: list[int]) -> str:
        return f"rank {ranks[0]} was last seen at train.py:7 in step"


def test_a_connection_that_a_living_rank_closed_is_explained_by_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abort, "has_peers", lambda: True)
    monkeypatch.setattr(abort, "world_size", lambda: 2)
    monkeypatch.setattr(abort, "current_heartbeat", OfLivingRanks)
    error = RuntimeError("[gloo] Connection closed by peer")
    cause = abort.explain(error, "a barrier")
    assert str(cause).startswith("a barrier: another rank closed its connection")
    assert "rank 1 was last seen at train.py:7 in step. Check whether all ranks" in str(cause)
    assert str(cause).endswith(str(error))
    assert abort.explain(cause, "the run") is cause
