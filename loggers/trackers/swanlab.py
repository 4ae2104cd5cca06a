"""SwanLabTracker: offline unless there is an API key."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loggers.base import RunInfo, Scalar, Status
from loggers.local_files import local_path
from loggers.multimedia.encode import figure_image, gif, pil_image
from loggers.trackers.tool import ToolTracker, local_folder, preserve_random_state, run_name
from loggers.values import plain_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SwanLabTracker"]

_STATES = {"success": "success", "failed": "crashed", "interrupted": "aborted"}


class SwanLabTracker(ToolTracker):
    """Logs to a SwanLab run, with files below ``<logging_dir>/swanlab``.

    The run is offline (upload it later with ``swanlab sync <folder>``) if there is no API key and
    the mode is not set by ``mode``, ``SWANLAB_MODE`` or a config file. A resume continues under the
    same run id; offline, each process creates its own folder. SwanLab ignores steps that a metric
    already has. Strings are recorded as text; NaN and infinities are kept. If the script has an
    open run, it is used, and not closed.

    Args:
        all_ranks: log on every rank, one SwanLab run per rank, grouped by the run's name.
        **init_kwargs: arguments of ``swanlab.init``; they override the defaults above.
            ``settings`` may be a dict.

    Raises:
        ImportError: from `start`, if swanlab is not installed.

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
        """Call ``swanlab.init``, or use the run that is open."""
        self._swanlab = self._import("swanlab")
        resumed = self._resumed_id(run, named=True)
        self._borrowed = self._swanlab.has_run()
        if self._borrowed:
            self._tool = self._swanlab.get_run()
        else:
            with preserve_random_state():
                self._tool = self._swanlab.init(**self._arguments(run, resumed))
        self._run_id = str(self._tool.id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._opened().config.update(plain_config(config))

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Record the values at a step."""
        run, text = self._opened(), self._swanlab.Text
        run.log({k: text(v) if isinstance(v, str) else v for k, v in scalars.items()}, step=step)
        self._logged(step)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record images with their captions. Needs Pillow."""
        made = {}
        for name, array in images.items():
            texts = list((captions or {}).get(name, ())) + [None] * len(array)
            pairs = zip(array, texts, strict=False)
            made[name] = self._create("Image", ((pil_image(a), {"caption": c}) for a, c in pairs))
        self._opened().log(made, step=step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as HTML, which needs no chart package."""
        page = _html_table(columns, rows)
        self._opened().log({name: self._create("Html", [(page, {})])}, step=step)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts."""
        made = {name: self._create("Text", [(text, {})]) for name, text in texts.items()}
        self._opened().log(made, step=step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record audio. Needs soundfile."""
        options = {"sample_rate": sample_rate}
        made = {name: self._create("Audio", [(s.T, options)]) for name, s in audio.items()}
        self._opened().log(made, step=step)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Record videos as GIF. Needs Pillow."""
        made = {name: self._create("Video", [(gif(v, fps), {})]) for name, v in videos.items()}
        self._opened().log(made, step=step)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures as images. Needs Pillow."""
        made = {n: self._create("Image", [(figure_image(f), {})]) for n, f in figures.items()}
        self._opened().log(made, step=step)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Save a file or folder under its own name; offline as links."""
        run, path = self._opened(), os.path.abspath(path)
        pattern = os.path.join(path, "**") if os.path.isdir(path) else path
        run.save(pattern, base_path=os.path.dirname(path), policy="now")

    def finish(self, status: Status = "success") -> None:
        """Finish the run as success, crashed or aborted."""
        self._end(status)
        run = self._release()
        if run is None or self._borrowed or not run.alive:  # SwanLab's own exit hook may run first
            return
        error = None if status == "success" else f"the run {status}"
        run.finish(state=_STATES[status], error=error)

    def _create(self, kind: str, items: Iterable[tuple[Any, dict[str, Any]]]) -> list[Any]:
        """Create SwanLab objects of a kind."""
        self._opened()
        return [getattr(self._swanlab, kind)(value, **options) for value, options in items]

    def _arguments(self, run: RunInfo, resumed: str | None) -> dict[str, Any]:
        """Return the arguments of ``swanlab.init``: defaults, overridden by the user's."""
        swanlab, name = self._swanlab, run_name(run)
        settings = swanlab.Settings()
        ours: dict[str, Any] = {
            "project": re.sub(r"[^0-9a-zA-Z_\-+.]", "-", run.name)[:100],
            "name": name,
            "id": resumed or re.sub(r'[<>:"/\\|?*#%\x00-\x1f\x7f]', "-", name),
            "resume": "allow" if resumed else "never",
        }
        if "mode" not in settings.model_fields_set and not settings.api_key:
            ours["mode"] = "offline"
        if local_path(run.logging_dir) is not None:
            ours["log_dir"] = local_folder(run, "swanlab", "")
        if not self.main_process_only:
            ours["group"] = run.name
        merged = {**ours, **self._init_kwargs}
        given = self._init_kwargs.get("settings")
        if given is None or isinstance(given, Mapping):  # a prompt would block
            merged["settings"] = swanlab.Settings(**{"interactive": False, **(given or {})})
        return merged


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as HTML; None is an empty cell."""

    def line(cells: Iterable[Any], tag: str) -> str:
        texts = (html.escape("" if cell is None else str(cell)) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
