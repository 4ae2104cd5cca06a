"""Put a small object only if no other writer did: by conditional requests where the store obeys.

Some stores ignore conditions. A probe detects them, once per bucket; there the object is compared
before and after the put, which narrows the race between two writers but does not close it. Such a
store may not check what arrives either, so there an object is replaced by a multipart upload.

A store that obeys conditions but does not check what arrives may keep a damaged put in place of the
old object. The probe detects that too; there the store copies the old object aside first, and back
as soon as a put is found damaged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointWarning,
    UnsettledWriteError,
)
from checkpoint_io.format.manifest import digest_matches
from checkpoint_io.format.names import probe_name
from checkpoint_io.storage.base import conflict_error
from checkpoint_io.storage.retry import Attempts
from checkpoint_io.storage.s3.client import (
    S3Client,
    is_absent,
    is_transient,
    lost_condition,
    status_of,
)
from checkpoint_io.storage.s3.download import head
from checkpoint_io.storage.s3.listing import abort_uploads_of, delete
from checkpoint_io.storage.s3.parts import Checksum
from checkpoint_io.storage.s3.upload import (
    CorruptUploadError,
    MultipartUpload,
    put,
    warn_of_leftovers,
)
from checkpoint_io.warning import warn

# no answer, or that of a gateway which got none: the store may still execute the request
_UNANSWERED = frozenset({0, 502, 504})


class Conditions(NamedTuple):
    """The conditions that a store obeys, and whether it checks what arrives."""

    absent: bool  # If-None-Match: *
    match: bool  # If-Match: an entity tag
    checks: bool  # refuses a body that does not have the checksum of its header


async def token(client: S3Client, key: str) -> str:
    """Return the entity tag of an object, "" if there is none."""
    try:
        return (await head(client, key))[1]
    except FileNotFoundError:
        return ""


async def replace(
    client: S3Client,
    key: str,
    data: bytes,
    expected: str | None,
    checksum: Checksum | None,
    beside: str,
) -> None:
    """Put an object; with `expected`, only in place of that version of it ("": of none).

    `beside` is the key of a copy that some stores need for the time of the call.
    """
    if expected is None:
        await _put(client, key, data, checksum, None)
        return
    obeyed = await conditions(client, key, checksum)
    if obeyed.absent if expected == "" else obeyed.match:
        if expected and not obeyed.checks:
            await _put_or_undo(client, key, data, checksum, expected, beside)
        else:
            await _put(client, key, data, checksum, expected)
        return
    if await token(client, key) != expected:
        raise conflict_error(client.place.of(key))
    if expected:
        await _put_verified(client, key, data, checksum)
    else:
        await _put(client, key, data, checksum, None)
    if not await _reads(client, key, data):
        raise conflict_error(client.place.of(key))


async def _put_verified(client: S3Client, key: str, data: bytes, checksum: Checksum | None) -> None:
    """Replace an object by a multipart upload, in one step after its bytes are verified.

    A store that knows no conditions may keep a damaged put, in place of the old object, too.
    """
    await MultipartUpload(client, key, checksum).put(data, lambda: _holds(client, key, data))
    with warn_of_leftovers(client.place.of(key)):
        await abort_uploads_of(client, key)  # of saves that were killed in between


async def _put_or_undo(
    client: S3Client,
    key: str,
    data: bytes,
    checksum: Checksum | None,
    expected: str,
    beside: str,
) -> None:
    """Replace an object in a store that keeps what arrives damaged: put the old one back then.

    The copies are made by the store, so that nothing happens to them on the way. A store that
    cannot copy leaves the damaged object to the next try.
    """
    copied = await _copy(client, key, beside, CopySourceIfMatch=expected)
    undo = partial(_undo, client, key, data, beside) if copied else None
    try:
        await _put(client, key, data, checksum, expected, undo)
    except BaseException:
        # The copy may be all that is left of the object: what was sent may have arrived damaged,
        # and may still arrive.
        copied = copied and await _is_whole(client, key, data)
        raise
    finally:
        if copied:
            with warn_of_leftovers(client.place.of(key)):
                await delete(client, [beside])


async def _copy(client: S3Client, source: str, target: str, **condition: str) -> bool:
    """Let the store copy an object; return False if it does not."""
    place = {"Bucket": client.bucket, "Key": source}
    try:
        await client.request("copy_object", "copying", target, CopySource=place, **condition)
    except Exception:
        return False
    return True


async def _undo(client: S3Client, key: str, data: bytes, beside: str, damaged: str) -> str:
    """Put the copied object back in place of damaged bytes of ours; return its entity tag."""
    if await token(client, key) != damaged:
        raise conflict_error(client.place.of(key))
    if not await _copy(client, beside, key) and not await _is_whole(client, key, data):
        raise CheckpointError(
            f"{client.place.of(key)} arrived damaged, and the store could not put the one before "
            f"back, which is lost: check the network and {client.place.endpoint}"
        )
    return await token(client, key)


async def _put(
    client: S3Client,
    key: str,
    data: bytes,
    checksum: Checksum | None,
    expected: str | None,
    undo: Callable[[str], Awaitable[str]] | None = None,
) -> None:
    """Put an object by one request, with a condition or without; retry transient errors.

    With `undo` the object is read back; if it arrived damaged, `undo` is called with its entity tag
    and returns the one to replace from then on.

    The subtle part: a request whose answer was lost may have been executed, so that the retry is
    refused because of our own earlier write. Reading the object back tells the two cases apart.
    """
    condition = {} if expected is None else _condition(expected)
    attempts = Attempts(client.policy)
    unanswered = False
    while True:
        try:
            answer = await put(client, key, data, checksum, **condition)
            if undo is not None and not await _reads(client, key, data):
                tag = str(answer.get("ETag", ""))
                raise CorruptUploadError(f"{key}: the store has other bytes than were sent", tag)
            return
        except CheckpointConflictError:
            raise
        except Exception as problem:
            error, undone = problem, False
            refused = expected is not None and (lost_condition(error) or is_absent(error))
            # The refusal may be due to an earlier attempt that arrived damaged, without its answer.
            if refused and undo is not None and (tag := await _token_of_damage(client, key, data)):
                error = CorruptUploadError(f"{key}: the store has other bytes than were sent", tag)
                refused = False
            if expected is not None and isinstance(error, CorruptUploadError) and error.tag:
                # the store has replaced the object by damaged bytes of ours: unless that is undone,
                # they are the version to replace from now on
                undone = undo is not None
                expected = error.tag if undo is None else await undo(error.tag)
                condition = _condition(expected)
            # what was not answered before an undo expects a version that is gone
            unanswered = not undone and (unanswered or status_of(error) in _UNANSWERED)
            # An earlier attempt may have arrived without its answer. This holds for the first
            # refusal too, since the HTTP client below repeats requests on its own. Equal bytes
            # prove that the write is ours: no two saves write the same manifest.
            if refused and await _holds(client, key, data):
                return
            # 409: another request was in progress at that moment, which may still fail
            busy = status_of(error) == 409 and await _is_still(client, key, expected)
            if refused and not busy:
                raise conflict_error(client.place.of(key)) from error
            pause = attempts.pause() if busy or is_transient(error) else None
            if pause is None:
                if attempts.made and await _holds(client, key, data):
                    return
                if busy and not unanswered:  # else the request in progress may be our own
                    raise conflict_error(client.place.of(key)) from error
                explained = client.explain(error, "writing", key, attempts.describe())
                if unanswered:
                    if undo is not None and (tag := await _token_of_damage(client, key, data)):
                        await undo(tag)
                    raise UnsettledWriteError(f"{explained}; it may still arrive") from error
                raise explained from error
        await asyncio.sleep(pause)


def _condition(expected: str) -> dict[str, str]:
    """Return the request parameter for an expected version."""
    return {"IfMatch": expected} if expected else {"IfNoneMatch": "*"}


async def _is_still(client: S3Client, key: str, expected: str | None) -> bool:
    """Return whether an object still is the expected version; True if that cannot be read."""
    try:
        return await token(client, key) == expected
    except Exception:
        return True


async def _holds(client: S3Client, key: str, data: bytes) -> bool:
    """Return whether an object exists with exactly these bytes; False if it cannot be read."""
    try:
        return await _reads(client, key, data)
    except Exception:
        return False


async def _token_of_damage(client: S3Client, key: str, data: bytes) -> str:
    """Return the entity tag of an object if that is a damaged manifest of ours, else ""."""
    try:
        tag = await token(client, key)  # before the bytes, so that it is not that of later ones
        harmed = digest_matches(data) and not digest_matches((await client.read(key))[0])
    except Exception:
        return ""
    return tag if harmed else ""


async def _is_whole(client: S3Client, key: str, data: bytes) -> bool:
    """Return whether an object is no damaged manifest of ours, as far as it tells; False if unread.

    A whole manifest is another save's, or the one before. Other objects do not tell.
    """
    if not digest_matches(data):
        return True
    try:
        return digest_matches((await client.read(key))[0])
    except Exception:
        return False


async def _reads(client: S3Client, key: str, data: bytes) -> bool:
    """Return whether an object has exactly these bytes; others are read once more."""
    if (await client.read(key))[0] == data:
        return True
    client.reconnect()  # bits may flip on the way here, on one connection alone
    return (await client.read(key))[0] == data


async def conditions(client: S3Client, key: str, checksum: Checksum | None) -> Conditions:
    """Return the conditions that the store obeys; probe once per bucket and process."""
    known = _conditions_cache(os.getpid(), client.place.endpoint, client.bucket)
    if not known:
        obeyed = await _probe(client, key.rpartition("/")[0], checksum)
        known.append(obeyed)
        if not (obeyed.absent and obeyed.match):
            warn(
                f"{client.place.of(None)} at {client.place.endpoint} ignores conditional writes: "
                "two jobs that save to one path at the same moment may both report success; give "
                "each job a folder of its own (botocore before 1.36 cannot send conditions)",
                CheckpointWarning,
            )
    return known[0]


@lru_cache(maxsize=64)
def _conditions_cache(pid: int, endpoint: str, bucket: str) -> list[Conditions]:
    """Return the list that caches the conditions of a bucket in a process."""
    return []


async def _probe(client: S3Client, folder: str, checksum: Checksum | None) -> Conditions:
    """Send requests whose conditions fail, for an object created for that."""
    name = probe_name()
    key = f"{folder}/{name}" if folder else name

    def ask(question: Callable[[], Awaitable[bool]]) -> Awaitable[bool]:
        return client.repeat_explained("probing", key, question)

    async def refuses(**condition: Any) -> bool:
        try:
            await put(client, key, b"probe", checksum, **condition)
        except Exception as error:
            if lost_condition(error):
                return True
            if status_of(error) in (400, 501):  # the store rejects conditions altogether
                return False
            raise
        return False

    async def refuses_damage() -> bool:
        if checksum is None:
            return False
        wrong: dict[str, Any] = {checksum.field: checksum.text(b"other bytes")}
        try:
            await client.once("put_object", Key=key, Body=b"probe", **wrong)
        except Exception as error:
            if status_of(error) == 400:
                return True
            raise
        return False

    try:
        await ask(refuses)
        absent = await ask(partial(refuses, IfNoneMatch="*"))
        match = await ask(partial(refuses, IfMatch='"00000000000000000000000000000000"'))
        # asked only where the answer is needed
        return Conditions(absent, match, match and await ask(refuses_damage))
    finally:
        await client.request("delete_object", "deleting", key)
