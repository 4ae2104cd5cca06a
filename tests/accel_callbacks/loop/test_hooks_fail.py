"""An error on one process inside of `accel.run` ends the run on all, and they may begin again.

The group's timeout is longer than the pool waits for a result: what hangs fails.
"""

from __future__ import annotations

import time

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.distributed import abort, heartbeat
from loggers import Tracker
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


class Fails(Callback):
    """Raises in one hook on some processes, and notes how the run ended."""

    can_vote = True

    def __init__(self, hook: str, ranks: list[int], error: BaseException) -> None:
        self.ended_with = ""

        def fail(run, model, *args):
            if run.accelerator.process_index in ranks:
                raise error

        setattr(self, hook, fail)

    def on_exception(self, run, model, exception):
        self.ended_with = type(exception).__name__


class Status(Tracker):
    name = "status"
    ended = "open"

    def start(self, run): ...

    def log(self, scalars, step): ...

    def finish(self, status="success"):
        self.ended = status


def ending(action) -> tuple[str, str, str]:
    """(what it raises, the text of it, from what), ("ok", "", "") where nothing is raised."""
    try:
        action()
    except BaseException as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return "ok", "", ""


def train(accel: Accelerator, body=lambda index: None) -> None:
    """Two epochs of four batches, each epoch validated and logged."""
    model = torch.nn.Linear(1, 1)
    model, optimizer, data, val = accel.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.utils.data.DataLoader(torch.ones(16, 1), 2),
        torch.utils.data.DataLoader(torch.ones(4, 1), 2),
    )
    with accel.run("demo") as run:
        for _ in run.epochs(2):
            for index, batch in enumerate(data):
                body(index)
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            with accel.evaluate(model):
                for batch in val:
                    accel.gather_for_metrics(model(batch))
            accel.log({"loss": 1.0})


ERRORS = {"error": ValueError, "interrupt": KeyboardInterrupt, "exit": SystemExit}


def fail_in_a_hook(hook: str, ranks: list[int], kind: str) -> tuple:
    fails = Fails(hook, ranks, ERRORS[kind]("no space left"))
    status = Status()
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=[fails], log_with=status)
    return (*ending(lambda: train(accel)), fails.ended_with, status.ended)


HOOKS = [
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_batch_end",
    "on_after_backward",
    "on_validation_end",
    "on_log",
    "on_train_epoch_end",
    "on_train_end",
    "teardown",
]


def on_one_rank_each() -> list:
    """Every hook on both ranks; in the default run, on one of them in turn."""
    pairs = [(hook, rank, index) for index, hook in enumerate(HOOKS) for rank in (0, 1)]
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(h, r, marks=marks[r == i % 2]) for h, r, i in pairs]


@pytest.mark.parametrize(("hook", "rank"), on_one_rank_each())
def test_an_error_in_a_hook_ends_the_run_on_all_processes(pool, hook, rank):
    outcomes = pool.run(fail_in_a_hook, hook, [rank], "error")
    kind, text, cause, _, _ = outcomes[rank]
    assert (kind, text, cause) == ("ValueError", "no space left", "NoneType")
    kind, text, cause, _, _ = outcomes[1 - rank]
    assert kind == "RemoteError"
    assert text.startswith(f"rank {rank} failed in ")
    assert "ValueError: no space left" in text
    assert "in fail" in text  # its traceback
    assert cause == "RuntimeError"  # what threw it out of its collective


def test_callbacks_and_trackers_learn_how_the_run_ended_on_each_process(pool):
    first, second = pool.run(fail_in_a_hook, "on_train_batch_end", [1], "error")
    assert first[3:] == ("RemoteError", "failed")
    assert second[3] == "ValueError"


