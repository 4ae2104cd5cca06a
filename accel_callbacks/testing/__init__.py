"""Test kit for callbacks: a small training, single hooks, and checks of what a loop may do to them.

A test of a callback calls ``check_callback`` or parametrizes over ``callback_checks``;
``tiny_training`` runs a real loop and returns what happened, ``fire`` calls one hook. Everything
runs on the CPU, needs no test runner, and leaves random generators and the topology of the process
as they were. Nothing else of the library may import this room, and nothing here may read the
private attributes of a callback: what is checked is what any loop could see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "Check": "checks",
    "Recorder": "training",
    "TinyTraining": "training",
    "callback_checks": "checks",
    "check_callback": "checks",
    "fire": "hooks",
    "record": "training",
    "tiny_training": "training",
}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.testing.checks import Check as Check
    from accel_callbacks.testing.checks import callback_checks as callback_checks
    from accel_callbacks.testing.checks import check_callback as check_callback
    from accel_callbacks.testing.hooks import fire as fire
    from accel_callbacks.testing.training import Recorder as Recorder
    from accel_callbacks.testing.training import TinyTraining as TinyTraining
    from accel_callbacks.testing.training import record as record
    from accel_callbacks.testing.training import tiny_training as tiny_training


__getattr__, __dir__ = lazy_names(__name__, _HOME)
