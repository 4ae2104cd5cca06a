"""Test kit for callbacks: a small training, single hooks, and checks of the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "Check": "checks",
    "HostSync": "host_sync",
    "Recorder": "training",
    "TinyTraining": "training",
    "callback_checks": "checks",
    "check_callback": "checks",
    "fire": "hooks",
    "host_syncs": "host_sync",
    "record": "training",
    "simulate": "hooks",
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
    from accel_callbacks.testing.hooks import simulate as simulate
    from accel_callbacks.testing.host_sync import HostSync as HostSync
    from accel_callbacks.testing.host_sync import host_syncs as host_syncs
    from accel_callbacks.testing.training import Recorder as Recorder
    from accel_callbacks.testing.training import TinyTraining as TinyTraining
    from accel_callbacks.testing.training import record as record
    from accel_callbacks.testing.training import tiny_training as tiny_training


__getattr__, __dir__ = lazy_names(__name__, _HOME)
