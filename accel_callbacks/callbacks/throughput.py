"""Throughput: log training speed, TFLOP/s, MFU and totals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks.callbacks.base import ResumableState, require_at_least
from accel_callbacks.callbacks.flops import FlopCounter, matmul_precision, peak_flops_of
from accel_callbacks.collectives.nested import find_batch_size

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Mark", "Throughput", "TrainingClock", "first_dimension", "speed_between"]

_WARMUP = 2  # steps of a process that are not measured: they compile, allocate and count FLOPs


class Throughput(ResumableState):
    """Log the speed of training over the last steps, and the totals of the run.

    The clock is stopped during evaluations and while a save starts, and the first two steps of a
    process are not measured. Training does not synchronize with the device: wall-clock time over a
    window is right on average. Values over all ranks are those of this rank times their number,
    which holds for even loaders; samples that pad a last batch count. Measured FLOPs are those of
    one batch, and taken for all. In a loop that iterates no prepared loader only steps, batches and
    seconds are counted, and FLOPs inside of ``accumulate``.

    Names, each after ``throughput/``: ``steps_per_s``; ``batches_per_s``, ``samples_per_s`` and
    ``tokens_per_s`` over all ranks, and the same after ``device/`` for this one;
    ``data_wait_fraction``, the fraction of the time spent waiting for the loader; ``tflops``
    (10^12 FLOP/s) and ``mfu`` (its fraction of the peak) of this device; ``total_samples`` and
    ``total_tokens`` over all ranks; ``total_seconds`` of training.

    Args:
        window: optimizer steps to average over, 100 by default.
        samples: called with a batch, returns its number of samples; the first dimension of its
            first tensor if ``None``.
        tokens: the same for tokens, as a number or as a tensor, which stays on its device; not
            counted if ``None``.
        flops_per_step: FLOPs of this rank in one optimizer step; measured if ``None``.
        measure_flops: count the FLOPs of the first batch, on by default: PyTorch's matrix products,
            convolutions and attention, forward and backward. Other operations, custom kernels and
            the optimizer are not counted.
        peak_flops: of one device, in FLOP/s; from a table of known devices if ``None``. For a
            device that is not in it, ``mfu`` is not logged.
        log_every_n_steps: optimizer steps between logs, 50 by default; the end is logged too.

    Attributes:
        rates: the values logged last.

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

    saves_alike = True  # its hook stops the clock, and leaves the checkpoint as it is
    settable: Mapping[str, str] = {"log_every": "log_every_n_steps"}

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
        require_at_least(1, window=window, log_every_n_steps=log_every_n_steps)
        self.window = window
        self._data_world = 1  # ranks that read different data
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
        self._measured: float | None = None  # FLOPs of a sample, or of a batch without samples
        self._counted = 0  # FLOPs of the current batch
        self._has_samples = True
        self._step: int | None = None  # of the last mark
        self._logged_step = 0
        self._peak: float | None = None

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Restart the measurement; reset the totals, unless ``load_state`` restored them."""
        self._stop_counting()
        self._data_world = run.data_world
        self.load_state_dict(self.state_dict())  # an evaluation after the run keeps its totals
        super().setup(run, model, stage)

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Look up the peak of the device."""
        self._peak = self.peak_flops
        if self._peak is None and run.accelerator.device.type in ("cuda", "xpu"):
            device = run.accelerator.device
            name = torch.get_device_module(device).get_device_name(device)
            precision = matmul_precision(run.accelerator.mixed_precision, model)
            self._peak = None if precision is None else peak_flops_of(name, precision)

    # --- the clock ----------------------------------------------------------------------------

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock, and count the FLOPs of the first batch."""
        self._clock.start(run.data_wait_s)
        if self._step is None:
            self._step = self._logged_step = run.global_step
        self._stop_counting()  # of a batch that had no end
        self._counted = 0
        measures = self.measure_flops and self.flops_per_step is None
        if measures and self._measured is None and self._steps < _WARMUP:
            self._counter = FlopCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Start the clock again after an evaluation or a save in the middle of the loop body."""
        self._clock.start(run.data_wait_s)
        counter = self._counter
        if counter is not None and counter.total == 0:  # the batch began after its forward
            self._stop_counting()

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """Stop the clock."""
        self._stop_clock(run)

    on_test_start = on_validation_start

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Stop the clock at the time when the save began."""
        self._stop_clock(run, getattr(run, "save_began", None))

    def _stop_clock(self, run: TrainingRun, at: float | None = None) -> None:
        if run.accelerator.device.type != "cpu":
            # Else queued training steps would run, and be waited for, while the clock is stopped.
            torch.accelerator.synchronize()
        self._clock.stop(run.data_wait_s, at)
        self._stop_counting()

    # --- the counts ---------------------------------------------------------------------------

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; mark the end of a step, and log every ``log_every_n_steps``."""
        without_loader = batch is None  # of a loop that iterates no prepared loader
        samples = None if without_loader else self.samples(batch)
        self._has_samples = samples is not None
        self._stop_counting()
        if self._counted:  # in this batch: convert to those of a sample
            self._measured = self._counted / (1 if samples is None else samples)
        self._batches += 1
        self._flops = self._flops + (self._measured or 0.0) * (1 if samples is None else samples)
        self._samples = self._samples + (samples or 0)
        if self.tokens is not None and not without_loader:
            self._tokens = self._tokens + self.tokens(batch)  # not in place: marks share the tensor
        if run.global_step != self._step:
            self._mark(run)
        if run.global_step // self.log_every_n_steps != self._logged_step // self.log_every_n_steps:
            self._log(run)

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
        """Log the steps since the last log."""
        if run.global_step != self._logged_step:
            self._log(run)

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Stop counting FLOPs."""
        self._stop_counting()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Stop counting FLOPs."""
        self._stop_counting()

    # --- the logged values --------------------------------------------------------------------

    def _log(self, run: TrainingRun) -> None:
        self._logged_step = run.global_step
        values = {**self._speeds(), **self._totals()}
        self.rates = {f"throughput/{name}": value for name, value in values.items()}
        run.accelerator.log(self.rates)

    def _speeds(self) -> dict[str, Any]:
        """Return the speeds over the window; nothing while it is empty."""
        if len(self._marks) < 2:
            return {}
        speed = speed_between(self._marks[0], self._marks[-1])
        local: dict[str, Any] = {"batches_per_s": speed.batches}
        if self._has_samples:
            local["samples_per_s"] = speed.samples
        if self.tokens is not None:
            local["tokens_per_s"] = speed.tokens
        speeds: dict[str, Any] = {
            "steps_per_s": speed.steps,
            **{name: value * self._data_world for name, value in local.items()},
            **{f"device/{name}": value for name, value in local.items()},
            "data_wait_fraction": speed.waited,
        }
        if self.flops_per_step is not None or self._measured is not None:
            speeds["tflops"] = speed.flops / 1e12
            if self._peak is not None:
                speeds["mfu"] = speed.flops / self._peak
        return speeds

    def _totals(self) -> dict[str, Any]:
        """Return the totals of the run, including those before a resume."""
        before = self._total
        totals: dict[str, Any] = {"total_seconds": before.seconds + self._clock.read()}
        if self._has_samples:
            totals["total_samples"] = before.samples + self._samples * self._data_world
        if self.tokens is not None:
            totals["total_tokens"] = before.tokens + self._tokens * self._data_world
        return totals

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the run, over all ranks."""
        return {
            "seconds": self._total.seconds + self._clock.read(),
            "samples": self._total.samples + self._samples * self._data_world,
            "tokens": self._total.tokens + self._tokens * self._data_world,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the totals, and restart the measurement."""
        self._start_measuring()
        self._total = Mark(**state_dict)


