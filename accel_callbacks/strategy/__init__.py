"""What the core asks of the way in which ranks train one model; on one device nothing differs.

The core knows no engine by name. It asks a `Strategy` to place and wrap models, and the four
interfaces beside it for the rest: `Gradients` in each step, `StateAccess` for checkpoints,
`DataRanks` for loaders and metrics, `Sequences` where ranks share the tokens of a batch. The
defaults of all five are one process on one device (`SingleDevice`), so an engine overrides what
differs for it and nothing else. `create_strategy` of `accel_callbacks.engine_options` makes the
strategy of a run.

Nothing here may import an engine, nor ask which one it is: what differs is a member of an
interface. What a step calls is bound once, so that a run on one device pays for no engine.
"""

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
