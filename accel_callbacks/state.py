"""The public names of `accel_callbacks.compat.state`, under the path that scripts import."""

# ruff: noqa: F403 (for type checkers only)

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_NAMES = (
    *("AcceleratorState", "DistributedType", "GradientState", "PartialState", "Topology"),
    *("destroy_topology", "is_initialized", "process_rank", "resolve_topology"),
)

if TYPE_CHECKING:
    from accel_callbacks.compat.state import *
else:
    __all__ = list(_NAMES)
__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(_NAMES, ".compat.state"))
