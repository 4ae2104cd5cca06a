"""Public names stay importable from the modules where scripts found them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

#: For each public module the names in its ``__all__``, and the entry point of the command line.
RECORDED: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "data" / "public_names.json").read_text(encoding="utf-8")
)


def missing_from(module: str, names: list[str]) -> list[str]:
    found = importlib.import_module(module)
    return [name for name in names if not hasattr(found, name)]


def test_public_names_are_where_they_were() -> None:
    assert all(RECORDED.values())
    missing = {module: missing_from(module, names) for module, names in RECORDED.items()}
    assert {module: names for module, names in missing.items() if names} == {}


def test_a_name_that_is_gone_is_found() -> None:
    assert missing_from("accel_callbacks", ["Accelerator", "Gone"]) == ["Gone"]
