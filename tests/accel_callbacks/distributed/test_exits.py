"""Programs on two processes end with the right code and no noise, whatever is open and however.

``python -m tests.support.exits`` repeats each way 200 times.
"""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in EXITS]
)
def test_a_program_ends_with_the_right_code(name):
    assert faults_of(EXITS[name]) == []
