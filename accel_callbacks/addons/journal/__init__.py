"""The journal of a run: what happened in each optimizer step, and what can be told from it.

A run enters by `Recorder`, an observer of its hooks, which hands rows and marks to a writer on the
threads of a tracker hub; `ReplayRecorder` takes its place in the processes of `accel replay`.
Readers enter by `Journal.read`, and tell from it: ``goodput``, ``samples``, ``runs``, ``replay``,
``report``.

The recorder waits for no device and draws nothing from a generator. On a disk files are only
appended to, rows in one for each attempt and rank, marks in one for each attempt, so that a torn
end is that of a kill. Their bytes are those of ``format`` and ``marks``: what was written once must
stay readable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

#: Variable with the file of a request, which `accel replay` sets for its processes alone.
REPLAY = "ACCEL_REPLAY"
_HOME = {
    "Attempt": "reader",
    "Goodput": "goodput",
    "Journal": "reader",
    "JournalError": "format",
    "StepSamples": "samples",
    "samples_of": "samples",
}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.addons.journal.format import JournalError as JournalError
    from accel_callbacks.addons.journal.goodput import Goodput as Goodput
    from accel_callbacks.addons.journal.reader import Attempt as Attempt
    from accel_callbacks.addons.journal.reader import Journal as Journal
    from accel_callbacks.addons.journal.samples import StepSamples as StepSamples
    from accel_callbacks.addons.journal.samples import samples_of as samples_of


__getattr__, __dir__ = lazy_names(__name__, _HOME)
