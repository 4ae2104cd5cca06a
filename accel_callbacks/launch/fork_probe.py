"""What forks of this process can use, tried out in one: accelerators, and threads of OpenMP."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

__all__ = ["ForkSupport", "probe_forks", "quiet_forks"]

_DEVICE_TIMEOUT = 60.0  # seconds; a driver may be slow to initialize
_THREAD_TIMEOUT = 1.0  # it takes milliseconds, or hangs


class ForkSupport(NamedTuple):
    """The devices and threads that forks can use.

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

    This process must not count devices itself: that alone can make CUDA unusable in its forks. And
    nothing tells whether OpenMP has run here before, in which case its threads hang in forks.

    Args:
        devices: probe accelerators.
        threads: torch threads that each process should use.

    Raises:
        RuntimeError: the fork died or hung while it probed devices.
    """
    if sys.platform == "win32" or (not devices and threads < 2):
        return ForkSupport()
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_probe, args=(writing, devices, threads))
    with quiet_forks():
        child.start()
    writing.close()
    try:
        if not reading.poll(_DEVICE_TIMEOUT):
            raise EOFError
        devices_found, spoiled = reading.recv()
        threaded = False
        with suppress(EOFError):  # it died as it computed
            threaded = threads > 1 and reading.poll(_THREAD_TIMEOUT) and reading.recv()
    except EOFError:
        raise RuntimeError(
            "a fork of this process that probed for GPUs died or hung: check their driver "
            "(nvidia-smi), then restart the kernel. debug_launcher needs no GPU."
        ) from None
    finally:
        child.kill()  # it may hang in OpenMP
        child.join()
        reading.close()
    return ForkSupport(devices_found, spoiled, threaded)


@contextmanager
def quiet_forks() -> Iterator[None]:
    """Silence Python's warning, since 3.12, about each fork of a process that has threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        yield


def _probe(writing: Connection, devices: bool, threads: int) -> None:
    """In the fork: send what devices there are, then whether threads compute."""
    writing.send(_count_devices() if devices else (0, False))
    if threads > 1:
        torch.set_num_threads(threads)
        torch.ones(1 << 18, device="cpu").exp_().sum()
        square = torch.ones(256, 256, device="cpu")
        square @ square
        writing.send(True)


def _count_devices() -> tuple[int, bool]:
    """Return the number of usable accelerators, and whether the parent has spoiled them."""
    for module in (torch.cuda, torch.xpu, torch.mps):
        in_bad_fork = getattr(module, "_is_in_bad_fork", None)
        if in_bad_fork is not None and in_bad_fork():
            return 0, True
    usable = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    # Torch does not notice every initialization of CUDA; the driver then counts more than is usable
    spoiled = torch.cuda.device_count() > usable
    return 0 if spoiled else usable, spoiled
