"""The one bound of what tests wait for: long enough for a machine that other work shares."""

import os
from datetime import timedelta

__all__ = ["BOUND", "OUTLASTING", "patience"]

#: Of process groups; below that of a test, so that what hangs is told by the ranks themselves.
BOUND = timedelta(minutes=10)
#: Of those of tests that show that nobody waits for it: longer than a test may take.
OUTLASTING = timedelta(hours=1)


def patience(seconds: float) -> float:
    """Seconds of a timeout that has to pass: as many, or more where others use the processors.

    A rank that lives must not be late only because it did not run. The tests themselves are
    several processes for each processor.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(1.0, load / 4), 10.0)
