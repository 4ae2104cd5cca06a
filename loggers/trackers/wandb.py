"""WandBTracker: offline unless there is an account and its server responds."""

from __future__ import annotations

import html
import http.client
import importlib
import logging
import os
import re
import time as clock
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from checkpoint_io.local_files import base_name, local_path
from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.encode import figure_png, gif, histogram, png, wav
from loggers.multimedia.files import Scratch
from loggers.trackers.tool import ToolTracker, tool_of
from loggers.values import plain_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["WandBTracker"]

_STEP_KEY = "trainer/global_step"  # the metric with the true step, named as by Lightning
_MODE_VARIABLES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_PROBE_TIMEOUT = 10.0  # seconds; a server that takes longer to respond is treated as down

_OFFLINE = (
    "W&B cannot be reached (%s): this run is logged offline. Upload it later with `wandb sync`; "
    "mode='offline' does the same without a warning."
)

_EXIT_CODES: dict[str, int] = {"success": 0, "failed": 1, "interrupted": 255}

# W&B's defaults lose 15 s of rows if the process is killed, and wait 90 s for a dead server.
_SETTINGS = {"x_transaction_log_flush_interval": 0.1, "init_timeout": 20.0, "silent": True}
# Seconds for which a row takes more values of its step; W&B keeps it in memory meanwhile.
_OPEN_S = 0.25

_logger = logging.getLogger("accel_callbacks.trackers")


