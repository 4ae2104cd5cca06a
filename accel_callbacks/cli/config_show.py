"""``accel config show``: every setting, its value and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_callbacks.cli.text import printable, table
from accel_callbacks.launch.config_file import PROJECT_FILE, default_path
from accel_callbacks.launch.option import SettingsError
from accel_callbacks.launch.resolve import Resolved, refuse_unbuilt, resolve_settings
from accel_callbacks.launch.settings import all_options


def run(
    config_file: str | None, script: str | None, as_json: bool, environment: Mapping[str, str]
) -> int:
    """Print what a launch would use, the command line apart."""
    resolved = resolve_settings({}, config_file, script, environment)
    print(_json(resolved) if as_json else _text(resolved, script, environment))
    return 0


def _text(resolved: Resolved, script: str | None, environment: Mapping[str, str]) -> str:
    lines = [_file_line(resolved, script, environment), ""]
    idle = resolved.idle()
    lines.append(table(("SETTING", "VALUE", "FROM"), _rows(resolved, idle)))
    if refused := _refusal(resolved):
        lines += ["", printable(f"accel launch stops: {refused}")]
    return "\n".join(lines)


def _file_line(resolved: Resolved, script: str | None, environment: Mapping[str, str]) -> str:
    if resolved.file is not None:
        return printable(f"config file: {resolved.file}")
    start = Path.cwd() if script is None else Path(script).resolve().parent
    own = default_path(environment)
    return printable(f"config file: none ({PROJECT_FILE} in {start} or above it, then {own})")


def _rows(resolved: Resolved, idle: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """One row a setting; a block of which nothing is given has one row of its own."""
    shown = {one.block for one in all_options() if one.block and resolved.given(one.path)}
    for one in all_options():
        if one.model is not None and one.name in shown:
            continue
        if one.block and one.block not in shown:
            continue
        origin = "default" if one.model is not None else resolved.origins[one.path]
        reason = f"; no effect: {idle[one.path]}" if one.path in idle else ""
        yield one.path, _shown(resolved.value(one.path)), f"{origin}{reason}"
    for key, reason in resolved.gone.items():
        yield key, "...", f"{resolved.file}; no effect: {reason}"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _refusal(resolved: Resolved) -> str:
    try:
        refuse_unbuilt(resolved)
    except SettingsError as error:
        return str(error)
    return ""


def _json(resolved: Resolved) -> str:
    idle = resolved.idle()
    settings = {
        one.path: {
            "value": resolved.value(one.path),
            "origin": resolved.origins[one.path],
            "no_effect": idle.get(one.path),
        }
        for one in all_options()
        if one.model is None
    }
    file = None if resolved.file is None else str(resolved.file)
    facts = {"file": file, "refused": _refusal(resolved) or None, "settings": settings}
    return json.dumps(facts, indent=2)
