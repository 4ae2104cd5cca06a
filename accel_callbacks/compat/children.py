"""Variables of Accelerate: those that children get, and those that count as this library's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from accel_callbacks.options import launched_options

__all__ = ["child_variables", "own_variables"]

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_PREFIXES = {  # of Accelerate's variables, by those of this library; the longer ones first
    "ACCEL_FSDP_": "FSDP_",
    "ACCEL_MEGATRON_LM_": "MEGATRON_LM_",
    "ACCEL_PARALLELISM_": "PARALLELISM_CONFIG_",
    "ACCEL_DEEPSPEED_": "ACCELERATE_DEEPSPEED_",
    "ACCEL_DYNAMO_": "ACCELERATE_DYNAMO_",
}
# Of options whose declaration names no variable of Accelerate's.
_NAMES = {
    "ACCEL_DEEPSPEED_GRADIENT_ACCUMULATION_STEPS": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCEL_DEEPSPEED_GRADIENT_CLIPPING": "ACCELERATE_GRADIENT_CLIPPING",
}
# Without DeepSpeed, for which others make a plugin of their own where they see its variable: here
# the Accelerator makes it, of the options of the launch.
_ENGINES = {
    "FSDP": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "MEGATRON_LM": {"ACCELERATE_USE_MEGATRON_LM": "true"},
}


def child_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set, beside those that there are.

    Children stand in by a module that Python runs at their start, which ``PYTHONPATH`` leads to.
    The options of the launch have the names of Accelerate too, since other packages read them.

    Args:
        environment: of this process; what it has of Accelerate's variables stays.
    """
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    declared = {
        option.variable: option.foreign
        for option in launched_options(environment).values()
        if option.foreign
    }
    options = {
        translated: value
        for name, value in environment.items()
        if (translated := declared.get(name) or _foreign_name(name))
    }
    options |= _ENGINES.get(environment.get("ACCEL_DISTRIBUTED_TYPE", ""), {})
    return {
        "ACCEL_AS_ACCELERATE": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([_STARTUP, *places])),
        **{name: value for name, value in options.items() if name not in environment},
    }


def _foreign_name(name: str) -> str | None:
    """Return what Accelerate calls a variable of this library, None if it has no such one."""
    if name in _NAMES:
        return _NAMES[name]
    for prefix, foreign in _PREFIXES.items():
        if name.startswith(prefix):
            return f"{foreign}{name.removeprefix(prefix)}"
    return None


def own_variables(environment: Mapping[str, str], *groups: str) -> dict[str, str]:
    """Return what Accelerate's variables are here, of the options that only it has set.

    Args:
        environment: of this process.
        *groups: groups of options beside those of the Accelerator itself, such as
            ``"parallelism"``.
    """
    own: dict[str, str] = {}
    for name, option in launched_options(environment).items():
        group, _, _ = name.rpartition(".")
        foreign = option.foreign or _foreign_name(option.variable) or ""
        is_asked = group in ("", "dynamo", *groups)
        if is_asked and environment.get(foreign) and option.variable not in environment:
            own[option.variable] = environment[foreign]
    return own
