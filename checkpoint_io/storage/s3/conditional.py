"""Putting a small object in place only if nobody else did: conditional requests, or careful looks.

Stores that ignore conditions exist. They are found out by a probe, once, and then the object is
looked at before and after the put: that narrows the gap between two writers, it does not close it.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointWarning,
    UnsettledWriteError,
)
from checkpoint_io.format.names import probe_name
from checkpoint_io.storage.retry import Attempts
from checkpoint_io.storage.s3.client import (
    S3Client,
    is_absent,
    is_transient,
    lost_condition,
    status_of,
)
from checkpoint_io.storage.s3.download import head
from checkpoint_io.storage.s3.parts import Checksum
from checkpoint_io.storage.s3.upload import CorruptUploadError, put

# no answer, or that of a gateway which had none: the store may be at it still
_OPEN = frozenset({0, 502, 504})


class Conditions(NamedTuple):
    """Which conditions a store obeys."""

    absent: bool  # If-None-Match: *
    match: bool  # If-Match: an entity tag


async def token(client: S3Client, key: str) -> str:
    """Return the entity tag of an object, "" if there is none."""
    try:
        return (await head(client, key))[1]
    except FileNotFoundError:
        return ""


async def replace(
    client: S3Client, key: str, data: bytes, expected: str | None, checksum: Checksum | None
) -> None:
    """Put an object, with `expected` only over that version of it ("": over none)."""
    if expected is None:
        await _put(client, key, data, checksum, None)
        return
    obeyed = await conditions(client, key, checksum)
    if obeyed.absent if expected == "" else obeyed.match:
        await _put(client, key, data, checksum, expected)
        return
    if await token(client, key) != expected:
        raise _conflict(client, key)
    await _put(client, key, data, checksum, None)
    if (await client.read(key))[0] != data:
        raise _conflict(client, key)


async def _put(
    client: S3Client, key: str, data: bytes, checksum: Checksum | None, expected: str | None
) -> None:
    """Put an object by one request that may be repeated, with a condition or without."""
    condition = {} if expected is None else _condition(expected)
    attempts = Attempts(client.policy)
    unanswered = False
    while True:
        try:
            await put(client, key, data, checksum, **condition)
            return
        except Exception as error:
            if expected is not None and isinstance(error, CorruptUploadError) and error.tag:
                # the store took them in place of what was there: only those may be replaced now
                expected, condition = error.tag, _condition(error.tag)
            unanswered = unanswered or status_of(error) in _OPEN
            refused = expected is not None and (lost_condition(error) or is_absent(error))
            # an earlier try may have arrived without its answer; the HTTP client below us repeats
            # requests too, so ours need not be the first. No two saves write the same bytes
            if refused and await _holds(client, key, data):
                return
            # 409: another request was under way at that moment, which may come to nothing
            busy = status_of(error) == 409 and await _is_still(client, key, expected)
            if refused and not busy:
                raise _conflict(client, key) from error
            pause = attempts.pause() if busy or is_transient(error) else None
            if pause is None:
                if attempts.made and await _holds(client, key, data):
                    return
                if busy and not unanswered:  # else it may be our own that is under way
                    raise _conflict(client, key) from error
                explained = client.explain(error, "writing", key, attempts.describe())
                if unanswered:
                    raise UnsettledWriteError(f"{explained}; it may still arrive") from error
                raise explained from error
        await asyncio.sleep(pause)


def _condition(expected: str) -> dict[str, str]:
    """Return the parameter that asks for a version."""
    return {"IfMatch": expected} if expected else {"IfNoneMatch": "*"}


def _conflict(client: S3Client, key: str) -> CheckpointConflictError:
    """Say that another writer was first."""
    return CheckpointConflictError(
        f"{client.place.of(key)} was changed by another save meanwhile: "
        "give each job a folder of its own"
    )


async def _is_still(client: S3Client, key: str, expected: str | None) -> bool:
    """Say whether an object is the version that is expected, as far as can be seen."""
    try:
        return await token(client, key) == expected
    except Exception:
        return True


async def _holds(client: S3Client, key: str, data: bytes) -> bool:
    """Say whether an object is there with just these bytes."""
    try:
        return (await client.read(key))[0] == data
    except Exception:
        return False


async def conditions(client: S3Client, key: str, checksum: Checksum | None) -> Conditions:
    """Find out, once for each bucket, which conditions the store obeys."""
    known = _known(os.getpid(), client.place.endpoint, client.bucket)
    if not known:
        obeyed = await _probe(client, key.rpartition("/")[0], checksum)
        known.append(obeyed)
        if not all(obeyed):
            warnings.warn(
                f"{client.place.of(None)} at {client.place.endpoint} ignores conditional writes: "
                "two jobs that save to one path at the same moment may both believe that they "
                "did; give each job a folder of its own (botocore before 1.36 cannot ask for them)",
                CheckpointWarning,
                stacklevel=2,
            )
    return known[0]


@lru_cache(maxsize=64)
def _known(pid: int, endpoint: str, bucket: str) -> list[Conditions]:
    """Return the place that remembers what a bucket obeys, for this process."""
    return []


async def _probe(client: S3Client, folder: str, checksum: Checksum | None) -> Conditions:
    """Ask for what a store with conditions refuses, on an object made for that."""
    name = probe_name()
    key = f"{folder}/{name}" if folder else name

    async def refuses(**condition: Any) -> bool:
        async def ask() -> bool:
            try:
                await put(client, key, b"probe", checksum, **condition)
            except Exception as error:
                if lost_condition(error):
                    return True
                if status_of(error) in (400, 501):  # it knows them, and does not offer them
                    return False
                raise
            return False

        try:
            return await client.repeat("probing", key, ask)
        except Exception as error:
            raise client.explain(error, "probing", key) from error

    try:
        await refuses()
        absent = await refuses(IfNoneMatch="*")
        match = await refuses(IfMatch='"00000000000000000000000000000000"')
        return Conditions(absent, match)
    finally:
        await client.request("delete_object", "deleting", key)
