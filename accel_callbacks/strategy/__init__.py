"""What the core asks of the way in which ranks train one model; on one device nothing differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names
from accel_callbacks.strategy.base import GatherCast as GatherCast
from accel_callbacks.strategy.base import Sequences, Strategy
from accel_callbacks.strategy.data_ranks import DataRanks
from accel_callbacks.strategy.gradients import Gradients

if TYPE_CHECKING:
    from accel_callbacks.strategy.single_device import SingleDevice as SingleDevice
    from accel_callbacks.strategy.state_access import StateAccess as StateAccess

__all__ = ["DataRanks", "Gradients", "Sequences", "SingleDevice", "StateAccess", "Strategy"]

# A run that shares its work with others has no use for the one, one that saves nothing for the
# other.
_HOME = {"SingleDevice": "single_device", "StateAccess": "state_access"}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
