"""A signal or a notice to one of two processes: both leave at the same place."""

from __future__ import annotations

import os
import signal
import time
import urllib.request

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, Preemption, cloud_notice
from tests.support import left
from tests.support.metadata import AWS, metadata_server, reply

pytestmark = pytest.mark.distributed


def run_left(folder: str | None, rank: int, place: str, number: int, sharded: bool) -> list:
    """The places that a run came to, and how it ended; the rank ``rank`` gets a signal."""
    log: list = []
    mine = int(os.environ["RANK"]) == rank

    def visit(now: str, here: int) -> None:
        log.append((now, here))
        if now == place and mine and here == number:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        steps, weights = left.train(folder, visit, sharded=sharded)
    except SystemExit as stop:
        return [stop.code, [entry for entry in log if entry[0] == place], len(log)]
    return [steps, weights]


@pytest.mark.parametrize(
    ("rank", "place", "number", "sharded"),
    [
        (0, "validation 0", 1, False),
        (1, "validation 1", 0, False),
        (1, "test", 2, False),
        (1, "validation 0", 1, True),
    ],
)
def test_both_leave_the_evaluation_at_one_batch_and_resume_bitwise(
    pool, tmp_path, rank, place, number, sharded
):
    ended = pool.run(run_left, str(tmp_path), rank, place, number, sharded)
    assert ended[0] == ended[1]
    code, places, _ = ended[0]
    assert code == 75
    assert places[-1][1] in (number, number + 1, number + 2)  # and not all six, but for the last
    resumed = pool.run(run_left, str(tmp_path), rank, "nowhere", 0, sharded)
    first = {"validation 0": 5, "validation 1": 9, "test": 9}[place]
    undisturbed = pool.run(run_left, None, rank, "nowhere", 0, sharded)
    assert [steps for steps, _ in resumed] == [list(range(first, 9))] * 2
    assert [weights for _, weights in resumed] == [weights for _, weights in undisturbed]


def run_noticed(folder: str, address: str, at: int) -> list:
    """The steps of a run of whose machine rank 0 gets a notice at a step, and its end."""
    preemption = Preemption(notices="aws", metadata_address=address)
    accel = Accelerator(cpu=True, callbacks=[preemption, Checkpoint(folder, every_n_steps=100)])
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(16, 1))
    model, optimizer, data = accel.prepare(model, sgd, data)
    steps: list[int] = []
    before, cloud_notice._EVERY = cloud_notice._EVERY, 0.02
    try:
        with accel.run("noticed") as run:
            for _ in run.epochs(1):
                for batch in data:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.append(run.global_step)
                    if run.global_step == at and run.is_global_zero:
                        urllib.request.urlopen(f"{address}/announce").close()
                        while preemption.received is None:
                            time.sleep(0.01)
    except SystemExit as stop:
        return [steps, stop.code, run.stop_reason.startswith("AWS spot notice")]
    finally:
        cloud_notice._EVERY = before
    return [steps]


def test_a_notice_to_one_machine_stops_both_at_one_step(pool, tmp_path):
    with metadata_server() as metadata:

        def announce(handler) -> None:
            metadata.announce()
            reply(handler, 200, b"")

        metadata.answers["/announce"] = announce
        began = time.monotonic()
        ended = pool.run(run_noticed, str(tmp_path), metadata.address, 3)
        assert ended == [[[1, 2, 3, 4], 75, True]] * 2
        # Both ranks ask, with a pause between two requests that is at least that long.
        pauses = (time.monotonic() - began) / 0.02
        assert metadata.requests.count(AWS) <= 2 * (pauses + 2)
        metadata.answers.clear()
        resumed = pool.run(run_noticed, str(tmp_path), metadata.address, 0)
    assert resumed == [[[5, 6, 7, 8]]] * 2


def run_apart(folder: str) -> list:
    """A run whose ranks evaluate slowly, out of step, and meet in no collective meanwhile."""
    accel = Accelerator(cpu=True, callbacks=[Preemption(), Checkpoint(folder, every_n_steps=100)])
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.ones(4, 1))
    val = torch.utils.data.DataLoader(torch.ones(400, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data, val = accel.prepare(model, sgd, data, val)
    batches = 0
    try:
        with accel.run("apart") as run:
            for _ in run.epochs(1):
                for batch in data:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                time.sleep(0.3 * run.global_rank)
                with accel.evaluate(model):
                    for batches, _ in enumerate(val, start=1):
                        time.sleep(0.6)
                        if batches == 2 and run.global_rank == 1:
                            os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as stop:
        return [stop.code, batches]
    return [batches]


def test_ranks_that_meet_in_no_collective_leave_at_one_batch_too(pool, tmp_path):
    first, second = pool.run(run_apart, str(tmp_path))
    assert first == second
    assert first[0] == 75
    assert first[1] < 200  # and not after all, which takes two minutes
