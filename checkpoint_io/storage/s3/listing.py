"""List and delete what is under a prefix of a bucket: objects, folders, unfinished uploads."""

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
_AT_ONCE = 16
_NOT_SUPPORTED = frozenset({400, 404, 405, 501})  # answers of stores that lack an operation


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
            files.pop("", None)  # the marker object that some tools create for a folder
            return files, folders
        more = {"ContinuationToken": answer["NextContinuationToken"]}


async def delete(client: S3Client, keys: Sequence[str]) -> None:
    """Delete objects, many per request; raise a single error for those that failed."""
    failed: list[str] = []
    for begin in range(0, len(keys), _BATCH):
        batch = keys[begin : begin + _BATCH]
        if len(batch) > 1:
            failed += await _delete_batch(client, batch)
        else:
            await client.request("delete_object", "deleting", batch[0])
    if failed:
        raise CheckpointError(
            f"{client.place.of(None)}: could not delete {len(failed)} of {len(keys)} objects: "
            + "; ".join(failed[:5])
        )


async def _delete_batch(client: S3Client, keys: Sequence[str]) -> list[str]:
    """Delete up to 1000 objects by one request; return the failures as text."""
    wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
    try:
        answer = await client.repeat(
            "deleting", None, lambda: client.once("delete_objects", Delete=wanted)
        )
    except Exception as error:
        if status_of(error) in _NOT_SUPPORTED and code_of(error) != "NoSuchBucket":
            return await _delete_singly(client, keys)
        client.raise_explained(error, "deleting objects of", None)
    # Some stores report missing keys as errors; others, under load, fail for some of the keys.
    left = [e["Key"] for e in answer.get("Errors") or () if e.get("Code") != "NoSuchKey"]
    return await _delete_singly(client, left)


async def _delete_singly(client: S3Client, keys: Iterable[str]) -> list[str]:
    """Delete objects by one request each; return the failures as text."""
    semaphore = asyncio.Semaphore(_AT_ONCE)

    async def remove(key: str) -> None:
        async with semaphore:
            await client.request("delete_object", "deleting", key)

    results = await asyncio.gather(*map(remove, keys), return_exceptions=True)
    return [str(error) for error in results if isinstance(error, BaseException)]


async def unfinished_uploads(client: S3Client, prefix: str) -> AsyncIterator[tuple[str, str]]:
    """Yield key and id of the multipart uploads under a prefix, none if the store cannot list."""
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
            if status_of(error) in _NOT_SUPPORTED and code_of(error) != "NoSuchBucket":
                return
            client.raise_explained(error, "listing the uploads of", None)
        for entry in answer.get("Uploads") or ():
            if entry["Key"].startswith(prefix):
                yield entry["Key"], entry["UploadId"]
        following = answer.get("NextKeyMarker"), answer.get("NextUploadIdMarker")
        if not answer.get("IsTruncated") or not following[0] or following == last:
            return  # some stores ignore the markers, and would return the same page forever
        last = following
        more = {"KeyMarker": following[0]}
        if following[1]:
            more["UploadIdMarker"] = following[1]


async def abort_upload(client: S3Client, key: str, upload_id: str) -> None:
    """Abort a multipart upload, if it still exists."""
    # fewer attempts: what is left only takes space, and the next save there removes it
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
        client.raise_explained(error, "aborting the upload of", key)


async def abort_uploads_of(client: S3Client, key: str, keep: str | None = None) -> None:
    """Abort all uploads of one key except `keep`, an upload's id, if they may be listed."""
    try:
        async for other_key, upload_id in unfinished_uploads(client, key):
            if other_key == key and upload_id != keep:
                await abort_upload(client, key, upload_id)
    except StoreAccessError:  # listing uploads requires a permission of its own
        return
