"""Progress bar for transfers that take longer than a few seconds."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

__all__ = ["TransferProgress"]

_DELAY = 3.0  # seconds before a bar that was not asked for appears


class TransferProgress:
    """Progress of a transfer, in bytes and bytes per second; a context manager.

    Args:
        label: text before the bar, such as "loading".
        total_bytes: number of bytes to transfer.
        enabled: True draws the bar at once, False never; None (default) draws it only if standard
            error is a terminal and the transfer takes longer than 3 seconds.

    Raises:
        ImportError: if `enabled` is True and `tqdm` is not installed.

    Example:
        >>> from checkpoint_io import TransferProgress
        >>> with TransferProgress("loading", 300, enabled=False) as progress:
        ...     progress.add(100)
        ...     progress.add(200)
        >>> progress.done_bytes
        300
    """

    def __init__(self, label: str, total_bytes: int, enabled: bool | None = None) -> None:
        self.done_bytes = 0
        self._label = label
        self._total = total_bytes
        self._enabled = enabled
        self._lock = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> TransferProgress:
        if self._enabled or (self._enabled is None and sys.stderr.isatty()):
            self._bar = self._make_bar()
        return self

    def _make_bar(self) -> Any:
        """Create the bar; a missing tqdm is an error only if the bar was asked for."""
        try:
            from tqdm import tqdm
        except ImportError as error:
            if self._enabled is None:
                return None
            raise ImportError("a progress bar needs tqdm: pip install tqdm") from error
        return tqdm(
            total=self._total,
            desc=self._label,
            unit="B",
            unit_scale=True,
            unit_divisor=1000,
            delay=0 if self._enabled else _DELAY,
            leave=False,
        )

    def add(self, nbytes: int) -> None:
        """Count transferred bytes; may be called from any thread."""
        with self._lock:
            self.done_bytes += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
