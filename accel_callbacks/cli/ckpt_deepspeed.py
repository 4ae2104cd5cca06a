"""Checkpoints that DeepSpeed itself has written, in the lists of ``accel ckpt``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import checkpoint_io
from accel_callbacks.terminal_text import size_of
from checkpoint_io.local_files import base_name, local_path
from checkpoint_io.storage import open_store
from checkpoint_io.weights import DeepSpeedSource, deepspeed_folder, sizes_of


@dataclass(frozen=True)
class DeepSpeedEntry:
    """One folder with the files of DeepSpeed's ranks.

    Args:
        path: its URL.
        source: its weights; None if it cannot be read.
        reason: why it cannot.
    """

    path: str
    source: DeepSpeedSource | None
    reason: str

    @property
    def step(self) -> int | None:
        """Number of optimizer steps, None if it is not known."""
        return None if self.source is None else self.source.step

    def _status(self) -> str:
        if self.source is None:
            return f"broken: {self.reason}"
        stages = {0: "no ZeRO", 2: "ZeRO 1 or 2", 3: "ZeRO 3"}
        ranks = f"{self.source.ranks} ranks" if self.source.stage else "whole"
        return f"of DeepSpeed: {stages[self.source.stage]}, {ranks}"

    def row(self, root: str) -> tuple[str, ...]:
        """Return the cells of ``accel ckpt ls``.

        Args:
            root: the folder that was asked for.
        """
        name = self.path.removeprefix(root).lstrip(f"/{os.sep}")
        size = "-" if self.source is None else size_of(self.source.nbytes)
        step = "-" if self.step is None else str(self.step)
        return name, step, "-", "-", "-", size, "-", self._status()

    def facts(self) -> dict[str, Any]:
        """Return what ``accel ckpt ls --json`` prints."""
        facts: dict[str, Any] = {
            "name": base_name(self.path),
            "path": self.path,
            "status": "broken" if self.source is None else "deepspeed",
            "reason": self.reason,
        }
        if self.source is not None:
            facts |= {
                "bytes": self.source.nbytes,
                "world_size": self.source.ranks,
                "metadata": {"step": self.step, "zero_stage": self.source.stage},
            }
        return facts

    def verdict(self, sizes_only: bool) -> dict[str, str]:
        """Verify the files, and return the result."""
        try:
            if self.source is not None and not sizes_only:
                self.source.verify()
        except OSError as error:
            return unread(self.path, error)
        except checkpoint_io.CheckpointError as error:
            return {"status": "damaged", "reason": str(error)}
        return {"status": "damaged" if self.source is None else "ok", "reason": self.reason}


def unread(path: str, error: OSError) -> dict[str, str]:
    """Return the verdict about a checkpoint whose files could not be read: it may be whole."""
    status = "unreachable" if local_path(path) is None else "unreadable"
    return {"status": status, "reason": str(error)}


def deepspeed_entry(path: str, options: Mapping[str, Any]) -> DeepSpeedEntry | None:
    """Return the checkpoint of DeepSpeed in a folder itself; ``latest`` is not followed."""
    try:
        store = open_store(path, options)
        if deepspeed_folder(store, sizes_of(store).keys() - {"latest"}) is None:
            return None
        return DeepSpeedEntry(path, DeepSpeedSource(store), "")
    except OSError:  # of a store that cannot be reached, nothing is known
        raise
    except checkpoint_io.CheckpointError as error:
        return DeepSpeedEntry(path, None, str(error))
