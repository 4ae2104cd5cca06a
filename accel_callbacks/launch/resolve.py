"""Resolve settings: command line over config file over environment variables over defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_callbacks.launch.config_file import find_config, read_config, values_of
from accel_callbacks.launch.settings import LaunchSettings, all_options, find
from accel_callbacks.launch.unsupported import IDLE, UNBUILT
from accel_callbacks.plugins.option import Option, SettingsError

__all__ = [
    "Resolved",
    "refuse_absent_gpus",
    "refuse_unbuilt",
    "resolve_conflicts",
    "resolve_settings",
]

_SAME = (("nproc_per_node", "num_processes"), ("nnodes", "num_machines"))
_ON_DEVICES = (
    *("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
    *("MULTI_HPU", "MULTI_NEURON", "XLA"),
)


@dataclass(frozen=True)
class Resolved:
    """Settings with the origin of each.

    Args:
        settings: what a launch is made of.
        origins: for each setting by its path, such as ``"fsdp_config.fsdp_version"``:
            ``"command line"``, ``"accel.yaml (its path)"``, ``"environment variable X"``,
            ``"default"``, or the setting that implies it.
        file: the config file, if there is one.
        gone: obsolete keys of the file, and why.
    """

    settings: LaunchSettings
    origins: Mapping[str, str]
    file: Path | None = None
    gone: Mapping[str, str] = field(default_factory=dict)

    def value(self, path: str) -> Any:
        """Return the value of a setting; its default if its block is not given."""
        block, _, name = path.rpartition(".")
        if not block:
            return getattr(self.settings, name)
        values = getattr(self.settings, block)
        return find(path).default if values is None else values[name]

    def given(self, path: str) -> bool:
        """Return whether a setting was given anywhere."""
        return self.origins.get(path, "default") != "default"

    def idle(self) -> dict[str, str]:
        """Return the given settings that have no effect in this launch, and why."""
        reasons = dict(self.gone)
        for option in all_options():
            if option.kind == "block" or not self.given(option.path):
                continue
            rule = IDLE.get(option.path) or IDLE.get(option.block)
            if option.idle:
                reasons[option.path] = option.idle
            elif rule is not None and rule[0](self.settings):
                reasons[option.path] = rule[1]
        return reasons

    def variables(self) -> dict[str, str]:
        """Return given settings of the Accelerator as ``ACCEL_*`` variables for the processes."""
        return {
            option.variable: _text(self.value(option.path))
            for option in all_options()
            if option.variable and self.given(option.path)
        }


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def resolve_settings(
    cli: Mapping[str, Any],
    config_file: str | None,
    script: str | None,
    environment: Mapping[str, str],
) -> Resolved:
    """Merge the command line, the config file, environment variables and defaults.

    Args:
        cli: parsed command line; None counts as not given, and other options are ignored.
        config_file: path of the file; None searches for one.
        script: where the search starts; None for the working directory.
        environment: usually ``os.environ``.

    Raises:
        SettingsError: a setting is invalid, or contradicts another; one line with its origin.
    """
    path = Path(config_file) if config_file is not None else find_config(script, environment)
    values, origins = _from_environment(environment)
    gone: dict[str, str] = {}
    if path is not None:
        origin = f"{path.name} ({path})"
        read, gone = values_of(read_config(path), str(path))
        values |= read
        origins |= dict.fromkeys(read, origin)
    typed = _from_command_line(cli)
    values |= typed
    origins |= dict.fromkeys(typed, "command line")
    resolve_conflicts(values, origins)
    everything = {option.path: origins.get(option.path, "default") for option in all_options()}
    return Resolved(_build_settings(values), everything, path, gone)


def _from_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in all_options():
        text = environment.get(option.variable) if option.variable else None
        if text is None or option.is_blank(text):
            continue
        try:
            values[option.path] = option.parse(text)
        except ValueError as error:
            raise SettingsError(f"environment variable {option.variable} {error}") from None
        origins[option.path] = f"environment variable {option.variable}"
    return values, origins


def _from_command_line(cli: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in all_options():
        argument = _argument(option, cli) if option.dest else None
        if argument is None:
            continue
        try:
            values[option.path] = option.read(
                list(argument) if isinstance(argument, tuple) else argument
            )
        except ValueError as error:
            raise SettingsError(f"{option.flag} {error}") from None
    return values


def _argument(option: Option, cli: Mapping[str, Any]) -> Any:
    """Return what a flag of an option says, or one that stands for a choice of it."""
    said = cli.get(option.dest)
    for flag, choice in option.shorthands.items() if option.choices else ():
        if cli.get(flag.removeprefix("--")):
            if said not in (None, choice):
                raise SettingsError(f"{flag} contradicts {option.dest} {said}: give one of them")
            said = choice
    return said


def _build_settings(values: Mapping[str, Any]) -> LaunchSettings:
    """Build the settings; a block without given options is None."""
    settings: dict[str, Any] = {path: values[path] for path in values if "." not in path}
    for block in {path.partition(".")[0] for path in values if "." in path}:
        settings[block] = {
            option.name: values.get(option.path, option.default)
            for option in all_options()
            if option.block == block
        }
    return LaunchSettings(**settings)


def resolve_conflicts(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Drop, in place, settings that contradict one of higher precedence, and add implied ones.

    Raises:
        SettingsError: two settings of the same origin contradict each other.
    """
    for first, second in _SAME:
        if first in values and second in values:
            _keep_stronger(first, second, values, origins)
    kind = values.get("distributed_type")
    processes = max(values.get("num_processes") or 1, values.get("nproc_per_node") or 1)
    if kind == "NO" and processes > 1:
        rival = "num_processes" if "num_processes" in values else "nproc_per_node"
        _keep_stronger("distributed_type", rival, values, origins)
    if kind in _ON_DEVICES and values.get("use_cpu"):
        _keep_stronger("distributed_type", "use_cpu", values, origins)
    if values.get("rdzv_backend") == "static" and ":" in (values.get("nnodes") or ""):
        # Accelerate always writes static, which does not allow a range of machines.
        _keep_stronger("nnodes", "rdzv_backend", values, origins)
    if values.get("distributed_type") == "MULTI_CPU":
        _all_on_cpu(values, origins)


