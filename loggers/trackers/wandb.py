"""Weights & Biases, offline unless there is an account and its server answers."""

from __future__ import annotations

import html
import http.client
import importlib
import logging
import netrc
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.encode import figure_png, gif, histogram, png, wav
from loggers.trackers.line_file import is_remote, local_path
from loggers.trackers.tool import ContinuingTracker, opened
from loggers.values import plain_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MediaObjects", "WandBTracker", "artifact", "media_objects", "mode_of", "unreachable"]

_DECIDED = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_LONGEST_ASK = 10.0  # seconds; a server that takes longer to say anything is down
_logger = logging.getLogger("accel_callbacks.trackers")
STEP_KEY = "trainer/global_step"


def mode_of(wandb: Any) -> str | None:
    """Return the mode that fits where the user gave none; None leaves it to ``wandb.init``.

    Without credentials that would ask for some, or fail. Nobody is asked here.
    """
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"  # newer releases do not look at it any more
    if any(os.environ.get(name) for name in _DECIDED):
        return None
    settings = wandb.setup().settings
    if settings.mode not in (None, "online") or getattr(settings, "api_key", None):
        return None
    return None if _in_netrc(str(settings.base_url)) else "offline"


def unreachable(wandb: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why the server that ``wandb.init`` would talk to does not answer, or None.

    A ``wandb.init`` that fails leaves the run's id taken in W&B's own process, so it is asked
    before. Any answer is one: what a server thinks of the credentials is not known yet.
    """
    settings = wandb.setup().settings.model_copy()
    settings.update_from_settings(arguments["settings"])
    if (arguments.get("mode") or settings.mode) not in (None, "online", "shared"):
        return None
    proxies = ("http_proxy", "https_proxy", "x_proxies")
    if any(getattr(settings, name, None) for name in proxies):
        return None  # only W&B knows this way
    return _silence(str(settings.base_url), min(float(settings.init_timeout), _LONGEST_ASK))


def _silence(url: str, seconds: float) -> str | None:
    """Return why nothing answers at a URL within some seconds, or None if something does."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return None
    except (urllib.error.HTTPError, http.client.HTTPException):
        return None
    except urllib.error.URLError as error:
        # Certificates that only W&B is told of, for example, are no silence.
        quiet = isinstance(error.reason, OSError) and type(error.reason).__module__ != "ssl"
        return f"{url}: {error.reason}" if quiet else None
    except OSError as error:
        return f"{url}: {error}"


def _in_netrc(base_url: str) -> bool:
    """Say whether ``wandb login`` has left a key for this server."""
    paths = (os.environ.get("NETRC") or "~/.netrc", "~/_netrc")
    hosts = {urlsplit(base_url).netloc, "api.wandb.ai"}
    for path in map(os.path.expanduser, paths):
        try:
            entries = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        if any(host in entries.hosts for host in hosts):
            return True
    return False


@contextmanager
def media_objects(wandb: Any) -> Iterator[MediaObjects]:
    """Make objects inside the block, and log them there: their files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="accel-wandb-") as folder:
        yield MediaObjects(wandb, folder)


class MediaObjects:
    """Makes objects of the package ``wandb`` out of arrays.

    Args:
        wandb: the package.
        folder: for the files, until they are logged.
    """

    def __init__(self, wandb: Any, folder: str) -> None:
        self._wandb = wandb
        self._folder = folder
        self._files = 0

    def images(self, pictures: np.ndarray, captions: Sequence[str] | None) -> list[Any]:
        """Pictures of one name: uint8 of shape (N, H, W, C)."""
        said: list[str | None] = list(captions or []) or [None] * len(pictures)
        paths = [self._file(png(picture), ".png") for picture in pictures]
        return [
            self._wandb.Image(path, caption=caption)
            for path, caption in zip(paths, said, strict=True)
        ]

    def figure(self, figure: Any) -> Any:
        """A matplotlib figure, drawn."""
        return self._wandb.Image(self._file(figure_png(figure), ".png"))

    def audio(self, samples: np.ndarray, sample_rate: int) -> Any:
        """A sound: floats of shape (samples,) or (samples, channels)."""
        path = self._file(wav(samples, sample_rate), ".wav")
        return self._wandb.Audio(path, sample_rate=sample_rate)

    def video(self, frames: np.ndarray, fps: int) -> Any:
        """A film: uint8 of shape (T, H, W, C)."""
        return self._wandb.Video(self._file(gif(frames, fps), ".gif"), format="gif")

    def text(self, text: str) -> Any:
        """A text as it is, in a fixed width."""
        return self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """A table; a column may have several types."""
        data = [list(row) for row in rows]
        return self._wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)

    def histogram(self, values: np.ndarray) -> Any:
        """A distribution of the finite values; None where there are none."""
        counted = histogram(values)
        if not counted["counts"]:
            return None
        return self._wandb.Histogram(np_histogram=(counted["counts"], counted["edges"]))

    def _file(self, data: bytes, ending: str) -> str:
        self._files += 1
        path = os.path.join(self._folder, f"{self._files}{ending}")
        with open(path, "wb") as file:
            file.write(data)
        return path


def artifact(wandb: Any, path: str, name: str | None, kind: str) -> Any:
    """Make an artifact of a file, a folder, or a URL, which is only referred to."""
    shown = name or os.path.basename(path.rstrip("/")) or "artifact"
    made = wandb.Artifact(re.sub(r"[^A-Za-z0-9_.-]", "-", shown), type=kind)
    if "://" in path:
        made.add_reference(path, checksum=False)
    elif os.path.isdir(path):
        made.add_dir(path)
    else:
        made.add_file(path)
    return made


"""The metric that holds the step; the name that Lightning's runs have it under."""

_OFFLINE = (
    "W&B cannot be reached (%s): this run is logged offline. Upload it later with `wandb sync`; "
    "mode='offline' asks for that without a warning."
)

_EXIT_CODES: dict[str, int] = {"success": 0, "failed": 1, "interrupted": 255}

# The tool's own defaults lose 15 s of rows to a kill and wait 90 s for a server that is down.
_SETTINGS = {"x_transaction_log_flush_interval": 1.0, "init_timeout": 20.0, "silent": True}


class WandBTracker(ContinuingTracker):
    """Logs to a Weights & Biases run, with files below ``<logging_dir>/wandb``.

    The run is offline (upload it later with ``wandb sync``) when there is no API key and neither
    ``mode`` nor the variables WANDB_MODE and WANDB_DISABLED say otherwise, and, with a warning,
    when the server does not answer within 20 seconds. A resume goes on under the same run id;
    offline, each process leaves a folder of its own, which ``wandb sync`` joins.

    W&B drops what is logged at a step lower than the last, so its own step counter only counts
    rows here. It is the optimizer step as long as steps rise; the true step is the metric
    ``trainer/global_step`` in every row, and is the x-axis of all charts. Nothing is dropped: not
    a lower step, not a second value of one name at one step, not what a resumed run logs again.

    Args:
        all_ranks: log on every process, one W&B run a rank, grouped by the run's name.
        **init_kwargs: arguments of ``wandb.init``; they win over everything said here.

    Raises:
        ImportError: from `start`, when wandb is not installed.

    >>> tracker = WandBTracker(mode="offline", tags=["baseline"])
    >>> tracker.raw is None  # the wandb run, once started
    True
    """

    name = "wandb"
    requires = ("wandb",)

    def __init__(self, *, all_ranks: bool = False, **init_kwargs: Any) -> None:
        super().__init__(all_ranks=all_ranks)
        self._init_kwargs = init_kwargs
        self._wandb: Any = None
        self._run: Any = None
        self._row = -1  # the newest value of W&B's own counter
        self._step: int | None = None
        self._names: set[str] = set()

    def start(self, run: RunInfo) -> None:
        """Call ``wandb.init``; a server that does not answer makes the run an offline one."""
        try:
            # Imported here and on logging processes only: the import wraps sys.stdout.
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(
                f"the wandb tracker needs wandb ({error}): pip install wandb"
            ) from error
        known = self._run_id if self._loaded else None
        self._begin(run)
        self._run_id = known or _run_id(run)
        self._row = self._row if self._loaded else -1
        self._run = self._init(self._arguments(self._wandb, run))
        if not getattr(self._run, "disabled", False):  # else its id is a made-up one
            self._run_id = self._run.id
        # Online, the server has the rows of a process that was killed after its last checkpoint.
        self._row = max(self._row, self._run.step - 1)
        self._step, self._names = None, set()
        self._run.define_metric(STEP_KEY)
        self._run.define_metric("*", step_metric=STEP_KEY)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._opened().config.update(plain_config(config), allow_val_change=True)

    def log(
        self,
        scalars: Mapping[str, Scalar],
        step: int,
        *,
        time: float | None = None,
        commit: bool | None = None,
    ) -> None:
        """Log a row; W&B writes one when a later one begins, or at once with ``commit=True``."""
        self._write(dict(scalars), step, time, commit)

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
        commit: bool | None = None,
    ) -> None:
        """Log a ``wandb.Image`` a picture."""
        said = captions or {}
        with media_objects(self._package()) as make:
            made = {name: make.images(all_, said.get(name)) for name, all_ in images.items()}
            self._write(made, step, commit=commit)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Log a ``wandb.Image`` a figure."""
        with media_objects(self._package()) as make:
            self._write({name: make.figure(one) for name, one in figures.items()}, step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Log a ``wandb.Audio`` a sound."""
        with media_objects(self._package()) as make:
            made = {name: make.audio(samples, sample_rate) for name, samples in audio.items()}
            self._write(made, step)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Log a ``wandb.Video`` a film, as a GIF (needs Pillow)."""
        with media_objects(self._package()) as make:
            self._write({name: make.video(one, fps) for name, one in videos.items()}, step)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Log a ``wandb.Html`` a text."""
        with media_objects(self._package()) as make:
            self._write({name: make.text(one) for name, one in texts.items()}, step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int,
        *,
        commit: bool | None = None,
    ) -> None:
        """Log a ``wandb.Table``."""
        with media_objects(self._package()) as make:
            self._write({name: make.table(columns, rows)}, step, commit=commit)

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Log a ``wandb.Histogram`` of the finite values each, if there are any."""
        with media_objects(self._package()) as make:
            made = {name: make.histogram(values) for name, values in histograms.items()}
            self._write({name: one for name, one in made.items() if one is not None}, step)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Log a ``wandb.Artifact`` with the file or folder in it, or a reference to a URL."""
        self._opened().log_artifact(artifact(self._wandb, path, name, kind))

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Log the model as it prints itself, under ``graph``."""
        with media_objects(self._package()) as make:
            self._write({"graph": make.text(str(model))}, self._last_step or 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the run id, the last step, and the number of W&B's newest row."""
        return {**super().state_dict(), "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that ``state`` names."""
        super().load_state_dict(state)
        self._row = state.get("row", -1)

    def finish(self, status: Status = "success") -> None:
        """Finish the run with exit code 0 (success), 1 (failed) or 255 (interrupted)."""
        self._end(status)
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=_EXIT_CODES[status])

    @property
    def raw(self) -> Any:
        """The ``wandb`` run, or None before `start` and after `finish`."""
        return self._run

    @property
    def run(self) -> Any:
        """The same as `raw`; Accelerate's name for it."""
        return self.raw

    def _opened(self) -> Any:
        """Return the run, or say that there is none."""
        return opened(self._run, "W&B")

    def _package(self) -> Any:
        """Return ``wandb``, of a run that is open."""
        self._opened()
        return self._wandb

    def _write(
        self,
        values: dict[str, Any],
        step: int,
        time: float | None = None,
        commit: bool | None = None,
    ) -> None:
        """Log values in the row of their step, or in a new one where they would be lost."""
        run = self._opened()
        same = step == self._step and self._names.isdisjoint(values)
        row = self._row if same else max(step, self._row + 1)
        when = {} if time is None else {"_timestamp": time}
        run.log({STEP_KEY: step, **when, **values}, step=row, commit=commit)
        self._names = self._names | values.keys() if same else set(values)
        self._row, self._step = row, None if commit else step  # W&B takes no more for such a row
        self._seen(step)

    def _init(self, arguments: dict[str, Any]) -> Any:
        """Call ``wandb.init``, for an offline run where the server cannot be had."""
        silence = unreachable(self._wandb, arguments)
        if silence is not None:
            _logger.warning(_OFFLINE, silence)
            return self._wandb.init(**{**arguments, "mode": "offline"})
        try:
            return self._wandb.init(**arguments)
        except (self._wandb.errors.CommError, TimeoutError) as error:
            _logger.warning(_OFFLINE, error)
            # The failed try still holds the id in W&B's own process.
            taken = arguments.get("id", self._run_id)
            return self._wandb.init(**{**arguments, "mode": "offline", "id": f"{taken}-offline"})

    def _arguments(self, wandb: Any, run: RunInfo) -> dict[str, Any]:
        """Return the arguments of ``wandb.init``: the user's, then ours where there is none."""
        ours: dict[str, Any] = {"project": run.name}
        if not {"resume_from", "fork_from"} & self._init_kwargs.keys():  # these name a run already
            ours["id"] = self._run_id or _run_id(run)
            ours["resume"] = "allow"
        if not is_remote(run.logging_dir):  # W&B writes to local folders only, else to its own
            ours["dir"] = local_path(run.logging_dir)
            os.makedirs(ours["dir"], exist_ok=True)
        if not self.main_process_only:
            ours["group"] = run.name
        if wandb.run is not None:  # leave a run that the script has open alone
            ours["reinit"] = "create_new"
        ours["mode"] = mode_of(wandb)
        merged = {**ours, **self._init_kwargs}
        merged["settings"] = _settings(wandb, self._init_kwargs.get("settings"))
        return merged


def _run_id(run: RunInfo) -> str:
    """Return the run's id in the characters that W&B allows."""
    suffix = f"-rank{run.rank}" if run.rank else ""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", run.run_id) + suffix


def _settings(wandb: Any, given: Any) -> Any:
    """Merge the user's settings over ours; older releases do not know all of ours."""
    if given is not None and not isinstance(given, Mapping):
        return given
    known = wandb.Settings()
    ours = {key: value for key, value in _SETTINGS.items() if hasattr(known, key)}
    return wandb.Settings(**{**ours, **(given or {})})
