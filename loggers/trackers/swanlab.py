"""SwanLabTracker: offline unless there is an API key."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from checkpoint_io.local_files import local_path
from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.encode import pil_image
from loggers.trackers.tool import ItemTracker, local_folder, run_name, tool_of
from loggers.values import plain_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SwanLabTracker"]

_STATES = {"success": "success", "failed": "crashed", "interrupted": "aborted"}


class SwanLabTracker(ItemTracker):
    """Logs to a SwanLab run, with files below ``<logging_dir>/swanlab``.

    The run is offline (upload it later with ``swanlab sync <folder>``) if there is no API key and
    the mode is not set by ``mode``, ``SWANLAB_MODE`` or a config file. A resume continues under the
    same run id; offline, each process creates its own folder. SwanLab ignores steps that a metric
    already has. Strings are recorded as text; NaN and infinities are kept. If the script has an
    open run, it is used, and not closed.

    Args:
        all_ranks: log on every rank, one SwanLab run per rank, grouped by the run's name.
        **options: arguments of ``swanlab.init``; they override the defaults above.
            ``settings`` may be a dict.

    Raises:
        ImportError: from `start`, if swanlab is not installed.

    Example:
        >>> tracker = SwanLabTracker(mode="offline", settings={"probe": {"monitor": False}})
        >>> tracker.raw is None  # the swanlab Run, once started
        True
    """

    name = "swanlab"
    requires = ("swanlab",)
    install = "swanlab"
    needs_rising_steps = derives_ids = True

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._target().config.update(plain_config(config))

    def log(
        self, scalars: Mapping[str, Scalar], step: int, *, print_to_console: bool | None = None
    ) -> None:
        """Record the values at a step."""
        self._target()
        text = self._package.Text
        values = {k: text(v) if isinstance(v, str) else v for k, v in scalars.items()}
        self.log_objects(values, step, print_to_console=print_to_console)
        self._note_step(step)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record images with their captions. Needs Pillow."""
        objects: dict[str, list[Any]] = {}
        for name, array in images.items():
            texts = (captions or {}).get(name, ())
            objects[name] = [
                self._create("Image", pil_image(pixels), caption=caption)
                for pixels, caption in zip_longest(array, texts)
            ]
        self._target().log(objects, step=step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as HTML, which needs no chart package."""
        page = self._create("Html", _html_table(columns, rows))
        self._target().log({name: [page]}, step=step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record audio. Needs soundfile."""
        objects = {
            name: [self._create("Audio", samples.T, sample_rate=sample_rate)]
            for name, samples in audio.items()
        }
        self._target().log(objects, step=step)

    def takes_object(self, value: Any) -> bool:
        """Return True for objects of SwanLab, and lists of these."""
        return tool_of(value) == "swanlab"

    def log_objects(
        self, objects: Mapping[str, Any], step: int, *, print_to_console: bool | None = None
    ) -> None:
        """Record objects of SwanLab, which also prints them if told to."""
        told = {} if print_to_console is None else {"print_to_console": print_to_console}
        self._target().log(dict(objects), step=step, **told)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Save a file or folder under its own name; offline as links."""
        run, path = self._target(), os.path.abspath(path)
        pattern = os.path.join(path, "**") if os.path.isdir(path) else path
        run.save(pattern, base_path=os.path.dirname(path), policy="now")

    def _image(self, name: str, image: Any, step: int, caption: str | None = None) -> None:
        self._target().log({name: [self._create("Image", image, caption=caption)]}, step=step)

    def _text(self, name: str, text: str, step: int) -> None:
        self._target().log({name: [self._create("Text", text)]}, step=step)

    def _video(self, name: str, data: bytes, step: int) -> None:
        """Record a GIF."""
        self._target().log({name: [self._create("Video", data)]}, step=step)

    def _tool_of_script(self) -> Any:
        return self._package.get_run() if self._package.has_run() else None

    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Call ``swanlab.init``."""
        return self._package.init(**self._arguments(run, resumed))

    def _close(self, tool: Any, status: Status) -> None:
        """Finish the run as success, crashed or aborted."""
        if not self._borrowed and tool.alive:  # SwanLab's own exit hook may run first
            error = None if status == "success" else f"the run {status}"
            tool.finish(state=_STATES[status], error=error)

    def _arguments(self, run: RunInfo, resumed: str | None) -> dict[str, Any]:
        """Return the arguments of ``swanlab.init``: defaults, overridden by the user's."""
        name, settings = run_name(run), self._package.Settings()
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
        merged = {**ours, **self._options}
        settings = self._options.get("settings") or {}
        if isinstance(settings, Mapping):
            settings = {"interactive": False, **settings}  # a prompt would block
            merged["settings"] = self._package.Settings(**settings)
        return merged


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as HTML; None is an empty cell."""

    def line(cells: Iterable[Any], tag: str) -> str:
        texts = (html.escape("" if cell is None else str(cell)) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
