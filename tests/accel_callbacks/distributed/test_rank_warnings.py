"""A warning of all ranks is shown by rank 0 alone, one of a single rank with its number."""

from __future__ import annotations

import warnings

import pytest

from accel_callbacks import Accelerator
from checkpoint_io.warning import warn
from tests.accel_callbacks.distributed.test_failing_scripts import run_script

pytestmark = pytest.mark.distributed

SCRIPT = """
import sys, time, warnings
from accel_callbacks import Accelerator
from checkpoint_io.warning import warn

if "own" in sys.argv:
    warnings.showwarning = lambda message, *place: print("mine:", message, file=sys.stderr)
accel = Accelerator(cpu=True)
if accel.process_index == 0:
    time.sleep(0.3)
warnings.warn("of all", stacklevel=1)
warn("ours of all")
if accel.process_index == 1:
    warnings.warn("of one", stacklevel=1)
if "fails" in sys.argv:
    raise ValueError("no data")
accel.end_training()
"""


def test_what_all_ranks_warn_of_is_shown_once():
    (_, first), (_, second) = run_script(code=SCRIPT)
    assert [first.count("UserWarning: of all"), first.count("UserWarning: ours of all")] == [1, 1]
    assert "[RANK" not in first
    assert "of all" not in second
    assert "[RANK 1] <string>:14: UserWarning: of one" in second


def test_a_rank_that_fails_says_what_it_has_warned_of():
    (_, first), (_, second) = run_script("fails", code=SCRIPT)
    assert first.count("UserWarning: of all") == 1
    assert "[RANK 1] <string>:14: UserWarning: of one" in second
    assert "ValueError: no data" in second
    assert "frame #" not in second


def test_a_script_that_shows_warnings_in_its_way_gets_all_of_them():
    outcomes = run_script("own", code=SCRIPT)
    assert [text.count("mine: of all") for _, text in outcomes] == [1, 1]


def recorded() -> list[str]:
    Accelerator(cpu=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Accelerator(cpu=True)
        warn("of all")
    return [str(warning.message) for warning in caught]


def raised() -> str:
    Accelerator(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            warn("of all")
        except UserWarning as error:
            return str(error)
    return ""


def test_each_rank_still_records_and_raises_its_warnings(pool):
    assert pool.run(recorded) == [["of all"]] * 2
    assert pool.run(raised) == ["of all"] * 2
