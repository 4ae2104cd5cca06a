"""Programs on two processes end with the right code and no noise, whatever is open and however.

``pytest -m slow`` repeats each way 200 times; so does ``python -m tests.support.exits``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.exits import EXITS, faults_of

pytestmark = pytest.mark.distributed

# One of each kind: a live model, an error, a thread, sys.exit, a notebook, a launcher.
FEW = (
    "loop, last line, tracker,workers,save,uncollected,cycle",
    "loop, destroy",
    "run, raise, rank 1, save",
    "thread, raise, rank 0",
    "daemon, stay",
    "loop, exit 3, rank 1, launched",
    "run, exit 0, rank 1",
    "notebook, last line, save,tracker,workers",
)


@pytest.mark.parametrize("name", FEW)
def test_a_program_ends_with_the_right_code(name):
    assert faults_of(EXITS[name]) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EXITS)
def test_a_program_ends_200_times_with_the_right_code(name):
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(faults_of, [EXITS[name]] * 200))
    wrong = [one for one in outcomes if one]
    assert not wrong, f"{len(wrong)} of 200, first: {wrong[0]}"
