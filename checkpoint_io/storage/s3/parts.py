"""Parts of uploads: how large, how many at once, and what vouches for their bytes."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from checkpoint_io.errors import CheckpointError
from checkpoint_io.storage.s3.client import STEP

IN_FLIGHT_BYTES = 8 * STEP  # of all uploads of a process
_MAX_PARTS = 10_000
_MIB = 1 << 20


def part_size(size: int | None) -> int:
    """Return the length of the parts of an object, for whose size 10,000 parts must do."""
    return max(STEP, -(-(size or 0) // (_MAX_PARTS * _MIB)) * _MIB)


def check_part_number(number: int, where: str) -> None:
    """Refuse one part too many."""
    if number > _MAX_PARTS:
        raise CheckpointError(
            f"{where}: longer than {_MAX_PARTS} parts; tell create() the size beforehand"
        )


class PartBudget:
    """Bounds the bytes on their way, and keeps the buffers of those that have arrived."""

    def __init__(self, limit: int = IN_FLIGHT_BYTES) -> None:
        self._limit = limit
        self._used = 0
        self._uploads = 0
        self._spare: list[bytearray] = []
        self._changed = threading.Condition()

    def enter(self) -> None:
        """Count an upload that begins."""
        with self._changed:
            self._uploads += 1

    def leave(self) -> None:
        """Count an upload that ended; the last one gives the memory back."""
        with self._changed:
            self._uploads -= 1
            if not self._uploads:
                self._spare.clear()

    def buffer(self, size: int) -> bytearray:
        """Return a buffer with any content."""
        with self._changed:
            for at, spare in enumerate(self._spare):
                if len(spare) == size:
                    return self._spare.pop(at)
        return bytearray(size)

    def keep(self, buffer: bytearray) -> None:
        """Take a buffer back that nobody reads any more."""
        with self._changed:
            if self._uploads and len(self._spare) * len(buffer) < self._limit:
                self._spare.append(buffer)

    def acquire(self, nbytes: int) -> None:
        """Wait until so many bytes more may be on their way (a single part always may)."""
        with self._changed:
            while self._used and self._used + nbytes > self._limit:
                self._changed.wait()
            self._used += nbytes

    def release(self, nbytes: int) -> None:
        """Count bytes that arrived or were given up."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()


def process_budget() -> PartBudget:
    """Return the one budget of this process; a forked child has its own."""
    return _budget_of(os.getpid())


@lru_cache(maxsize=1)
def _budget_of(pid: int) -> PartBudget:
    """Make the budget of a process."""
    return PartBudget()


class Checksum(NamedTuple):
    """A checksum that S3 verifies on arrival."""

    algorithm: str  # as in ChecksumAlgorithm
    of: Callable[[Any], int]

    @property
    def field(self) -> str:
        """Return the name of the parameter and of the answer's field."""
        return f"Checksum{self.algorithm}"

    def text(self, data: Any) -> str:
        """Return the checksum of bytes as S3 writes it."""
        return base64.b64encode(self.of(data).to_bytes(4, "big")).decode("ascii")


def best_checksum() -> Checksum:
    """Return CRC32C where a fast one is installed, else the CRC32 that Python has."""
    for find in (_google_crc32c, _aws_crc32c):
        try:
            return Checksum("CRC32C", find())
        except ImportError:
            continue
    return Checksum("CRC32", zlib.crc32)


def _google_crc32c() -> Callable[[Any], int]:
    """Find the CRC32C of google-crc32c, if it is the compiled one."""
    import google_crc32c

    if google_crc32c.implementation != "c":
        raise ImportError("the pure Python version is slower than zlib's CRC32")
    # it takes bytes-like objects through value() only as bytes; extend() is the same
    return lambda data: int(google_crc32c.value(bytes(data)))


def _aws_crc32c() -> Callable[[Any], int]:
    """Find the CRC32C of awscrt, with which botocore computes it too."""
    from awscrt import checksums

    return lambda data: int(checksums.crc32c(data))


def verify_arrival(answer: Mapping[str, Any], field: str, sent: str | None, data: Any) -> bool:
    """Say whether the store has the bytes that were sent, as far as its answer tells.

    A store that echoes the checksum has verified it. Others tell the MD5 in the entity tag, unless
    they encrypt with keys of the customer's; nothing is known about what they tell otherwise.
    """
    if sent is not None and answer.get(field):
        return str(answer[field]) == sent
    tag = str(answer.get("ETag", "")).strip('"').lower()
    encrypted = answer.get("SSECustomerAlgorithm") or "kms" in str(
        answer.get("ServerSideEncryption", "")
    )
    if encrypted or len(tag) != 32 or set(tag) - set("0123456789abcdef"):
        return True
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == tag


def tag_of_parts(tags: list[str]) -> str | None:
    """Return the entity tag that most stores give to an object of these parts, if computable."""
    try:
        digests = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
    except ValueError:
        return None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(tags)}"
