"""torch's profiler with options, and one trace file per rank."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from accel_callbacks.errors import nearest
from accel_callbacks.plugins.base import KwargsHandler
from checkpoint_io.local_files import absolute
from checkpoint_io.warning import warn

__all__ = ["ProfileKwargs", "profiling"]

_ACTIVITIES = {
    name.lower(): activity for name, activity in torch.profiler.ProfilerActivity.__members__.items()
}


@dataclass(frozen=True)
class ProfileKwargs(KwargsHandler):
    """Options of ``Accelerator.profile``.

    Args:
        activities: activities to record, of ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"mtia"``,
            ``"hpu"``; all that this machine supports if ``None``.
        schedule_option: steps to skip and to record, as in :func:`torch.profiler.schedule`:
            ``wait``, ``warmup``, ``active``, ``repeat``, ``skip_first``. Call ``step()`` of the
            profiler after each training step then. The full block is recorded if ``None``.
        on_trace_ready: called with the profiler when a recording is complete.
        record_shapes: record the input shapes of operations.
        profile_memory: record allocations and deallocations.
        with_stack: record file and line of operations.
        with_flops: estimate floating-point operations of matrix products and convolutions.
        with_modules: record the hierarchy of modules (TorchScript only).
        output_trace_dir: folder for ``profile_<rank>.json``, a Chrome trace; not written if
            ``None``. With a schedule it holds the last completed recording.

    Raises:
        ValueError: an activity or a schedule option does not exist.

    Example:
        >>> from accel_callbacks import ProfileKwargs
        >>> ProfileKwargs(schedule_option={"wait": 1, "warmup": 1, "activ": 2})
        Traceback (most recent call last):
        ValueError: schedule_option has no 'activ'. Did you mean 'active'?
    """

    role: ClassVar[str] = "the profiler"

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[torch.profiler.profile], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.activities, str):
            raise ValueError(f"activities must be a list, [{self.activities!r}].")
        for name in self.activities or ():
            if name not in _ACTIVITIES:
                raise ValueError(
                    f"activity {name!r} is unknown; use some of {sorted(_ACTIVITIES)}."
                    + nearest(str(name).lower(), _ACTIVITIES)
                )
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)

    def build(self) -> torch.profiler.profile:
        """Return a profiler with these options, which writes no file.

        Raises:
            ValueError: this machine does not support an activity.

        Example:
            >>> import torch
            >>> from accel_callbacks import ProfileKwargs
            >>> with ProfileKwargs(activities=["cpu"]).build() as profiler:
            ...     total = torch.ones(3).sum()
            >>> any(event.key == "aten::sum" for event in profiler.key_averages())
            True
        """
        schedule = None
        if self.schedule_option is not None:
            schedule = torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=[_available(name) for name in self.activities] if self.activities else None,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _available(name: str) -> torch.profiler.ProfilerActivity:
    activity = _ACTIVITIES[name]
    supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    if activity not in supported:
        names = sorted(known for known, entry in _ACTIVITIES.items() if entry in supported)
        raise ValueError(f"activity {name!r} cannot be recorded here; this machine has {names}.")
    return activity


def _check_schedule(options: Mapping[str, int]) -> None:
    known = inspect.signature(torch.profiler.schedule).parameters
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"schedule_option has no {name!r}.{nearest(name, known)}")
        if not isinstance(value, int) or value < (name == "active"):
            least = int(name == "active")
            raise ValueError(f"schedule_option {name}={value!r} must be an integer from {least}.")
    missing = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty and name not in options
    ]
    if missing:
        raise ValueError(f"schedule_option needs {', '.join(missing)} too.")


@contextmanager
def profiling(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Context manager: record the block, and write its trace even after an exception.

    Example:
        >>> import tempfile, os
        >>> from accel_callbacks import ProfileKwargs
        >>> from accel_callbacks.plugins.profiler import profiling
        >>> folder = tempfile.mkdtemp()
        >>> with profiling(ProfileKwargs(output_trace_dir=folder), rank=0):
        ...     pass
        >>> os.listdir(folder)
        ['profile_0.json']
    """
    profiler = handler.build()
    traces = _Traces(handler, rank)
    profiler.on_trace_ready = traces.add
    with profiler:
        try:
            yield profiler
        finally:
            traces.ending = True
    if not traces.ready:
        warn(
            f"nothing was recorded: schedule_option={dict(handler.schedule_option or {})} was not "
            f"completed in {profiler.step_num} steps. Call step() of the profiler after each "
            "training step, or record earlier.",
        )


class _Traces:
    """Handle completed recordings: call the user's function, and write the trace."""

    def __init__(self, handler: ProfileKwargs, rank: int) -> None:
        self.ready = 0
        self.ending = False
        self._on_trace_ready = handler.on_trace_ready
        self._path: str | None = None
        if handler.output_trace_dir is not None:
            folder = absolute(handler.output_trace_dir)
            os.makedirs(folder, exist_ok=True)
            self._path = os.path.join(folder, f"profile_{rank}.json")

    def add(self, profiler: torch.profiler.profile) -> None:
        """Handle a completed recording; ``on_trace_ready`` of the profiler."""
        self.ready += 1
        if self._on_trace_ready is not None:
            self._on_trace_ready(profiler)
        if self._path is None or (self.ending and self.ready > 1):
            return  # a recording that the end of the block cut off must not replace a full one
        try:
            profiler.export_chrome_trace(self._path)
        except RuntimeError as error:
            if "already saved" not in str(error):  # torch exports a trace only once
                raise
            warn(
                f"{self._path} is not written: on_trace_ready has saved the trace already, and "
                "torch saves it once. Leave out one of the two.",
            )
