"""The useful part of the time of a launch with several attempts, by the journal of its run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir

from accel_callbacks.addons.journal.launch_note import VARIABLE, read_note
from accel_callbacks.launch.extension import LaunchExtension
from accel_callbacks.launch.launch_folder import launch_folder

__all__ = ["LaunchGoodput"]


class LaunchGoodput(LaunchExtension):
    """Lets the run say where its journal is, and reads the goodput from it."""

    def start_workers(self, stack: ExitStack, restarts: int) -> Mapping[str, str]:
        """Return the variable with the folder for the note of the run."""
        self._folder = stack.enter_context(launch_folder(Path(gettempdir())))
        return {VARIABLE: str(self._folder)}

    def summary(self) -> str:
        """Return the useful part of the time; empty for a run without a journal."""
        note = read_note(self._folder)
        if note is None:
            return ""
        from accel_callbacks.addons.journal import Goodput, Journal

        try:
            goodput = Goodput.of(Journal.read(note["folder"], note["run_id"]))
        except Exception as error:  # the journal is of a run that was killed, or elsewhere
            return f"no goodput: {type(error).__name__}: {error}"
        return f"goodput {goodput.share:.1%}: `accel report {note['folder']}` shows the rest"
