"""After a watch has aborted this rank for another one's error, no call of a step goes on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, Callback, RemoteError, collectives
from accel_callbacks.collectives.store import BoundedStore
from accel_callbacks.distributed import abort, heartbeat
from accel_callbacks.distributed.heartbeat import Heartbeat
from accel_callbacks.errors import LostRankError
from tests.accel_callbacks.distributed.test_failing_scripts import run_script
from tests.support.bound import BOUND
from tests.support.loss import tells_of_loss

pytestmark = pytest.mark.distributed

METHODS = [
    *("backward", "step", "log", "save", "save_state", "save_model"),
    *("evaluate", "evaluate, end"),
]


class Counts(Callback):
    """Counts the steps, the rows and the ends of evaluations."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_after_optimizer_step(self, run, model, optimizer):
        self.seen.append("step")

    def on_log(self, run, model, metrics, step):
        self.seen.append("row")

    def on_validation_end(self, run, model):
        self.seen.append("evaluated")


def follow_rank_1(accel: Accelerator) -> None:
    """Rank 1 publishes an error; wait until the watch of this rank has aborted it."""
    on_device = heartbeat._runs_on_device
    heartbeat._runs_on_device = lambda: True  # gloo would not need the watch
    if accel.process_index == 1:
        report = {"rank": 1, "where": "the run", "details": "ValueError: struck"}
        collectives.store().set("failure", json.dumps(report))
        abort.abort_group()
    while not abort.group_is_aborted():
        time.sleep(0.01)
    heartbeat._runs_on_device = on_device


def go_on(method: str, folder: str) -> list:
    """What a rank does that another one's error has aborted, without any collective."""
    counts = Counts()
    accel = Accelerator(cpu=True, callbacks=[counts], timeout=BOUND)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=1.0))
    model = torch.nn.Linear(1, 1)
    evaluation = accel.evaluate(model)
    path = f"{folder}/{accel.process_index}"
    if method == "evaluate, end":
        evaluation.__enter__()
    weight.grad = torch.ones(1)
    counts.seen.clear()
    follow_rank_1(accel)
    calls = {
        "backward": lambda: accel.backward((weight * 3).sum()),
        "step": optimizer.step,
        "log": lambda: accel.log({"loss": 1.0}),
        "save": lambda: accel.save({"weight": torch.ones(1)}, path),
        "save_state": lambda: accel.save_state(path),
        "save_model": lambda: accel.save_model(model, path),
        "evaluate": evaluation.__enter__,
        "evaluate, end": lambda: evaluation.__exit__(None, None, None),
    }
    told = ""
    if accel.process_index == 0:  # rank 1 has the error that it published
        try:
            calls[method]()
        except RemoteError as error:
            told = str(error)
    left = [one.name for one in Path(folder).iterdir()]
    accel.loop.position.stages.clear()
    torch.set_grad_enabled(True)  # rank 1 does not leave its evaluation
    return [told, counts.seen, weight.item(), weight.grad.item(), left]


@pytest.mark.parametrize("method", METHODS)
def test_the_error_is_raised_and_nothing_is_done(pool, tmp_path, method):
    first, _ = pool.run(go_on, method, str(tmp_path))
    assert first == ["rank 1 failed in the run: ValueError: struck", [], 1.0, 1.0, []]


def a_new_accelerator() -> float:
    accel = Accelerator(cpu=True, timeout=BOUND)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=1.0))
    accel.backward((weight * 3).sum())
    optimizer.step()
    return weight.item()


def test_a_new_accelerator_has_nothing_of_it(pool, tmp_path):
    pool.run(go_on, "step", str(tmp_path))
    assert pool.run(a_new_accelerator) == [-2.0, -2.0]


def told_once() -> list[str]:
    """A run that has raised the error lets its hooks log and save."""
    logged: list[str] = []

    class Last(Callback):
        def on_exception(self, run, model, exception):
            run.accelerator.log({"failed": 1})
            logged.append(type(exception).__name__)

    accel = Accelerator(cpu=True, callbacks=[Last()], timeout=BOUND)
    try:
        with accel.run("told"):
            accel.loop.begin_training()
            follow_rank_1(accel)
            accel.log({"loss": 1.0})
            if accel.process_index == 1:
                raise ValueError("struck")
    except (RemoteError, ValueError):
        pass
    return logged


