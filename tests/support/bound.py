"""The one bound of what tests wait for: long enough for a machine that other work shares."""

from datetime import timedelta

__all__ = ["BOUND", "OUTLASTING"]

#: Of process groups; below that of a test, so that what hangs is told by the ranks themselves.
BOUND = timedelta(minutes=10)
#: Of those of tests that show that nobody waits for it: longer than a test may take.
OUTLASTING = timedelta(hours=1)
