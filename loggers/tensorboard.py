"""Scalars, text and hyperparameters for TensorBoard, through ``torch.utils.tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loggers.base import RunInfo, Scalar, Status, check_status
from loggers.config import flat_config, plain_config
from loggers.resumable import ResumableTracker


class TensorBoardTracker(ResumableTracker):
    """Writes event files to ``<logging_dir>/tensorboard``, which may be an fsspec URL.

    A resume goes on in the same folder and hides the steps that are logged again. Strings are
    written as text, the config as text and as hyperparameters. Scalars are stored in single
    precision, as TensorBoard does.

    Args:
        subdir: folder below ``logging_dir``, default "tensorboard". Ranks above 0 add ``rank<r>``.
        all_ranks: log on every process rather than on the main one only.
        flush_secs: seconds between the writer's own flushes, default 30. On a remote URL only
            these count, because each one uploads the whole file again.
        **writer_kwargs: further arguments of ``SummaryWriter``.

    Raises:
        ImportError: from `start`, when torch or tensorboard is not installed.

    >>> tracker = TensorBoardTracker(flush_secs=5)
    >>> tracker.raw is None  # the SummaryWriter, once started
    True
    """

    name = "tensorboard"

    def __init__(
        self,
        subdir: str = "tensorboard",
        *,
        all_ranks: bool = False,
        flush_secs: int = 30,
        **writer_kwargs: Any,
    ) -> None:
        super().__init__(all_ranks=all_ranks)
        self._subdir = subdir
        self._writer_kwargs = {"flush_secs": flush_secs, **writer_kwargs}
        self._writer: Any = None
        self._remote = False

    def start(self, run: RunInfo) -> None:
        """Open the ``SummaryWriter``."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"the tensorboard tracker needs torch and tensorboard ({error}): "
                "pip install tensorboard"
            ) from error
        parts = [run.logging_dir.rstrip("/"), self._subdir, f"rank{run.rank}" if run.rank else ""]
        self._remote = "://" in run.logging_dir
        self._run_id = self._run_id or run.run_id
        kwargs = dict(self._writer_kwargs)
        if run.resumed_step is not None:
            kwargs.setdefault("purge_step", run.resumed_step + 1)
        folder = "/".join(part for part in parts if part)
        self._writer = SummaryWriter(folder, **kwargs)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the config as a JSON block under Text and as one row under HParams."""
        from torch.utils.tensorboard.summary import hparams

        text = json.dumps(plain_config(config), indent=2, ensure_ascii=False)
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        writer = self._opened()
        writer.add_text("config", indented, 0)
        # Only the session record: the tab then finds the run's own scalars as its metrics, and
        # add_hparams would open a second run for it.
        _, session, _ = hparams(flat_config(config), {})  # type: ignore[no-untyped-call]
        writer.file_writer.add_summary(session, 0)

    def log(self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None) -> None:
        """Write one event a value: a scalar, or text for a str."""
        writer = self._opened()
        for tag, value in scalars.items():
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(tag, value, step, walltime=time)
        self._last_step = step

    def flush(self) -> None:
        """Hand pending events to the file system."""
        if not self._remote:
            self._opened().flush()

    def finish(self, status: Status = "success") -> None:
        """Close the writer, which writes what is pending."""
        check_status(status)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    @property
    def raw(self) -> Any:
        """The ``SummaryWriter``, or None before `start` and after `finish`."""
        return self._writer

    def _opened(self) -> Any:
        """Return the writer, or say that there is none."""
        if self._writer is None:
            raise RuntimeError(
                "the TensorBoard tracker is not open: call start(run) before logging"
            )
        return self._writer
