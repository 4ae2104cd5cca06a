"""Models larger than memory: a plan, weights on demand, Accelerate's names for both.

Each name is imported from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "AbsentWeightError": "placeholder",
    "OffloadOptions": "residence",
    "OffloadReport": "traffic_report",
    "WeightReadError": "source",
    "onloaded": "residence",
    "report": "traffic_report",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.offload.placeholder import AbsentWeightError as AbsentWeightError
    from accel_callbacks.offload.residence import OffloadOptions as OffloadOptions
    from accel_callbacks.offload.residence import onloaded as onloaded
    from accel_callbacks.offload.source import WeightReadError as WeightReadError
    from accel_callbacks.offload.traffic_report import OffloadReport as OffloadReport
    from accel_callbacks.offload.traffic_report import report as report


__getattr__, __dir__ = lazy_names(__name__, _HOME)
