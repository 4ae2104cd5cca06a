"""The body of an upload, sent in slices: the transport copies no more than one at a time."""

from __future__ import annotations

from typing import Any

from aiohttp.payload import Payload

_SLICE = 512 << 10
_WORTH_IT = 1 << 20


class SlicedBody(Payload):
    """Memory as a body for aiohttp, and as a file for botocore, which may want to hash it."""

    def __init__(self, data: bytes | bytearray) -> None:
        super().__init__(data, content_type="application/octet-stream")
        self._view = memoryview(data)
        self._size = len(data)
        self._at = 0

    def __len__(self) -> int:
        """Return the length in bytes."""
        return len(self._view)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Refuse: these are no characters."""
        raise TypeError("a body of bytes")

    async def write(self, writer: Any) -> None:
        """Send all slices, each when there is room for it."""
        for begin in range(0, len(self._view), _SLICE):
            await writer.write(self._view[begin : begin + _SLICE])

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        """Send all; the length is the one that was announced."""
        await self.write(writer)

    def read(self, size: int = -1) -> bytes:
        """Read on, as from a file."""
        end = len(self._view) if size < 0 else self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place, as in a file."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        """Return the place, as of a file."""
        return self._at


def body_of(data: bytes | bytearray, options: Any) -> Any:
    """Return what to give to the client: slices of what is large, if it speaks aiohttp."""
    other = (options or {}).get("http_session_cls") is not None
    return data if other or len(data) < _WORTH_IT else SlicedBody(data)
