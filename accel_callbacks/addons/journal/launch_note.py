"""The note by which a run tells the launcher of its processes where its journal is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint_io.local_files import replace

__all__ = ["VARIABLE", "leave_note", "read_note"]

#: Environment variable with the folder of the launch; not set by other launchers.
VARIABLE = "ACCEL_LAUNCH_NOTES"
_NAME = "journal.json"


def leave_note(content: Mapping[str, str]) -> None:
    """Write the note, in one step; do nothing if no launcher reads it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    with suppress(OSError):  # such as a full disk; or the launcher, and its folder, are gone
        part = Path(folder, f"{_NAME}.{os.getpid()}")
        part.write_text(json.dumps(content), encoding="utf-8")
        replace(part, Path(folder, _NAME))


def read_note(folder: Path) -> Any:
    """Return the content of the note, None if nobody has left it."""
    with suppress(OSError, ValueError):
        return json.loads((folder / _NAME).read_text(encoding="utf-8"))
    return None
