"""What moves the bytes of large objects, and the one that does it with the client of s3fs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from checkpoint_io.storage.s3.client import S3Client
from checkpoint_io.storage.s3.download import Fetch
from checkpoint_io.storage.s3.parts import Checksum
from checkpoint_io.stores.s3_upload import upload
from checkpoint_io.stores.spans import Deliver, Span, Write


class Transfer(Protocol):
    """Moves the bytes of large objects; all else goes through the client."""

    def upload(self, key: str, size: int | None) -> AbstractContextManager[Write]:
        """Upload an object that appears when the block ends well."""

    def fetch(self, spans: Sequence[Span], key_of: Callable[[str], str], deliver: Deliver) -> None:
        """Read spans as `Store.fetch` says."""


class ClientTransfer:
    """Moves bytes through the client of s3fs."""

    def __init__(self, client: S3Client, checksum: Checksum | None) -> None:
        self._client = client
        self._checksum = checksum

    def upload(self, key: str, size: int | None) -> AbstractContextManager[Write]:
        """Upload an object in parts."""
        return upload(self._client, key, size, self._checksum)

    def fetch(self, spans: Sequence[Span], key_of: Callable[[str], str], deliver: Deliver) -> None:
        """Read spans, several at once."""
        Fetch(self._client, spans, key_of).run(deliver)
