"""The pool of processes: what it does when one of them ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def crash_once(mark: str) -> int:
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return 5


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


def test_a_call_that_crashed_once_runs_again_and_says_so(alone, tmp_path):
    with pytest.warns(UserWarning, match=r"rank 0 ended with -6 in crash_once; .* runs again"):
        assert alone.run(crash_once, str(tmp_path / "mark")) == [5]


def test_a_call_that_crashes_each_time_fails(alone):
    with (
        pytest.warns(UserWarning, match="runs again"),
        pytest.raises(AssertionError, match="rank 0 ended with -11 in crash"),
    ):
        alone.run(crash)


def test_a_process_that_leaves_fails_at_once(alone):
    with pytest.raises(AssertionError, match="rank 0 ended with 3 in leave"):
        alone.run(leave)
