"""Standard output whose reader may go away, as in ``accel env | head -1``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from accel_callbacks.cli.parser import CommandError

CLOSED = 128 + 13  # what a shell says of a process that SIGPIPE ended


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """End quietly if standard output is closed; a CommandError if it cannot hold the text.

    Example:
        >>> from accel_callbacks.cli.pipes import pipe_may_close
        >>> with pipe_may_close():
        ...     print("one")
        one
    """
    try:
        try:
            yield
        finally:  # --help ends by SystemExit
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise SystemExit(CLOSED) from None
    except UnicodeEncodeError as error:
        text = f"standard output is {error.encoding}, which cannot hold all of this"
        raise CommandError(f"{text}: set PYTHONIOENCODING=utf-8", 1) from error
