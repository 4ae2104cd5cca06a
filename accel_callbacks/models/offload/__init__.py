"""Models larger than memory: plan the placement of weights, load them, fetch them in forward.

``plan`` decides from sizes and budgets alone, and ``infer_auto_device_map`` is its view as a map.
By a map, ``assignment.assign`` gives each weight a place; ``checkpoint_weights.load_spread`` reads
those of devices and leaves the others in their files; ``dispatch.spread`` puts placeholders and a
``residence.UnitHook`` into the modules. In a forward the hook takes its unit from a ``Window``,
whose thread reads the next one with a ``source.Reader`` meanwhile. ``compat.big_modeling`` has the
functions of scripts: ``dispatch_model``, ``load_checkpoint_and_dispatch``, ``cpu_offload``.

A placeholder never computes, and no file of weights is ever written to: what would change a weight
in a file is an error. Weights of a file that has changed since the dispatch are never used. Only
``budgets`` asks the hardware.

Each name is imported from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "AbsentWeightError": "placeholder",
    "DeviceUse": "planner",
    "OffloadOptions": "residence",
    "OffloadReport": "traffic_report",
    "Plan": "planner",
    "PlanError": "planner",
    "Unit": "weights",
    "WeightReadError": "source",
    "Weights": "weights",
    "onloaded": "residence",
    "plan": "planner",
    "report": "traffic_report",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.models.offload.placeholder import AbsentWeightError as AbsentWeightError
    from accel_callbacks.models.offload.planner import DeviceUse as DeviceUse
    from accel_callbacks.models.offload.planner import Plan as Plan
    from accel_callbacks.models.offload.planner import PlanError as PlanError
    from accel_callbacks.models.offload.planner import plan as plan
    from accel_callbacks.models.offload.residence import OffloadOptions as OffloadOptions
    from accel_callbacks.models.offload.residence import onloaded as onloaded
    from accel_callbacks.models.offload.source import WeightReadError as WeightReadError
    from accel_callbacks.models.offload.traffic_report import OffloadReport as OffloadReport
    from accel_callbacks.models.offload.traffic_report import report as report
    from accel_callbacks.models.offload.weights import Unit as Unit
    from accel_callbacks.models.offload.weights import Weights as Weights


__getattr__, __dir__ = lazy_names(__name__, _HOME)