@pytest.mark.parametrize("kind", ["interrupt", "exit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_on_one_process_ends_all(pool, rank, kind):
    outcomes = pool.run(fail_in_a_hook, "on_train_batch_end", [rank], kind)
    assert outcomes[rank][0] == ERRORS[kind].__name__
    assert outcomes[1 - rank][0] == "RemoteError"


def test_processes_that_fail_at_once_raise_their_own_errors(pool):
    outcomes = pool.run(fail_in_a_hook, "on_train_batch_end", [0, 1], "error")
    assert [outcome[:3] for outcome in outcomes] == [
        ("ValueError", "no space left", "NoneType")
    ] * 2


def fail_in_the_body(rank: int) -> tuple:
    accel = Accelerator(cpu=True, timeout=BOUND)

    def body(index):
        if index == 2 and accel.process_index == rank:
            raise OSError("disk")

    return ending(lambda: train(accel, body))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_between_batches_ends_the_run_on_all_processes(pool, rank):
    outcomes = pool.run(fail_in_the_body, rank)
    assert outcomes[rank][:2] == ("OSError", "disk")
    assert outcomes[1 - rank][0] == "RemoteError"


def fail_where_nothing_is_exchanged(rank: int) -> tuple:
    accel = Accelerator(cpu=True, timeout=BOUND)

    def alone():
        with accel.run("alone"):
            if accel.process_index == rank:
                raise OSError("disk")

    return ending(alone)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_done_learns_of_the_error_at_the_end_of_the_run(pool, rank):
    outcomes = pool.run(fail_where_nothing_is_exchanged, rank)
    assert outcomes[rank][0] == "OSError"
    assert outcomes[1 - rank][0] == "RemoteError"


def fail_with_two_runs_open() -> tuple:
    outer = Accelerator(cpu=True, timeout=BOUND)
    inner = Accelerator(cpu=True)

    def both():
        with outer.run("outer"):
            train(inner, lambda index: 1 / (1 - inner.process_index))

    return ending(both)


def test_a_run_around_a_run_passes_the_error_on(pool):
    first, second = pool.run(fail_with_two_runs_open)
    assert first[0] == "RemoteError"
    assert "the run 'demo'" in first[1]
    assert second[0] == "ZeroDivisionError"


def fail_on_some_of_four(ranks: list[int]) -> tuple:
    fails = Fails("on_log", ranks, ValueError("no space left"))
    return ending(lambda: train(Accelerator(cpu=True, timeout=BOUND, callbacks=[fails])))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [2], [1, 3]])
def test_all_of_four_processes_learn_of_the_error(pool_of_4, ranks):
    outcomes = pool_of_4.run(fail_on_some_of_four, ranks)
    for rank, (kind, text, _) in enumerate(outcomes):
        assert kind == ("ValueError" if rank in ranks else "RemoteError")
        assert "no space left" in text


# --- afterwards ----------------------------------------------------------------------------------


def sweep(failing_rank: int) -> list:
    """Three runs, of which the second fails on one process."""
    found = []
    for number in range(3):
        accel = Accelerator(cpu=True, timeout=BOUND)

        def body(index, accel=accel, number=number):
            if number == 1 and accel.process_index == failing_rank:
                raise OSError("disk")

        kind = ending(lambda accel=accel, body=body: train(accel, body))[0]
        found.append((kind, accel.current_run.global_step))
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sweep_that_catches_the_error_goes_on_with_its_next_run(pool, rank):
    outcomes = pool.run(sweep, rank)
    own, others = ("OSError", 0), ("RemoteError", 0)
    assert outcomes[rank] == [("ok", 8), own, ("ok", 8)]
    assert outcomes[1 - rank] == [("ok", 8), others, ("ok", 8)]


def use_after_an_error(folder: str) -> list:
    fails = Fails("on_log", [1], ValueError("no space left"))
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=[fails], project_dir=folder)
    ending(lambda: train(accel))
    actions = [
        accel.save_state,
        accel.load_state,
        accel.run("again").__enter__,
        accel.wait_for_everyone,
        accel.end_training,
    ]
    return [ending(action)[:2] for action in actions]


def test_an_accelerator_whose_run_has_ended_with_an_error_says_what_to_do(pool, tmp_path):
    for outcomes in pool.run(use_after_an_error, str(tmp_path)):
        *refused, barrier, end = outcomes
        assert [kind for kind, _ in refused] == ["RuntimeError"] * 3
        assert all("Make a new Accelerator" in text for _, text in refused)
        assert barrier[0] in ("RuntimeError", "RemoteError")
        assert end == ("ok", "")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


# --- devices -------------------------------------------------------------------------------------


def wait_while_another_publishes_an_error() -> list:
    """What a process does that NCCL would leave waiting; here gloo is not told of the error."""
    accel = Accelerator(cpu=True, timeout=BOUND)
    on_device, heartbeat._runs_on_device = heartbeat._runs_on_device, lambda: True
    found: list[str] = []
    if accel.process_index == 1:
        abort.store().set(heartbeat.REPORT, '{"rank": 1, "where": "a run", "details": "disk"}')
        while not abort.store().check(["heard"]):
            time.sleep(0.01)
    else:
        error = ending(accel.wait_for_everyone)
        abort.store().set("heard", "")
        found.append(error[0])
        found.append(abort.abort_run(RuntimeError("gloo: " + error[1]), "here").args[0])
    heartbeat._runs_on_device = on_device
    abort.abort_group()
    return found


def test_a_process_whose_collectives_do_not_notice_looks_out_for_errors(pool):
    first, second = pool.run(wait_while_another_publishes_an_error)
    assert first == ["RemoteError", "rank 1 failed in a run: disk"]
    assert second == []
