"""DVCLiveTracker: plain files that DVC compares and plots."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint_io.local_files import remove, replace
from loggers.base import RunInfo, Scalar, Status, Tracker
from loggers.file_names import portable_path
from loggers.trackers.tool import ItemTracker, local_folder, run_name
from loggers.values import stored_config

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(ItemTracker):
    """Writes the files of DVCLive to ``<logging_dir>/dvclive/<run id>``.

    No DVC repository is needed, nothing is committed, and no ``dvc.yaml`` is written unless
    requested by the options. A resume continues in the same folder, truncated to the resumed step.
    Strings, NaN and infinities are recorded as text. The status is in ``metrics.json``.

    Args:
        all_ranks: log on every rank, each to its own folder.
        live: a ``Live`` to use in place of a new one.
        **options: arguments of ``dvclive.Live``; they override the defaults above. With a
            constant ``dir``, a new run replaces the files of the previous one.

    Raises:
        ImportError: from `start`, if dvclive is not installed.
        ValueError: from `start`, if ``logging_dir`` is a remote URL and there is no ``dir``.

    Example:
        >>> tracker = DVCLiveTracker(report="html")
        >>> tracker.raw is None  # the dvclive Live, once started
        True
    """

    name = "dvclive"
    requires = ("dvclive",)
    install = "dvclive"
    derives_ids = True
    log_audio, log_video = Tracker.log_audio, Tracker.log_video
    _changed = False  # something was logged since the last flush

    def __init__(self, *, all_ranks: bool = False, live: Any = None, **options: Any) -> None:
        super().__init__(all_ranks=all_ranks, **options)
        self._given = live

    def _tool_of_script(self) -> Any:
        return self._given

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write ``params.yaml``, nested like the config, without secrets."""
        self._target().log_params(stored_config(config))

    def log(
        self,
        scalars: Mapping[str, Scalar],
        step: int,
        *,
        timestamp: bool = False,
        plot: bool = True,
    ) -> None:
        """Append to one file per metric; ``metrics.json`` is written at the next flush.

        Args:
            scalars: values by name.
            step: optimizer steps so far.
            timestamp: of ``Live.log_metric``.
            plot: of ``Live.log_metric``.
        """
        live = self._at(step)
        for name, value in scalars.items():
            live.log_metric(portable_path(name), value, timestamp=timestamp, plot=plot)
        self._note_step(step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Write ``plots/custom/<name>/<step>.json``, plotted over the first column."""
        points = [dict(zip(columns, row, strict=True)) for row in rows]
        plotted = list(columns[1:]) or list(columns)
        self._at(step).log_plot(f"{portable_path(name)}/{step}", points, x=columns[0], y=plotted)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Copy a file or folder to ``artifacts/``; needs a DVC repository."""
        self._target().log_artifact(path, type=kind, name=name, copy=True, cache=False)

    def flush(self) -> None:
        """Write ``metrics.json``, and the report if one is configured."""
        live = self._target()
        if self._changed:
            live.sync()
            self._changed = False

    def _image(self, name: str, image: Any, step: int, caption: str | None = None) -> None:
        """Write ``plots/images/<name>/<step>.png``; the caption is not recorded."""
        self._at(step).log_image(f"{portable_path(name)}/{step}.png", image)

    def _text(self, name: str, text: str, step: int) -> None:
        """Write ``text/<name>/<step>.txt``, because DVCLive cannot log texts."""
        path = Path(self._at(step).dir, "text", portable_path(name), f"{step}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Open a ``Live``."""
        keep = self._begin(run)
        self._run_id = resumed or run_name(run)
        ours: dict[str, Any] = {"save_dvc_exp": False, "dvcyaml": None, "resume": bool(resumed)}
        if "dir" not in self._options:
            ours["dir"] = os.path.join(
                local_folder(run, "dvclive", "set dir="), portable_path(self._run_id)
            )
        merged = {**ours, **self._options}
        if merged["resume"] and keep is not None:
            _truncate(Path(merged["dir"]), keep)
        self._changed = False
        return self._package.Live(**merged)

    def _id(self) -> str:
        return str(self._run_id)

    def _close(self, live: Any, status: Status) -> None:
        """Write the status to ``metrics.json`` and end the ``Live``."""
        live.summary["status"] = status
        live.end()

    def _at(self, step: int) -> Any:
        """Return the ``Live``, set to a step."""
        live = self._target()
        live.step = step
        self._changed = True
        return live


def _truncate(folder: Path, keep: int) -> None:
    """Remove the rows of steps above ``keep``, which are logged again."""
    for path in sorted(folder.glob("plots/metrics/**/*.tsv")):
        text = path.read_text(encoding="utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t"))
        past = [row for row in rows if _step_of(row) is not None and _step_of(row) <= keep]
        if len(past) < len(rows):
            _rewrite(path, list(rows[0]), past)


def _step_of(row: Mapping[str, Any]) -> Any:
    """Return the step of a row; None if the row is incomplete after a crash."""
    step = row.get("step")
    return int(step) if step is not None and step.isdecimal() else None


def _rewrite(path: Path, header: list[str], rows: list[dict[str, Any]]) -> None:
    """Replace a file of metrics atomically."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, header, delimiter="\t", lineterminator=os.linesep)
    writer.writeheader()
    writer.writerows(rows)
    temporary = path.with_suffix(".tsv.part")
    try:
        temporary.write_text(buffer.getvalue(), encoding="utf-8", newline="")
        replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise
