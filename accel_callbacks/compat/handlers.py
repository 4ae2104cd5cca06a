"""Handlers and sizes of a mesh as scripts for Accelerate define, assign and read them."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

from accel_callbacks.compat.children import own_variables
from accel_callbacks.compat.environment import patch_environment
from accel_callbacks.compat.stand_in import StandIn
from accel_callbacks.options import resolve_config
from accel_callbacks.plugins import base, parallelism, parallelism_handlers
from accel_callbacks.plugins import compile as compiling
from checkpoint_io.warning import warn

__all__ = ["KwargsHandler", "ParallelismConfig", "TorchContextParallelConfig", "TorchDynamoPlugin"]

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


class TorchDynamoPlugin(compiling.TorchDynamoPlugin, metaclass=StandIn):
    """Options of torch.compile, of which the launcher sets those that the script leaves out.

    Args:
        backend: the backend; ``"no"`` compiles nothing, whatever the launcher says.
        mode: the mode.
        fullgraph: raise for a model that cannot be compiled as one graph.
        dynamic: compile for all shapes.
        options: a dict for the backend.
        disable: compile nothing, whatever the other options are.
        use_regional_compilation: compile the repeated blocks of a model separately.
    """

    stands_for = compiling.TorchDynamoPlugin
    __setattr__ = object.__setattr__

    def __init__(
        self,
        backend: Any = None,
        mode: str | None = None,
        fullgraph: bool | None = None,
        dynamic: bool | None = None,
        options: Any = None,
        disable: bool = False,
        use_regional_compilation: bool | None = None,
    ) -> None:
        values = {
            "backend": backend,
            "mode": mode,
            "fullgraph": fullgraph,
            "dynamic": dynamic,
            "options": options,
            "use_regional_compilation": use_regional_compilation,
        }
        given = {name: value for name, value in values.items() if value is not None}
        if not _is_off(backend):
            launch = resolve_config({}, {**os.environ, **own_variables(os.environ)})
            given = {**launch.launched.get(self.block.group, {}), **given}
        idle = sorted(given.keys() - {"backend"})
        if idle and _is_off(given.get("backend", "no")) and not disable:
            warn(
                "TorchDynamoPlugin compiles nothing without a backend, as with Accelerate, so that "
                f"{', '.join(idle)} has no effect: give backend='inductor', or launch with "
                "--dynamo_backend inductor."
            )
            given = {}
        super().__init__(**given, disable=disable)

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all options, the backend by the name that torch has for it."""
        return {**super().to_dict(), "backend": self.compile_kwargs()["backend"]}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that are not the defaults."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        if isinstance(kwargs.get("backend"), compiling.DynamoBackend):
            kwargs["backend"] = kwargs["backend"].value.lower()
        return kwargs


def _is_off(backend: Any) -> bool:
    return str(getattr(backend, "value", backend)).lower() == "no"


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

    def _join_axes(self) -> dict[str, list[str]]:
        """Return the axes of each joined dimension, which may be one axis alone."""
        active = {name: getattr(self, dimensions) for name, dimensions in _JOINED.items()}
        others = {name: axes for name, axes in super()._join_axes().items() if "sp" in axes}
        return {name: axes for name, axes in active.items() if axes} | others


for _twin, _home in (
    (KwargsHandler, "utils.dataclasses"),
    (TorchContextParallelConfig, "utils.dataclasses"),
    (TorchDynamoPlugin, "utils.dataclasses"),
    (ParallelismConfig, "parallelism_config"),
):
    _twin.__module__ = f"accelerate.{_home}"  # by which it is pickled, and read there
