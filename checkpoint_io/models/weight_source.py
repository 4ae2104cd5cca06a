"""What model weights look like to those who load them, however they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.open import RangeReader, Store
from checkpoint_io.weights.source import Landing

Wanted = Sequence[tuple[str, torch.Tensor]]


class WeightInfo(NamedTuple):
    """What is known of a stored tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """A file of weights: where it is, and what it is called in messages."""

    store: Store
    name: str
    label: str

    @property
    def where(self) -> str:
        """Its place, for messages."""
        return f"{self.store.url}/{self.label}"

    @contextmanager
    def open(self) -> Iterator[RangeReader]:
        """Open it for ranged reads."""
        try:
            manager = self.store.open(self.name)
            reader = manager.__enter__()
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{self.where} is missing, though it is listed there: copy all files again"
            ) from None
        try:
            yield reader
        finally:
            manager.__exit__(None, None, None)

    def read_json(self, limit: int) -> Any:
        """Read a whole file of strict JSON."""
        with self.open() as reader:
            if reader.size > limit:
                raise CorruptCheckpointError(
                    f"{self.where}: {reader.size} bytes is more than such a file has"
                )
            return jsonio.loads(bytes(reader.read(0, reader.size)), self.where)


class WeightSource(Protocol):
    """Stored weights, whose names and shapes are known and whose data are read when asked for."""

    @property
    def where(self) -> str:
        """What to call them in messages."""

    @property
    def infos(self) -> Mapping[str, WeightInfo]:
        """The stored tensors by name."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Other names of stored tensors, to the names under which these are stored."""

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Fill tensors with stored ones, which must have their shapes; converts dtypes."""


def landing_for(info: WeightInfo, target: torch.Tensor) -> Landing:
    """Plan how a stored tensor gets into a target."""
    return Landing(info.shape, info.dtype, target)
