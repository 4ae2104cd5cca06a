"""Sizes of the axes of a device mesh."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from accel_callbacks.plugins.base import KwargsHandler

__all__ = ["AXES", "ParallelismConfig"]

#: The axes of a mesh from the outermost, whose ranks are farthest apart, to the innermost.
AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_VARIABLE = "ACCEL_PARALLELISM_{}_SIZE"
_BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",)}


@dataclass(frozen=True)
class ParallelismConfig(KwargsHandler):
    """The sizes of the axes over which the ranks of a run are arranged.

    The product of all sizes is the number of ranks. Ranks that differ in ``tp``, ``cp`` or ``sp``
    only share a replica of the model, and get the same batches.

    Args:
        dp_replicate_size: replicas of the model, or of its shards (HSDP).
        dp_shard_size: ranks over which FSDP shards each replica.
        tp_size: ranks of tensor parallelism.
        cp_size: ranks of context parallelism.
        cp_backend: ``"torch"``.
        sp_size: ranks of sequence parallelism; not together with ``cp_size``.
        sp_backend: ``"deepspeed"``.
        tp_handler: options of tensor parallelism.
        cp_handler: options of context parallelism.
        sp_handler: options of sequence parallelism.

    Each size is what ``accel launch`` was told if None, else 1.

    Raises:
        ValueError: a size is not positive, or axes do not go together.
        TypeError: a size is no integer.

    Example:
        >>> from accel_callbacks import ParallelismConfig
        >>> config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
        >>> config.total_size, config.fsdp_dim_names
        (8, ['dp_replicate', 'dp_shard_cp'])
        >>> config.get_mesh()
        (('dp_replicate', 'dp_shard'), (2, 4))
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    # The mesh by device type: a mesh has groups of its own, and is built once.
    _meshes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in AXES:
            name = f"{axis}_size"
            size = getattr(self, name)
            if size is None:
                object.__setattr__(self, name, _launched_size(axis, os.environ))
            elif isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name}={size!r} must be an integer.")
            elif size < 1:
                raise ValueError(f"{name}={size} must be at least 1.")
        for name, known in _BACKENDS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, known[0])
            elif getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use {known[0]!r}.")
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both divide sequences: use one."
            )

    # --- sizes ----------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis, the outermost first."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def total_size(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different data."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    dp_size = data_parallel_size

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that read the same data."""
        return self.total_size // self.data_parallel_size

    # --- which axes there are -------------------------------------------------------------------

    @property
    def dp_replicate_enabled(self) -> bool:
        """True with several replicas."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if FSDP shards the model."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """True with tensor parallelism."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """True with context parallelism."""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """True with sequence parallelism."""
        return self.sizes["sp"] > 1

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes of more than one rank."""
        return [axis for axis, size in self.sizes.items() if size > 1]

    # --- names of axes, joined ones included ----------------------------------------------------

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes whose ranks read different data."""
        return [axis for axis in ("dp_replicate", "dp_shard") if self.sizes[axis] > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes whose ranks read the same data."""
        return [axis for axis in ("tp", "cp", "sp") if self.sizes[axis] > 1]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes over which FSDP shards."""
        return [axis for axis in ("dp_shard", "cp") if self.sizes[axis] > 1]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes over which losses are averaged."""
        return [axis for axis in ("dp_replicate", "dp_shard", "cp") if self.sizes[axis] > 1]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh that FSDP gets: replicas, if any, and shards."""
        return (["dp_replicate"] if self.dp_replicate_enabled else []) + ["dp_shard_cp"]

    @property
    def model_shard_dim_names(self) -> list[str]:
        """The axes over which a model is cut."""
        return [axis for axis in ("dp_shard", "tp") if self.sizes[axis] > 1]

    # --- the mesh -------------------------------------------------------------------------------

    def get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names of the axes of more than one rank, the outermost first, and their sizes.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig(dp_shard_size=2, tp_size=4).get_mesh()
            (('dp_shard', 'tp'), (2, 4))
        """
        active = self.active_mesh_dims
        return tuple(active), tuple(self.sizes[axis] for axis in active)

    def build_device_mesh(self, device_type: str) -> Any:
        """Collective: return the mesh over all ranks, with its joined dimensions; None for one.

        Joined are, as far as they have ranks, ``"dp"`` of both data axes, ``"dp_shard_cp"``, over
        which FSDP shards, and ``"dp_cp"``, over which losses are averaged.

        Args:
            device_type: such as ``"cpu"`` or ``"cuda"``.

        Returns:
            A ``torch.distributed.device_mesh.DeviceMesh``.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig().build_device_mesh("cpu") is None
            True
        """
        names, sizes = self.get_mesh()
        if not names:
            return None
        if device_type not in self._meshes:
            # Imported here, because most runs have no mesh.
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
            joined = ("dp", self.dp_dim_names), ("dp_shard_cp", self.dp_shard_cp_dim_names)
            for name, axes in (*joined, ("dp_cp", self.dp_cp_dim_names)):
                if axes:
                    mesh[tuple(axes)]._flatten(name)
            self._meshes[device_type] = mesh
        return self._meshes[device_type]

    get_device_mesh = build_device_mesh

    def to_json(self) -> dict[str, int | str]:
        """Return the sizes and backends as plain values.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig(tp_size=2).to_json()["tp_size"]
            2
        """
        backends = {name: getattr(self, name) for name in _BACKENDS}
        return {**{f"{axis}_size": size for axis, size in self.sizes.items()}, **backends}

    def check_world(self, world_size: int) -> None:
        """Raise unless the axes arrange all ranks.

        Raises:
            ValueError: the product of the sizes is not the number of ranks.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig(dp_shard_size=3).check_world(4)
            Traceback (most recent call last):
            ValueError: ParallelismConfig(dp_shard_size=3) arranges 3 ranks, and this run has 4: ...
        """
        if self.total_size == world_size:
            return
        shown = ", ".join(f"{axis}_size={self.sizes[axis]}" for axis in self.active_mesh_dims)
        others = self.total_size // self.sizes["dp_shard"]
        fits = world_size % others == 0
        advice = (
            f"give dp_shard_size={world_size // others} to shard over the rest of them, or "
            f"dp_replicate_size={world_size * self.sizes['dp_replicate'] // self.total_size or 1}"
            if fits and world_size % self.total_size == 0
            else f"their product must be {world_size}"
        )
        raise ValueError(
            f"ParallelismConfig({shown}) arranges {self.total_size} ranks, and this run has "
            f"{world_size}: {advice}."
        )


def _launched_size(axis: str, environment: Mapping[str, str]) -> int:
    """Return the size that the launcher has set, 1 if none."""
    name = _VARIABLE.format(axis.upper())
    text = environment.get(name, "1")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name}={text!r} must be a positive integer.")
    return int(text)
