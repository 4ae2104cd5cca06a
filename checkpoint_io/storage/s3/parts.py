"""Parts of uploads: their size, the memory they may take, and their checksums."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from checkpoint_io.errors import CheckpointError
from checkpoint_io.storage.s3.client import STEP

IN_FLIGHT_BYTES = 8 * STEP  # of all uploads of a process together
_MAX_PARTS = 10_000
_MIB = 1 << 20


def part_size(size: int | None) -> int:
    """Return the length of the parts of an object, such that 10,000 parts hold it."""
    return max(STEP, -(-(size or 0) // (_MAX_PARTS * _MIB)) * _MIB)


def check_part_number(number: int, url: str) -> None:
    """Raise CheckpointError if S3 does not allow so many parts."""
    if number > _MAX_PARTS:
        raise CheckpointError(
            f"{url}: longer than {_MAX_PARTS} parts; pass the size to create() beforehand"
        )


class PartBuffer:
    """Copies what is written into parts.

    Args:
        budget: where the buffers of the parts come from.
        url: of the object, for errors.
        size: of the whole object, if known: the buffer of a small one is no larger.

    Attributes:
        part_size: length of each part but the last.
        written: number of bytes so far.
    """

    def __init__(self, budget: PartBudget, url: str, size: int | None) -> None:
        self.part_size = part_size(size)
        self.written = 0
        self._budget = budget
        self._url = url
        self._size = size
        self._buffer: bytearray | None = None
        self._filled = 0

    def check_complete(self) -> None:
        """Raise CheckpointError unless as many bytes were written as were announced."""
        if self._size is not None and self.written != self._size:
            raise CheckpointError(
                f"{self._url}: {self.written} bytes instead of the announced {self._size}"
            )

    def fill(self, data: memoryview[int]) -> Iterator[tuple[bytearray, int]]:
        """Copy bytes; yield each part that is full, as a buffer and its used length."""
        source = np.frombuffer(data, dtype=np.uint8)
        if self._size is not None and self.written + len(source) > self._size:
            raise CheckpointError(f"{self._url}: more than the announced {self._size} bytes")
        at = 0
        while at < len(source):
            if self._buffer is None:
                left = self.part_size if self._size is None else self._size - self.written
                self._buffer = self._budget.buffer(min(left, self.part_size))
            count = min(len(self._buffer) - self._filled, len(source) - at)
            target = np.frombuffer(self._buffer, dtype=np.uint8)
            # unlike a slice assignment, numpy releases the GIL while it copies
            target[self._filled : self._filled + count] = source[at : at + count]
            at += count
            self._filled += count
            self.written += count
            if self._filled == self.part_size:
                yield self.take()

    def take(self) -> tuple[bytearray, int]:
        """Return the current part, which may be empty, and start another."""
        part = self._buffer or bytearray(), self._filled
        self._buffer, self._filled = None, 0
        return part


class PartBudget:
    """Bounds the bytes in flight, and keeps the buffers of those that have arrived."""

    def __init__(self, limit: int = IN_FLIGHT_BYTES) -> None:
        self._limit = limit
        self._used = 0
        self._uploads = 0
        self._spare: list[bytearray] = []
        self._changed = threading.Condition()

    @contextmanager
    def entered(self) -> Iterator[PartBudget]:
        """Count an upload for the time of the block; the last one that ends frees the memory."""
        with self._changed:
            self._uploads += 1
        try:
            yield self
        finally:
            with self._changed:
                self._uploads -= 1
                if not self._uploads:
                    self._spare.clear()

    def buffer(self, size: int) -> bytearray:
        """Return a buffer with arbitrary content."""
        with self._changed:
            for at, spare in enumerate(self._spare):
                if len(spare) == size:
                    return self._spare.pop(at)
        return bytearray(size)

    def keep(self, buffer: bytearray) -> None:
        """Keep a buffer that is no longer read, to be used again."""
        with self._changed:
            if self._uploads and len(self._spare) * len(buffer) < self._limit:
                self._spare.append(buffer)

    def acquire(self, nbytes: int) -> None:
        """Wait until that many more bytes may be in flight (a single part always may)."""
        with self._changed:
            while self._used and self._used + nbytes > self._limit:
                self._changed.wait()
            self._used += nbytes

    def release(self, nbytes: int) -> None:
        """Count bytes that arrived or were abandoned."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()


def process_budget() -> PartBudget:
    """Return the budget of this process; a forked child has its own."""
    return _budget_of(os.getpid())


@lru_cache(maxsize=1)
def _budget_of(pid: int) -> PartBudget:
    """Create the budget of a process."""
    return PartBudget()


class Checksum(NamedTuple):
    """A checksum that S3 verifies on arrival."""

    algorithm: str  # as in ChecksumAlgorithm
    of: Callable[[Any], int]

    @property
    def field(self) -> str:
        """Return the name of the request's parameter and of the answer's field."""
        return f"Checksum{self.algorithm}"

    def text(self, data: Any) -> str:
        """Return the checksum of bytes in S3's notation."""
        return base64.b64encode(self.of(data).to_bytes(4, "big")).decode("ascii")


def best_checksum() -> Checksum:
    """Return CRC32C if a fast implementation is installed, else Python's CRC32."""
    for find in (_google_crc32c, _aws_crc32c):
        try:
            return Checksum("CRC32C", find())
        except ImportError:
            continue
    return Checksum("CRC32", zlib.crc32)


def _google_crc32c() -> Callable[[Any], int]:
    """Return the CRC32C of google-crc32c; ImportError unless it is the compiled one."""
    import google_crc32c

    if google_crc32c.implementation != "c":
        raise ImportError("the pure Python version is slower than zlib's CRC32")
    # value() and extend() accept bytes only, no other bytes-like objects
    return lambda data: int(google_crc32c.value(bytes(data)))


def _aws_crc32c() -> Callable[[Any], int]:
    """Return the CRC32C of awscrt, which botocore uses too."""
    from awscrt import checksums

    return lambda data: int(checksums.crc32c(data))


def verify_arrival(answer: Mapping[str, Any], field: str, sent: str | None, data: Any) -> bool:
    """Return False if the answer shows that the store has other bytes than were sent.

    A store that echoes the checksum has verified it. Others return the MD5 as the entity tag,
    unless they encrypt with keys of the customer; any other tag proves nothing.
    """
    if sent is not None and answer.get(field):
        return str(answer[field]) == sent
    tag = str(answer.get("ETag", "")).strip('"').lower()
    encryption = str(answer.get("ServerSideEncryption", ""))
    encrypted = answer.get("SSECustomerAlgorithm") or "kms" in encryption
    if encrypted or len(tag) != 32 or set(tag) - set("0123456789abcdef"):
        return True
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == tag


def tag_of_parts(tags: list[str]) -> str | None:
    """Return the entity tag that most stores assign to an object of these parts, if computable."""
    try:
        digests = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
    except ValueError:
        return None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(tags)}"