def _keep_stronger(
    first: str, second: str, values: dict[str, Any], origins: dict[str, str]
) -> None:
    """Drop the setting of lower precedence; turn ``use_cpu`` off, as processes may inherit it."""
    rank, rival = _precedence(origins[first]), _precedence(origins[second])
    if rank == rival:
        raise SettingsError(
            f"{first}: {values[first]} contradicts {second}: {values[second]} "
            f"({origins[first]}): give one of them"
        )
    loser, winner = (second, first) if rank > rival else (first, second)
    del values[loser]
    if loser == "use_cpu":
        values[loser], origins[loser] = False, f"{winner} ({origins[winner]})"
    else:
        del origins[loser]


def _all_on_cpu(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Turn ``use_cpu`` on for MULTI_CPU; drop the latter if it is off with higher precedence."""
    denied = values.get("use_cpu") is False
    if denied and _precedence(origins["use_cpu"]) > _precedence(origins["distributed_type"]):
        del values["distributed_type"], origins["distributed_type"]
        return
    if not values.get("use_cpu"):
        values["use_cpu"] = True
        origins["use_cpu"] = f"distributed_type ({origins['distributed_type']})"


def _precedence(origin: str) -> int:
    """Rank an origin: environment variable 1, config file 2, command line 3."""
    if origin == "command line":
        return 3
    return 1 if origin.startswith("environment variable") else 2


def refuse_unbuilt(resolved: Resolved) -> None:
    """Refuse features that this version does not implement.

    Raises:
        SettingsError: one is requested; one line with the setting, its origin and an alternative.
    """
    for feature in UNBUILT:
        if feature.asked(resolved.settings):
            raise SettingsError(
                f"{feature.path}: {_text(resolved.value(feature.path))} "
                f"({resolved.origins[feature.path]}): {feature.reason}; {feature.instead}"
            )


def refuse_absent_gpus(resolved: Resolved, root: Path = Path("/")) -> None:
    """Refuse a launch on devices that are absent: it would silently train on the CPU.

    Raises:
        SettingsError: there is no such device; one line with the origin and an alternative.
    """
    from accel_callbacks.launch.machine import has_driver

    kind = resolved.settings.distributed_type
    if kind is not None and not has_driver(kind, root):
        name = kind.removeprefix("MULTI_")
        raise SettingsError(
            f"distributed_type: {kind} ({resolved.origins['distributed_type']}): this machine "
            f"shows no {name}; --use_cpu trains on the CPU"
        )
    ids = resolved.settings.gpu_ids
    on_gpus = ids is not None and not resolved.settings.use_cpu and kind in (None, "NO")
    if on_gpus and not has_driver("MULTI_GPU", root):
        raise SettingsError(
            f"gpu_ids: {ids} ({resolved.origins['gpu_ids']}): this machine shows no GPU; leave it "
            "out, or --use_cpu trains on the CPU"
        )
