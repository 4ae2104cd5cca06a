"""Fork safely from a notebook: probe what forks can use, and restore the kernel afterwards."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from accel_callbacks.launch.ignored_signals import keep_ignored_signals

__all__ = ["ForkSupport", "isolated_launcher", "probe_forks"]

_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_LAUNCHER_LOGS = (
    "torch.distributed.elastic",
    "torch.distributed.launcher",
    "torch.multiprocessing",
)
_DEVICE_TIMEOUT = 60.0  # seconds; a driver may be slow to initialize
_THREAD_TIMEOUT = 1.0  # it takes milliseconds, or hangs


@contextmanager
def isolated_launcher() -> Iterator[None]:
    """Restore signal handlers and loggers after torch's launcher, and kill children it left.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, for which torch's launcher raises SignalException.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received: int | None = None
    with ExitStack() as undo:
        undo.enter_context(_restored_handlers())
        undo.enter_context(_killed_children())
        undo.enter_context(_quiet_launcher())
        undo.enter_context(keep_ignored_signals())
        try:
            yield
        except SignalException as stop:
            received = int(stop.sigval)
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    if received is not None:
        os.kill(os.getpid(), received)  # again, for the restored handler
        raise SystemExit(128 + received)


@contextmanager
def _restored_handlers() -> Iterator[None]:
    numbers = [getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # None: installed by C code, cannot be restored from here
                    signal.signal(number, handler)


@contextmanager
def _killed_children() -> Iterator[None]:
    """Kill children that are left: a second Ctrl-C interrupts the wait for them to end."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the logs of torch's launcher, which repeat the error raised, and fork warnings."""
    known = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(_LAUNCHER_LOGS)
        and isinstance(logger, logging.Logger)
        and not logger.disabled
    ]
    quiet = [] if "LOGLEVEL" in os.environ else known
    with warnings.catch_warnings():
        # Python 3.12 warns about every fork of a process that has threads.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        for logger in quiet:
            logger.disabled = True
        try:
            yield
        finally:
            for logger in quiet:
                logger.disabled = False


@dataclass(frozen=True)
class ForkSupport:
    """The devices and threads that forked processes can use.

    Args:
        devices: number of usable accelerators.
        spoiled: accelerators exist, but forks cannot use them: this process has initialized one.
        threaded: torch may use several threads.
    """

    devices: int = 0
    spoiled: bool = False
    threaded: bool = False


def probe_forks(*, devices: bool, threads: int) -> ForkSupport:
    """Fork once and try what forks of this process can use.

    This process must not query devices itself: that alone can make CUDA unusable in its forks. And
    nothing tells whether OpenMP has run here before, in which case its threads hang in forks.

    Args:
        devices: probe accelerators.
        threads: torch threads that each process should use.

    Raises:
        RuntimeError: the fork died or hung while it probed devices.
    """
    if sys.platform == "win32" or (not devices and threads < 2):
        return ForkSupport()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # see _quiet_launcher
        child = os.fork()
    if child == 0:
        _probe(devices, threads, writing)
    os.close(writing)
    try:
        answer = _read_line(reading, _DEVICE_TIMEOUT)
        if answer is None:
            raise RuntimeError(
                "a fork of this process that probed for GPUs died or hung: check their driver "
                "(nvidia-smi), then restart the kernel. debug_launcher needs no GPU."
            )
        spoiled = answer == "spoiled"
        threaded = threads > 1 and _read_line(reading, _THREAD_TIMEOUT) == "threads"
    finally:
        os.kill(child, signal.SIGKILL)  # it may hang in OpenMP
        os.waitpid(child, 0)
        os.close(reading)
    return ForkSupport(0 if spoiled else int(answer), spoiled, threaded)


def _probe(devices: bool, threads: int, writing: int) -> None:
    """In the fork: write one line about devices and one about threads, then exit."""
    try:
        os.write(writing, f"{_devices() if devices else 0}\n".encode())
        if threads > 1:
            torch.set_num_threads(threads)
            torch.ones(1 << 18, device="cpu").exp_().sum()
            square = torch.ones(256, 256, device="cpu")
            square @ square
            os.write(writing, b"threads\n")
    finally:
        os._exit(0)


def _devices() -> int | str:
    for module in (torch.cuda, torch.xpu, torch.mps):
        in_bad_fork = getattr(module, "_is_in_bad_fork", None)
        if in_bad_fork is not None and in_bad_fork():
            return "spoiled"
    usable = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    # Torch does not notice every initialization of CUDA; the driver then counts more devices than
    # are usable.
    return "spoiled" if torch.cuda.device_count() > usable else usable


def _read_line(reading: int, seconds: float) -> str | None:
    """Return the next line; None on a timeout or if the fork has died."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([reading], [], [], seconds)
        byte = os.read(reading, 1) if ready else b""
        if not byte:
            return None
        text += byte
    return text.decode().strip()
