"""What is under a prefix of a bucket: objects, folders, unfinished uploads; and their removal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from checkpoint_io.errors import CheckpointError
from checkpoint_io.storage.s3.client import (
    S3Client,
    StoreAccessError,
    code_of,
    is_absent,
    status_of,
)

_BATCH = 1000  # keys that one request may delete
_TOGETHER = 16
_NOT_OFFERED = frozenset({400, 404, 405, 501})


async def listing(client: S3Client, prefix: str) -> tuple[dict[str, int], list[str]]:
    """Return the objects directly under a prefix with their sizes, and the folders there."""
    files: dict[str, int] = {}
    folders: list[str] = []
    more: dict[str, Any] = {}
    while True:
        answer = await client.request(
            "list_objects_v2", "listing", Prefix=prefix, Delimiter="/", **more
        )
        for entry in answer.get("Contents") or ():
            files[entry["Key"][len(prefix) :]] = int(entry["Size"])
        for entry in answer.get("CommonPrefixes") or ():
            folders.append(entry["Prefix"][len(prefix) :].removesuffix("/"))
        if not answer.get("IsTruncated"):
            files.pop("", None)  # the marker that some tools make for a folder
            return files, folders
        more = {"ContinuationToken": answer["NextContinuationToken"]}


async def delete(client: S3Client, keys: Sequence[str]) -> None:
    """Delete objects, many with one request; what could not be deleted is one error."""
    failed: list[str] = []
    for begin in range(0, len(keys), _BATCH):
        batch = keys[begin : begin + _BATCH]
        if len(batch) > 1:
            failed += await _delete_together(client, batch)
        else:
            await client.request("delete_object", "deleting", batch[0])
    if failed:
        raise CheckpointError(
            f"{client.place.of(None)}: could not delete {len(failed)} of {len(keys)} objects: "
            + "; ".join(failed[:5])
        )


async def _delete_together(client: S3Client, keys: Sequence[str]) -> list[str]:
    """Delete up to 1000 objects; returns what failed, as text."""
    wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
    try:
        answer = await client.repeat(
            "deleting", None, lambda: client.once("delete_objects", Delete=wanted)
        )
    except Exception as error:
        if status_of(error) in _NOT_OFFERED and code_of(error) != "NoSuchBucket":
            return await _delete_singly(client, keys)
        raise client.explain(error, "deleting objects of", None) from error
    # some stores report what was not there, others drop a part of the load with an error each
    left = [e["Key"] for e in answer.get("Errors") or () if e.get("Code") != "NoSuchKey"]
    return await _delete_singly(client, left)


async def _delete_singly(client: S3Client, keys: Iterable[str]) -> list[str]:
    """Delete objects one by one, several at a time; returns what failed, as text."""
    gate = asyncio.Semaphore(_TOGETHER)

    async def remove(key: str) -> None:
        async with gate:
            await client.request("delete_object", "deleting", key)

    results = await asyncio.gather(*map(remove, keys), return_exceptions=True)
    return [str(error) for error in results if isinstance(error, BaseException)]


async def unfinished(client: S3Client, prefix: str) -> AsyncIterator[tuple[str, str]]:
    """Yield key and id of the multipart uploads under a prefix, none where a store has no list."""
    more: dict[str, Any] = {}
    last: tuple[Any, Any] | None = None
    while True:
        try:
            answer = await client.repeat(
                "listing uploads of",
                None,
                partial(client.once, "list_multipart_uploads", Prefix=prefix, **more),
            )
        except Exception as error:
            if status_of(error) in _NOT_OFFERED and code_of(error) != "NoSuchBucket":
                return
            raise client.explain(error, "listing the uploads of", None) from error
        for entry in answer.get("Uploads") or ():
            if entry["Key"].startswith(prefix):
                yield entry["Key"], entry["UploadId"]
        following = answer.get("NextKeyMarker"), answer.get("NextUploadIdMarker")
        if not answer.get("IsTruncated") or not following[0] or following == last:
            return  # some stores ignore where to go on
        last = following
        more = {"KeyMarker": following[0]}
        if following[1]:
            more["UploadIdMarker"] = following[1]


async def give_up(client: S3Client, key: str, upload_id: str) -> None:
    """Abort an upload; one that is not there any more is fine. Tried less than other things."""
    policy = replace(client.policy, attempts=min(client.policy.attempts, 5))
    try:
        await client.repeat(
            "aborting the upload of",
            key,
            lambda: client.once("abort_multipart_upload", Key=key, UploadId=upload_id),
            policy,
        )
    except Exception as error:
        if code_of(error) == "NoSuchUpload" or is_absent(error):
            return
        raise client.explain(error, "aborting the upload of", key) from error


async def give_up_all(client: S3Client, key: str, keep: str | None = None) -> None:
    """Abort the uploads of one key, where that is allowed; `keep` is an id to spare."""
    try:
        async for found, upload_id in unfinished(client, key):
            if found == key and upload_id != keep:
                await give_up(client, key, upload_id)
    except StoreAccessError:  # listing uploads takes a right of its own
        return
