"""Ranks that wait for each other in different calls: told with both places, and by the checker."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.distributed import stack
from accel_callbacks.distributed.stack import Call, MainThread, Wait, find_divergence
from tests.support.bound import BOUND


def beats(*waits, progress=None):
    progress = progress or [[0, 0, 2, 2]] * len(waits)
    return {
        rank: {"wait": list(wait), "progress": done}
        for rank, (wait, done) in enumerate(zip(waits, progress, strict=True))
    }


SAVES = Wait("save_state", True, 6.0)
BACKWARD = Wait("backward", False, 6.0)


def test_a_rank_that_has_begun_a_later_batch_does_not_come():
    rank, told = find_divergence(0, beats(SAVES, BACKWARD, progress=[[0, 0, 2, 2], [0, 0, 3, 2]]))
    assert rank == 1
    assert "went on without save_state, in which rank 0 waits for it" in told
    assert "if accel.is_main_process:" in told
    later_epoch = [[0, 0, 2, 2], [0, 1, 1, 2]]
    assert find_divergence(0, beats(SAVES, BACKWARD, progress=later_epoch)) is not None


def test_a_rank_in_another_collective_does_not_come():
    barrier = Wait("wait_for_everyone", True, 6.0)
    assert find_divergence(0, beats(SAVES, barrier))[0] == 1
    assert find_divergence(1, beats(SAVES, barrier)) is None  # one of them tells
    assert find_divergence(1, beats(BACKWARD, SAVES, progress=[[0, 0, 3, 2], [0, 0, 2, 2]]))[0] == 0


@pytest.mark.parametrize(
    ("wait", "progress"),
    [
        (BACKWARD, [0, 0, 2, 2]),  # of the same batch: it may be slow
        (BACKWARD, []),  # ranks need not be equally far
        (BACKWARD, [1, 0, 3, 2]),  # another training
        (BACKWARD._replace(seconds=4.0), [0, 0, 3, 2]),
        (SAVES, [0, 0, 2, 2]),  # it is there
        (Wait("wait_for_everyone", True, 4.0), [0, 0, 2, 2]),
        (Wait("", False, 60.0), [0, 0, 2, 2]),  # code of the script's own
    ],
)
def test_a_rank_that_may_come_is_waited_for(wait, progress):
    assert find_divergence(0, beats(SAVES, wait, progress=[[0, 0, 2, 2], progress])) is None


def test_all_others_must_be_elsewhere():
    later = [[0, 0, 2, 2], [0, 0, 3, 2], [0, 0, 2, 2]]
    assert find_divergence(0, beats(SAVES, BACKWARD, BACKWARD, progress=later)) is None
    later[2] = [0, 0, 3, 2]
    assert find_divergence(0, beats(SAVES, BACKWARD, BACKWARD, progress=later))[0] == 1


def test_time_at_a_place_begins_anew_where_the_thread_moves(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stack, "time", type("Clock", (), {"monotonic": lambda: now[0]}))
    thread = MainThread(threading.current_thread())
    here = [Call("train.py", 3, "main")]
    assert thread.observe(here) == Wait("", False, 0.0)
    now[0] += 7
    assert thread.observe(here).seconds == 7
    assert thread.observe([Call("train.py", 4, "main")]).seconds == 0
    in_collective = [
        Call(f"{torch.__path__[0]}/distributed/distributed_c10d.py", 9, "gather"),
        *here,
    ]
    monkeypatch.setattr(stack, "thread_is_asleep", lambda thread: True)
    assert thread.observe(in_collective) == Wait("gather", True, 0.0)
    now[0] += 6
    assert thread.observe(in_collective) == Wait("gather", True, 6.0)
    monkeypatch.setattr(stack, "thread_is_asleep", lambda thread: False)  # it may go on
    assert thread.observe(in_collective) == Wait("gather", False, 6.0)


def saves_on_main(folder):
    """As scripts of Accelerate save."""
    accel = Accelerator(cpu=True, timeout=BOUND)
    model = torch.nn.Linear(1, 1)
    model, optimizer, data = accel.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(8, 1))
    )
    for index, batch in enumerate(data):
        accel.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        if index == 1 and accel.is_main_process:
            accel.save_state(folder)


def saves_at_the_end(folder):
    accel = Accelerator(cpu=True, timeout=BOUND)
    accel.prepare(torch.nn.Linear(1, 1))
    if accel.is_main_process:
        accel.gather(torch.ones(1))
    accel.wait_for_everyone()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("function", "call"), [(saves_on_main, "save_state"), (saves_at_the_end, "gather")]
)
def test_a_call_of_the_main_process_alone_ends_all(fresh_pool, tmp_path, function, call):
    for kind, text in fresh_pool.outcomes(function, tmp_path / "state"):
        assert kind in ("LostRankError", "RuntimeError", "RemoteError"), text
        assert f"rank 1 went on without {call}, in which rank 0 waits for it" in text
