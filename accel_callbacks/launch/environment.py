"""Set environment variables for child processes; the only place that writes ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["changed_environment"]


@contextmanager
def changed_environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes started in the block; restore the whole environment after it.

    Changes that others make in the block, as torch's launcher does, are undone too.

    Example:
        >>> import os
        >>> from accel_callbacks.launch.environment import changed_environment
        >>> with changed_environment({"ACCEL_EXAMPLE": "1"}):
        ...     os.environ["ACCEL_EXAMPLE"]
        '1'
        >>> "ACCEL_EXAMPLE" in os.environ
        False
    """
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        changed = {name: value for name, value in before.items() if os.environ.get(name) != value}
        os.environ.update(changed)
