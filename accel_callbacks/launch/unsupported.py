"""Settings that are accepted but not implemented, and those that have no effect in a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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

    Example:
        >>> from accel_callbacks.launch.unsupported import UNBUILT
        >>> {one.path for one in UNBUILT} >= {"distributed_type"}
        True
    """

    path: str
    asked: _Test
    reason: str
    instead: str


def _kind(kind: str, name: str) -> Unbuilt:
    return Unbuilt(
        "distributed_type",
        lambda settings: settings.distributed_type == kind,
        f"{name} is not in this version",
        "--distributed_type MULTI_GPU or MULTI_CPU trains with DDP",
    )


def _axis(axis: str) -> Unbuilt:
    key = f"parallelism_config_{axis}_size"
    return Unbuilt(
        f"parallelism_config.{key}",
        lambda settings: (
            bool(settings.parallelism_config) and getattr(settings.parallelism_config, key) > 1
        ),
        "this axis of parallelism is not in this version",
        f"--{key} 1 leaves it out",
    )


def _fp8(backend: str, name: str) -> Unbuilt:
    return Unbuilt(
        "fp8_config.backend",
        lambda settings: (
            settings.mixed_precision == "fp8"
            and settings.fp8_config is not None
            and settings.fp8_config.backend == backend
        ),
        f"fp8 with {name} is not in this version",
        "--fp8_backend AO computes with torchao",
    )


UNBUILT: tuple[Unbuilt, ...] = (
    _kind("FSDP", "fully sharded data parallelism"),
    _kind("DEEPSPEED", "DeepSpeed"),
    _kind("MEGATRON_LM", "Megatron-LM"),
    _axis("dp_replicate"),
    _axis("dp_shard"),
    _axis("tp"),
    _axis("cp"),
    _axis("sp"),
    _fp8("TE", "Transformer Engine"),
    _fp8("MSAMP", "MS-AMP"),
    Unbuilt(
        "mpirun_config.mpirun_hostfile",
        lambda settings: bool(settings.mpirun_config and settings.mpirun_config.mpirun_hostfile),
        "mpirun is not started from here",
        "remove mpirun_config and start `accel launch` on each machine, or under SLURM",
    ),
    Unbuilt(
        "tpu_use_cluster",
        lambda settings: bool(settings.tpu_use_cluster),
        "a pod of TPUs is not started from here",
        "remove it and start `accel launch` on each machine",
    ),
)


def _without(kind: str) -> _Test:
    return lambda settings: settings.distributed_type != kind


def _always(settings: Any) -> bool:
    return True


def _every_axis_is_one(settings: Any) -> bool:
    return not any(one.asked(settings) for one in UNBUILT if one.path.startswith("parallelism"))


def _no_backend(settings: Any) -> bool:
    return settings.dynamo_config is None or settings.dynamo_config.dynamo_backend.lower() == "no"


_FP8_ELSEWHERE = (
    *("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_length"),
    *("amax_compute_algorithm", "override_linear_precision", "optimization_level"),
)
_POD = ("tpu_name", "tpu_zone", "tpu_use_sudo", "tpu_vm", "tpu_env", "commands", "command_file")

#: For a setting or block: the predicate under which it has no effect, and the reason.
IDLE: Mapping[str, tuple[_Test, str]] = {
    "compute_environment": (_always, "a launch runs on this machine and those it connects to"),
    "same_network": (_always, "machines connect to main_process_ip in either case"),
    "enable_cpu_affinity": (_always, "numa_binding binds processes to cores"),
    "machine_rank": (lambda s: s.num_machines == 1 and s.nnodes is None, "there is one machine"),
    "main_training_function": (_without("XLA"), "only on a TPU"),
    "downcast_bf16": (_without("XLA"), "only on a TPU"),
    **dict.fromkeys(_POD, (_always, "only for a pod of TPUs")),
    "tpu_use_cluster": (lambda s: not s.tpu_use_cluster, "only for a pod of TPUs"),
    "fsdp_config": (_without("FSDP"), "distributed_type is not FSDP"),
    "deepspeed_config": (_without("DEEPSPEED"), "distributed_type is not DEEPSPEED"),
    "megatron_lm_config": (_without("MEGATRON_LM"), "distributed_type is not MEGATRON_LM"),
    "parallelism_config": (_every_axis_is_one, "every axis has size 1"),
    "mpirun_config": (lambda s: not s.mpirun_config.mpirun_hostfile, "there is no hostfile"),
    "fp8_config": (lambda s: s.mixed_precision != "fp8", "mixed_precision is not fp8"),
    "fp8_config.enable_fsdp_float8_all_gather": (_without("FSDP"), "distributed_type is not FSDP"),
    **{
        f"fp8_config.{name}": (_always, "only for backends that are not in this version")
        for name in _FP8_ELSEWHERE
    },
    "dynamo_config": (_no_backend, "dynamo_backend is no"),
}
