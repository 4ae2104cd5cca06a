"""Variables for the processes of a launch: the one place that changes those of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["changed_environment"]


@contextmanager
def changed_environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started inside; afterwards all is as it was.

    What others write meanwhile, as torch's launcher does, is put back too.

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
