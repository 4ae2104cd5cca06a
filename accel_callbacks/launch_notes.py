"""Notes that a process leaves for the launcher that has started it, in a folder of the launch."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_callbacks.local_files import replace

__all__ = [
    "IMPORTS",
    "JOURNAL",
    "VARIABLE",
    "WARM",
    "leave_note",
    "note_imports",
    "read_note",
]

#: Environment variable with the folder; not set by other launchers.
VARIABLE = "ACCEL_LAUNCH_NOTES"
IMPORTS = "imports.json"  # modules of a process that has trained, and what it changed before
JOURNAL = "journal.json"  # where the run has its journal
WARM = "warm.json"  # the fork server has imported those modules


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


def note_imports() -> None:
    """Leave the modules of this process, with which the processes of a restart may begin.

    Only the last process of a machine does: what the first one has beside them is for trackers.
    """
    folder = os.environ.get(VARIABLE)
    last = os.environ.get("LOCAL_WORLD_SIZE", "").isdecimal() and os.environ.get(
        "LOCAL_RANK"
    ) == str(int(os.environ["LOCAL_WORLD_SIZE"]) - 1)
    if not folder or not last or sys.platform != "linux" or Path(folder, IMPORTS).exists():
        return
    leave_note(IMPORTS, {"modules": _modules(), "changed": _changed_variables()})


def _modules() -> dict[str, str]:
    """Return the files of the imported modules, in the order in which their imports began."""
    files = {}
    for name, module in list(sys.modules.items()):
        with suppress(Exception):  # anything can stand in sys.modules
            # A lazy module is imported when its attributes are asked for.
            spec = object.__getattribute__(module, "__dict__").get("__spec__")
            if spec is not None and spec.name == name and os.path.isabs(spec.origin):
                files[name] = spec.origin
    return files


def _changed_variables() -> dict[str, str | None]:
    """Return the variables that differ from those with which this process was started."""
    initial = {}
    for pair in Path("/proc/self/environ").read_bytes().split(b"\0"):
        name, _, value = pair.partition(b"=")
        initial[os.fsdecode(name)] = os.fsdecode(value)
    initial.pop("", None)
    names = sorted({*initial, *os.environ})
    return {
        name: os.environ.get(name) for name in names if initial.get(name) != os.environ.get(name)
    }
