"""Throughput, MFU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.flops import FlopCounter, matmul_precision, peak_flops_of
from accel_callbacks.callbacks.resumable_state import ResumableState
from accel_callbacks.utils.operations import find_batch_size

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Mark", "Throughput", "TrainingClock", "first_dimension", "speed_between"]

# Steps of a process that are left out: they compile, allocate, and count FLOPs.
_WARMUP = 2


class Mark(NamedTuple):
    """What a process has done up to a step; counts may be tensors on the device.

    Attributes:
        seconds: of training.
        waited: seconds of it that went into waiting for the loader.
    """

    seconds: float = 0.0
    waited: float = 0.0
    steps: Any = 0
    batches: Any = 0
    samples: Any = 0
    tokens: Any = 0
    flops: Any = 0.0


def speed_between(first: Mark, last: Mark) -> Mark:
    """Each count per second of training, and ``waited`` as a part of the time.

    Example:
        >>> from accel_callbacks.callbacks.throughput import Mark, speed_between
        >>> speed_between(Mark(seconds=1.0, steps=2), Mark(seconds=3.0, steps=8)).steps
        3.0
    """
    seconds = max(last.seconds - first.seconds, 1e-9)
    speeds = [(after - before) / seconds for before, after in zip(first, last, strict=True)]
    return Mark(*speeds)._replace(seconds=seconds)


def first_dimension(batch: Any) -> int | None:
    """The samples of a batch; of usual ones without looking at all that is in it.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.throughput import first_dimension
        >>> first_dimension({"x": torch.ones(4, 2)}), first_dimension(["a text"])
        (4, None)
    """
    item = batch
    while isinstance(item, (list, tuple, dict)) and item:
        item = item[0] if isinstance(item, (list, tuple)) else next(iter(item.values()))
    usual = isinstance(item, torch.Tensor) and item.dim() > 0
    return int(item.shape[0]) if usual else find_batch_size(batch)


class TrainingClock:
    """Counts seconds of training; it stands still while something else is done.

    Example:
        >>> from accel_callbacks.callbacks.throughput import TrainingClock
        >>> clock = TrainingClock()
        >>> clock.go(waited=0.0)
        >>> clock.stop(waited=0.0)
        >>> clock.read() == clock.read()
        True
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._waited: float | None = None

    def go(self, waited: float) -> None:
        """Training goes on; ``waited`` is what it has waited for its data so far, in seconds."""
        if self._since is None:
            # Between a save and the next batch, only the wait for that batch is training.
            self._seconds += 0.0 if self._waited is None else waited - self._waited
            self._since = time.perf_counter()

    def stop(self, waited: float, at: float | None = None) -> None:
        """Something else begins, or has begun ``at`` an earlier ``time.perf_counter()``."""
        if self._since is None:
            return
        early = 0.0 if at is None else max(time.perf_counter() - max(at, self._since), 0.0)
        self._seconds, self._since, self._waited = self.read() - early, None, waited

    def read(self) -> float:
        """Seconds so far."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._seconds + running


class Throughput(ResumableState):
    """Logs the speed of training over the last steps, and the totals of the run.

    The clock stands still during evaluations and while a checkpoint is begun, and the first two
    steps of a process are left out. The device is not synchronised in training: wall-clock time
    over a window is right on average. Figures of all processes are those of this one times their
    number, which holds where loaders are even; samples that fill up a last batch count. It needs a
    prepared loader, and one batch is a sample of all where FLOPs are measured.

    Names, each after ``throughput/``: ``steps_per_s``; ``batches_per_s``, ``samples_per_s`` and
    ``tokens_per_s`` of all processes, and the same after ``device/`` of this one;
    ``data_wait_fraction``, the part of the time that it waited for the loader; ``tflops``
    (10^12 FLOP/s) and ``mfu`` (that part of the peak) of this device; ``total_samples``,
    ``total_tokens`` of all processes, ``total_seconds`` of training.

    Args:
        window: optimizer steps to average over, 100 by default.
        samples: called with a batch, gives its number of samples; the first dimension of its first
            tensor if ``None``.
        tokens: the same for tokens, a number or a tensor, which stays on its device; not counted if
            ``None``.
        flops_per_step: FLOPs of this process in one optimizer step; measured if ``None``.
        measure_flops: count the FLOPs of the first batch, on by default: matrix products,
            convolutions and attention of PyTorch's, forward and backward. Not counted are other
            operations, kernels of one's own and the optimizer.
        peak_flops: of one device, in FLOP/s; from a table of known devices if ``None``, and where
            a device is not in it, there is no ``mfu``.
        log_every_n_steps: optimizer steps between logs, 50 by default; the end is logged too.

    Attributes:
        rates: what was logged last.

    Raises:
        ValueError: ``window`` or ``log_every_n_steps`` is below 1.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Throughput
        >>> speed = Throughput(tokens=lambda batch: batch.numel())
        >>> accel = Accelerator(cpu=True, callbacks=[speed])
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer, data = accel.prepare(
        ...     model,
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2),
        ... )
        >>> with accel.run("speed") as run:
        ...     for batch in data:
        ...         accel.backward(model(batch).sum())
        ...         optimizer.step()
        >>> speed.rates["throughput/total_samples"], speed.rates["throughput/total_tokens"]
        (8, 32)
    """

    def __init__(
        self,
        window: int = 100,
        *,
        samples: Callable[[Any], Any] | None = None,
        tokens: Callable[[Any], Any] | None = None,
        flops_per_step: float | None = None,
        measure_flops: bool = True,
        peak_flops: float | None = None,
        log_every_n_steps: int = 50,
    ) -> None:
        for name, value in {"window": window, "log_every_n_steps": log_every_n_steps}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.window = window
        self.samples = samples or first_dimension
        self.tokens = tokens
        self.flops_per_step = flops_per_step
        self.measure_flops = measure_flops
        self.peak_flops = peak_flops
        self.log_every_n_steps = log_every_n_steps
        self._counter: FlopCounter | None = None
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self._total = Mark()  # of all ranks, up to the start of this process
        self._start_measuring()

    def _start_measuring(self) -> None:
        """Reset the clock, the counts and the window of this process, but not the totals."""
        self.rates: dict[str, Any] = {}
        self._clock = TrainingClock()
        self._steps = self._batches = 0
        self._samples: Any = 0
        self._tokens: Any = 0
        self._flops: Any = 0.0
        self._marks: deque[Mark] = deque(maxlen=self.window + 1)
        self._measured: float | None = None  # FLOPs of a sample; of a batch without samples
        self._counted = 0  # in the batch that is being measured
        self._has_samples = True
        self._step: int | None = None  # up to which it has counted
        self._logged_step = 0
        self._peak: float | None = None

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Restart the measurement; reset the totals, unless ``load_state`` restored them."""
        self._stop_counting()
        self.load_state_dict(self.state_dict())  # an evaluation after the run keeps its totals
        super().setup(run, model, stage)

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Learn what the device could do."""
        self._peak = self.peak_flops
        if self._peak is None and run.accelerator.device.type in ("cuda", "xpu"):
            device = run.accelerator.device
            name = torch.get_device_module(device).get_device_name(device)
            precision = matmul_precision(run.accelerator.mixed_precision, model)
            self._peak = peak_flops_of(name, precision)

    # --- the clock ----------------------------------------------------------------------------

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Training goes on; the FLOPs of the first batch are counted."""
        self._clock.go(run.data_wait_s)
        if self._step is None:
            self._step = self._logged_step = run.global_step
        self._stop_counting()  # of a batch that was only looked at
        self._counted = 0
        if self._counts_flops and self._measured is None and self._steps < _WARMUP:
            self._counter = FlopCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    @property
    def _counts_flops(self) -> bool:
        return self.measure_flops and self.flops_per_step is None

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Training goes on, after an evaluation or a save in the middle of the body."""
        self._clock.go(run.data_wait_s)

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """The clock stands still."""
        self._pause(run)

    def on_test_start(self, run: TrainingRun, model: Any) -> None:
        """The clock stands still."""
        self._pause(run)

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """The clock stands still, from where the save began."""
        self._pause(run, getattr(run, "save_began", None))

    def _pause(self, run: TrainingRun, at: float | None = None) -> None:
        if run.accelerator.device.type != "cpu":
            torch.accelerator.synchronize()  # else what follows waits for the steps before it
        self._clock.stop(run.data_wait_s, at)
        self._stop_counting()

    # --- the counts ---------------------------------------------------------------------------

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; at the end of a step set a mark, and log if it is time to."""
        samples = self.samples(batch)
        self._has_samples = samples is not None
        self._take_flops(samples)
        self._batches += 1
        self._flops = self._flops + (self._measured or 0.0) * (1 if samples is None else samples)
        self._samples = self._samples + (samples or 0)
        if self.tokens is not None:
            self._tokens = self._tokens + self.tokens(batch)  # not in place: marks hold it
        if run.global_step != self._step:
            self._mark(run)
        if run.global_step // self.log_every_n_steps != self._logged_step // self.log_every_n_steps:
            self._log(run)

    def _take_flops(self, samples: Any) -> None:
        """The FLOPs that were counted in this batch, as those of a sample."""
        self._stop_counting()
        if self._counted:
            self._measured = self._counted / (1 if samples is None else samples)

    def _stop_counting(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__()
            self._counted = counter.total

    def _mark(self, run: TrainingRun) -> None:
        self._steps += run.global_step - (self._step or 0)
        self._step = run.global_step
        if self._steps <= _WARMUP:
            self._marks.clear()
        per = self.flops_per_step
        self._marks.append(
            Mark(
                seconds=self._clock.read(),
                waited=run.data_wait_s,
                steps=self._steps,
                batches=self._batches,
                samples=self._samples,
                tokens=self._tokens,
                flops=self._flops if per is None else per * self._steps,
            )
        )

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Log what was done since the last log."""
        if run.global_step != self._logged_step:
            self._log(run)

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Count no more."""
        self._stop_counting()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Count no more."""
        self._stop_counting()

    # --- the figures --------------------------------------------------------------------------

    def _log(self, run: TrainingRun) -> None:
        self._logged_step = run.global_step
        processes = run.world_size
        self.rates = {
            f"throughput/{name}": value
            for name, value in {**self._speeds(processes), **self._totals(processes)}.items()
        }
        run.accelerator.log(self.rates)

    def _speeds(self, processes: int) -> dict[str, Any]:
        """Over the window; nothing while it is empty."""
        if len(self._marks) < 2:
            return {}
        passed = speed_between(self._marks[0], self._marks[-1])
        local: dict[str, Any] = {"batches_per_s": passed.batches}
        if self._has_samples:
            local["samples_per_s"] = passed.samples
        if self.tokens is not None:
            local["tokens_per_s"] = passed.tokens
        speeds: dict[str, Any] = {
            "steps_per_s": passed.steps,
            **{name: value * processes for name, value in local.items()},
            **{f"device/{name}": value for name, value in local.items()},
            "data_wait_fraction": passed.waited,
        }
        if self.flops_per_step is not None or self._measured is not None:
            speeds["tflops"] = passed.flops / 1e12
            if self._peak is not None:
                speeds["mfu"] = passed.flops / self._peak
        return speeds

    def _totals(self, processes: int) -> dict[str, Any]:
        """Of the run, those before a resume included."""
        before = self._total
        totals: dict[str, Any] = {"total_seconds": before.seconds + self._clock.read()}
        if self._has_samples:
            totals["total_samples"] = before.samples + self._samples * processes
        if self.tokens is not None:
            totals["total_tokens"] = before.tokens + self._tokens * processes
        return totals

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The totals of the run, over all processes."""
        processes = collectives.world_size()
        return {
            "seconds": self._total.seconds + self._clock.read(),
            "samples": self._total.samples + self._samples * processes,
            "tokens": self._total.tokens + self._tokens * processes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the totals, and restart the measurement."""
        self._start_measuring()
        self._total = Mark(**state_dict)
