"""How each public callback is made for the contract tests: so that it has something to do there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accel_callbacks import callbacks


@dataclass(frozen=True)
class Case:
    """A callback to check.

    Args:
        make: its factory.
        allow_sync: where it may wait for the device, and why is said beside it.
        slow: it is checked in the slow tests only; another case of its class is in the default run.
    """

    make: Callable[[], Any]
    allow_sync: tuple[str, ...] = ()
    slow: bool = False


def samples(run: Any, model: Any, batch: Any, outputs: Any) -> dict[str, Any]:
    """A text, a picture and a table for a SampleLogger."""
    table = {"columns": ["n"], "rows": [[len(batch)]]}
    return {"text": "a", "picture": model(batch).reshape(-1, 1, 1, 1).sigmoid(), "table": table}


# On the CPU, where that costs nothing, it reads at once; a test on a GPU allows none of it.
AT_ONCE = ("on_after_backward", "on_before_optimizer_step")
MEMORY = "memory://contract"

CASES: dict[str, Case] = {
    "Callback": Case(callbacks.Callback),
    "Checkpoint": Case(lambda: callbacks.Checkpoint(f"{MEMORY}/epochs")),
    "Checkpoint of steps": Case(  # a save copies to the host
        lambda: callbacks.Checkpoint(
            f"{MEMORY}/steps", every_n_steps=2, monitor="val/loss", keep_last=1
        ),
        allow_sync=("on_train_batch_end",),
        slow=True,
    ),
    "Checkpoint in the foreground": Case(
        lambda: callbacks.Checkpoint(every_n_epochs=1, async_save=False), slow=True
    ),
    "Control": Case(lambda: callbacks.Control(settings={"noise": 0.5})),
    "DeviceStats": Case(lambda: callbacks.DeviceStats(every_n_steps=1)),
    "EMA": Case(lambda: callbacks.EMA(0.5)),
    "EMA that copies buffers": Case(
        lambda: callbacks.EMA(0.5, every_n_steps=2, use_buffers="copy", warmup=True), slow=True
    ),
    "EarlyStopping": Case(lambda: callbacks.EarlyStopping("val/loss")),
    "EarlyStopping that stops": Case(
        lambda: callbacks.EarlyStopping("val/loss", patience=0, mode="max"), slow=True
    ),
    "EnergyMonitor": Case(lambda: callbacks.EnergyMonitor("DEU")),
    "Freeze": Case(lambda: callbacks.Freeze({"0.*": 3}, lr_factor=0.5)),
    "Freeze for ever": Case(
        lambda: callbacks.Freeze({"0.*": None, "2.bias": "1 epoch"}), slow=True
    ),
    "GradientAccumulationScheduler": Case(
        lambda: callbacks.GradientAccumulationScheduler({1: 2}),
    ),
    "GradientAccumulationScheduler of steps": Case(
        lambda: callbacks.GradientAccumulationScheduler({"step": {2: 2}}), slow=True
    ),
    "GradientNorm": Case(lambda: callbacks.GradientNorm(per_layer=True)),
    "LearningRateMonitor": Case(lambda: callbacks.LearningRateMonitor(log_momentum=True)),
    "LearningRateMonitor of epochs": Case(
        lambda: callbacks.LearningRateMonitor("epoch"), slow=True
    ),
    "ModelSummary": Case(callbacks.ModelSummary),
    "NonFinite": Case(callbacks.NonFinite, allow_sync=AT_ONCE),
    "NonFinite that skips": Case(
        lambda: callbacks.NonFinite(action="skip"), allow_sync=AT_ONCE, slow=True
    ),
    "NonFinite that goes back": Case(
        lambda: [callbacks.NonFinite(action="rollback"), callbacks.Checkpoint(f"{MEMORY}/back")],
        allow_sync=AT_ONCE,
        slow=True,
    ),
    "Preemption": Case(callbacks.Preemption),
    "Profiler": Case(
        lambda: callbacks.Profiler(wait=0, warmup=1, active=1, repeat=0, activities=["cpu"])
    ),
    "ProgressBar": Case(callbacks.ProgressBar),
    "RichProgressBar": Case(callbacks.RichProgressBar),
    "SpikeGuard": Case(
        lambda: callbacks.SpikeGuard(warmup=2, snapshot_every_n_steps=2),
        allow_sync=(*AT_ONCE, "on_train_batch_end"),  # the copies, every snapshot_every_n_steps
    ),
    "SampleLogger": Case(lambda: callbacks.SampleLogger(samples, n=1)),
    "SampleLogger of training": Case(
        lambda: callbacks.SampleLogger(samples, stage="train", every="2 steps"), slow=True
    ),
    "Throughput": Case(lambda: callbacks.Throughput(window=4, log_every_n_steps=1)),
    "Timer": Case(callbacks.Timer),
    "Timer that could stop": Case(lambda: callbacks.Timer("1 h"), slow=True),
    "WeightAveraging": Case(callbacks.WeightAveraging),
    "WeightAveraging of steps": Case(
        lambda: callbacks.WeightAveraging(every_n_steps=1, start_step=2), slow=True
    ),
}
