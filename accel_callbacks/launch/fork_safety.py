"""What forks may do here, and the kernel put back as it was."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Prospect", "left_as_it_was", "look_ahead"]

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_LAUNCHER_LOGS = (
    "torch.distributed.elastic",
    "torch.distributed.launcher",
    "torch.multiprocessing",
)
_FOR_DEVICES = 60.0  # seconds; a driver may be slow to wake up
_FOR_THREADS = 1.0  # takes milliseconds, or for ever


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """Around torch's launcher: its signal handlers, its log lines and its processes end with it.

    Raises:
        KeyboardInterrupt: a Ctrl-C came, which torch's launcher turns into an error of its own.

    Example:
        >>> import signal
        >>> from accel_callbacks.launch.fork_safety import left_as_it_was
        >>> before = signal.getsignal(signal.SIGTERM)
        >>> with left_as_it_was():
        ...     _ = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        >>> signal.getsignal(signal.SIGTERM) == before
        True
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received: int | None = None
    with ExitStack() as undo:
        undo.enter_context(_own_handlers())
        undo.enter_context(_no_child_left())
        undo.enter_context(_quiet_launcher())
        try:
            yield
        except SignalException as stop:
            received = int(stop.sigval)
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    if received is not None:
        os.kill(os.getpid(), received)  # for the handler that was there before
        raise SystemExit(128 + received)


@contextmanager
def _own_handlers() -> Iterator[None]:
    numbers = [getattr(signal, name) for name in _STOPS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # one that C code has set cannot be set again
                    signal.signal(number, handler)


@contextmanager
def _no_child_left() -> Iterator[None]:
    """A second Ctrl-C breaks off the wait for processes that end slowly: then they are killed."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Torch's launcher logs what is raised anyway; Python 3.12 warns of each fork with threads."""
    known = [
        one
        for name, one in logging.root.manager.loggerDict.items()
        if name.startswith(_LAUNCHER_LOGS) and isinstance(one, logging.Logger) and not one.disabled
    ]
    quiet = [] if "LOGLEVEL" in os.environ else known
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        for one in quiet:
            one.disabled = True
        try:
            yield
        finally:
            for one in quiet:
                one.disabled = False


@dataclass(frozen=True)
class Prospect:
    """What forked processes can do.

    Args:
        devices: accelerators that they can use.
        spoiled: accelerators are here, but not for them: this process has used one already.
        threaded: they may compute with several threads.

    Example:
        >>> from accel_callbacks.launch.fork_safety import Prospect
        >>> Prospect(devices=2).spoiled
        False
    """

    devices: int = 0
    spoiled: bool = False
    threaded: bool = False


def look_ahead(*, devices: bool, threads: int) -> Prospect:
    """Fork once and try.

    This process must not ask for devices itself: that alone can spoil CUDA for its forks. And
    whether OpenMP has run here before, in which case its threads hang in forks, cannot be asked.

    Args:
        devices: whether to look for accelerators.
        threads: how many each process should compute with.

    Raises:
        RuntimeError: the fork died or hung while it looked for devices.

    Example:
        >>> from accel_callbacks.launch.fork_safety import look_ahead
        >>> look_ahead(devices=False, threads=1)
        Prospect(devices=0, spoiled=False, threaded=False)
    """
    if not devices and threads < 2:
        return Prospect()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, of forks and threads
        child = os.fork()
    if child == 0:
        _try(devices, threads, writing)
    os.close(writing)
    try:
        found = _line(reading, _FOR_DEVICES)
        if found is None:
            raise RuntimeError(
                "a fork of this process that looked for GPUs gave no answer: see whether their "
                "driver works (nvidia-smi), then restart the kernel. debug_launcher goes without."
            )
        spoiled = found == "spoiled"
        threaded = threads > 1 and _line(reading, _FOR_THREADS) == "threads"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
    return Prospect(0 if spoiled else int(found), spoiled, threaded)


def _try(devices: bool, threads: int, writing: int) -> None:
    """In the fork: one line about devices, one about threads."""
    try:
        os.write(writing, f"{_devices() if devices else 0}\n".encode())
        if threads > 1:
            torch.set_num_threads(threads)
            torch.ones(1 << 18).exp_().sum()
            torch.ones(256, 256) @ torch.ones(256, 256)
            os.write(writing, b"threads\n")
    finally:
        os._exit(0)


def _devices() -> int | str:
    for module in (torch.cuda, torch.xpu, torch.mps):
        in_bad_fork = getattr(module, "_is_in_bad_fork", None)
        if in_bad_fork is not None and in_bad_fork():
            return "spoiled"
    usable = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    # Torch does not notice all ways to wake up CUDA; then its driver counts more than can be used.
    return "spoiled" if torch.cuda.device_count() > usable else usable


def _line(reading: int, seconds: float) -> str | None:
    """The next line, None where none comes in time or the fork has died."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([reading], [], [], seconds)
        byte = os.read(reading, 1) if ready else b""
        if not byte:
            return None
        text += byte
    return text.decode().strip()
