"""DeviceStats: log memory and load of the device, the machine and the process."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.base import Callback, require_at_least
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["DeviceStats"]

Reading = Callable[[], float]

_GIB = 1 << 30
# Logged name, function of torch's module for the device, and divisor of its result.
_DEVICE_READINGS = (
    ("memory_allocated_gib", "memory_allocated", _GIB),
    ("memory_reserved_gib", "memory_reserved", _GIB),
    ("memory_peak_gib", "max_memory_allocated", _GIB),
)
# The same of functions that ask the driver, which may take milliseconds or hang.
_DRIVER_READINGS = (
    ("utilization_percent", "utilization", 1),
    ("temperature_c", "temperature", 1),
    ("power_w", "power_draw", 1000),
)
_MPS_READINGS = (
    ("memory_allocated_gib", "current_allocated_memory", _GIB),
    ("memory_reserved_gib", "driver_allocated_memory", _GIB),
)


class DeviceStats(Callback):
    """Log the memory and the load of the device, the machine and the process.

    Nothing waits for the device. Each rank reads its own values; the trackers receive those of the
    main process, and only that one asks the driver (for ``utilization_percent``, ``temperature_c``
    and ``power_w``), on a thread of its own from the step before: what has not come by then is left
    out of the row. Values that a machine does not provide are left out, with a warning if they
    were available before.

    Names, each after ``device/``: ``memory_allocated_gib``, ``memory_reserved_gib``,
    ``memory_peak_gib`` (since the process started, unless you reset it), ``alloc_retries`` (failed
    allocations that were retried); with ``pip install nvidia-ml-py`` ``utilization_percent``,
    ``temperature_c``, ``power_w``; of the process ``process_rss_gib`` and ``process_cpu_percent``
    (100 is one core); of the machine ``cpu_percent`` and ``host_memory_percent``;
    ``disk_free_gib``.

    Args:
        every_n_steps: optimizer steps between logs, 50 by default.
        cpu: log values of the process and the machine too. Those of the machine need psutil:
            without it they are left out if ``None``, the default, and an error is raised if
            ``True``.
        disk: a folder whose free space is logged; none by default.

    Raises:
        ValueError: ``every_n_steps`` is below 1.
        ImportError: ``cpu=True`` without psutil.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import DeviceStats
        >>> stats = DeviceStats(disk=".")
        >>> accel = Accelerator(cpu=True, callbacks=[stats])
        >>> values = stats.read(accel.device)
        >>> values["device/process_rss_gib"] > 0, values["device/disk_free_gib"] >= 0
        (True, True)
    """

    settable: Mapping[str, str] = {"log_every": "every_n_steps"}

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        cpu: bool | None = None,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        require_at_least(1, every_n_steps=every_n_steps)
        if cpu:
            _psutil(needed=True)
        self.every_n_steps = every_n_steps
        self.cpu = cpu
        self.disk = os.fspath(disk) if disk is not None else None
        self._readings: dict[str, Reading] | None = None
        self._driver: _DriverThread | None = None
        self._all_driver_readings: dict[str, Reading] | None = None
        self._logged_step = self._asked_step = 0

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Find the available readings."""
        device = run.accelerator.device
        self._readings = _available(self._candidates(device))
        driver = _driver_readings(device) if run.is_global_zero else {}
        self._driver = _DriverThread(driver) if driver else None
        self._logged_step = self._asked_step = 0

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log every ``every_n_steps`` steps."""
        step = run.global_step
        if step % self.every_n_steps == 0 and step != self._logged_step:
            self._logged_step = step
            assert self._readings is not None
            values = _read(self._readings)
            if self._driver is not None:
                values.update(self._driver.take())
            run.accelerator.log(values)
        due = (step + 1) % self.every_n_steps == 0 and step != self._asked_step
        if self._driver is not None and due:
            self._asked_step = step
            self._driver.ask()

    def read(self, device: torch.device) -> dict[str, float]:
        """Return the current values by name, those of the driver too; waits for the driver."""
        if self._readings is None:
            self._readings = _available(self._candidates(device))
        if self._all_driver_readings is None:
            self._all_driver_readings = _available(_driver_readings(device))
        return {**_read(self._readings), **_read(self._all_driver_readings)}

    def _candidates(self, device: torch.device) -> dict[str, Reading]:
        candidates = dict(_device_readings(device))
        if self.cpu is not False:
            candidates.update({"process_cpu_percent": _CpuPercent(), "process_rss_gib": _rss_gib})
            candidates.update(_machine_readings())
        if self.disk is not None:
            disk = self.disk
            candidates["disk_free_gib"] = lambda: shutil.disk_usage(disk).free / _GIB
        return candidates


class _DriverThread:
    """Readings of the driver, taken on a thread so that a slow driver holds no step.

    Args:
        candidates: readings by name; those that do not work at first are left out silently.
    """

    def __init__(self, candidates: dict[str, Reading]) -> None:
        self._candidates = candidates
        self._readings: dict[str, Reading] | None = None
        self._values: dict[str, float] = {}
        self._failures: list[str] = []
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Start to read, unless an earlier reading is still under way."""
        if self._thread is None or not self._thread.is_alive():
            self._values = {}
            self._thread = threading.Thread(target=self._run, name="accel-driver", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        if self._readings is None:
            self._readings = _available(self._candidates)
        self._values = _read(self._readings, self._failures.append)

    def take(self) -> dict[str, float]:
        """Return what has been read since the last call, without waiting."""
        values, self._values = self._values, {}
        while self._failures:
            warn(self._failures.pop())
        return values


def _read(readings: dict[str, Reading], tell: Callable[[str], None] = warn) -> dict[str, float]:
    """Return the values of readings; drop those that fail."""
    values: dict[str, float] = {}
    for name, reading in list(readings.items()):
        try:
            values[f"device/{name}"] = reading()
        except Exception as error:  # a driver that fails must not end the training
            del readings[name]
            tell(f"DeviceStats: {name} cannot be read any more and is left out: {error!r}")
    return values


def _available(candidates: dict[str, Reading]) -> dict[str, Reading]:
    """Return the readings that work; a driver only fails when called, each in its own way."""
    readings = {}
    for name, reading in candidates.items():
        with suppress(Exception):
            reading()
            readings[name] = reading
    return readings


def _device_readings(device: torch.device) -> dict[str, Reading]:
    if device.type == "cpu":
        return {}
    module = torch.get_device_module(device)
    is_mps = device.type == "mps"
    args = () if is_mps else (device,)
    readings: dict[str, Reading] = {}
    for name, function, divisor in _MPS_READINGS if is_mps else _DEVICE_READINGS:
        if hasattr(module, function):
            readings[name] = _divide_by(getattr(module, function), args, divisor)
    if hasattr(module, "memory_stats"):
        readings["alloc_retries"] = lambda: module.memory_stats(*args)["num_alloc_retries"]
    return readings


def _driver_readings(device: torch.device) -> dict[str, Reading]:
    if device.type in ("cpu", "mps"):
        return {}
    module = torch.get_device_module(device)
    return {
        name: _divide_by(getattr(module, function), (device,), divisor)
        for name, function, divisor in _DRIVER_READINGS
        if hasattr(module, function)
    }


def _divide_by(
    function: Callable[..., Any], args: tuple[torch.device, ...], divisor: int
) -> Reading:
    return lambda: function(*args) / divisor


def _machine_readings() -> dict[str, Reading]:
    psutil = _psutil()
    if psutil is None:
        return {}
    return {
        "cpu_percent": psutil.cpu_percent,
        "host_memory_percent": lambda: psutil.virtual_memory().percent,
    }


def _psutil(needed: bool = False) -> Any:
    try:
        return importlib.import_module("psutil")
    except ImportError:
        if needed:
            raise ImportError(
                "DeviceStats(cpu=True) reads the machine with psutil: pip install psutil"
            ) from None
        return None


def _rss_gib() -> float:
    """Return the resident memory of this process in GiB."""
    psutil = _psutil()
    if psutil is not None:
        return float(psutil.Process().memory_info().rss / _GIB)
    if sys.platform != "linux":
        raise NotImplementedError("without psutil it is read from /proc")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _GIB


class _CpuPercent:
    """The percentage of one core that this process used since the last call."""

    def __init__(self) -> None:
        self._at = (time.process_time(), time.perf_counter())

    def __call__(self) -> float:
        before, self._at = self._at, (time.process_time(), time.perf_counter())
        busy, passed = self._at[0] - before[0], self._at[1] - before[1]
        return 100 * busy / passed if passed > 0 else 0.0
