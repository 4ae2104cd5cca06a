"""What forked processes leave for their launcher: that they began, and how they failed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from accel_callbacks.errors import RemoteError

__all__ = ["LastWords"]

_HERE = Path(__file__).parent
_AFTERMATH = (signal.SIGTERM, signal.SIGABRT)  # the failure of another process can lead to these


class Ended(Protocol):
    """The part of torch's ``ProcessFailure`` that is read here."""

    @property
    def exitcode(self) -> int:
        """Exit code; -n for signal n."""


class _Words(NamedTuple):
    rank: int
    when: float
    secondary: bool
    summary: str
    text: str
    gone: list[int]


class LastWords:
    """The folder, seen from a process that writes to it, and from the launcher that reads.

    Args:
        folder: an empty one, for one launch.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from accel_callbacks.launching.last_words import LastWords
        >>> words = LastWords(Path(tempfile.mkdtemp()))
        >>> words.began(rank=0)
        >>> _ = words.failed(0, ValueError("no data"))
        >>> print(words.explain({}, "notebook_launcher"))
        rank 0 failed in notebook_launcher: ValueError: no data
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_attempt(self, number: int) -> LastWords:
        """In a process: the words of this start, apart from those of the starts before it."""
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        return LastWords(folder)

    def of_last_attempt(self) -> LastWords:
        """In the launcher: the words of the last start, which may be the only one."""
        numbers = [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]
        return LastWords(self.folder / str(max(numbers))) if numbers else self

    def began(self, rank: int) -> None:
        """In a process: it is there."""
        (self.folder / f"{rank}.pid").write_text(str(os.getpid()))

    def failed(self, rank: int, error: BaseException) -> str:
        """In a process: the traceback of the function, which is returned too."""
        when = time.time()
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _HERE:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        time.sleep(0.05)  # a killed peer loses its connections just before it is seen to be dead
        words = _Words(rank, when, isinstance(error, RemoteError), summary, text, self._gone(rank))
        unready = self.folder / f"{rank}.new"
        unready.write_text(json.dumps(words._asdict()))
        os.replace(unready, self.folder / f"{rank}.json")
        return text

    def _gone(self, rank: int) -> list[int]:
        """Other ranks that are dead and have left no words."""
        pids = {int(path.stem): path.read_text() for path in self.folder.glob("*.pid")}
        quiet = [one for one in pids if one != rank and not (self.folder / f"{one}.json").exists()]
        return sorted(one for one in quiet if _is_dead(pids[one]))

    def explain(self, ended: Mapping[int, Ended], where: str) -> RemoteError:
        """In the launcher: the error to raise, that of the process which failed first.

        Args:
            ended: how processes ended, by rank, as far as torch's launcher knows.
            where: which call it is that failed.
        """
        found = [_Words(**json.loads(p.read_text())) for p in self.folder.glob("*.json")]
        found.sort(key=lambda words: (words.secondary, words.when))
        gone = found[0].gone if found else []
        spoken = {words.rank for words in found}
        codes = {rank: one.exitcode for rank, one in ended.items() if rank not in spoken}
        late = [r for r in codes if found and r not in gone and -codes[r] in _AFTERMATH]
        mute = [rank for rank in dict.fromkeys([*gone, *codes]) if rank not in late]
        if mute:
            mute.sort(key=lambda rank: codes.get(rank, 0) >= 0)  # those first that were killed
            also = "".join(f"\nthen rank {words.rank} failed: {words.summary}" for words in found)
            return _error(mute[0], where, _how(codes.get(mute[0])) + also)
        if not found:
            return _error(0, where, "a process ended, and left no error")
        first, others = found[0], sorted(words.rank for words in found[1:])
        after = [f"(then also rank {', '.join(map(str, others))})"] if others else []
        after += [f"(also rank {rank}: {_how(codes[rank])})" for rank in late]
        lines = [*after, first.text]
        below = [""] if "\n" in first.text and not after else []
        return _error(first.rank, where, "\n".join([*below, *lines]))


def _error(rank: int, where: str, details: str) -> RemoteError:
    return RemoteError(rank=rank, where=where, details=details)


def _how(code: int | None) -> str:
    """How a process ended that said nothing."""
    if code == -signal.SIGKILL or code is None:
        name = "it was killed by SIGKILL" if code is not None else "it was killed, or left at once"
        return f"{name}, which often means out of memory: try smaller batches or fewer processes"
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


def _is_dead(pid: str) -> bool:
    """Whether a process has ended; a parent that has not yet noticed keeps its number."""
    if sys.platform != "linux":
        return False
    try:
        status: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return status in ("Z", "X")
