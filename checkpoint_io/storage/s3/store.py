"""A folder of checkpoint files under a prefix of an S3 bucket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from checkpoint_io.format.names import MANIFEST, save_id_of
from checkpoint_io.storage.base import (
    Deliver,
    ObjectStore,
    Span,
    Write,
    child_name,
    is_child_name,
    probe_by_writing,
)
from checkpoint_io.storage.retry import RetryPolicy
from checkpoint_io.storage.s3 import conditional
from checkpoint_io.storage.s3.client import S3Client, configured, sends_checksums
from checkpoint_io.storage.s3.download import Fetch, S3Reader, head
from checkpoint_io.storage.s3.listing import abort_upload, delete, listing, unfinished_uploads
from checkpoint_io.storage.s3.parts import Checksum, best_checksum
from checkpoint_io.storage.s3.upload import upload

_AT_ONCE = 16


class S3Store(ObjectStore):
    """A prefix of a bucket; objects appear complete, and the manifest by a conditional put."""

    can_remove = True

    def __init__(
        self,
        client: S3Client,
        prefix: str,
        url: str,
        checksum: Checksum | None,
    ) -> None:
        self._client = client
        self._prefix = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
        self._checksum = checksum
        self.url = url

    @property
    def compares(self) -> bool:
        """True where the bucket obeys conditional writes; tested once per process."""
        key = self._key(MANIFEST)
        obeyed = self._client.run(conditional.conditions(self._client, key, self._checksum))
        return obeyed.absent and obeyed.match

    def _key(self, name: str) -> str:
        """Return the key of a file of this folder."""
        return self._prefix + name

    def create(self, name: str, size: int | None = None) -> AbstractContextManager[Write]:
        """Upload a new object; publish nothing, and leave no parts, if the block raises."""
        return upload(self._client, self._key(name), size, self._checksum)

    def token(self, name: str) -> str:
        """Return the entity tag of an object, "" if there is none."""
        return self._client.run(conditional.token(self._client, self._key(name)))

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        """Put an object by one request, conditionally if `expected` is given."""
        key, beside = self._key(name), self._key(temporary)
        work = conditional.replace(self._client, key, data, expected, self._checksum, beside)
        self._client.run(work)

    def fetch(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Read spans, several at once, each object in a single version."""
        if spans:
            Fetch(self._client, spans, self._key).run(deliver)

    def forget(self, name: str) -> None:
        """Do nothing: each read is a request of its own."""

    def reconnect(self) -> None:
        """Make a new client; requests that are under way finish with the old one."""
        self._client.reconnect()

    @contextmanager
    def open(self, name: str) -> Iterator[S3Reader]:
        """Open an object for ranged reads of its current version."""
        size, tag = self._client.run(head(self._client, self._key(name)))
        yield S3Reader(self._client, self._key(name), size, tag)

    def sizes(self) -> dict[str, int]:
        """List the objects directly below this prefix."""
        return self._client.run(listing(self._client, self._prefix))[0]

    def folders(self) -> list[str]:
        """List the folders directly below this prefix whose names `child` accepts."""
        names = self._client.run(listing(self._client, self._prefix))[1]
        return sorted(filter(is_child_name, names))

    def versions(self, name: str) -> dict[str, str]:
        """List the folders, each with the entity tag of its file of this name."""
        tags = self._client.run(self._versions(name))
        return {folder: tags[folder] for folder in sorted(filter(is_child_name, tags))}

    async def _versions(self, name: str) -> dict[str, str]:
        """List everything by one request, or ask for each file if that is not enough."""
        answer = await self._client.request("list_objects_v2", "listing", Prefix=self._prefix)
        tags: dict[str, str] = {}
        if not answer.get("IsTruncated"):
            for entry in answer.get("Contents") or ():
                folder, inside, file = entry["Key"][len(self._prefix) :].partition("/")
                if inside:
                    tag = str(entry.get("ETag", "")) if file == name else ""
                    tags[folder] = tag or tags.get(folder, "")
            return tags
        _, folders = await listing(self._client, self._prefix)
        semaphore = asyncio.Semaphore(_AT_ONCE)

        async def ask(folder: str) -> None:
            async with semaphore:
                key = self._key(f"{folder}/{name}")
                tags[folder] = await conditional.token(self._client, key)

        await asyncio.gather(*map(ask, folders))
        return tags

    def remove(self, name: str) -> None:
        """Delete one object."""
        self._client.run(delete(self._client, [self._key(name)]))

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete objects; a leading manifest is gone before the others, which need few requests."""
        keys = [self._key(name) for name in names]
        # one request deletes in no given order: a manifest must not outlive the files it names
        if names and names[0] == MANIFEST:
            self._client.run(delete(self._client, keys[:1]))
            keys = keys[1:]
        if keys:
            self._client.run(delete(self._client, keys))

    def abort_uploads(self, save_id: str) -> None:
        """Abort the multipart uploads of files of one save in this folder."""
        self._client.run(self._abort_uploads(save_id))

    async def _abort_uploads(self, save_id: str) -> None:
        """Find the uploads of a save and abort them."""
        async for key, upload_id in unfinished_uploads(self._client, self._prefix):
            if save_id_of(key[len(self._prefix) :]) == save_id:
                await abort_upload(self._client, key, upload_id)

    def probe(self) -> None:
        """Write, read back, list and remove a small object, and test for conditional writes."""
        probe_by_writing(self)
        self.sizes()
        _ = self.compares

    def remove_folder(self) -> None:
        """Do nothing: a prefix without objects does not exist."""

    def child(self, name: str) -> S3Store:
        """Return the store of a folder below this one."""
        prefix, url = self._key(child_name(name)), f"{self.url}/{name}"
        return S3Store(self._client, prefix, url, self._checksum)


def open_s3(url: str, options: Mapping[str, Any], policy: RetryPolicy) -> S3Store | None:
    """Open a prefix through s3fs; None if another driver is registered for the protocol."""
    from fsspec.core import url_to_fs

    driver_options, policy = configured(options, policy)
    filesystem, path = url_to_fs(url, **driver_options)
    if not hasattr(filesystem, "get_s3") or not hasattr(filesystem, "split_path"):
        return None
    bucket, prefix = filesystem.split_path(path)[:2]
    if not bucket:
        raise ValueError(f"{url} names no bucket")
    endpoint = (
        filesystem.endpoint_url
        or filesystem.client_kwargs.get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or "AWS"
    )

    def make(unshared: bool) -> Any:
        # fsspec caches one filesystem per process and set of options
        cache = {"skip_instance_cache": True} if unshared else {}
        return url_to_fs(url, **{**driver_options, **cache})[0]

    client = S3Client(bucket, str(endpoint), policy, make)
    checksum = best_checksum() if sends_checksums(options) else None
    return S3Store(client, prefix, url.rstrip("/"), checksum)
