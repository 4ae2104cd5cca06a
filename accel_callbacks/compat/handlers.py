"""Handlers and sizes of a mesh as scripts for Accelerate define, assign and read them."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

from accel_callbacks.compat.children import own_variables
from accel_callbacks.compat.environment import patch_environment
from accel_callbacks.compat.stand_in import StandIn
from accel_callbacks.plugins import base, parallelism, parallelism_handlers

__all__ = ["KwargsHandler", "ParallelismConfig", "TorchContextParallelConfig"]

# Dimensions of a mesh that have the ranks of one axis alone too.
_JOINED = {
    "dp": "dp_dim_names",
    "dp_shard_cp": "dp_shard_cp_dim_names",
    "dp_cp": "dp_cp_dim_names",
}


@dataclass
class KwargsHandler(metaclass=StandIn):
    """Options that a dataclass of the script's declares, and of which it may assign the values.

    Handlers of this library are instances too.
    """

    stands_for = base.KwargsHandler

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all options."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options whose value is not the default."""
        usual = vars(type(self)())
        return {name: value for name, value in self.to_dict().items() if usual[name] != value}


class TorchContextParallelConfig(
    parallelism_handlers.TorchContextParallelConfig, metaclass=StandIn
):
    """Options of context parallelism, of which the launcher of Accelerate may set one."""

    stands_for = parallelism_handlers.TorchContextParallelConfig
    __setattr__ = object.__setattr__

    def __post_init__(self) -> None:
        with patch_environment(**own_variables(os.environ, "parallelism")):
            super().__post_init__()


class ParallelismConfig(parallelism.ParallelismConfig, metaclass=StandIn):
    """Sizes of a mesh, which the launcher of Accelerate may set, and which may be assigned."""

    stands_for = parallelism.ParallelismConfig
    __setattr__ = object.__setattr__

    def __post_init__(self) -> None:
        with patch_environment(**own_variables(os.environ, "parallelism")):
            super().__post_init__()

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.get_mesh()

    def _joined_axes(self) -> dict[str, list[str]]:
        """Return the axes of each joined dimension, which may be one axis alone."""
        active = {name: getattr(self, dimensions) for name, dimensions in _JOINED.items()}
        others = {name: axes for name, axes in super()._joined_axes().items() if "sp" in axes}
        return {name: axes for name, axes in active.items() if axes} | others


for _twin, _home in (
    (KwargsHandler, "utils.dataclasses"),
    (TorchContextParallelConfig, "utils.dataclasses"),
    (ParallelismConfig, "parallelism_config"),
):
    _twin.__module__ = f"accelerate.{_home}"  # by which it is pickled, and read there
