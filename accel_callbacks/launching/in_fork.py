"""A function in a forked process, with what a fork leaves behind put right."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from accel_callbacks.distributed.topology import destroy_topology
from accel_callbacks.launching.last_words import LastWords
from accel_callbacks.launching.parcel import Parcel

__all__ = ["InFork", "WholeLines"]


@dataclass(frozen=True)
class InFork:
    """How a process begins and ends around the function that it is for.

    Args:
        words: where it leaves its error.
        threads: with which torch computes here.
        redirected: torch's launcher reads what this process writes.
        outspoken: show an error at once too; it may be followed by another attempt.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from accel_callbacks.launching.in_fork import InFork
        >>> InFork(LastWords(Path(tempfile.mkdtemp())), threads=1).outspoken
        False
    """

    words: LastWords
    threads: int
    redirected: bool = False
    outspoken: bool = False

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Parcel:
        """The function's result, packed; its error is left for the launcher, and raised."""
        rank = int(os.environ["RANK"])
        _plain_signals()
        (_read_by_launcher if self.redirected else _in_whole_lines)()
        torch.set_num_threads(self.threads)
        words = self.words.of_attempt(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        words.began(rank)
        try:
            parcel = _packed(function, args)
        except KeyboardInterrupt:
            # Torch's launcher would take this for a success, and wait for its result for ever.
            raise SystemExit(128 + signal.SIGINT) from None
        except BaseException as error:
            text = words.failed(rank, error)
            if self.outspoken:
                print(f"rank {rank} failed:\n{text}", file=sys.stderr)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        destroy_topology()
        return parcel


def _packed(function: Callable[..., Any], args: Sequence[Any]) -> Parcel:
    try:
        return Parcel(function(*args))
    except SystemExit as end:
        if end.code in (None, 0):
            return Parcel(None)
        raise


def _plain_signals() -> None:
    """The handlers of torch's launcher are for itself; here they would raise in the function."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def _read_by_launcher() -> None:
    """Torch redirects the file that a stream names; a notebook's stream does not write to it."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        redirected = getattr(sys, name).fileno()
        if redirected != number:
            os.dup2(redirected, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def _in_whole_lines() -> None:
    """A notebook's streams send each piece of a line at once: processes would mix their lines."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, WholeLines(stream))


class WholeLines(io.TextIOBase):
    """A stream that hands text on by the line, or when it is flushed.

    Args:
        stream: what the text is for.

    Example:
        >>> import io
        >>> from accel_callbacks.launching.in_fork import WholeLines
        >>> below = io.StringIO()
        >>> lines = WholeLines(below)
        >>> _ = lines.write("half a "), lines.write("line, ")
        >>> below.getvalue()
        ''
        >>> _ = lines.write("whole\\nrest")
        >>> below.getvalue()
        'half a line, whole\\n'
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._kept = ""

    def write(self, text: str) -> int:
        """Keep what is not yet a line."""
        lines, newline, rest = text.rpartition("\n")
        if newline:
            self._hand_on(self._kept + lines + newline)
            self._kept = ""
        self._kept += rest
        return len(text)

    def flush(self) -> None:
        """Hand on what is there."""
        kept, self._kept = self._kept, ""
        if kept:
            self._hand_on(kept)

    def _hand_on(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def writable(self) -> bool:
        """It is."""
        return True

    def isatty(self) -> bool:
        """As the stream below."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """As the stream below."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the stream below."""
        return getattr(self._stream, "encoding", None) or "utf-8"
