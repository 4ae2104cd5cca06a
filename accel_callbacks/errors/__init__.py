"""The error classes, suggestions for mistyped names, and how the end of a script is told.

All rooms raise the classes of this file, and end a text about an unknown name by `nearest`. The
first Accelerator installs the excepthook of ``rank_report``: of several ranks that fail, one shows
its traceback, and the others a line. ``text`` folds the frames of libraries; ``removed`` has what
earlier versions were called, with what serves now.

Nothing here takes part in a collective or waits for another rank without a limit: the group may be
gone. A fault while an error is told must not hide the error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "NO_MODEL",
    "DistributedOperationException",
    "LostRankError",
    "RemoteError",
    "ResumeError",
]


class RemoteError(RuntimeError):
    """Another rank failed in a block or collective that all ranks take part in.

    The message has the rank and the traceback of the rank that failed, so that the log of any one
    rank shows the cause. The failing rank itself raises its own exception.

    Example:
        >>> from accel_callbacks import RemoteError
        >>> raise RemoteError(rank=1, where="synchronize", details="ValueError: no such file")
        Traceback (most recent call last):
        accel_callbacks.errors.RemoteError: rank 1 failed in synchronize: ValueError: no such file
    """

    rank: int | None

    def __init__(self, *, rank: int, where: str, details: str) -> None:
        super().__init__(f"rank {rank} failed in {where}: {details}")
        self.rank = rank
        self.where = where


class LostRankError(RemoteError):
    """Another rank died, or has not answered for the timeout of the process group.

    The message says which rank, what of (the signal or exit code, if it is on this machine), and
    where it was last seen. ``rank`` is None if only the rendezvous store does not answer.

    Example:
        >>> from accel_callbacks.errors import LostRankError
        >>> raise LostRankError("rank 1 was killed by SIGKILL", rank=1, where="backward")
        Traceback (most recent call last):
        accel_callbacks.errors.LostRankError: backward: rank 1 was killed by SIGKILL. See its own \
output; started again, the run resumes from its newest checkpoint.
    """

    def __init__(self, text: str, *, rank: int | None, where: str) -> None:
        RuntimeError.__init__(
            self,
            f"{where}: {text}. See its own output; started again, the run resumes from its newest "
            "checkpoint.",
        )
        self.rank = rank
        self.where = where


class DistributedOperationException(RuntimeError):
    """In debug mode, the ranks were about to start different collectives; nothing was sent.

    It is raised on all ranks, and its message shows the call of each of them.

    Example:
        >>> from accel_callbacks.errors import DistributedOperationException
        >>> issubclass(DistributedOperationException, RuntimeError)
        True
    """


#: Of a checkpoint of a run that had prepared no model, to be formatted with its path.
NO_MODEL = (
    "{} holds no model: the run that saved it had prepared none, and what it trained is lost. "
    "Pass the model to accel.prepare(), and start afresh: accel.run(resume=False), or another "
    "folder."
)


class ResumeError(RuntimeError):
    """A checkpoint does not fit the objects that it is loaded into; nothing was changed.

    Or it is the newest that ``Accelerator.run`` has found, and of a run with another name or
    config. Also raised on the attempt to train or save after a load that failed midway.

    Example:
        >>> from accel_callbacks import ResumeError
        >>> issubclass(ResumeError, RuntimeError)
        True
    """


def unknown_option(owner: str, name: str, known: Sequence[str], instead: str = "") -> str:
    """Return one line for an argument that a constructor lacks, with what to pass instead.

    Args:
        owner: name of the class.
        name: the argument.
        known: the arguments that it has.
        instead: a sentence, in place of the nearest name.

    Example:
        >>> from accel_callbacks.errors import unknown_option
        >>> unknown_option("EMA", "decey", ["decay", "name"])
        "EMA() has no option 'decey'. Did you mean 'decay'?"
        >>> unknown_option("EMA", "speed", ["decay", "name"])
        "EMA() has no option 'speed'. It has decay, name."
    """
    hint = f" {instead}" if instead else nearest(name, known)
    options = f" It has {', '.join(known)}." if known and not hint else ""
    return f"{owner}() has no option {name!r}.{hint}{options}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a ' Did you mean ...?' hint for a mistyped name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
