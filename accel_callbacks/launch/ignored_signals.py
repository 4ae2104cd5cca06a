"""Keep signals ignored that are ignored when a launch starts, as ``nohup`` and ``&`` leave them.

Torch's launcher sets a handler for SIGHUP and SIGINT all the same, and processes inherit only what
is ignored: a launch under ``nohup`` would end as the terminal closes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["keep_ignored_signals"]


@contextmanager
def keep_ignored_signals() -> Iterator[None]:
    """Ignore in the processes of torch's launcher, and in itself, what this process ignores."""
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext

    contexts: tuple[Any, ...] = (MultiprocessContext, SubprocessContext)
    ignored = [
        number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN
    ]
    starts = [context._start for context in contexts]
    try:
        for context, start in zip(contexts, starts, strict=True):
            context._start = _start_of(ignored, start)
        yield
    finally:
        for context, start in zip(contexts, starts, strict=True):
            context._start = start


def _start_of(ignored: Sequence[int], start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a start of processes, called once torch's handlers are set, that ignores signals."""

    def ignore_and_start(context: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # the only one that may set them
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
        start(context)

    return ignore_and_start
