"""Text of an error: the user's frames as Python shows them, runs of library frames as one line.

Frames of torch and of this library say little to whoever wrote the script, and neither do causes
that the error repeats. Both are left out here, and counted; ``ACCEL_FULL_TRACEBACK=1`` shows them.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from types import FrameType, TracebackType
from typing import NamedTuple

from accel_callbacks.errors import RemoteError

__all__ = [
    "VARIABLE",
    "folded_text",
    "innermost_call",
    "is_library_error",
    "passes_through_library",
    "published_text",
    "shows_all_frames",
    "whole_text",
]

#: Environment variable that turns the folding off.
VARIABLE = "ACCEL_FULL_TRACEBACK"

_OURS = {"accel_callbacks", "checkpoint_io", "loggers"}
# Top-level packages whose frames are folded. Those of models, such as transformers, are not: they
# say which layer it was.
_CORE = _OURS | {"torch", "functorch", "torch_xla", "deepspeed"}
# Packages below ours and torch's. Their frames are folded beside frames of those only, as are those
# of the standard library.
_BELOW = {
    *("fsspec", "s3fs", "gcsfs", "adlfs", "boto3", "botocore", "aiobotocore"),
    *("aiohttp", "aioitertools", "urllib3", "requests", "safetensors", "numpy", "triton"),
}
_LIBRARY = os.path.normcase(sysconfig.get_path("stdlib") + os.sep)
_INSTALLED = re.compile(r"\b(site|dist)-packages\b")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WORKER = os.path.join(_ROOT, "launch", "worker.py")  # it runs scripts, as __main__
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_HEAD = "Traceback (most recent call last):\n"
# What torch appends to the messages of errors that come from C++.
_NATIVE = re.compile(r"(?:^frame #\d+: .*\n?)+", re.MULTILINE)
_OFF = ("", "0", "false", "no")


def shows_all_frames() -> bool:
    """Return whether the environment asks for errors as a whole."""
    return os.environ.get(VARIABLE, "").lower() not in _OFF


def whole_text(error: BaseException, trace: TracebackType | None) -> str:
    """Return the text that Python prints for an error.

    Args:
        error: the error.
        trace: its traceback, or the part of it to show.

    Example:
        >>> from accel_callbacks.errors.text import whole_text
        >>> whole_text(ValueError("no data"), None)
        'ValueError: no data\\n'
    """
    return "".join(traceback.format_exception(type(error), error, trace))


def folded_text(error: BaseException, trace: TracebackType | None, note: str = "") -> str:
    """Return the text of an error with runs of library frames and repeated causes left out.

    Frames and messages of the user's own code are complete. The text is that of
    :func:`whole_text` if there is nothing to leave out.

    Args:
        error: the error.
        trace: its traceback, or the part of it to show.
        note: a line to put above the message, which stays the end.

    Example:
        >>> from accel_callbacks.errors.text import folded_text
        >>> try:
        ...     raise ValueError("no data")
        ... except ValueError as error:
        ...     text = folded_text(error, error.__traceback__)
        >>> text.splitlines()[-1]
        'ValueError: no data'
    """
    links = _chain(error, trace)
    groups = any(isinstance(getattr(link.error, "exceptions", None), tuple) for link in links)
    if groups or getattr(sys, "tracebacklimit", None) is not None:
        return whole_text(error, trace)
    if isinstance(error, RemoteError):  # its causes only say that a connection was closed
        place = next((link for link in links if _has_user_frames(link.frames)), links[-1])
        return _stack(place.frames) + note + _message(error)
    return "".join(_parts(links, note))


def published_text(error: BaseException, trace: TracebackType | None = None) -> str:
    """Return the text of an error for other processes, folded unless all frames are asked for.

    Args:
        error: the error.
        trace: the part of its traceback to show, all of it by default.

    Example:
        >>> from accel_callbacks.errors.text import published_text
        >>> published_text(ValueError("no data"))
        'ValueError: no data\\n'
    """
    trace = error.__traceback__ if trace is None else trace
    if not shows_all_frames():
        with suppress(Exception):  # a fault here must not hide the error
            return folded_text(error, trace)
    return whole_text(error, trace)


def innermost_call(error: BaseException, trace: TracebackType | None) -> tuple[str, str]:
    """Return the function of a library in which an error was raised, and the user's line.

    Args:
        error: the error; the place is that of its first cause that went through the user's code.
        trace: its traceback.

    Returns:
        The name of the function, and file and line, such as ``("backward", "train.py:31")``; empty
        strings where there is none.

    Example:
        >>> from accel_callbacks.errors.text import innermost_call
        >>> innermost_call(ValueError("no data"), None)
        ('', '')
    """
    for link in _chain(error, trace):
        users = [i for i, frame in enumerate(link.frames) if frame.is_users]
        if users:
            last, below = link.frames[users[-1]], link.frames[users[-1] + 1 :]
            place = f"{os.path.basename(last.summary.filename)}:{last.summary.lineno}"
            named = (frame.summary.name for frame in below if frame.is_core)
            return next(named, ""), place
    return "", ""


def passes_through_library(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether an error, or one of its causes, has a frame of this library.

    Args:
        error: the error.
        trace: its traceback.
    """
    return any(frame.package in _OURS for link in _chain(error, trace) for frame in link.frames)


