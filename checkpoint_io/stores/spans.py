"""What stores and their users agree on: byte spans of files, and who takes what was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from checkpoint_io.errors import CorruptCheckpointError

Write = Callable[["memoryview[int]"], None]
Deliver = Callable[[int, "memoryview[int]"], None]


REMOTE_SPAN = 16 << 20  # bytes of one request: enough to hide its latency


class Span(NamedTuple):
    """Bytes `begin` to `end` (exclusive) of the file `name`."""

    name: str
    begin: int
    end: int


class _Opens(Protocol):
    """What can be read span by span."""

    url: str

    def open(self, name: str) -> AbstractContextManager[Any]:
        """Open a file for ranged reads."""


def fetch_in_turn(store: _Opens, spans: Sequence[Span], deliver: Deliver) -> None:
    """Read spans one after the other, each file opened once if its spans follow each other."""
    at = 0
    while at < len(spans):
        name = spans[at].name
        try:
            with store.open(name) as reader:
                while at < len(spans) and spans[at].name == name:
                    span = spans[at]
                    if span.end > reader.size:
                        raise CorruptCheckpointError(
                            f"{store.url}/{name}: truncated, ends before byte {span.end}"
                        )
                    deliver(at, reader.read(span.begin, span.end))
                    at += 1
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{store.url}/{name} is missing, though the manifest names it"
            ) from None
