"""check_callback: check that a callback keeps the contract of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_callbacks.distributed.topology import destroy_topology, is_initialized
from accel_callbacks.errors import nearest
from accel_callbacks.testing import fault_checks, run_checks, state_checks
from accel_callbacks.testing.run_checks import Subject, captured_output
from accel_callbacks.testing.training import seeded_rng

__all__ = ["Check", "callback_checks", "check_callback"]

_CHECKS: dict[str, Callable[[Subject], None]] = {
    **run_checks.CHECKS,
    **state_checks.CHECKS,
    **fault_checks.CHECKS,
}


@dataclass(frozen=True)
class Check:
    """One check of one callback; call it without arguments.

    Args:
        name: such as ``"resume"``.
        run: the function to call.

    Raises:
        AssertionError: when called, if the callback violates the contract.

    Example:
        >>> from accel_callbacks.callbacks import LearningRateMonitor
        >>> from accel_callbacks.testing import callback_checks
        >>> check = callback_checks(LearningRateMonitor)[0]
        >>> print(check)
        arguments
        >>> check()
    """

    name: str
    run: Callable[[], None] = field(repr=False)

    def __call__(self) -> None:
        """Run the check."""
        self.run()

    def __str__(self) -> str:
        return self.name


def callback_checks(
    factory: Callable[[], Any],
    *,
    skip: Sequence[str] = (),
    allow_sync: Sequence[str] = (),
    **training: Any,
) -> list[Check]:
    """Return the checks of a callback one by one, to parametrize a test.

    Args:
        factory: makes a new callback: its class, or a function. If the callback depends on others,
            the function returns a list of it and these.
        skip: names of checks to skip.
        allow_sync: hooks that may wait for the device, in addition to its ``syncs``.
        **training: options of :class:`TinyTraining`, such as ``model`` and ``data``, if the
            callback needs certain ones.

    Raises:
        ValueError: ``skip`` names an unknown check, or ``allow_sync`` an unknown hook.

    Example:
        >>> from accel_callbacks.callbacks import Timer
        >>> from accel_callbacks.testing import callback_checks
        >>> ", ".join(map(str, callback_checks(Timer, skip=["order"])))
        'arguments, whole_runs, window, break, on_error, host_sync, second_run, state, resume, \
error_before, error_after, error_in_loop'
    """
    for name in skip:
        if name not in _CHECKS:
            raise ValueError(f"skip: {name!r} is no check.{nearest(name, _CHECKS)}")
    subject = Subject(factory, allow_sync, training)
    return [
        Check(name, _isolated(check, subject))
        for name, check in _CHECKS.items()
        if name not in skip
    ]


def check_callback(
    factory: Callable[[], Any],
    *,
    skip: Sequence[str] = (),
    allow_sync: Sequence[str] = (),
    **training: Any,
) -> None:
    """Run all checks on a callback; the arguments are those of :func:`callback_checks`.

    Raises:
        AssertionError: the callback violates the contract. The message says what to change.
        ValueError: as for :func:`callback_checks`.

    Example:
        >>> from accel_callbacks import Callback
        >>> from accel_callbacks.testing import check_callback
        >>> class Steps(Callback):
        ...     steps = 0
        ...
        ...     def on_after_optimizer_step(self, run, model, optimizer):
        ...         self.steps += 1
        ...
        ...     def state_dict(self):
        ...         return {"steps": self.steps}
        >>> check_callback(Steps)
        Traceback (most recent call last):
        AssertionError: Steps does not reset its state in a second run. After the first and after \
the second: steps: 6 and 12. Reset it in `setup`, unless run.resumed_from is set.
    """
    for check in callback_checks(factory, skip=skip, allow_sync=allow_sync, **training):
        check()


def _isolated(check: Callable[[Subject], None], subject: Subject) -> Callable[[], None]:
    """Wrap a check so that it prints nothing and restores the state of the process."""

    def run() -> None:
        was_initialized = is_initialized()
        try:
            with captured_output(), seeded_rng(torch.device("cpu")):
                check(subject)
        finally:
            if not was_initialized:
                destroy_topology()

    return run
