"""For tests and doctests: collections of garbage stay quick, and examples begin afresh."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

_seen: set[Path] = set()

# What `nohup`, cron or a script's `&` starts inherits Ctrl-C as ignored, and so does all that it
# starts in turn. Tests send it: to this process, to workers of xdist, and to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The journal of each run asks git for what differs from the commit, which takes a second here, and
# thousands of tests begin a run. The tests of trackers, without torch, let their tools see git.
if importlib.util.find_spec("torch") is not None:
    os.environ.setdefault("GIT_DIR", os.devnull)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before each file: what is there now is gone through no more.

    The library collects garbage at the end of a training, and thousands of tests make that slow.
    """
    if item.path not in _seen:
        _seen.add(item.path)
        gc.collect()
        gc.freeze()
    if isinstance(item, pytest.DoctestItem):
        _leave_the_group()


def _leave_the_group() -> None:
    """Each example begins as a program does, whatever the one before has made."""
    state = sys.modules.get("accel_callbacks.distributed.topology")
    if state is not None:
        state.destroy_topology()
