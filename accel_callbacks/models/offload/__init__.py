"""Models larger than memory: plan the placement of weights, load them, fetch them in forward.

Each name is imported from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "AbsentWeightError": "placeholder",
    "Budget": "budgets",
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
    from accel_callbacks.models.offload.budgets import Budget as Budget
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
