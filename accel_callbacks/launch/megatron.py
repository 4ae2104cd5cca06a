"""Settings of Megatron-LM that a launch does not pass on."""

from __future__ import annotations

from accel_callbacks.launch.resolve import Resolved
from accel_callbacks.launch.settings import find
from accel_callbacks.launch.unsupported import OF_MEGATRON

__all__ = ["megatron_note"]

_BLOCK = "megatron_lm_config."


def megatron_note(resolved: Resolved) -> str:
    """Name the options of Megatron-LM that have no meaning here, each with its origin.

    Options of the command line are left out: those without effect are reported in any case.

    Returns:
        One line; empty if there are none, or another kind of run is launched.

    Example:
        >>> from accel_callbacks.launch.megatron import megatron_note
        >>> from accel_callbacks.launch.resolve import resolve_settings
        >>> megatron_note(resolve_settings({"num_processes": 2}, None, "/x", {"HOME": "/x"}))
        ''
    """
    if resolved.value("distributed_type") != "MEGATRON_LM":
        return ""
    found = [
        f"{key} ({resolved.origins[_BLOCK + key]}): {reason}"
        for key, reason in OF_MEGATRON.items()
        if resolved.origins[_BLOCK + key] not in ("default", "command line")
        and resolved.value(_BLOCK + key) != find(_BLOCK + key).default
    ]
    start = "Megatron-LM's loop is not run, and these have no effect: "
    return start + "; ".join(found) if found else ""
