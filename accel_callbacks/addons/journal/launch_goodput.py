"""The useful part of the time of a launch with several attempts, by the journal of its run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from accel_callbacks.launch.extension import LaunchExtension
from accel_callbacks.launch.launch_folder import launch_folder
from checkpoint_io.local_files import replace

__all__ = ["LaunchGoodput", "leave_note"]

#: Environment variable with the folder of the launch; not set by other launchers.
_VARIABLE = "ACCEL_LAUNCH_NOTES"
_NAME = "journal.json"


def leave_note(content: Mapping[str, str]) -> None:
    """Write the note, in one step; do nothing if no launcher reads it."""
    folder = os.environ.get(_VARIABLE)
    if not folder:
        return
    with suppress(OSError):  # such as a full disk; or the launcher, and its folder, are gone
        part = Path(folder, f"{_NAME}.{os.getpid()}")
        part.write_text(json.dumps(content), encoding="utf-8")
        replace(part, Path(folder, _NAME))


class LaunchGoodput(LaunchExtension):
    """Lets the run say where its journal is, and reads the goodput from it."""

    def start_workers(self, stack: ExitStack, restarts: int) -> Mapping[str, str]:
        """Return the variable with the folder for the note of the run."""
        self._folder = stack.enter_context(launch_folder(Path(gettempdir())))
        return {_VARIABLE: str(self._folder)}

    def summary(self) -> str:
        """Return the useful part of the time; empty for a run without a journal."""
        note = _read_note(self._folder)
        if note is None:
            return ""
        from accel_callbacks.addons.journal import Goodput, Journal

        try:
            goodput = Goodput.of(Journal.read(note["folder"], note["run_id"]))
        except Exception as error:  # the journal is of a run that was killed, or elsewhere
            return f"no goodput: {type(error).__name__}: {error}"
        return f"goodput {goodput.share:.1%}: `accel report {note['folder']}` shows the rest"


def _read_note(folder: Path) -> Any:
    """Return the content of the note, None if nobody has left it."""
    with suppress(OSError, ValueError):
        return json.loads((folder / _NAME).read_text(encoding="utf-8"))
    return None
