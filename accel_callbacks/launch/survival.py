"""Call a train function again in the same process, after the loss of another rank."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from accel_callbacks.distributed.abort import abort_devices, abort_run, explain
from accel_callbacks.distributed.process_group import forget_stores
from accel_callbacks.distributed.topology import current_device, destroy_topology, when_joined
from accel_callbacks.errors import RemoteError
from accel_callbacks.launch.environment import set_variables
from accel_callbacks.launch.worker import without_frames
from accel_callbacks.launch_notes import (
    ATTEMPT,
    SURVIVOR,
    VARIABLE,
    leave_note,
    remove_note,
    survives,
    take_note,
)
from accel_callbacks.logging import notice

__all__ = ["survive"]

_PATIENCE = 120.0  # seconds for the launcher to begin another attempt
_DEVICE_PATIENCE = 10.0  # seconds for the work that is queued on a device
_POLLING = 0.01
_OPERATION = "survive"
P = ParamSpec("P")
T = TypeVar("T")


def survive(train: Callable[P, T]) -> Callable[P, T]:
    """Decorator: call a train function again, in this process, each time another rank is lost.

    Under ``accel launch --max_restarts N`` the launcher starts lost processes again, and each
    process that is inside of such a function keeps its pid: it leaves the broken group, waits for
    the others, and calls the function again from its first line. The function makes its
    Accelerator, models and loaders itself, and resumes by :meth:`Accelerator.run`. What is made
    outside of it stays, such as imports, datasets, caches and the context of a device. What is
    alive at the first call, or after the first loss, is left out of garbage collections from then
    on.

    An error of this rank is raised as it is. Without that launcher, so is the loss of another rank.

    Args:
        train: the function.

    Returns:
        A function with the same arguments and result.

    Raises:
        LostRankError: another rank is lost, and this process cannot survive that; a line on
            standard error says why.

    Example:
        >>> from accel_callbacks import Accelerator, survive
        >>> @survive
        ... def train(steps):
        ...     accel = Accelerator(cpu=True)
        ...     with accel.run("demo") as run:
        ...         for epoch in run.epochs(1):
        ...             ...
        ...     return steps
        >>> train(3)
        3
    """

    @functools.wraps(train)
    def survivor(*args: P.args, **keywords: P.kwargs) -> T:
        # Each loss collects garbage, and would look through what imports have left each time: those
        # before the call, and, from the second loss on, those of the function.
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        lost_before = False
        with _noted():
            while True:
                try:
                    return train(*args, **keywords)
                except Exception as error:
                    cause = explain(error, _OPERATION)
                    goes_on = isinstance(cause, RemoteError) and _may_survive(cause)
                    if not goes_on and cause is error:
                        raise
                    if not goes_on:
                        raise cause from error
                    without_frames(error)
                    loss = without_frames(cause)
                # Outside of the except block: nothing of the attempt is alive any more.
                _join_next_attempt(loss)
                if not lost_before:
                    gc.freeze()
                lost_before = True

    return survivor


@contextmanager
def _noted() -> Iterator[None]:
    """Context manager: tell the launcher that this process survives the loss of another one.

    Only from the moment on in which it has joined a group: before, it would not notice a loss.
    """
    note = SURVIVOR.format(os.getpid())
    when_joined(lambda: leave_note(note, {"waits": False}))
    try:
        yield
    finally:
        when_joined(None)
        remove_note(note)


def _may_survive(loss: BaseException) -> bool:
    """Abort the attempt, and return whether this process may take part in another one."""
    reason = _reason_to_end()
    if not reason:
        abort_run(loss, _OPERATION)
        if not abort_devices() or not _device_answers():
            reason = f"the device {current_device()} is stuck, or has failed"
    if reason:
        notice(f"survive: {reason}; this process ends with the error")
    return not reason


def _reason_to_end() -> str:
    """Return why the launcher has no other attempt for this process; empty if it may have."""
    if not os.environ.get(VARIABLE):
        return (
            "start the script with `accel launch --max_restarts N`, which starts lost processes "
            "again beside those that are left"
        )
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return "give `accel launch` a number of restarts, --max_restarts N"
    if not survives():
        return "the processes had not joined a group"
    return ""


def _device_answers() -> bool:
    """Return whether the work that is queued on the device of this process ends without error."""
    device = current_device()
    if device is None or device.type in ("cpu", "xla"):
        return True
    answers: list[bool] = []

    def wait() -> None:
        torch.accelerator.synchronize(device)
        answers.append(True)

    thread = threading.Thread(target=wait, name="accel-device", daemon=True)
    thread.start()
    thread.join(_DEVICE_PATIENCE)
    return bool(answers)


def _join_next_attempt(loss: BaseException) -> None:
    """Leave the broken group, and become a process of the attempt that the launcher begins.

    Raises:
        BaseException: ``loss``, if there is none.
    """
    destroy_topology()
    if dist.is_initialized():  # a group that the function has made itself
        gc.collect()
        dist.destroy_process_group()
    forget_stores()
    pid, launcher = os.getpid(), os.getppid()
    leave_note(SURVIVOR.format(pid), {"waits": True})
    deadline = time.monotonic() + _PATIENCE
    while (attempt := take_note(ATTEMPT.format(pid))) is None:
        if os.getppid() != launcher or time.monotonic() > deadline:
            notice(f"survive: the launcher has begun no other attempt in {_PATIENCE:.0f} s")
            raise loss
        time.sleep(_POLLING)
    remove_note(SURVIVOR.format(pid))
    if not attempt:  # no restarts are left
        raise loss
    for number, path in zip((1, 2), attempt["streams"], strict=True):
        _redirect(number, path)
    set_variables(attempt["variables"])


def _redirect(number: int, path: str | None) -> None:
    """Write a stream to the file that it has in this attempt; None if it has none."""
    if path:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
