"""Upload of one object: whole at the end of a block, or not there at all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from checkpoint_io.errors import CheckpointError, CheckpointWarning
from checkpoint_io.storage.s3.client import STEP, S3Client
from checkpoint_io.storage.s3.parts import Checksum, part_size, process_budget, verify_arrival
from checkpoint_io.storage.s3.upload import CorruptUploadError, MultipartUpload
from checkpoint_io.stores.spans import Write


async def put(
    client: S3Client, key: str, data: bytes, checksum: Checksum | None, **extra: Any
) -> dict[str, Any]:
    """Put a small object by one request, tried once; returns the answer."""
    sent = checksum.text(data) if checksum else None
    field = checksum.field if checksum else ""
    fields = {field: sent} if checksum else {}
    answer = await client.once(
        "put_object", 1 + len(data) / STEP, Key=key, Body=client.body(data), **fields, **extra
    )
    if not verify_arrival(answer, field, sent, data):
        tag = str(answer.get("ETag", ""))
        raise CorruptUploadError(f"{key}: the store has other bytes than were sent", tag)
    return dict(answer)


@contextmanager
def upload(
    client: S3Client, key: str, size: int | None, checksum: Checksum | None
) -> Iterator[Write]:
    """Upload what is written in the block; a block that raises leaves nothing behind."""
    work = _Upload(client, key, size, checksum)
    try:
        yield work.write
        work.finish()
    except BaseException:
        work.abort()
        raise
    finally:
        work.close()


@contextmanager
def told(where: str) -> Iterator[None]:
    """Warn of what could not be taken back; the error that was the cause stays the one raised."""
    try:
        yield
    except Exception as error:
        warnings.warn(
            f"parts of {where} may be left in the store, the next save there removes them: {error}",
            CheckpointWarning,
            stacklevel=3,
        )


class _Upload:
    """One object on its way. Bytes are copied into a part; parts that are full are being sent."""

    def __init__(
        self, client: S3Client, key: str, size: int | None, checksum: Checksum | None
    ) -> None:
        self._client = client
        self._key = key
        self._where = client.place.of(key)
        self._size = size
        self._checksum = checksum
        self._budget = process_budget()
        self._budget.enter()
        self._part_size = part_size(size)
        self._buffer: bytearray | None = None
        self._filled = 0
        self._written = 0
        self._parts = MultipartUpload(client, key, checksum)

    def write(self, data: memoryview[int]) -> None:
        """Copy bytes into parts and send those that are full."""
        source = np.frombuffer(data, dtype=np.uint8)
        if self._size is not None and self._written + len(source) > self._size:
            raise CheckpointError(f"{self._where}: more than the announced {self._size} bytes")
        at = 0
        while at < len(source):
            if self._buffer is None:
                left = self._part_size if self._size is None else self._size - self._written
                self._buffer = self._budget.buffer(min(left, self._part_size))
            count = min(len(self._buffer) - self._filled, len(source) - at)
            target = np.frombuffer(self._buffer, dtype=np.uint8)
            # numpy copies without holding the interpreter
            target[self._filled : self._filled + count] = source[at : at + count]
            at += count
            self._filled += count
            self._written += count
            if self._filled == self._part_size:
                self._send()

    def _send(self) -> None:
        """Send the part, in the background, once there is room for it."""
        assert self._buffer is not None
        whole = self._filled == len(self._buffer)
        body = self._buffer if whole else self._buffer[: self._filled]
        self._buffer, self._filled = None, 0
        self._parts.send(body)

    def finish(self) -> None:
        """Wait for all parts, then publish the object."""
        if self._size is not None and self._written != self._size:
            raise CheckpointError(
                f"{self._where}: {self._written} bytes instead of the announced {self._size}"
            )
        if self._parts.begun:
            if self._filled:
                self._send()
            self._parts.complete(self._written)
            with told(self._where):
                self._parts.abort_strays()
            return
        data = bytes(memoryview(self._buffer or b"")[: self._filled])
        self._client.run(self._put_whole(data))

    async def _put_whole(self, data: bytes) -> None:
        """Upload a small object by one request."""
        try:
            await self._client.repeat(
                "uploading", self._key, lambda: put(self._client, self._key, data, self._checksum)
            )
        except Exception as error:
            raise self._client.explain(error, "uploading", self._key) from error

    def abort(self) -> None:
        """Leave nothing in the store."""
        with told(self._where):
            self._parts.abort()

    def close(self) -> None:
        """Give the buffers back."""
        self._buffer = None
        self._budget.leave()
