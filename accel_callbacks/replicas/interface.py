"""What a loop and a strategy ask of the rounds of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from accel_callbacks.data.loader import DataLoaderShard

__all__ = ["ReplicaRounds", "Share"]


class Share(NamedTuple):
    """The part of a global batch that a replica reads."""

    place: int
    replicas: int


class ReplicaRounds(Protocol):
    """`accel_callbacks.replicas.rounds.Rounds`, without what it imports.

    Attributes:
        is_open: a window is being trained.
        refused: the last window does not count.
        writes: this replica saves checkpoints and logs for all.
        on_writing: called when it begins to.
    """

    is_open: bool
    refused: bool
    writes: bool
    on_writing: Callable[[], None]

    def join(self) -> None:
        """Wait for the others, and take over the state of one that trains."""

    def begin(self) -> Share:
        """Begin a round unless one is open; return this replica's share of its batches."""

    def batches(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Return the batches of this replica in a training pass."""

    def watch(self, loader: DataLoaderShard | None) -> None:
        """Note where the window begins in the data, at its first batch; None to forget."""

    def settle(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of a window and vote on it."""

    def state_dict(self) -> dict[str, int]:
        """Return the windows committed so far."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over the windows of another replica, or of a checkpoint."""

    def close(self) -> None:
        """Leave the others."""
