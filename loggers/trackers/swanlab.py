"""SwanLab, offline unless there is an API key."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.encode import gif
from loggers.multimedia.files import figure_picture, picture
from loggers.trackers.line_file import is_remote
from loggers.trackers.tool import ToolTracker, local_folder, name_of_run, same_random_numbers
from loggers.values import plain_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SwanLabTracker"]

_STATES = {"success": "success", "failed": "crashed", "interrupted": "aborted"}


class SwanLabTracker(ToolTracker):
    """Logs to a SwanLab run, with files below ``<logging_dir>/swanlab``.

    The run is offline (upload it later with ``swanlab sync <folder>``) when there is no API key and
    neither ``mode`` nor ``SWANLAB_MODE`` nor a config file says otherwise. A resume goes on under
    the same run id; offline, each process leaves a folder of its own. SwanLab ignores steps that a
    metric already has. Strings are recorded as text, NaN and infinities as they are. A run that the
    script has open is used, and left open.

    Args:
        all_ranks: log on every process, one SwanLab run a rank, grouped by the run's name.
        **init_kwargs: arguments of ``swanlab.init``; they win over everything said here.
            ``settings`` may be a dict.

    Raises:
        ImportError: from `start`, when swanlab is not installed.

    >>> tracker = SwanLabTracker(mode="offline", settings={"probe": {"monitor": False}})
    >>> tracker.raw is None  # the swanlab Run, once started
    True
    """

    name = "swanlab"
    requires = ("swanlab",)
    install = "swanlab"
    needs_rising_steps = True

    def __init__(self, *, all_ranks: bool = False, **init_kwargs: Any) -> None:
        super().__init__(all_ranks=all_ranks)
        self._init_kwargs = init_kwargs
        self._swanlab: Any = None
        self._borrowed = False

    def start(self, run: RunInfo) -> None:
        """Call ``swanlab.init``, or take the run that is open."""
        self._swanlab = self._import("swanlab")
        resumed = self._resumed(run, named=True)
        self._borrowed = self._swanlab.has_run()
        if self._borrowed:
            self._tool = self._swanlab.get_run()
        else:
            with same_random_numbers():
                self._tool = self._swanlab.init(**self._arguments(run, resumed))
        self._run_id = str(self._tool.id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._opened().config.update(plain_config(config))

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Record the values at a step."""
        run, text = self._opened(), self._swanlab.Text
        run.log({k: text(v) if isinstance(v, str) else v for k, v in scalars.items()}, step=step)
        self._seen(step)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record pictures with their captions. Needs Pillow."""
        made = {}
        for name, array in images.items():
            texts = list((captions or {}).get(name, ())) + [None] * len(array)
            pairs = zip(array, texts, strict=False)
            made[name] = self._made("Image", ((picture(a), {"caption": c}) for a, c in pairs))
        self._opened().log(made, step=step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as HTML, for which no chart package is needed."""
        page = _html_table(columns, rows)
        self._opened().log({name: self._made("Html", [(page, {})])}, step=step)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts."""
        made = {name: self._made("Text", [(text, {})]) for name, text in texts.items()}
        self._opened().log(made, step=step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record sounds. Needs soundfile."""
        options = {"sample_rate": sample_rate}
        made = {name: self._made("Audio", [(s.T, options)]) for name, s in audio.items()}
        self._opened().log(made, step=step)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Record films as GIF. Needs Pillow."""
        made = {name: self._made("Video", [(gif(v, fps), {})]) for name, v in videos.items()}
        self._opened().log(made, step=step)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures as pictures. Needs Pillow."""
        made = {n: self._made("Image", [(figure_picture(f), {})]) for n, f in figures.items()}
        self._opened().log(made, step=step)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Save a file, or a folder's files, under their own names; offline these are links."""
        run, path = self._opened(), os.path.abspath(path)
        pattern = os.path.join(path, "**") if os.path.isdir(path) else path
        run.save(pattern, base_path=os.path.dirname(path), policy="now")

    def finish(self, status: Status = "success") -> None:
        """Finish the run as success, crashed or aborted."""
        self._end(status)
        run = self._closed()
        if run is None or self._borrowed or not run.alive:  # SwanLab's own hooks may be first
            return
        error = None if status == "success" else f"the run {status}"
        run.finish(state=_STATES[status], error=error)

    def _made(self, kind: str, items: Iterable[tuple[Any, dict[str, Any]]]) -> list[Any]:
        """Make SwanLab's own objects."""
        self._opened()
        return [getattr(self._swanlab, kind)(value, **options) for value, options in items]

    def _arguments(self, run: RunInfo, resumed: str | None) -> dict[str, Any]:
        """Return the arguments of ``swanlab.init``: the user's, then ours where there is none."""
        swanlab, name = self._swanlab, name_of_run(run)
        found = swanlab.Settings()
        ours: dict[str, Any] = {
            "project": re.sub(r"[^0-9a-zA-Z_\-+.]", "-", run.name)[:100],
            "name": name,
            "id": resumed or re.sub(r'[<>:"/\\|?*#%\x00-\x1f\x7f]', "-", name),
            "resume": "allow" if resumed else "never",
        }
        if "mode" not in found.model_fields_set and not found.api_key:
            ours["mode"] = "offline"
        if not is_remote(run.logging_dir):
            ours["log_dir"] = local_folder(run, "swanlab", "")
        if not self.main_process_only:
            ours["group"] = run.name
        merged = {**ours, **self._init_kwargs}
        given = self._init_kwargs.get("settings")
        if given is None or isinstance(given, Mapping):  # nobody is there to answer a question
            merged["settings"] = swanlab.Settings(**{"interactive": False, **(given or {})})
        return merged


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as HTML; None is an empty cell."""

    def line(cells: Iterable[Any], tag: str) -> str:
        texts = (html.escape("" if cell is None else str(cell)) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
