"""Upload objects through the client of s3fs, in one request or in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from checkpoint_io.errors import CheckpointWarning, UnsettledWriteError
from checkpoint_io.storage.base import Write
from checkpoint_io.storage.s3.client import STEP, S3Client, StoreUnavailableError, is_transient
from checkpoint_io.storage.s3.download import head
from checkpoint_io.storage.s3.listing import abort_upload, abort_uploads_of
from checkpoint_io.storage.s3.parts import (
    Checksum,
    PartBuffer,
    check_part_number,
    process_budget,
    tag_of_parts,
    verify_arrival,
)
from checkpoint_io.warning import warn


@contextmanager
def upload(
    client: S3Client, key: str, size: int | None, checksum: Checksum | None
) -> Iterator[Write]:
    """Upload what is written in the block; a block that raises leaves nothing behind."""
    url = client.place.of(key)
    multipart = MultipartUpload(client, key, checksum)
    with process_budget().entered() as budget:
        parts = PartBuffer(budget, url, size)

        def write(data: memoryview[int]) -> None:
            for part in parts.fill(data):
                multipart.send(*part)

        try:
            yield write
            parts.check_complete()
            buffer, length = parts.take()
            if not multipart.begun:  # all of it fits one request
                data = bytes(memoryview(buffer)[:length])
                whole = partial(put, client, key, data, checksum)
                client.run(client.repeat_explained("uploading", key, whole))
                return
            if length:
                multipart.send(buffer, length)
            multipart.complete(parts.written)
            with warn_of_leftovers(url):
                multipart.abort_strays()
        except BaseException:
            with warn_of_leftovers(url):
                multipart.abort()
            raise
        finally:
            parts.take()  # the traceback of an error may keep this frame


class MultipartUpload:
    """The multipart upload of one object; created in the store with the first part."""

    def __init__(self, client: S3Client, key: str, checksum: Checksum | None) -> None:
        self._client = client
        self._key = key
        self._checksum = checksum
        self._budget = process_budget()
        self._id: str | None = None
        self._strays = False  # the store may have an upload whose id never reached us
        self._sent: list[Future[dict[str, Any]]] = []
        self._failed: Future[dict[str, Any]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.begun = False

    def send(self, buffer: bytearray, length: int) -> None:
        """Send a part in the background, once there is room; raise the error of an earlier one."""
        if self._failed is not None:
            self._failed.result()
        body = buffer if length == len(buffer) else buffer[:length]
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
        future.add_done_callback(partial(self._on_sent, len(body)))

    def _on_sent(self, nbytes: int, future: Future[dict[str, Any]]) -> None:
        """Release the room of a part, and keep a failure for the writer."""
        self._budget.release(nbytes)
        if not future.cancelled() and future.exception() is not None:
            self._failed = self._failed or future

    async def _begin(self) -> None:
        """Create the upload and keep its id."""
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
                # unless the store refused, it may have created an upload before the answer was lost
                refused = isinstance(error, Exception) and not is_transient(error)
                self._strays = self._strays or not refused
                raise

        try:
            answer = await self._client.repeat_explained("uploading", self._key, begin)
        finally:
            self._tasks.discard(task)
        # set on the loop and not by the writer, whose thread may be interrupted at any point
        self._id = str(answer["UploadId"])

    async def _send_part(self, number: int, body: bytearray, text: str | None) -> dict[str, Any]:
        """Send one part until the store has it; return its entry for the completion."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        tries = 0

        async def send() -> dict[str, Any]:
            nonlocal tries
            tries += 1
            return await self._try_part(number, body, text)

        try:
            entry = await self._client.repeat_explained(
                f"uploading part {number} of", self._key, send
            )
        finally:
            self._tasks.discard(task)
        if tries == 1:  # after a retry, the broken connection may still read from the buffer
            self._budget.keep(body)
        return entry

    async def _try_part(self, number: int, body: bytearray, text: str | None) -> dict[str, Any]:
        """Send one part once and verify what arrived."""
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
            intact = check()
        else:  # without an echo the body must be hashed, which would block the loop
            intact = await asyncio.get_running_loop().run_in_executor(None, check)
        if not intact:
            raise CorruptUploadError(f"part {number} did not arrive as it was sent")
        return {"PartNumber": number, "ETag": answer["ETag"], **extra}

    def complete(self, size: int) -> None:
        """Wait for the parts and publish the object, which has `size` bytes."""
        entries = [future.result() for future in self._sent]
        self._client.run(self._complete(entries, partial(self._is_there, entries, size)))

    def abort_strays(self) -> None:
        """Abort uploads that were created by a request whose answer was lost."""
        if self._strays:
            self._client.run(abort_uploads_of(self._client, self._key, keep=self._id))

    async def put(self, data: bytes, is_there: Callable[[], Awaitable[bool]]) -> None:
        """Upload a small object as one part, which replaces an older one only once it is verified.

        After lost answers, `is_there` says whether it took place; else UnsettledWriteError.
        """
        entry = await self._client.repeat_explained(
            "uploading", self._key, partial(self._try_single, data)
        )
        try:
            await self._complete([entry], is_there)
        except StoreUnavailableError as error:
            await self._give_up()
            raise UnsettledWriteError(f"{error}; it may still arrive") from error
        except BaseException:
            await self._give_up()
            raise

    async def _try_single(self, data: bytes) -> dict[str, Any]:
        """Begin an upload and send its only part once; a failure ends the upload."""
        # a new upload for each try: some stores do not take another part in place of a bad one
        text = self._checksum.text(data) if self._checksum else None
        try:
            await self._begin()
            return await self._try_part(1, bytearray(data), text)
        except BaseException:
            await self._give_up()
            raise

    async def _give_up(self) -> None:
        """Abort the upload; a failure to do so is only a warning."""
        with warn_of_leftovers(self._client.place.of(self._key)):
            await self._abort()

    async def _complete(
        self, entries: list[dict[str, Any]], is_there: Callable[[], Awaitable[bool]]
    ) -> None:
        """Publish the object; retry as long as it is not there."""
        answers_lost = 0

        async def complete() -> None:
            nonlocal answers_lost
            try:
                await self._client.once(
                    "complete_multipart_upload",
                    5.0,  # the store may have to copy all parts
                    Key=self._key,
                    UploadId=self._id,
                    MultipartUpload={"Parts": entries},
                )
            except Exception as error:
                answers_lost += is_transient(error)
                raise

        try:
            await self._client.repeat_explained("completing", self._key, complete)
        except Exception:
            # the upload is gone then (NoSuchUpload), and the object is there
            if not answers_lost or not await is_there():
                raise

    async def _is_there(self, entries: list[dict[str, Any]], size: int) -> bool:
        """Return whether the object exists as it was sent."""
        try:
            stored_size, tag = await head(self._client, self._key)
        except Exception:
            return False
        expected = tag_of_parts([entry["ETag"] for entry in entries])
        tag = tag.strip('"')
        # only where the store forms tags as S3 does
        comparable = expected is not None and "-" in tag and len(tag) == len(expected)
        return stored_size == size and (tag == expected or not comparable)

    def abort(self) -> None:
        """Stop sending and remove the parts that arrived."""
        if self.begun:
            self._client.run(self._abort())

    async def _abort(self) -> None:
        """Cancel the requests, then abort the upload."""
        # in this order: a part that arrives after the abort would stay in the store
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._id is not None:
            await abort_upload(self._client, self._key, self._id)
        if self._strays:
            await abort_uploads_of(self._client, self._key)


async def put(
    client: S3Client, key: str, data: bytes, checksum: Checksum | None, **extra: Any
) -> dict[str, Any]:
    """Put a small object by a single request without retries; return the answer."""
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
def warn_of_leftovers(url: str) -> Iterator[None]:
    """Turn an error in the block, which aborts an upload, into a warning."""
    # so that the error that made the upload fail is the one that is raised
    try:
        yield
    except Exception as error:
        warn(
            f"parts of {url} may be left in the store, the next save there removes them: {error}",
            CheckpointWarning,
        )


class CorruptUploadError(ConnectionError):
    """The store received other bytes than were sent; a retry may succeed.

    Attributes:
        tag: entity tag of the object that the store has now, "" if it has none.
    """

    def __init__(self, message: str, tag: str = "") -> None:
        super().__init__(message)
        self.tag = tag
