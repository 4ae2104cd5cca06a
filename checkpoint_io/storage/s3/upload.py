"""An upload, whole or in parts; the Transfer protocol."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from checkpoint_io.errors import CheckpointError, CheckpointWarning
from checkpoint_io.storage.base import Deliver, Span, Write
from checkpoint_io.storage.retry import Attempts
from checkpoint_io.storage.s3.client import STEP, S3Client, is_transient
from checkpoint_io.storage.s3.download import Fetch, head
from checkpoint_io.storage.s3.listing import give_up, give_up_all
from checkpoint_io.storage.s3.parts import (
    Checksum,
    check_part_number,
    part_size,
    process_budget,
    tag_of_parts,
    verify_arrival,
)


class CorruptUploadError(ConnectionError):
    """What arrived at the store is not what was sent; sending it again may help.

    Attributes:
        tag: entity tag of the object that the store now has instead, "" if it has none.
    """

    def __init__(self, message: str, tag: str = "") -> None:
        super().__init__(message)
        self.tag = tag


class MultipartUpload:
    """The multipart upload of one object; begins with its first part."""

    def __init__(self, client: S3Client, key: str, checksum: Checksum | None) -> None:
        self._client = client
        self._key = key
        self._checksum = checksum
        self._budget = process_budget()
        self._id: str | None = None
        self._strays = False  # an answer with an upload's id may have got lost
        self._sent: list[Future[dict[str, Any]]] = []
        self._failed: Future[dict[str, Any]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.begun = False

    def send(self, body: bytearray) -> None:
        """Send a part in the background, once there is room; raises what others have met."""
        if self._failed is not None:
            self._failed.result()
        number = len(self._sent) + 1
        check_part_number(number, self._client.place.of(self._key))
        if not self.begun:
            self.begun = True
            self._client.run(self._begin())
        text = self._checksum.text(body) if self._checksum else None
        self._budget.acquire(len(body))
        try:
            future = self._client.start(self._send_part(number, body, text))
        except BaseException:
            self._budget.release(len(body))
            raise
        self._sent.append(future)
        future.add_done_callback(partial(self._note, len(body)))

    def _note(self, nbytes: int, future: Future[dict[str, Any]]) -> None:
        """Make room, and remember a failure for the writer."""
        self._budget.release(nbytes)
        if not future.cancelled() and future.exception() is not None:
            self._failed = self._failed or future

    async def _begin(self) -> None:
        """Begin the upload; its id is noted here, where an interrupt of the writer does no harm."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        extra: dict[str, Any] = {}
        if self._checksum is not None:
            extra["ChecksumAlgorithm"] = self._checksum.algorithm

        async def begin() -> Any:
            try:
                return await self._client.once("create_multipart_upload", Key=self._key, **extra)
            except BaseException as error:
                refused = isinstance(error, Exception) and not is_transient(error)
                self._strays = self._strays or not refused
                raise

        try:
            answer = await self._client.repeat("uploading", self._key, begin)
        except Exception as error:
            raise self._client.explain(error, "uploading", self._key) from error
        finally:
            self._tasks.discard(task)
        self._id = str(answer["UploadId"])

    async def _send_part(self, number: int, body: bytearray, text: str | None) -> dict[str, Any]:
        """Send one part until the store has it; returns its line for the completion."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        tries = 0

        async def send() -> dict[str, Any]:
            nonlocal tries
            tries += 1
            return await self._try_part(number, body, text)

        doing = f"uploading part {number} of"
        try:
            line = await self._client.repeat(doing, self._key, send)
        except Exception as error:
            raise self._client.explain(error, doing, self._key) from error
        finally:
            self._tasks.discard(task)
        if tries == 1:  # a connection that broke may still hold on to the buffer
            self._budget.keep(body)
        return line

    async def _try_part(self, number: int, body: bytearray, text: str | None) -> dict[str, Any]:
        """Send one part once and check what arrived."""
        field = self._checksum.field if self._checksum else ""
        extra: dict[str, Any] = {field: text} if self._checksum else {}
        answer = await self._client.once(
            "upload_part",
            1 + len(body) / STEP,
            Key=self._key,
            UploadId=self._id,
            PartNumber=number,
            Body=self._client.body(body),
            **extra,
        )
        check = partial(verify_arrival, answer, field, text, body)
        if text and answer.get(field):
            right = check()
        else:  # without an echo it takes a hash of the body, too long for the loop
            right = await asyncio.get_running_loop().run_in_executor(None, check)
        if not right:
            raise CorruptUploadError(f"part {number} did not arrive as it was sent")
        return {"PartNumber": number, "ETag": answer["ETag"], **extra}

    def complete(self, size: int) -> None:
        """Wait for the parts and publish the object, which has `size` bytes."""
        lines = [future.result() for future in self._sent]
        self._client.run(self._complete(lines, size))

    def abort_strays(self) -> None:
        """Remove what a beginning whose answer got lost may have left."""
        if self._strays:
            self._client.run(give_up_all(self._client, self._key, keep=self._id))

    async def _complete(self, lines: list[dict[str, Any]], size: int) -> None:
        """Publish the object; whether it is there after a lost answer is found out by looking."""
        attempts = Attempts(self._client.policy)
        while True:
            try:
                await self._client.once(
                    "complete_multipart_upload",
                    5.0,  # the store may have to copy all parts
                    Key=self._key,
                    UploadId=self._id,
                    MultipartUpload={"Parts": lines},
                )
                return
            except Exception as error:
                pause = attempts.pause() if is_transient(error) else None
                if pause is None:
                    if attempts.made and await self._is_there(lines, size):
                        return
                    tried = attempts.describe()
                    raise self._client.explain(error, "completing", self._key, tried) from error
            await asyncio.sleep(pause)

    async def _is_there(self, lines: list[dict[str, Any]], size: int) -> bool:
        """Say whether the object is there as it was sent."""
        try:
            found, tag = await head(self._client, self._key)
        except Exception:
            return False
        expected = tag_of_parts([line["ETag"] for line in lines])
        tag = tag.strip('"')
        comparable = expected is not None and "-" in tag and len(tag) == len(expected)
        return found == size and (tag == expected or not comparable)

    def abort(self) -> None:
        """Stop sending and remove the parts that arrived."""
        if self.begun:
            self._client.run(self._abort())

    async def _abort(self) -> None:
        """Stop the tasks first, so that none of them adds a part afterwards."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._id is not None:
            await give_up(self._client, self._key, self._id)
        if self._strays:
            await give_up_all(self._client, self._key)


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
