"""Profiler: record a few training steps with torch's profiler."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.checkpoint.project import path_in
from accel_callbacks.plugins.profiler import ProfileKwargs
from checkpoint_io.local_files import absolute, local_path
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Profiler"]


class Profiler(Callback):
    """Write a trace of some training steps, one for each rank.

    After ``skip_first`` steps come ``repeat`` cycles of ``wait`` steps without cost, ``warmup``
    steps that are recorded and discarded, and ``active`` steps that are written to
    ``rank<rank>.<global step>.pt.trace.json``: a Chrome trace (for Perfetto), in the layout that
    TensorBoard's profiler plugin reads. A recording cut short by the end of training or by an error
    is written too. Only one profiler can record at a time.

    Args:
        dir: folder or fsspec URL; ``<project_dir>/profile`` if ``None``.
        wait: steps to skip, 5 by default.
        warmup: steps to record and discard, 2 by default.
        active: steps to record, 3 by default.
        repeat: cycles, 1 by default; 0 for cycles until training ends.
        skip_first: steps to skip before the first cycle, 0 by default.
        unit: what counts as a step: ``"step"`` of the optimizer (default), or each ``"batch"``.
        activities: as in :class:`ProfileKwargs`; all that this machine has if ``None``.
        record_shapes: record the input shapes of operations.
        profile_memory: record allocations.
        with_stack: record file and line of operations.
        with_flops: estimate FLOPs of matrix products and convolutions.
        on_trace_ready: called with torch's profiler after a trace is written.
        storage_options: for the filesystem behind a URL.

    Attributes:
        traces: the files that this rank has written in this run.

    Raises:
        ValueError: an unknown unit or activity, or an invalid number.

    Warns:
        UserWarning: training ended before anything was recorded.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Profiler
        >>> profiler = Profiler(tempfile.mkdtemp(), wait=0, warmup=1, active=1, activities=["cpu"])
        >>> accel = Accelerator(cpu=True, callbacks=[profiler])
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer, data = accel.prepare(
        ...     model,
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     torch.utils.data.DataLoader(torch.ones(3, 1)),
        ... )
        >>> with accel.run("profiled"):
        ...     for batch in data:
        ...         accel.backward(model(batch).sum())
        ...         optimizer.step()
        >>> profiler.traces[0].endswith("rank0.00000002.pt.trace.json")
        True
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        skip_first: int = 0,
        unit: str = "step",
        activities: Sequence[str] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        on_trace_ready: Callable[[torch.profiler.profile], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if unit not in ("step", "batch"):
            raise ValueError(f"unit={unit!r} is unknown; use 'step' or 'batch'.")
        self.dir = absolute(dir) if dir is not None else None
        self.unit = unit
        self.options = ProfileKwargs(
            activities=activities,
            schedule_option={
                "wait": wait,
                "warmup": warmup,
                "active": active,
                "repeat": repeat,
                "skip_first": skip_first,
            },
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
        )
        self.steps_to_run = skip_first + repeat * (wait + warmup + active) if repeat else None
        self._on_trace_ready = on_trace_ready
        self.storage_options = dict(storage_options or {})
        self.traces: list[str] = []
        self._profiler: torch.profiler.profile | None = None
        self._step = 0
        self._recorded = False

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the traces: a profile belongs to one process, and a resume does not continue it."""
        self._stop()
        self.traces, self._recorded = [], False

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Start the schedule."""
        profiler = self.options.build()
        profiler.on_trace_ready = lambda profiler: self._write(run, profiler)
        profiler.start()
        self._profiler, self._step = profiler, run.global_step

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the schedule, and stop the profiler after its last cycle."""
        profiler = self._profiler
        if profiler is None or (self.unit == "step" and run.global_step == self._step):
            return
        self._step = run.global_step
        profiler.step()
        if profiler.step_num == self.steps_to_run:
            self._stop()

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Write the recording in progress; warn if nothing was recorded."""
        steps = 0 if self._profiler is None else self._profiler.step_num
        self._stop()
        if not self._recorded:
            warn(
                f"nothing was recorded: {dict(self.options.schedule_option or {})} needs more than "
                f"the {steps} steps of this training. Record earlier, or train longer.",
            )

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Write the recording in progress, which shows what preceded the error."""
        self._stop()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Stop the profiler."""
        self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write(self, run: TrainingRun, profiler: torch.profiler.profile) -> None:
        """Write a completed recording, and call the user's function."""
        self._recorded = True
        folder = self.dir or path_in(run.default_root_dir, "profile")
        name = f"rank{run.global_rank}.{run.global_step:08d}.pt.trace.json"
        path = local_path(folder)
        target = f"{folder.rstrip('/')}/{name}" if path is None else os.path.join(path, name)
        try:
            if path is None:
                self._upload(profiler, target)
            else:
                os.makedirs(path, exist_ok=True)
                profiler.export_chrome_trace(target)
        # Each storage backend raises its own errors; a failed trace must not end the training.
        except Exception as error:
            text = f"the trace {target} was not written, and training continues"
            warn(f"{text}: {type(error).__name__}: {error}")
            return
        self.traces.append(target)
        if self._on_trace_ready is not None:
            self._on_trace_ready(profiler)

    def _upload(self, profiler: torch.profiler.profile, url: str) -> None:
        """Write to a local file first, the only kind that torch writes, and copy it."""
        import fsspec

        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, "trace.json")
            profiler.export_chrome_trace(local)
            with (
                open(local, "rb") as source,
                fsspec.open(url, "wb", **self.storage_options) as file,
            ):
                shutil.copyfileobj(source, file)
