"""The contract of our own callbacks: the checks that users have, and what only we ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accel_callbacks.testing import Check
from accel_callbacks.testing.checks import CHECKS, isolated
from tests.support.contract import fault_checks, run_checks, state_checks
from tests.support.contract.host_sync import HostSync, host_syncs

__all__ = ["Check", "HostSync", "callback_checks", "host_syncs"]

_ALL: dict[str, Callable[[Any], None]] = {
    **run_checks.CHECKS,
    **CHECKS,
    **state_checks.CHECKS,
    **fault_checks.CHECKS,
}


def callback_checks(
    factory: Callable[[], Any],
    *,
    skip: Sequence[str] = (),
    allow_sync: Sequence[str] = (),
    **training: Any,
) -> list[Check]:
    """All checks of a callback.

    Args:
        factory: makes a new callback, or a list of it and others that it depends on.
        skip: names of checks to skip.
        allow_sync: hooks that may wait for the device.
        **training: options of its trainings.
    """
    subject = run_checks.OurSubject(factory, allow_sync, training)
    return [
        Check(name, isolated(check, subject)) for name, check in _ALL.items() if name not in skip
    ]
