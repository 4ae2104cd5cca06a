"""A multipart upload: a sliding window of parts, complete at the end or taken back."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Any

from checkpoint_io.storage.retry import Attempts
from checkpoint_io.storage.s3.client import STEP, S3Client
from checkpoint_io.storage.s3.download import head
from checkpoint_io.storage.s3.listing import give_up, give_up_all
from checkpoint_io.storage.s3.parts import (
    Checksum,
    check_part_number,
    process_budget,
    tag_of_parts,
    verify_arrival,
)
from checkpoint_io.stores.s3_errors import is_transient


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