def test_hooks_after_the_error_may_log(pool):
    assert pool.run(told_once) == [["RemoteError"], ["ValueError"]]


def lost() -> list[str]:
    """A heartbeat that loses a rank, over a store in this process."""
    from accel_callbacks.distributed.heartbeat import remote_failure

    Accelerator(cpu=True, timeout=BOUND)
    aborted, store = threading.Event(), BoundedStore(dist.HashStore())
    beat = {"count": 1, "place": "", "process": ["elsewhere", 1], "left": None, "stuck": 0.0}
    store.set("heartbeat/1", json.dumps({**beat, "time": 0.0}))
    pending: list[bool] = []

    def abort_it() -> None:
        pending.append(remote_failure.pending is not None)
        aborted.set()

    watch = Heartbeat(store, 0, 2, timeout=0.5, abort=abort_it)
    watch.start()
    assert aborted.wait()
    watch.stop()
    try:
        remote_failure.raise_in("backward")
    except LostRankError as error:
        return [str(pending), str(error)]
    finally:
        remote_failure.__init__()  # the group goes on
    return []


def test_a_rank_that_hangs_is_known_before_the_abort_lets_the_training_go_on(pool):
    for pending, text in pool.run(lost):
        assert pending == "[True]"
        assert text.startswith("backward: rank 1 ")
        assert tells_of_loss(text, 1)


# --- the failing rank itself ------------------------------------------------------------------


def fails_with_an_abort_that_hangs() -> list[str]:
    """What the hooks of a failing rank see whose NCCL does not end."""
    seen: list[str] = []
    ended = threading.Event()

    class Backend:
        def abort(self) -> None:
            seen.append("aborting")
            ended.wait()

    class Group:
        _device_types = (torch.device("cuda"),)

        def _get_backend(self, kind: torch.device) -> Backend:
            return Backend()

    class Last(Callback):
        def on_exception(self, run, model, exception):
            seen.append("hook")

    accel = Accelerator(cpu=True, callbacks=[Last()], timeout=BOUND)
    real, abort._ABORT_TIMEOUT = abort._groups, 0.1
    abort._groups = lambda: [*real(), Group()]
    try:
        with accel.run("hangs"):
            accel.loop.begin_training()
            if accel.process_index == 1:
                raise ValueError("struck")
            accel.wait_for_everyone()
    except (RemoteError, ValueError):
        seen.append("raised")
    finally:
        abort._groups = real
        ended.set()
    return seen


def test_hooks_of_a_failing_rank_do_not_wait_for_an_abort_that_hangs(pool):
    assert pool.run(fails_with_an_abort_that_hangs) == [["aborting", "hook", "raised"]] * 2


AT_EXIT = """
import sys
from datetime import timedelta
import torch.distributed as dist
from accel_callbacks import Accelerator, collectives
from accel_callbacks.distributed import topology

accel = Accelerator(cpu=True, timeout=timedelta(minutes=10))
device, fails = sys.argv[1] == "nccl", sys.argv[2] == "fails"
collectives.has_device_backend = lambda group: device
destroy = dist.destroy_process_group
topology.abort_devices = lambda: print("aborted", file=sys.stderr)

def destroyed(*args):
    print("destroyed", file=sys.stderr)
    destroy(*args)

dist.destroy_process_group = destroyed
accel.wait_for_everyone()
if fails and accel.process_index == 1:
    raise ValueError("struck")
"""


@pytest.mark.parametrize(
    ("backend", "how", "expected"),
    [
        ("nccl", "fails", ["destroyed", "aborted"]),
        ("gloo", "fails", ["destroyed", "destroyed"]),
        ("nccl", "ends", ["destroyed", "destroyed"]),
    ],
)
def test_a_process_that_ends_with_an_error_aborts_what_a_destruction_would_flush(
    backend, how, expected
):
    outcomes = run_script(backend, how, code=AT_EXIT)
    assert [code for code, _ in outcomes] == [0, int(how == "fails")]
    words = [[w for w in ("aborted", "destroyed") if w in text] for _, text in outcomes]
    assert words == [[one] for one in expected]
