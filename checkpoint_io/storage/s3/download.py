"""Read objects by byte ranges: several at once, of exact length and of a single version."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.storage.base import Deliver, Span, missing_error, truncated_error
from checkpoint_io.storage.s3.client import (
    STEP,
    S3Client,
    code_of,
    is_absent,
    status_of,
)

IN_FLIGHT = 8  # concurrent requests of one fetch
_BUFFERS = IN_FLIGHT + 4  # including those in use by `deliver`
_PIECE = 1 << 20

KeyOf = Callable[[str], str]


class Fetch:
    """Reads spans on the event loop and delivers them on the calling thread."""

    def __init__(self, client: S3Client, spans: Sequence[Span], key_of: KeyOf) -> None:
        self._client = client
        self._spans = spans
        self._key_of = key_of
        self._versions = Versions(client)
        self._ready: queue.SimpleQueue[tuple[int, bytearray] | None] = queue.SimpleQueue()
        self._free: asyncio.Queue[bytearray] | None = None

    def run(self, deliver: Deliver) -> None:
        """Read all spans; the first error of a read or of `deliver` ends it."""
        work = self._client.start(self._read_all())
        work.add_done_callback(lambda _: self._ready.put(None))
        try:
            while (part := self._ready.get()) is not None:
                index, buffer = part
                span = self._spans[index]
                deliver(index, memoryview(buffer)[: span.end - span.begin])
                self._client.loop.call_soon_threadsafe(self._release, buffer)
            work.result()
        except BaseException:
            work.cancel()
            raise

    def _release(self, buffer: bytearray) -> None:
        """Free a buffer for the next read (on the loop)."""
        assert self._free is not None
        self._free.put_nowait(buffer)

    async def _read_all(self) -> None:
        """Run several readers that share the list of spans."""
        longest = max(span.end - span.begin for span in self._spans)
        self._free = asyncio.Queue()
        for _ in range(min(_BUFFERS, len(self._spans))):
            self._free.put_nowait(bytearray(longest))
        indices = iter(range(len(self._spans)))
        readers = [
            asyncio.ensure_future(self._reader(indices))
            for _ in range(min(IN_FLIGHT, len(self._spans)))
        ]
        try:
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _reader(self, indices: Any) -> None:
        """Read one span after another, as long as there are any."""
        assert self._free is not None
        while True:
            # the buffer first: while `deliver` is slow, no buffer is free and no request is sent
            buffer = await self._free.get()
            index = next(indices, None)
            if index is None:
                self._free.put_nowait(buffer)
                return
            await self._read(self._spans[index], buffer)
            self._ready.put((index, buffer))

    async def _read(self, span: Span, buffer: bytearray) -> None:
        """Read one span, of the version of its object that the first answer had."""
        key = self._key_of(span.name)
        view = memoryview(buffer)[: span.end - span.begin]
        try:
            if view:
                work = RangeRead(self._client, key, span.begin, view)
                await work.run(self._versions.version(key))
            else:
                await self._check_size(key, span.end)
        except CheckpointNotFoundError:  # the bucket itself is missing
            raise
        except FileNotFoundError:
            raise missing_error(self._client.place.of(key)) from None

    async def _check_size(self, key: str, end: int) -> None:
        """Check that an object has at least `end` bytes, for a span of no bytes."""
        size, tag = await head(self._client, key)
        if size < end:
            raise CorruptCheckpointError(f"{self._client.place.of(key)}: truncated")
        self._versions.note(key, tag)


class S3Reader:
    """Ranged reads of an object, all of the version that it had when it was opened."""

    def __init__(self, client: S3Client, key: str, size: int, tag: str) -> None:
        self._client = client
        self._key = key
        self._versions = Versions(client)
        self._versions.note(key, tag)
        self.size = size

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Return exactly these bytes."""
        if end > self.size:
            raise truncated_error(self._client.place.of(self._key), end)
        data = bytearray(end - begin)
        if data:
            work = RangeRead(self._client, self._key, begin, memoryview(data))
            self._client.run(work.run(self._versions.version(self._key)))
        return memoryview(data)


