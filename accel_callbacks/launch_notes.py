"""Notes that a process leaves for the launcher that has started it, in a folder of the launch."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_callbacks.local_files import replace

__all__ = ["JOURNAL", "VARIABLE", "leave_note", "read_note"]

#: Environment variable with the folder; not set by other launchers.
VARIABLE = "ACCEL_LAUNCH_NOTES"
JOURNAL = "journal.json"  # where the run has its journal


def leave_note(name: str, content: Any) -> None:
    """Write a note, in one step; do nothing if no launcher reads it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    with suppress(OSError):  # such as a full disk; or the launcher, and its folder, are gone
        part = Path(folder, f"{name}.{os.getpid()}")
        part.write_text(json.dumps(content), encoding="utf-8")
        replace(part, Path(folder, name))


def read_note(folder: Path, name: str) -> Any:
    """Return the content of a note, None if nobody has left it."""
    with suppress(OSError, ValueError):
        return json.loads((folder / name).read_text(encoding="utf-8"))
    return None
