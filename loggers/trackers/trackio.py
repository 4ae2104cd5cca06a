"""TrackioTracker: a local database that Trackio's dashboard shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from checkpoint_io.local_files import base_name
from loggers.base import RunInfo, Scalar, Status
from loggers.trackers.tool import ItemTracker, as_float, run_name, tool_of
from loggers.values import plain_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TrackioTracker"]


class TrackioTracker(ItemTracker):
    """Logs to a Trackio run, in a local database unless a Space or a server is configured.

    Trackio writes to ``$TRACKIO_DIR`` only, by default ``trackio`` in Hugging Face's cache folder;
    ``logging_dir`` is not used. Set the variable before Python starts to move the database. A
    resume continues the same run; values of repeated steps are recorded twice. NaN and infinities
    are kept. A run that fails or is interrupted gets an alert, because Trackio has no status.

    Args:
        all_ranks: log on every rank, one Trackio run per rank, grouped by the run's name.
        **options: arguments of ``trackio.init``; they override the defaults above.

    Raises:
        ImportError: from `start`, if trackio is not installed.

    Example:
        >>> tracker = TrackioTracker(auto_log_cpu=False)
        >>> tracker.raw is None  # the trackio Run, once started
        True
    """

    name = "trackio"
    requires = ("trackio",)
    install = "trackio"
    derives_ids = True

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Update the run's config, which Trackio stores with the next values."""
        plain = plain_config(config)
        # Trackio reserves keys that begin with an underscore.
        self._target().config.update({key.lstrip("_") or key: v for key, v in plain.items()})

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Log the values at a step; they reach the database within about a second."""
        values = {
            # Trackio drops integers beyond 64 bits.
            name: as_float(value) if isinstance(value, int) and value.bit_length() > 63 else value
            for name, value in scalars.items()
        }
        self._target().log(values, step=step)
        self._note_step(step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table."""
        table = self._create("Table", columns=list(columns), data=[list(row) for row in rows])
        self._target().log({name: table}, step=step)

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Record histograms, in 64 bins."""
        objects = {name: self._create("Histogram", values) for name, values in histograms.items()}
        self._target().log(objects, step=step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record audio as 16-bit WAV."""
        objects = {}
        for name, samples in audio.items():
            whole = (samples * 32767).round().astype("int16")  # the volume of floats is normalized
            objects[name] = self._create("Audio", whole, sample_rate=sample_rate)
        self._target().log(objects, step=step)

    def takes_object(self, value: Any) -> bool:
        """Return True for objects of Trackio, and lists of these."""
        return tool_of(value) == "trackio"

    def log_objects(self, objects: Mapping[str, Any], step: int) -> None:
        """Record objects of Trackio."""
        self._target().log(dict(objects), step=step)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Store a version of a file or folder under its name."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", name or base_name(path))
        self._target().log_artifact(path, name=name, type=kind)

    def _image(self, name: str, image: Any, step: int, caption: str | None = None) -> None:
        self._target().log({name: self._create("Image", image, caption=caption)}, step=step)

    def _text(self, name: str, text: str, step: int) -> None:
        """Record a text, shown as Markdown."""
        self._target().log({name: self._create("Markdown", text)}, step=step)

    def _video(self, name: str, data: bytes, step: int) -> None:
        """Record a GIF, which needs no ffmpeg."""
        video = self._create("Video", self._scratch.file(data, ".gif"))
        self._target().log({name: video}, step=step)

    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Call ``trackio.init``."""
        ours: dict[str, Any] = {
            "project": run.name,
            "name": resumed or run_name(run),
            "resume": "allow" if resumed else "never",
            "embed": False,  # no dashboard in a notebook unless requested
        }
        if not self.main_process_only:
            ours["group"] = run.name
        return self._package.init(**{**ours, **self._options})

    def _id(self) -> str:
        return str(self._tool.name)

    def _close(self, tool: Any, status: Status) -> None:
        """Write what is pending, for up to Trackio's limit of 30 seconds, and end the run."""
        if status != "success":
            levels = self._package.AlertLevel
            level = levels.ERROR if status == "failed" else levels.WARN
            tool.alert(f"run {status}", level=level)
        tool.finish()
