"""Settings of FSDP1 and Megatron-LM: what each is here, and which have no meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_callbacks.compat.megatron import IDLE
from accel_callbacks.launch.resolve import Resolved
from accel_callbacks.launch.settings import all_options
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.option import SettingsError, options_of

__all__ = ["OF_FSDP1", "fsdp1_notes", "megatron_note", "to_fsdp2"]

#: Keys of ``fsdp_config`` that have no meaning in FSDP2, and what takes their place.
OF_FSDP1: Mapping[str, str] = {
    option.name: option.idle
    for option in options_of(FullyShardedDataParallelPlugin)
    if option.attribute in ("backward_prefetch", "use_orig_params")
}

_BLOCK = "fsdp_config."
_STRATEGY = "fsdp_config.fsdp_sharding_strategy"
_RESHARD = "fsdp_config.fsdp_reshard_after_forward"
_VERSION = "fsdp_config.fsdp_version"
_STATE_DICT = "fsdp_config.fsdp_state_dict_type"
_REPLICATE = "parallelism_config.parallelism_config_dp_replicate_size"
_SHARD = "parallelism_config.parallelism_config_dp_shard_size"
_FREES = {
    "FULL_SHARD": "true",
    "SHARD_GRAD_OP": "false",
    "HYBRID_SHARD": "true",
    "HYBRID_SHARD_ZERO2": "false",
}


def fsdp1_notes(resolved: Resolved) -> list[str]:
    """Describe the options of FSDP1 in the settings of a sharded launch, a line for each.

    Options of the command line are left out: those without effect are reported in any case.
    """
    if resolved.value("distributed_type") != "FSDP" and resolved.value(_SHARD) == 1:
        return []
    if resolved.given(_VERSION) and resolved.value(_VERSION) == 2:
        return []
    lines = [
        f"{key} ({resolved.origins[_BLOCK + key]}) has no meaning in FSDP2: {instead}"
        for key, instead in OF_FSDP1.items()
        if resolved.origins[_BLOCK + key] not in ("default", "command line")
    ]
    for path in (_STRATEGY, _RESHARD):
        if resolved.given(path) and (frees := _FREES.get(resolved.value(path))):
            lines.append(_describe_strategy(path, resolved.value(path), frees))
    if not (lines or resolved.given(_VERSION)):
        return []
    origin = f" ({resolved.origins[_VERSION]})" if resolved.given(_VERSION) else ""
    advice = "; `accel config update` rewrites the file" if resolved.file else ""
    return [f"fsdp_version: 1{origin} is trained as 2{advice}", *lines]


def _describe_strategy(path: str, strategy: str, frees: str) -> str:
    replicas = ", with a replica on each machine" if strategy.startswith("HYBRID") else ""
    key = path.removeprefix(_BLOCK)
    return f"{key}: {strategy} is fsdp_reshard_after_forward: {frees}{replicas}"


def to_fsdp2(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return settings by path with those of FSDP1 replaced, and a line for each replaced one.

    Raises:
        SettingsError: ``NO_SHARD``, or the replicas of ``HYBRID_SHARD`` cannot be counted.
    """
    settings = dict(values)
    if not any(path.startswith(_BLOCK) for path in settings):
        return settings, []
    lines: list[str] = []
    for key, instead in OF_FSDP1.items():
        if settings.pop(_BLOCK + key, None) is not None:
            lines.append(f"removed {key}: {instead}")
    if settings.get(_STATE_DICT) == "LOCAL_STATE_DICT":
        settings[_STATE_DICT] = "SHARDED_STATE_DICT"
        lines.append("fsdp_state_dict_type: LOCAL_STATE_DICT is SHARDED_STATE_DICT")
    frees = settings.pop(_RESHARD, None)
    strategy = settings.pop(_STRATEGY, None)
    # Both in one file: the words of version 2 say what was meant.
    if frees in (None, *_FREES, "NO_SHARD") and (frees or strategy):
        path, name = (_STRATEGY, strategy) if strategy else (_RESHARD, frees)
        if name == "NO_SHARD":
            raise SettingsError(
                f"{path}: NO_SHARD is DDP: give distributed_type: MULTI_GPU (or MULTI_CPU) and "
                "leave fsdp_config out"
            )
        frees = _FREES[name]
        lines.append(_describe_strategy(path, name, frees))
        if name.startswith("HYBRID"):
            lines += _replicate(settings, path)
    elif strategy:
        lines.append("removed fsdp_sharding_strategy: fsdp_reshard_after_forward is given")
    settings[_VERSION] = 2
    if frees is not None:
        settings[_RESHARD] = frees
    return settings, lines


def _replicate(values: dict[str, Any], path: str) -> list[str]:
    """Add the sizes of the mesh that has a replica on each machine, unless some are given."""
    machines = values.get("num_machines", 1)
    if machines == 1 or _REPLICATE in values or _SHARD in values:
        return []
    local = values.get("nproc_per_node")
    if local is None and values.get("num_processes", 0) % machines == 0:
        local = values.get("num_processes", 0) // machines
    if not local:
        raise SettingsError(
            f"{path}: has a replica on each of {machines} machines: give num_processes, a multiple "
            "of num_machines, or dp_replicate_size and dp_shard_size in parallelism_config"
        )
    values |= {_REPLICATE: machines, _SHARD: local}
    return [f"added parallelism_config: dp_replicate_size {machines}, dp_shard_size {local}"]


def megatron_note(resolved: Resolved) -> str:
    """Name the options of Megatron-LM that have no meaning here, each with its origin.

    Options of the command line are left out: those without effect are reported in any case.

    Returns:
        One line; empty if there are none, or another kind of run is launched.
    """
    if resolved.value("distributed_type") != "MEGATRON_LM":
        return ""
    idle = [option for option in all_options() if option.idle == IDLE]
    options = [
        f"{option.name} ({resolved.origins[option.path]})"
        for option in idle
        if resolved.origins[option.path] not in ("default", "command line")
        and resolved.value(option.path) != option.default
    ]
    start = "Megatron-LM's loop is not run, and these have no effect: "
    return f"{start}{', '.join(options)}: {IDLE}" if options else ""
