"""For tests and doctests: collections of garbage stay quick, however much is loaded."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

_seen: set[Path] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before each file: what is there now is gone through no more.

    The library collects garbage at the end of a training, and thousands of tests make that slow.
    """
    if item.path not in _seen:
        _seen.add(item.path)
        gc.collect()
        gc.freeze()
