"""Settings that are accepted but not implemented, and those that have no effect in a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_callbacks.launch.settings import all_options
from accel_callbacks.plugins import LAUNCHED
from accel_callbacks.plugins.option import Option

__all__ = ["IDLE", "UNBUILT", "Unbuilt"]

_Test = Callable[[Any], bool]


@dataclass(frozen=True, eq=False)
class Unbuilt:
    """A feature that is not implemented; remove its entry when it is.

    Args:
        path: the setting that requests the feature.
        asked: predicate: do these settings request it?
        reason: why it is refused.
        instead: alternative settings.
    """

    path: str
    asked: _Test
    reason: str
    instead: str


def _refusal(option: Option) -> Unbuilt:
    """Refuse an option by its own declaration, in the kind of run that it is for."""
    kind = option.block.removesuffix("_config").upper()

    def is_asked(settings: Any) -> bool:
        block = getattr(settings, option.block)
        asked = block is not None and block[option.name] not in (None, "", 1, option.default)
        return asked and settings.distributed_type == kind

    reason, _, instead = option.refused.partition(": ")
    return Unbuilt(option.path, is_asked, reason, instead)


def _fp8(backend: str, name: str) -> Unbuilt:
    return Unbuilt(
        "fp8_config.backend",
        lambda settings: (
            settings.mixed_precision == "fp8"
            and settings.fp8_config is not None
            and settings.fp8_config["backend"] == backend
        ),
        f"fp8 with {name} is not in this version",
        "--fp8_backend AO computes with torchao",
    )


def _is_sharded(settings: Any) -> bool:
    mesh = settings.parallelism_config
    return settings.distributed_type == "FSDP" or (
        mesh is not None and mesh["parallelism_config_dp_shard_size"] > 1
    )


def _fsdp(key: str, value: Any, reason: str, instead: str) -> Unbuilt:
    return Unbuilt(
        f"fsdp_config.{key}",
        lambda settings: (
            _is_sharded(settings)
            and settings.fsdp_config is not None
            and settings.fsdp_config[key] == value
        ),
        reason,
        instead,
    )


_DDP = "--distributed_type MULTI_GPU or MULTI_CPU trains with DDP, which is the same"

UNBUILT: tuple[Unbuilt, ...] = (
    *(_refusal(option) for option in all_options() if option.refused),
    _fsdp("fsdp_sharding_strategy", "NO_SHARD", "FSDP2 always shards", _DDP),
    _fsdp("fsdp_reshard_after_forward", "NO_SHARD", "FSDP2 always shards", _DDP),
    _fp8("TE", "Transformer Engine"),
    _fp8("MSAMP", "MS-AMP"),
    Unbuilt(
        "mpirun_config.mpirun_hostfile",
        lambda settings: bool(settings.mpirun_config and settings.mpirun_config["mpirun_hostfile"]),
        "mpirun is not started from here",
        "remove mpirun_config and start `accel launch` on each machine, or under SLURM",
    ),
    Unbuilt(
        "num_machines",
        lambda settings: settings.distributed_type == "XLA" and settings.num_machines > 1,
        "a pod of several machines is not in this version",
        "--num_machines 1 trains on the TPU devices of one",
    ),
    Unbuilt(
        "tpu_use_cluster",
        lambda settings: bool(settings.tpu_use_cluster),
        "a pod of TPUs is not started from here",
        "remove it: one machine trains on its TPU devices",
    ),
)


def _without(kind: str) -> _Test:
    return lambda settings: settings.distributed_type != kind


def _of_kind(kind: str) -> tuple[str, tuple[_Test, str]]:
    """Return the rule of a block of options that only one kind of run has."""
    return f"{kind.lower()}_config", (_without(kind), f"distributed_type is not {kind}")


def _is_whole(settings: Any) -> bool:
    return not _is_sharded(settings)


def _every_axis_is_one(settings: Any) -> bool:
    mesh = settings.parallelism_config or {}
    return all(value == 1 for key, value in mesh.items() if key.endswith("_size"))


def _no_backend(settings: Any) -> bool:
    return (
        settings.dynamo_config is None or settings.dynamo_config["dynamo_backend"].lower() == "no"
    )


#: For a setting or block: the predicate under which it has no effect, and the reason. One that
#: never has an effect says so where it is declared.
IDLE: Mapping[str, tuple[_Test, str]] = {
    "num_processes": (
        lambda settings: settings.distributed_type == "XLA",
        "one process computes on all devices of a TPU",
    ),
    "machine_rank": (lambda s: s.num_machines == 1 and s.nnodes is None, "there is one machine"),
    "main_training_function": (_without("XLA"), "only on a TPU"),
    "downcast_bf16": (_without("XLA"), "only on a TPU"),
    **dict(_of_kind(group.upper()) for group in LAUNCHED),
    "fsdp_config": (_is_whole, "distributed_type is not FSDP"),
    "parallelism_config": (_every_axis_is_one, "every axis has size 1"),
    "mpirun_config": (lambda s: not s.mpirun_config["mpirun_hostfile"], "there is no hostfile"),
    "fp8_config": (lambda s: s.mixed_precision != "fp8", "mixed_precision is not fp8"),
    "dynamo_config": (_no_backend, "dynamo_backend is no"),
}