def is_library_error(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether the innermost frame of an error is one of torch or of this library.

    Args:
        error: the error.
        trace: its traceback.
    """
    frames = _chain(error, trace)[-1].frames
    return bool(frames) and frames[-1].is_core


class _Frame(NamedTuple):
    summary: traceback.FrameSummary
    module: str
    is_core: bool  # of torch or ours
    is_below: bool  # of what these call

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def is_users(self) -> bool:
        return not (self.is_core or self.is_below)


class _Link(NamedTuple):
    error: BaseException
    frames: Sequence[_Frame]
    leads_on: str  # text between this error and the one that followed


def _chain(error: BaseException, trace: TracebackType | None) -> list[_Link]:
    """Return the causes of an error, the first one first, and itself."""
    links, seen = [_Link(error, _frames(trace, None), "")], {id(error)}
    packages = {frame.package for frame in links[0].frames if frame.is_users}
    while True:
        last = links[-1].error
        if last.__cause__ is not None:
            cause, leads_on = last.__cause__, _CAUSE
        elif last.__context__ is not None and not last.__suppress_context__:
            cause, leads_on = last.__context__, _CONTEXT
        else:
            return links[::-1]
        if id(cause) in seen:
            return links[::-1]
        seen.add(id(cause))
        links.append(_Link(cause, _frames(cause.__traceback__, packages), leads_on))


def _frames(trace: TracebackType | None, packages: Collection[str] | None) -> list[_Frame]:
    """Return the frames of a traceback, outermost first.

    Args:
        trace: of an error.
        packages: the installed packages that are the user's; all that are not known if None.
    """
    summaries = traceback.extract_tb(trace)
    frames = (frame for frame, _ in traceback.walk_tb(trace))
    pairs = zip(frames, summaries, strict=False)
    return [_frame(frame, summary, packages) for frame, summary in pairs]


def _frame(
    frame: FrameType, summary: traceback.FrameSummary, packages: Collection[str] | None
) -> _Frame:
    path = os.path.normcase(summary.filename)
    module = str(frame.f_globals.get("__name__"))
    if path == os.path.normcase(_WORKER):
        module = "accel_callbacks.launch.worker"
    package = module.partition(".")[0]
    # By their files: a script may have the name of a module of the standard library.
    installed = _INSTALLED.search(path) is not None
    standard = path.startswith((_LIBRARY, "<frozen ")) and not installed
    others = installed and packages is not None and package not in packages
    return _Frame(summary, module, package in _CORE, standard or others or package in _BELOW)


def _has_user_frames(frames: Iterable[_Frame]) -> bool:
    return any(frame.is_users for frame in frames)


def _parts(links: Sequence[_Link], note: str) -> Iterator[str]:
    """Yield the texts of errors, without causes that add no fact to what follows."""
    known = " ".join(_plain(link.error) for link in links if _has_user_frames(link.frames))
    known += " " + _plain(links[-1].error)
    shown = False  # of several causes without frames of the user's, the first one
    for link in links[:-1]:
        if _has_user_frames(link.frames):
            yield _stack(link.frames) + _message(link.error) + link.leads_on
            shown = False
        elif not shown and _plain(link.error) not in known:
            yield f"{_message(link.error).strip().partition(chr(10))[0]}, which led to:\n"
            shown = True
    yield _stack(links[-1].frames) + note + _message(links[-1].error)


def _plain(error: BaseException) -> str:
    """Return the first line of a message, to be looked for in other ones."""
    words = (str(error).strip() or type(error).__name__).partition("\n")[0].lower()
    return " ".join(words.rstrip(".").split())


def _message(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(type(error), error))
    return _NATIVE.sub(_fold_native, text).rstrip("\n") + "\n"


def _fold_native(frames: re.Match[str]) -> str:
    return f"  ... {frames[0].count('frame #')} frames in C++\n"


def _stack(frames: Sequence[_Frame]) -> str:
    if not frames:
        return ""
    lines = [_HEAD]
    groups = [list(group) for _, group in groupby(frames, lambda frame: frame.is_users)]
    for group in groups:
        if any(frame.is_core for frame in group):
            lines.append(_fold(group, ends=group is groups[-1]))
        else:
            summaries = traceback.StackSummary.from_list([frame.summary for frame in group])
            lines += summaries.format()
    return "".join(lines)


def _fold(frames: Sequence[_Frame], ends: bool) -> str:
    """Return the line for a run of frames; at the end of the traceback it names the innermost."""
    packages = list(dict.fromkeys(frame.package for frame in frames if frame.is_core))
    count = "1 frame" if len(frames) == 1 else f"{len(frames)} frames"
    last = frames[-1]
    place = f", to {last.module}, line {last.summary.lineno}, in {last.summary.name}"
    return f"  ... {count} in {' and '.join(packages)}{place if ends else ''}\n"
