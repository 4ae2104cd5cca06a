"""The hooks of a run: the base class, and the built-in callbacks, one file and one line each.

A loop enters by ``Dispatcher`` (``dispatch/``), which orders the callbacks once and keeps a tuple
of calls for each hook; ``Observer`` goes along with a run without being one of its callbacks. A
callback that a checkpoint is to keep returns plain values and tensors from ``state_dict``, and
restores them in place; one whose state is of a single run is a ``ResumableState``.

What must never be done here: a collective in a hook that not all ranks fire at the same step, nor
in ``on_exception``, where other ranks may be gone; a stop, a save or a preemption but by the vote
of the ranks (``run.stop``, ``run.save_now``, ``run.preempt``); a wait for the device in a hook of
each batch, where ``HostCopy`` lets a value be read a step later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "Callback": "base",
    "CallbackHandle": "dispatch.functions",
    "CallbackReport": "dispatch.ledger",
    "CallbackTime": "dispatch.ledger",
    "Checkpoint": "checkpoint",
    "Control": "control",
    "DeviceStats": "device_stats",
    "EMA": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "EnergyMonitor": "energy_monitor",
    "Freeze": "freeze",
    "FunctionHandle": "dispatch.functions",
    "GradientAccumulationScheduler": "accumulation_scheduler",
    "GradientNorm": "gradient_norm",
    "Interval": "interval",
    "LayerSummary": "model_summary",
    "LearningRateMonitor": "learning_rate_monitor",
    "ModelSummary": "model_summary",
    "NonFinite": "non_finite",
    "Observer": "observer",
    "Preemption": "preemption",
    "Profiler": "profiler",
    "ProgressBar": "progress_bar",
    "RichProgressBar": "progress_bar",
    "SampleLogger": "sample_logger",
    "SpikeGuard": "spike_guard",
    "Summary": "model_summary",
    "Throughput": "throughput",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
    "configured": "dispatch.registration",
    "register_observer": "observer",
    "summarize": "model_summary",
}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.callbacks.accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from accel_callbacks.callbacks.base import Callback as Callback
    from accel_callbacks.callbacks.checkpoint import Checkpoint as Checkpoint
    from accel_callbacks.callbacks.control import Control as Control
    from accel_callbacks.callbacks.device_stats import DeviceStats as DeviceStats
    from accel_callbacks.callbacks.dispatch.functions import CallbackHandle as CallbackHandle
    from accel_callbacks.callbacks.dispatch.functions import FunctionHandle as FunctionHandle
    from accel_callbacks.callbacks.dispatch.ledger import CallbackReport as CallbackReport
    from accel_callbacks.callbacks.dispatch.ledger import CallbackTime as CallbackTime
    from accel_callbacks.callbacks.dispatch.registration import configured as configured
    from accel_callbacks.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from accel_callbacks.callbacks.energy_monitor import EnergyMonitor as EnergyMonitor
    from accel_callbacks.callbacks.freeze import Freeze as Freeze
    from accel_callbacks.callbacks.gradient_norm import GradientNorm as GradientNorm
    from accel_callbacks.callbacks.interval import Interval as Interval
    from accel_callbacks.callbacks.learning_rate_monitor import (
        LearningRateMonitor as LearningRateMonitor,
    )
    from accel_callbacks.callbacks.model_summary import LayerSummary as LayerSummary
    from accel_callbacks.callbacks.model_summary import ModelSummary as ModelSummary
    from accel_callbacks.callbacks.model_summary import Summary as Summary
    from accel_callbacks.callbacks.model_summary import summarize as summarize
    from accel_callbacks.callbacks.non_finite import NonFinite as NonFinite
    from accel_callbacks.callbacks.observer import Observer as Observer
    from accel_callbacks.callbacks.observer import register_observer as register_observer
    from accel_callbacks.callbacks.preemption import Preemption as Preemption
    from accel_callbacks.callbacks.profiler import Profiler as Profiler
    from accel_callbacks.callbacks.progress_bar import ProgressBar as ProgressBar
    from accel_callbacks.callbacks.progress_bar import RichProgressBar as RichProgressBar
    from accel_callbacks.callbacks.sample_logger import SampleLogger as SampleLogger
    from accel_callbacks.callbacks.spike_guard import SpikeGuard as SpikeGuard
    from accel_callbacks.callbacks.throughput import Throughput as Throughput
    from accel_callbacks.callbacks.timer import Timer as Timer
    from accel_callbacks.callbacks.weight_averaging import EMA as EMA
    from accel_callbacks.callbacks.weight_averaging import WeightAveraging as WeightAveraging


__getattr__, __dir__ = lazy_names(__name__, _HOME)