class TrainingClock:
    """Measure the seconds of training, without evaluations and saves.

    Example:
        >>> from accel_callbacks.callbacks.throughput import TrainingClock
        >>> clock = TrainingClock()
        >>> clock.start(waited=0.0)
        >>> clock.stop(waited=0.0)
        >>> clock.read() == clock.read()
        True
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._waited: float | None = None  # at the last stop

    def start(self, waited: float) -> None:
        """Start or continue.

        Args:
            waited: total seconds that training has waited for its data so far.
        """
        if self._since is None:
            # Between a save and the next batch, only the wait for that batch is training time.
            self._seconds += 0.0 if self._waited is None else waited - self._waited
            self._since = time.perf_counter()

    def stop(self, waited: float, at: float | None = None) -> None:
        """Stop now, or ``at`` an earlier ``time.perf_counter()``."""
        if self._since is None:
            return
        late = 0.0 if at is None else max(time.perf_counter() - max(at, self._since), 0.0)
        self._seconds, self._since, self._waited = self.read() - late, None, waited

    def read(self) -> float:
        """Return the seconds so far."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._seconds + running


class Mark(NamedTuple):
    """The work of a process up to a step; counts may be tensors on the device.

    Attributes:
        seconds: of training.
        waited: seconds of these spent waiting for the loader.
    """

    seconds: float = 0.0
    waited: float = 0.0
    steps: Any = 0
    batches: Any = 0
    samples: Any = 0
    tokens: Any = 0
    flops: Any = 0.0


def speed_between(first: Mark, last: Mark) -> Mark:
    """Return each count per second of training, and ``waited`` as a fraction of the time."""
    seconds = max(last.seconds - first.seconds, 1e-9)
    speeds = [(after - before) / seconds for before, after in zip(first, last, strict=True)]
    return Mark(*speeds)._replace(seconds=seconds)


def first_dimension(batch: Any) -> int | None:
    """Return the number of samples of a batch, None if it has no tensors."""
    first = batch  # usually a tensor; else search the whole batch, which is slower
    while isinstance(first, (list, tuple, dict)) and first:
        first = first[0] if isinstance(first, (list, tuple)) else next(iter(first.values()))
    has_samples = isinstance(first, torch.Tensor) and first.dim() > 0
    return int(first.shape[0]) if has_samples else find_batch_size(batch)
