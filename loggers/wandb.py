"""Weights & Biases, offline unless credentials are there."""

from __future__ import annotations

import importlib
import netrc
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from loggers.base import RunInfo, Scalar, Status, check_status
from loggers.config import plain_config
from loggers.resumable import ResumableTracker

_EXIT_CODES: dict[str, int] = {"success": 0, "failed": 1, "interrupted": 255}

# The tool's own defaults lose 15 s of rows to a kill and block 90 s on a server that is down.
_SETTINGS = {"x_transaction_log_flush_interval": 1.0, "init_timeout": 30.0, "silent": True}


class WandBTracker(ResumableTracker):
    """Logs to a Weights & Biases run, with files below ``<logging_dir>/wandb``.

    The run is offline (upload it later with ``wandb sync``) when there is no API key and neither
    ``mode`` nor the variables WANDB_MODE and WANDB_DISABLED say otherwise. A resume goes on under
    the same run id; offline, each process leaves a folder of its own, which ``wandb sync`` joins.
    W&B ignores steps lower than the last it has: a resumed online run keeps the rows that were
    uploaded before the interruption (pass ``resume_from`` to rewind it on the server).

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

    def __init__(self, *, all_ranks: bool = False, **init_kwargs: Any) -> None:
        super().__init__(all_ranks=all_ranks)
        self._init_kwargs = init_kwargs
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Call ``wandb.init``."""
        try:
            # Imported here and on logging processes only: the import wraps sys.stdout.
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(
                f"the wandb tracker needs wandb ({error}): pip install wandb"
            ) from error
        self._run = wandb.init(**self._arguments(wandb, run))
        self._run_id = self._run.id

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._opened().config.update(plain_config(config), allow_val_change=True)

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Log the values at an explicit step; W&B writes a step when a later one begins."""
        self._opened().log(dict(scalars), step=step)
        self._last_step = step

    def finish(self, status: Status = "success") -> None:
        """Finish the run with exit code 0 (success), 1 (failed) or 255 (interrupted)."""
        check_status(status)
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=_EXIT_CODES[status])

    @property
    def raw(self) -> Any:
        """The ``wandb`` run, or None before `start` and after `finish`."""
        return self._run

    def _opened(self) -> Any:
        """Return the run, or say that there is none."""
        if self._run is None:
            raise RuntimeError("the W&B tracker is not open: call start(run) before logging")
        return self._run

    def _arguments(self, wandb: Any, run: RunInfo) -> dict[str, Any]:
        """Return the arguments of ``wandb.init``: the user's, then ours where there is none."""
        ours: dict[str, Any] = {"project": run.name}
        if not {"resume_from", "fork_from"} & self._init_kwargs.keys():  # these name a run already
            ours["id"] = self._run_id or _run_id(run)
            ours["resume"] = "allow"
        if "://" not in run.logging_dir:  # W&B writes to local folders only; else it picks its own
            os.makedirs(run.logging_dir, exist_ok=True)
            ours["dir"] = run.logging_dir
        if not self.main_process_only:
            ours["group"] = run.name
        if wandb.run is not None:  # leave a run that the script has open alone
            ours["reinit"] = "create_new"
        if _offline_by_default(wandb):
            ours["mode"] = "offline"
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


def _offline_by_default(wandb: Any) -> bool:
    """Say whether ``wandb.init`` would ask for, or fail without, credentials."""
    decided = ("WANDB_MODE", "WANDB_DISABLED", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if any(os.environ.get(name) for name in decided):
        return False
    settings = wandb.setup().settings
    if settings.mode not in (None, "online") or getattr(settings, "api_key", None):
        return False
    return not _in_netrc(str(settings.base_url))


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
