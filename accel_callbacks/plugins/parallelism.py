"""Sizes of the axes of a device mesh."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType, ref

from accel_callbacks.plugins.base import KwargsHandler, Launch
from accel_callbacks.plugins.option import SettingsError, launched
from accel_callbacks.plugins.parallelism_handlers import (
    MESH_BLOCK,
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from checkpoint_io.warning import warn

__all__ = ["AXES", "ParallelismConfig"]

#: The axes of a mesh from the outermost, whose ranks are farthest apart, to the innermost.
AXES = ("dp_replicate", "dp_shard", "pp", "cp", "sp", "tp")
_VARIABLE = MESH_BLOCK.variables + "{}_SIZE"
_BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",)}
_HANDLERS: Mapping[str, type[KwargsHandler]] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}
# Dimensions of a mesh that join several axes; not built where only one of them has ranks.
_JOINED: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_sp": ("dp_shard", "sp"),
    "dp_sp": ("dp_replicate", "dp_shard", "sp"),
}


class _Mesh(NamedTuple):
    """A mesh with its joined dimensions, and the process group that it was built in."""

    root: Any
    joined: dict[str, Any]
    group: ReferenceType[Any]


@dataclass(frozen=True)
class ParallelismConfig(KwargsHandler):
    """The sizes of the axes over which the ranks of a run are arranged.

    The product of all sizes is the number of ranks. Ranks that differ in ``pp``, ``tp``, ``cp`` or
    ``sp`` only share a replica of the model, and get the same batches. If all sizes are 1, all
    ranks are data parallel: sharded with an ``fsdp_plugin``, else replicated.

    Args:
        dp_replicate_size: replicas of the model, or of its shards (HSDP).
        dp_shard_size: ranks over which FSDP shards each replica.
        pp_size: ranks of a pipeline, of which each has some layers.
        tp_size: ranks of tensor parallelism.
        cp_size: ranks of context parallelism.
        cp_backend: ``"torch"``.
        sp_size: ranks of sequence parallelism, which exchange tokens for heads around attention;
            not together with ``cp_size``.
        sp_backend: ``"deepspeed"``, as Accelerate names it; the exchange is torch's.
        tp_handler: options of tensor parallelism, a :class:`TorchTensorParallelConfig`.
        cp_handler: options of context parallelism, a :class:`TorchContextParallelConfig`.
        sp_handler: options of sequence parallelism, a :class:`DeepSpeedSequenceParallelConfig`.

    Each size is what ``accel launch`` was told if None, else 1.

    Raises:
        ValueError: a size is not positive, or axes do not go together.
        TypeError: a size is no integer, or a handler is of another class.

    Warns:
        UserWarning: a handler for an axis that was given the size 1.

    Example:
        >>> from accel_callbacks import ParallelismConfig
        >>> config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
        >>> config.total_size, config.fsdp_dim_names
        (8, ['dp_replicate', 'dp_shard'])
        >>> config.get_mesh()
        (('dp_replicate', 'dp_shard'), (2, 4))
    """

    block: ClassVar = MESH_BLOCK

    dp_replicate_size: int | None = launched(
        1,
        "replicas of the model, or of its shards",
        least=1,
        foreign="PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        question="How many replicas of the sharded model (HSDP)?",
    )
    dp_shard_size: int | None = launched(
        1,
        "shards of each replica (FSDP)",
        least=1,
        foreign="PARALLELISM_CONFIG_DP_SHARD_SIZE",
    )
    tp_size: int | None = launched(
        1,
        "processes that share each layer (tensor parallelism), by a plan",
        least=1,
        foreign="PARALLELISM_CONFIG_TP_SIZE",
        question="How many processes share each layer (tensor parallelism, by a plan)?",
    )
    cp_size: int | None = launched(
        1,
        "processes that share each sequence (context parallelism)",
        least=1,
        foreign="PARALLELISM_CONFIG_CP_SIZE",
        question="How many processes share each sequence (context parallelism)?",
    )
    cp_backend: str | None = launched(
        "torch",
        "backend of context parallelism",
        choices=_BACKENDS["cp_backend"],
        passed=False,
    )
    sp_size: int | None = launched(
        1,
        "processes of sequence parallelism",
        least=1,
        foreign="PARALLELISM_CONFIG_SP_SIZE",
    )
    sp_backend: str | None = launched(
        "deepspeed",
        "backend of sequence parallelism",
        choices=_BACKENDS["sp_backend"],
        passed=False,
    )
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = launched(
        1,
        "processes that each have some layers (a pipeline), for prepare_pipeline",
        least=1,
        foreign="PARALLELISM_CONFIG_PP_SIZE",
    )

    @classmethod
    def from_arguments(cls, **given: Any) -> Any:
        """Return the arrangement that arguments of an Accelerator ask for, None without one.

        Raises:
            TypeError: it is of another class.
            ValueError: both arguments are given.
        """
        plugin = TorchTensorParallelPlugin.from_arguments(
            torch_tp_plugin=given.pop("torch_tp_plugin", None)
        )
        config = super().from_arguments(**given)
        if plugin is None:
            return config
        if config is not None:
            raise ValueError(
                f"torch_tp_plugin is a parallelism_config with tp_size={plugin.tp_size}, and both "
                "were given: leave torch_tp_plugin out, and give tp_size to the parallelism_config."
            )
        return cls(tp_size=plugin.tp_size)

    @classmethod
    def from_launch(cls, given: Any, launch: Launch) -> Any:
        """Return the script's arrangement of ranks, or else the launcher's; None without one.

        Raises:
            ValueError: a size of the launcher is not positive, or axes do not go together.
        """
        options = launch.launched.get(cls.block.group, {})
        # The sizes that the launch leaves out are 1.
        sizes: dict[str, Any] = {f"{axis}_size": options.get(f"{axis}_size", 1) for axis in AXES}
        if given is not None or all(size == 1 for size in sizes.values()):
            return given
        travels = options.get("cp_comm_strategy")
        if travels is not None and sizes["cp_size"] > 1:
            sizes["cp_handler"] = TorchContextParallelConfig(travels)
        return cls(**sizes)

    @classmethod
    def check_launch(cls, block: Mapping[str, Any], processes: int) -> None:
        """Raise SettingsError unless the mesh of a launch arranges all of its processes."""
        sizes = {key: size for key, size in block.items() if key.endswith("_size") and size > 1}
        arranged = math.prod(sizes.values())
        if not sizes or arranged == processes:
            return
        shown = ", ".join(f"{key}: {size}" for key, size in sizes.items())
        raise SettingsError(
            f"parallelism_config: {shown} arranges {arranged} processes, and this launch has "
            f"{processes}: the product of the sizes must be {processes}, or --num_processes "
            f"{arranged}"
        )

    def __post_init__(self) -> None:
        launched = {axis for axis in AXES if getattr(self, f"{axis}_size") is None}
        for axis in AXES:
            name = f"{axis}_size"
            size = getattr(self, name)
            if size is None:
                object.__setattr__(self, name, _size_of_launch(axis, os.environ))
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
        for axis, kind in _HANDLERS.items():
            self._check_handler(axis, kind, axis in launched)

    def _check_handler(self, axis: str, kind: type[KwargsHandler], launched: bool) -> None:
        """Give an axis with several ranks the default options, and refuse those of another.

        Where the launcher chooses the size, a script has the options for every choice.
        """
        name, size = f"{axis}_handler", self.sizes[axis]
        handler = getattr(self, name)
        if handler is None:
            object.__setattr__(self, name, kind() if size > 1 else None)
        elif not isinstance(handler, kind):
            raise TypeError(f"{name}={handler!r} must be a {kind.__name__}.")
        elif size == 1 and launched:
            object.__setattr__(self, name, None)
        elif size == 1:
            warn(f"{name} has no effect, because {axis}_size is 1: leave it out, or give the size.")

    def __getstate__(self) -> dict[str, Any]:
        """Return the options without meshes, which belong to the groups of this process."""
        return {name: value for name, value in vars(self).items() if name != "_meshes"}

    @cached_property
    def _meshes(self) -> dict[str, _Mesh]:
        """The mesh by device type: a mesh has groups of its own, and is built once."""
        return {}

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
    def pp_enabled(self) -> bool:
        """True with a pipeline."""
        return self.sizes["pp"] > 1

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
        return [axis for axis in ("pp", "tp", "cp", "sp") if self.sizes[axis] > 1]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes over which FSDP shards, but for ``sp``."""
        return [axis for axis in ("dp_shard", "cp") if self.sizes[axis] > 1]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes over which losses are averaged."""
        return [axis for axis in ("dp_replicate", "dp_shard", "cp") if self.sizes[axis] > 1]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh that FSDP gets: replicas, if any, and shards."""
        axis = "sp" if self.sp_enabled else "cp"
        shards = [name for name in ("dp_shard", axis) if self.sizes[name] > 1]
        joined = shards if len(shards) < 2 else [f"dp_shard_{axis}"]
        return (["dp_replicate"] if self.dp_replicate_enabled else []) + joined

    @property
    def model_shard_dim_names(self) -> list[str]:
        """The axes over which a model is cut."""
        return [axis for axis in ("dp_shard", "pp", "tp") if self.sizes[axis] > 1]

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

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis.

        Args:
            rank: index among all ranks.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig(dp_shard_size=2, tp_size=4).coordinate(6)
            {'dp_replicate': 0, 'dp_shard': 1, 'pp': 0, 'cp': 0, 'sp': 0, 'tp': 2}
        """
        index: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, index[axis] = divmod(rank, self.sizes[axis])
        return {axis: index[axis] for axis in AXES}

    def build_device_mesh(self, device_type: str) -> Any:
        """Collective at the first call: return the mesh over all ranks; None for one rank.

        Where they join several axes of more than one rank, it also has the dimensions ``"dp"``
        (both data axes), ``"dp_shard_cp"`` or ``"dp_shard_sp"`` (over which FSDP shards) and
        ``"dp_cp"`` or ``"dp_sp"`` (over which losses are averaged), for :meth:`get_submesh`.

        Args:
            device_type: such as ``"cpu"`` or ``"cuda"``.

        Returns:
            A ``torch.distributed.device_mesh.DeviceMesh``. Each process group of torch has one.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig().build_device_mesh("cpu") is None
            True
        """
        names, sizes = self.get_mesh()
        if not names:
            return None
        # Imported here, because the launcher reads the names of the axes, and no torch.
        import torch.distributed as dist

        known = self._meshes.get(device_type)
        if known is None or not dist.is_initialized() or known.group() is not dist.group.WORLD:
            # Imported here, because most runs have no mesh.
            from torch.distributed.device_mesh import init_device_mesh

            root: Any = init_device_mesh(device_type, sizes, mesh_dim_names=names)
            joined = {name: root[axes]._flatten(name) for name, axes in self._join_axes().items()}
            if not dist.is_initialized():  # a mesh of something else than torch's groups
                return root
            known = self._meshes[device_type] = _Mesh(root, joined, ref(dist.group.WORLD))
        return known.root

    def _join_axes(self) -> dict[str, list[str]]:
        """Return the axes of each dimension of the mesh that joins several."""
        active = {
            name: [axis for axis in axes if self.sizes[axis] > 1] for name, axes in _JOINED.items()
        }
        return {name: axes for name, axes in active.items() if len(axes) > 1}

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh, built for this type of device if there is none yet.

        Args:
            device_type: such as ``"cpu"`` or ``"cuda"``; that of the mesh that there is if None.

        Raises:
            ValueError: there is a mesh of another type, or none and no type is given.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig(tp_size=2).get_device_mesh()
            Traceback (most recent call last):
            ValueError: there is no mesh yet: pass its device_type, such as "cuda".
        """
        if device_type is None:
            if not self._meshes and self.total_size > 1:
                raise ValueError('there is no mesh yet: pass its device_type, such as "cuda".')
            device_type = next(iter(self._meshes), "cpu")
        elif self._meshes and device_type not in self._meshes:
            raise ValueError(
                f"device_type={device_type!r}: the mesh is built for {next(iter(self._meshes))!r}."
            )
        return self.build_device_mesh(device_type)

    def get_submesh(self, names: Sequence[str], device_type: str | None = None) -> Any:
        """Return the part of the mesh with these dimensions, joined ones such as ``"dp"`` too.

        Slicing the mesh gives the same, but torch warns if a dimension is joined.

        Args:
            names: dimensions from the outermost to the innermost, such as
                :attr:`fsdp_dim_names`.
            device_type: as for :meth:`get_device_mesh`.

        Raises:
            KeyError: the mesh has no dimension of this name.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig().get_submesh(["dp_shard"])
            Traceback (most recent call last):
            KeyError: "'dp_shard' is no dimension of this mesh, which has ()."
        """
        root = self.get_device_mesh(device_type)
        axes = self.active_mesh_dims
        joined = {} if root is None else self._meshes[root.device_type].joined
        for name in names:
            if name not in axes and name not in joined:
                known = (*axes, *joined)
                raise KeyError(f"{name!r} is no dimension of this mesh, which has {known}.")
        if not any(name in joined for name in names):
            return root[tuple(names)]
        if len(names) == 1:
            return joined[names[0]]
        concatenate = getattr(type(root), "_concatenate", None)
        if concatenate is None:  # such a torch does not warn either
            return root[tuple(names)]
        return concatenate([joined[name] if name in joined else root[name] for name in names])

    def to_json(self) -> dict[str, Any]:
        """Return sizes, backends and the options of handlers as plain values.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig(tp_size=2).to_json()["tp_size"]
            2
        """
        plain: dict[str, Any] = {f"{axis}_size": size for axis, size in self.sizes.items()}
        plain |= {name: getattr(self, name) for name in _BACKENDS}
        for axis in _HANDLERS:
            handler = getattr(self, f"{axis}_handler")
            plain[f"{axis}_handler"] = None if handler is None else handler.to_plain()
        return plain

    def fitted(self, world_size: int, *, sharded: bool) -> ParallelismConfig:
        """Return the arrangement of this many ranks.

        Args:
            world_size: number of ranks.
            sharded: an ``fsdp_plugin`` is given.

        Raises:
            ValueError: the product of the sizes is not the number of ranks, or nothing can be
                sharded.

        Example:
            >>> from accel_callbacks import ParallelismConfig
            >>> ParallelismConfig().fitted(4, sharded=True).get_mesh()
            (('dp_shard',), (4,))
        """
        if self.total_size == 1 and world_size > 1:
            if sharded:
                return replace(self, dp_shard_size=world_size)
            return replace(self, dp_replicate_size=world_size)
        self.check_world(world_size)
        if sharded and world_size > 1 and not {*self.fsdp_dim_names} - {"dp_replicate"}:
            shown = ", ".join(f"{axis}_size={self.sizes[axis]}" for axis in self.active_mesh_dims)
            raise ValueError(
                f"fsdp_plugin shards over dp_shard_size, which is 1 in ParallelismConfig({shown}): "
                "give a dp_shard_size, or leave the plugin out."
            )
        return self

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
            else f"their product must be {world_size}, or `accel launch --num_processes "
            f"{self.total_size}` starts as many"
        )
        raise ValueError(
            f"ParallelismConfig({shown}) arranges {self.total_size} ranks, and this run has "
            f"{world_size}: {advice}."
        )


def _size_of_launch(axis: str, environment: Mapping[str, str]) -> int:
    """Return the size that the launcher has set, 1 if none."""
    name = _VARIABLE.format(axis.upper())
    text = environment.get(name) or "1"
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name}={text!r} must be a positive integer.")
    return int(text)
