"""Settings that say the same thing twice: the one from the nearer place wins."""

from __future__ import annotations

from typing import Any

from accel_callbacks.launch.option import SettingsError

__all__ = ["settle"]

_SAME = (("nproc_per_node", "num_processes"), ("nnodes", "num_machines"))
_ON_DEVICES = (
    *("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
    *("MULTI_HPU", "MULTI_NEURON", "XLA"),
)


def _strength(origin: str) -> int:
    """How near a place is: environment, file, command line."""
    if origin == "command line":
        return 3
    return 1 if origin.startswith("environment variable") else 2


def settle(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Drop what a nearer place overrules, in place, and add what follows from the rest.

    Raises:
        SettingsError: one place contradicts itself.

    Example:
        >>> from accel_callbacks.launching.rivals import settle
        >>> values = {"distributed_type": "NO", "num_processes": 2}
        >>> origins = {"distributed_type": "a.yaml (a.yaml)", "num_processes": "command line"}
        >>> settle(values, origins)
        >>> values
        {'num_processes': 2}
    """
    for first, second in _SAME:
        if first in values and second in values:
            _keep_nearer(first, second, values, origins)
    kind = values.get("distributed_type")
    if kind == "NO" and _several(values):
        rival = "num_processes" if "num_processes" in values else "nproc_per_node"
        _keep_nearer("distributed_type", rival, values, origins)
    if kind in _ON_DEVICES and values.get("use_cpu"):
        _keep_nearer("distributed_type", "use_cpu", values, origins)
    if values.get("rdzv_backend") == "static" and ":" in (values.get("nnodes") or ""):
        # Accelerate's files always say static, which cannot shrink or grow.
        _keep_nearer("nnodes", "rdzv_backend", values, origins)
    if values.get("distributed_type") == "MULTI_CPU":
        _all_on_cpu(values, origins)


def _several(values: dict[str, Any]) -> bool:
    return max(values.get("num_processes") or 1, values.get("nproc_per_node") or 1) > 1


def _keep_nearer(first: str, second: str, values: dict[str, Any], origins: dict[str, str]) -> None:
    """Drop the farther of two; a processes' variable that loses is told to them as off."""
    one, other = _strength(origins[first]), _strength(origins[second])
    if one == other:
        raise SettingsError(
            f"{first}: {values[first]} contradicts {second}: {values[second]} "
            f"({origins[first]}): give one of them"
        )
    loser, winner = (second, first) if one > other else (first, second)
    del values[loser]
    if loser == "use_cpu":
        values[loser], origins[loser] = False, f"{winner} ({origins[winner]})"
    else:
        del origins[loser]


def _all_on_cpu(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Processes on the CPU leave GPUs alone, which Accelerate's files say as well."""
    denied = values.get("use_cpu") is False
    if denied and _strength(origins["use_cpu"]) > _strength(origins["distributed_type"]):
        del values["distributed_type"], origins["distributed_type"]
        return
    if not values.get("use_cpu"):
        values["use_cpu"] = True
        origins["use_cpu"] = f"distributed_type ({origins['distributed_type']})"