class RangeRead:
    """Fills memory with bytes of one object; resumes where a connection broke."""

    def __init__(self, client: S3Client, key: str, begin: int, target: memoryview[int]) -> None:
        self._client = client
        self._key = key
        self._url = client.place.of(key)
        self._at = begin
        self._end = begin + len(target)
        self._left = target

    async def run(self, version: Callable[[str], None]) -> None:
        """Read; pass the entity tag of each answer to `version`, which raises if it changed."""

        async def read_on() -> None:
            policy = self._client.policy
            # It grows with the length: a slow connection is not a stalled one.
            bound = policy.connect_timeout + policy.read_timeout * (1 + len(self._left) / STEP)
            await asyncio.wait_for(self._once(version), bound)

        try:
            await self._client.repeat("reading", self._key, read_on)
        except Exception as error:
            if status_of(error) == 416:  # range not satisfiable
                raise truncated_error(self._url, self._end) from error
            if is_absent(error):
                raise FileNotFoundError(f"{self._url} is missing") from error
            self._client.raise_explained(error, "reading", self._key)

    async def _once(self, version: Callable[[str], None]) -> None:
        """Send one request for the rest, and keep count of what arrives."""
        # What has arrived before a connection broke stays: the next attempt asks for less.
        span = f"bytes={self._at}-{self._end - 1}"
        step = 1 + len(self._left) / STEP
        answer = await self._client.once("get_object", step, Key=self._key, Range=span)
        body = answer["Body"]
        async with body:  # older versions of aiobotocore yield something else than the body
            version(str(answer.get("ETag", "")))
            _check_range(answer, self._at, self._end, self._url)
            while self._left:
                piece = await body.read(min(_PIECE, len(self._left)))
                if not piece:
                    raise EOFError(f"{self._url}: ended at byte {self._at} of {self._end}")
                self._left[: len(piece)] = piece
                self._left = self._left[len(piece) :]
                self._at += len(piece)


def _check_range(answer: dict[str, Any], begin: int, end: int, url: str) -> None:
    """Raise if an answer holds other bytes than were requested."""
    length = answer.get("ContentLength")
    content_range = str(answer.get("ContentRange") or "")
    if content_range:
        span, _, total = content_range.removeprefix("bytes ").partition("/")
        if total.isdigit() and int(total) < end:
            raise CorruptCheckpointError(f"{url}: truncated, {total} bytes, not {end} or more")
        complete = span == f"{begin}-{end - 1}"
    else:  # a complete object: right if all of it was requested
        complete = begin == 0 and length == end
    if not complete or (length is not None and length != end - begin):
        # EOFError counts as transient, so that the request is retried
        raise EOFError(
            f"{url}: bytes {begin} to {end} were requested, {content_range or length} came"
        )


class Versions:
    """Records the first version seen of each object; another one is an error."""

    def __init__(self, client: S3Client) -> None:
        self._client = client
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()

    def note(self, key: str, tag: str) -> None:
        """Compare the entity tag of an answer with the first one of the object."""
        with self._lock:
            first = self._tags.setdefault(key, tag)
        if first != tag:
            raise CorruptCheckpointError(
                f"{self._client.place.of(key)} was replaced while it was being read"
            )

    def version(self, key: str) -> Callable[[str], None]:
        """Return `note` for one object."""
        return lambda tag: self.note(key, tag)


async def head(client: S3Client, key: str) -> tuple[int, str]:
    """Return size and entity tag of an object; FileNotFoundError if there is none."""
    try:
        answer = await client.repeat("looking at", key, lambda: client.once("head_object", Key=key))
    except Exception as error:
        if is_absent(error) or code_of(error) == "NoSuchBucket":
            raise FileNotFoundError(f"{client.place.of(key)} is missing") from error
        raise client.explain(await _cause(client, key, error), "looking at", key) from None
    return int(answer["ContentLength"]), str(answer.get("ETag", ""))


async def _cause(client: S3Client, key: str, error: Exception) -> Exception:
    """Return the error with the store's reason: the answer to a HEAD has a status alone."""
    if status_of(error) not in (400, 403):
        return error
    try:
        answer = await client.once("get_object", Key=key, Range="bytes=0-0")
    except Exception as reason:
        return reason if status_of(reason) == status_of(error) else error
    async with answer["Body"]:
        return error
