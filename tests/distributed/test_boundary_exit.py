"""A signal to one of two processes in an evaluation: both leave before the same batch."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support import left

pytestmark = pytest.mark.distributed


def run_left(folder: str | None, rank: int, place: str, number: int, slow: float = 0.0) -> list:
    """The places that a run came to, and how it ended; the rank ``rank`` gets a signal."""
    log: list = []
    mine = int(os.environ["RANK"]) == rank

    def visit(now: str, here: int) -> None:
        log.append((now, here))
        if now == place and mine:
            time.sleep(slow)
            if here == number:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        steps, weights = left.train(folder, visit)
    except SystemExit as stop:
        return [stop.code, [entry for entry in log if entry[0] == place], len(log)]
    return [steps, weights]


@pytest.mark.parametrize(
    ("rank", "place", "number"), [(0, "validation 0", 1), (1, "validation 1", 0), (1, "test", 2)]
)
def test_both_leave_the_evaluation_at_one_batch_and_resume_bitwise(
    pool, tmp_path, rank, place, number
):
    ended = pool.run(run_left, str(tmp_path), rank, place, number)
    assert ended[0] == ended[1]
    code, places, _ = ended[0]
    assert code == 75
    assert places[-1][1] in (number, number + 1, number + 2)  # and not all six, but for the last
    resumed = pool.run(run_left, str(tmp_path), rank, "nowhere", 0)
    first = {"validation 0": 5, "validation 1": 9, "test": 9}[place]
    undisturbed = pool.run(run_left, None, rank, "nowhere", 0)
    assert [steps for steps, _ in resumed] == [list(range(first, 9))] * 2
    assert [weights for _, weights in resumed] == [weights for _, weights in undisturbed]
