"""A bar with bytes per second for transfers that take long enough to need one."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

__all__ = ["TransferProgress"]

_PATIENCE = 3.0


class TransferProgress:
    """Shows how far a transfer is, in bytes and bytes per second; a context manager.

    Args:
        label: what is being done, such as "loading".
        total_bytes: how many bytes there are to move.
        enabled: True draws the bar at once, False never; None (default) draws it only where
            standard error is a terminal, and only if the transfer is still going after 3 seconds.

    Raises:
        ImportError: the bar is wanted and `tqdm` is not installed.

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
        self._guard = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> TransferProgress:
        if self._enabled or (self._enabled is None and sys.stderr.isatty()):
            self._bar = self._make_bar()
        return self

    def _make_bar(self) -> Any:
        """Make the bar; without being asked for one, its absence is no error."""
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
            delay=0 if self._enabled else _PATIENCE,
            leave=False,
        )

    def add(self, nbytes: int) -> None:
        """Count bytes that have been moved; from any thread."""
        with self._guard:
            self.done_bytes += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guard:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