class WandBTracker(ToolTracker):
    """Logs to a Weights & Biases run, with files below ``<logging_dir>/wandb``.

    The run is offline (upload it later with ``wandb sync``) if there is no API key and the mode is
    not set by ``mode``, WANDB_MODE or WANDB_DISABLED; also, with a warning, if the server does not
    respond within 20 seconds. A resume continues under the same run id; offline, each process
    creates its own folder, and ``wandb sync`` joins them.

    W&B drops values logged at a step lower than the last, so its own step counter only counts rows
    here. It equals the optimizer step as long as steps increase; the true step is the metric
    ``trainer/global_step`` in every row, and is the x-axis of all charts. Nothing is dropped: not
    a lower step, not a second value of one name at one step, not the repeated steps of a resumed
    run. A row is on disk within a second, so values that are logged later at the same step have a
    row of their own.

    Args:
        all_ranks: log on every rank, one W&B run per rank, grouped by the run's name.
        **options: arguments of ``wandb.init``; they override the defaults above.

    Raises:
        ImportError: from `start`, if wandb is not installed.

    Example:
        >>> tracker = WandBTracker(mode="offline", tags=["baseline"])
        >>> tracker.raw is None  # the wandb run, once started
        True
    """

    name = "wandb"
    requires = ("wandb",)
    install = "wandb"
    derives_ids = True

    def __init__(self, *, all_ranks: bool = False, **options: Any) -> None:
        super().__init__(all_ranks=all_ranks, **options)
        self._row = -1  # the latest value of W&B's own step counter
        self._step: int | None = None
        self._names: set[str] = set()
        self._open_since: float | None = None

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._target().config.update(plain_config(config), allow_val_change=True)

    def log(
        self,
        scalars: Mapping[str, Scalar],
        step: int,
        *,
        time: float | None = None,
        commit: bool | None = None,
    ) -> None:
        """Log a row; it is written at a flush, when the next begins, or with ``commit=True``.

        With ``commit=False`` no flush writes it.
        """
        self._write(dict(scalars), step, time, commit)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
        commit: bool | None = None,
    ) -> None:
        """Log one ``wandb.Image`` per image."""
        with self._files() as file:
            values = {
                name: [
                    self._package.Image(file(png(pixels), ".png"), caption=caption)
                    for pixels, caption in zip_longest(array, (captions or {}).get(name, ()))
                ]
                for name, array in images.items()
            }
            self._write(values, step, commit=commit)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Log one ``wandb.Image`` per figure."""
        with self._files() as file:
            values = {
                name: self._package.Image(file(figure_png(figure), ".png"))
                for name, figure in figures.items()
            }
            self._write(values, step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Log one ``wandb.Audio`` per clip."""
        with self._files() as file:
            values = {
                name: self._package.Audio(
                    file(wav(samples, sample_rate), ".wav"), sample_rate=sample_rate
                )
                for name, samples in audio.items()
            }
            self._write(values, step)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Log one ``wandb.Video`` per video, as a GIF (needs Pillow)."""
        with self._files() as file:
            values = {
                name: self._package.Video(file(gif(frames, fps), ".gif"), format="gif")
                for name, frames in videos.items()
            }
            self._write(values, step)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Log one ``wandb.Html`` per text."""
        self._write({name: self._html_of(text) for name, text in texts.items()}, step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int,
        *,
        commit: bool | None = None,
    ) -> None:
        """Log a ``wandb.Table``, whose columns may have mixed types."""
        table = self._create(
            "Table",
            columns=list(columns),
            data=[list(row) for row in rows],
            allow_mixed_types=True,
        )
        self._write({name: table}, step, commit=commit)

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Log one ``wandb.Histogram`` per name, of the finite values if there are any."""
        counted = {name: histogram(values) for name, values in histograms.items()}
        values = {
            name: self._create("Histogram", np_histogram=(bins["counts"], bins["edges"]))
            for name, bins in counted.items()
            if bins["counts"]
        }
        self._write(values, step)

    def takes_object(self, value: Any) -> bool:
        """Return False for objects of another tool; W&B takes arrays, lists and its own."""
        return tool_of(value) in (None, "wandb")

    def log_objects(
        self, objects: Mapping[str, Any], step: int, *, commit: bool | None = None
    ) -> None:
        """Log values as ``wandb.log`` takes them."""
        self._write(dict(objects), step, commit=commit)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Log a ``wandb.Artifact`` with the file or folder, or a reference to a URL."""
        self._target().log_artifact(_artifact(self._package, path, name, kind))

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Log ``str(model)``, under ``graph``."""
        self._write({"graph": self._html_of(str(model))}, self._last_step or 0)

    def flush(self) -> None:
        """Write the latest row, unless it is so new that values of its step may follow."""
        since = self._open_since
        if since is not None and clock.monotonic() - since >= _OPEN_S:
            self._target().log({}, step=self._row, commit=True)
            self._step = self._open_since = None

    @property
    def unflushed(self) -> bool:
        """Whether the latest row is still open."""
        return self._open_since is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the run id, the last step, and the number of W&B's latest row."""
        return {**super().state_dict(), "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run in ``state`` at the next `start`."""
        super().load_state_dict(state)
        self._row = state.get("row", -1)

    @property
    def run(self) -> Any:
        """The same as `raw`; Accelerate's name for it."""
        return self.raw

    @contextmanager
    def _files(self) -> Iterator[Callable[[bytes, str], str]]:
        """Write files for media objects to log inside the block, and remove them after it."""
        self._target()
        scratch = Scratch()
        try:
            yield scratch.file
        finally:
            scratch.close()

    def _html_of(self, text: str) -> Any:
        return self._create("Html", f"<pre>{html.escape(text)}</pre>", inject=False)

    def _write(
        self,
        values: dict[str, Any],
        step: int,
        time: float | None = None,
        commit: bool | None = None,
    ) -> None:
        """Log values in the row of their step, or in a new one if W&B would drop them there."""
        run = self._target()
        same = step == self._step and self._names.isdisjoint(values)
        row = self._row if same else max(step, self._row + 1)
        when = {} if time is None else {"_timestamp": time}
        run.log({_STEP_KEY: step, **when, **values}, step=row, commit=commit)
        self._names = self._names | values.keys() if same else set(values)
        if commit is not None:
            self._open_since = None
        elif not same or self._open_since is None:
            self._open_since = clock.monotonic()
        # A committed row takes no more values, so the next call begins another.
        self._row, self._step = row, None if commit else step
        self._note_step(step)

    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Call ``wandb.init``; if the server does not respond, the run is offline."""
        self._run_id = resumed or _run_id(run)
        tool = self._init(self._arguments(run))
        # Online, the server has the rows of a process that was killed after its last checkpoint.
        self._row = max(self._row if resumed else -1, tool.step - 1)
        self._step, self._names, self._open_since = None, set(), None
        tool.define_metric(_STEP_KEY)
        tool.define_metric("*", step_metric=_STEP_KEY)
        return tool

    def _id(self) -> str:
        disabled = getattr(self._tool, "disabled", False)  # such a run has a dummy id
        return str(self._run_id if disabled else self._tool.id)

    def _close(self, tool: Any, status: Status) -> None:
        """Finish the run with exit code 0 (success), 1 (failed) or 255 (interrupted)."""
        self._open_since = None
        tool.finish(exit_code=_EXIT_CODES[status])

    def _init(self, arguments: dict[str, Any]) -> Any:
        """Call ``wandb.init``; for an offline run if the server cannot be reached."""
        problem = _connection_error(self._package, arguments)
        if problem is not None:
            _logger.warning(_OFFLINE, problem)
            return self._package.init(**{**arguments, "mode": "offline"})
        try:
            return self._package.init(**arguments)
        except (self._package.errors.CommError, TimeoutError) as error:
            _logger.warning(_OFFLINE, error)
            # The failed attempt still reserves the id in W&B's own process.
            run_id = f"{arguments.get('id', self._run_id)}-offline"
            return self._package.init(**{**arguments, "mode": "offline", "id": run_id})

    def _arguments(self, run: RunInfo) -> dict[str, Any]:
        """Return the arguments of ``wandb.init``: defaults, overridden by the user's."""
        wandb = self._package
        ours: dict[str, Any] = {"project": run.name}
        # These options select a run already.
        if not {"resume_from", "fork_from"} & self._options.keys():
            ours["id"] = self._run_id
            ours["resume"] = "allow"
        folder = local_path(run.logging_dir)
        if folder is not None:  # W&B writes to local folders only; by default to its own
            ours["dir"] = folder
            os.makedirs(folder, exist_ok=True)
        if not self.main_process_only:
            ours["group"] = run.name
        if wandb.run is not None:  # do not touch an open run of the script
            ours["reinit"] = "create_new"
        ours["mode"] = _default_mode(wandb)
        merged = {**ours, **self._options}
        merged["settings"] = _settings(wandb, self._options.get("settings"))
        return merged


def _run_id(run: RunInfo) -> str:
    """Return the run's id with the characters that W&B allows."""
    suffix = f"-rank{run.rank}" if run.rank else ""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", run.run_id) + suffix


def _settings(wandb: Any, settings: Any) -> Any:
    """Merge the user's settings over the defaults, of which older releases lack some."""
    if settings is not None and not isinstance(settings, Mapping):
        return settings
    known = wandb.Settings()
    ours = {key: value for key, value in _SETTINGS.items() if hasattr(known, key)}
    return wandb.Settings(**{**ours, **(settings or {})})


def _default_mode(wandb: Any) -> str | None:
    """Return the mode if the user set none; None leaves it to ``wandb.init``.

    Without credentials ``wandb.init`` would prompt for them, or fail.
    """
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"  # newer releases ignore this variable
    if any(os.environ.get(name) for name in _MODE_VARIABLES):
        return None
    settings = wandb.setup().settings
    if settings.mode not in (None, "online") or getattr(settings, "api_key", None):
        return None
    # A key that ``wandb login`` has stored; requests is a dependency of wandb.
    stored_login = importlib.import_module("requests.utils").get_netrc_auth
    servers = (str(settings.base_url), "https://api.wandb.ai")
    return None if any(map(stored_login, servers)) else "offline"


def _connection_error(wandb: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why the server for ``wandb.init`` does not respond, or None.

    The server is probed first, because a failed ``wandb.init`` leaves the run's id reserved in
    W&B's own process. Any response counts, since credentials are not sent.
    """
    settings = wandb.setup().settings.model_copy()
    settings.update_from_settings(arguments["settings"])
    if (arguments.get("mode") or settings.mode) not in (None, "online", "shared"):
        return None
    proxies = ("http_proxy", "https_proxy", "x_proxies")
    if any(getattr(settings, name, None) for name in proxies):
        return None  # W&B's own proxies are not used by the probe
    return _probe(str(settings.base_url), min(float(settings.init_timeout), _PROBE_TIMEOUT))


def _probe(url: str, seconds: float) -> str | None:
    """Return why a URL does not respond within some seconds, or None if it does."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return None
    except (urllib.error.HTTPError, http.client.HTTPException):
        return None
    except urllib.error.URLError as error:
        # TLS errors do not count: W&B may be configured with certificates that urllib lacks.
        down = isinstance(error.reason, OSError) and type(error.reason).__module__ != "ssl"
        return f"{url}: {error.reason}" if down else None
    except OSError as error:
        return f"{url}: {error}"


def _artifact(wandb: Any, path: str, name: str | None, kind: str) -> Any:
    """Create an artifact of a file or folder, or a reference to a URL."""
    shown = name or base_name(path) or "artifact"
    created = wandb.Artifact(re.sub(r"[^A-Za-z0-9_.-]", "-", shown), type=kind)
    if "://" in path:
        created.add_reference(path, checksum=False)
    elif os.path.isdir(path):
        created.add_dir(path)
    else:
        created.add_file(path)
    return created
