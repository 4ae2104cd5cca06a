"""Obstore engine."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.storage.base import Deliver, Span, Write
from checkpoint_io.storage.retry import RetryPolicy
from checkpoint_io.storage.s3.client import STEP, S3Client, StoreAccessError, StoreUnavailableError
from checkpoint_io.storage.s3.download import Versions, head
from checkpoint_io.storage.s3.listing import give_up_all
from checkpoint_io.storage.s3.parts import PartBudget, part_size, process_budget
from checkpoint_io.storage.s3.upload import Transfer, told
from checkpoint_io.threads import for_each

# what concerns s3fs alone, or goes through the client that s3fs makes
_OWN = frozenset(
    {
        "anon", "asynchronous", "cache_regions", "config_kwargs", "client_kwargs",
        "default_block_size", "default_cache_type", "default_fill_cache", "endpoint_url",
        "fixed_upload_size", "key", "listings_expiry_time", "local_expiry_check", "loop",
        "max_concurrency", "max_paths", "password", "profile", "requester_pays",
        "s3_additional_kwargs", "secret", "session", "skip_instance_cache", "token",
        "use_listings_cache", "use_ssl", "username", "version_aware",
    }
)  # fmt: skip
_CLIENT = frozenset(
    {
        "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url",
        "region_name", "use_ssl", "verify",
    }
)  # fmt: skip
_CONFIG = frozenset(
    {
        "connect_timeout", "max_pool_connections", "read_timeout", "region_name",
        "request_checksum_calculation", "response_checksum_validation", "retries", "s3",
    }
)  # fmt: skip
_S3 = frozenset({"addressing_style", "payload_signing_enabled"})
_EXTRA = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_AT_ONCE = 8  # parts of one object
_READERS = 8


class Feed:
    """An iterable of parts that is written to; obstore sends them from where they are."""

    def __init__(self, part_size: int) -> None:
        self.part_size = part_size
        self.written = 0
        self._budget = process_budget()
        self._budget.enter()
        self._tickets: list[_Ticket] = []
        self._buffer: bytearray | None = None
        self._filled = 0
        self._changed = threading.Condition()
        self._waiting: Any = None  # a part to be taken
        self._ended = False
        self._cause: BaseException | None = None
        self._failure: BaseException | None = None
        self._done = False

    def run(self, put: Callable[[], None]) -> None:
        """Run the upload and keep its error for the writer."""
        try:
            put()
        except BaseException as error:
            self._failure = error
        with self._changed:
            self._done, self._waiting = True, None
            self._changed.notify_all()

    def write(self, data: memoryview[int]) -> None:
        """Copy bytes; a full part is handed over, which waits until there is room."""
        source = np.frombuffer(data, dtype=np.uint8)
        at = 0
        while at < len(source):
            if self._buffer is None:
                self._buffer = self._budget.buffer(self.part_size)
            count = min(self.part_size - self._filled, len(source) - at)
            target = np.frombuffer(self._buffer, dtype=np.uint8)
            # numpy copies without holding the interpreter
            target[self._filled : self._filled + count] = source[at : at + count]
            at += count
            self._filled += count
            if self._filled == self.part_size:
                self._hand()
        self.written += len(source)

    def _hand(self) -> None:
        """Hand the part over, once there is room among all uploads and in this one."""
        assert self._buffer is not None
        self.raise_failure()
        buffer, length = self._buffer, self._filled
        self._buffer, self._filled = None, 0
        self._budget.acquire(length)
        ticket = _Ticket(self._budget, buffer, length)
        self._tickets.append(ticket)
        part = np.frombuffer(buffer, dtype=np.uint8)[:length]
        # obstore lets go of a part when it has arrived
        weakref.finalize(part, ticket.arrived).atexit = False
        with self._changed:
            while self._waiting is not None and not self._done:
                self._changed.wait()
            if not self._done:
                self._waiting = part
            self._changed.notify_all()
        self.raise_failure()

    def end(self, cause: BaseException | None) -> None:
        """Hand over the rest and end, or make the upload fail for a cause."""
        if cause is None and self._filled:
            self._hand()
        with self._changed:
            self._cause = cause
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give back what the upload held, also what an error still refers to."""
        for ticket in self._tickets:
            ticket.leave()
        self._buffer = None
        self._budget.leave()

    def raise_failure(self) -> None:
        """Raise what the upload met."""
        if self._failure is not None:
            raise self._failure

    def __iter__(self) -> Iterator[Any]:
        """Yield the parts as they come."""
        while True:
            with self._changed:
                while self._waiting is None and not self._ended:
                    self._changed.wait()
                if self._cause is not None:
                    raise RuntimeError("the writer gave up") from self._cause
                part, self._waiting = self._waiting, None
                self._changed.notify_all()
            if part is None:
                return
            yield part
            part = None  # or this frame would keep it


class _Ticket:
    """The place that one part has in the budget."""

    def __init__(self, budget: PartBudget, buffer: bytearray, length: int) -> None:
        self._budget = budget
        self._buffer = buffer
        self._length = length
        self._left = False

    def arrived(self) -> None:
        """Leave the budget, and let another part use the memory."""
        if not self._left:
            self._budget.keep(self._buffer)
        self.leave()

    def leave(self) -> None:
        """Leave the budget, once."""
        if not self._left:
            self._left = True
            self._budget.release(self._length)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that would be lost on the way to obstore."""
    config = options.get("config_kwargs") or {}
    for path, given, known in (
        ("", options, _OWN),
        ("client_kwargs.", options.get("client_kwargs") or {}, _CLIENT),
        ("config_kwargs.", config, _CONFIG),
        ("config_kwargs.s3.", config.get("s3") or {}, _S3),
        ("s3_additional_kwargs.", options.get("s3_additional_kwargs") or {}, frozenset(_EXTRA)),
    ):
        if unknown := sorted(set(given) - known):
            raise ValueError(
                f'storage_options: transfer="obstore" does not know {path}{unknown[0]}; '
                'leave it out or use transfer="fsspec"'
            )
    verify = (options.get("client_kwargs") or {}).get("verify")
    if verify not in (None, True, False):
        raise ValueError(
            'storage_options: transfer="obstore" takes True or False for client_kwargs.verify; '
            "it trusts the certificates of the system"
        )


def make_store(client: S3Client, options: Mapping[str, Any], policy: RetryPolicy) -> Any:
    """Make obstore's store for the bucket that the client talks to."""
    module: Any = import_module("obstore.store")
    meta = client.run(_meta(client))
    settings: dict[str, Any] = {"region": meta.region_name}
    explicit = options.get("endpoint_url") or "amazonaws.com" not in str(meta.endpoint_url)
    if explicit:
        settings["endpoint"] = meta.endpoint_url
    style = ((options.get("config_kwargs") or {}).get("s3") or {}).get("addressing_style")
    if style == "virtual" and not explicit:
        settings["virtual_hosted_style_request"] = True
    if options.get("requester_pays"):
        settings["request_payer"] = True
    for name, value in (options.get("s3_additional_kwargs") or {}).items():
        settings[_EXTRA[name]] = value
    more: dict[str, Any] = {}
    if options.get("anon"):
        settings["skip_signature"] = True
    else:
        more["credential_provider"] = _credentials(client)
    return module.S3Store(
        client.bucket,
        config=settings,
        client_options=_client_options(options, meta, policy),
        retry_config=_retry_config(policy),
        **more,
    )


async def _meta(client: S3Client) -> Any:
    """Return what the client of s3fs knows about itself."""
    return (await client.connected()).meta


def _client_options(options: Mapping[str, Any], meta: Any, policy: RetryPolicy) -> dict[str, Any]:
    """Return obstore's options of the connection."""
    # a request is a part of 16 MiB at most, for which twice the read timeout is allowed
    total = policy.connect_timeout + 2 * policy.read_timeout
    result: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=policy.connect_timeout),
        "timeout": timedelta(seconds=total),
    }
    if str(meta.endpoint_url).startswith("http://"):
        result["allow_http"] = True
    if (options.get("client_kwargs") or {}).get("verify") is False:
        result["allow_invalid_certificates"] = True
    return result


def _retry_config(policy: RetryPolicy) -> dict[str, Any]:
    """Return obstore's form of the policy."""
    return {
        "max_retries": policy.attempts - 1,
        "retry_timeout": timedelta(seconds=policy.deadline),
        "backoff": {
            "init_backoff": timedelta(seconds=policy.base_delay),
            "max_backoff": timedelta(seconds=policy.max_delay),
            "base": 2,
        },
    }


def _credentials(client: S3Client) -> Callable[[], dict[str, Any]]:
    """Return a function that gives obstore the credentials that s3fs has found, as of now."""

    def provide() -> dict[str, Any]:
        return client.run(_current(client))

    return provide


async def _current(client: S3Client) -> dict[str, Any]:
    """Ask the client of s3fs for its credentials, refreshed if they had to be."""
    signer = (await client.connected())._request_signer
    found = await signer._credentials.get_frozen_credentials()
    expires = getattr(signer._credentials, "_expiry_time", None)
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": expires,
    }


class ObstoreTransfer:
    """Moves bytes with obstore; requests about objects go through the client of s3fs."""

    def __init__(
        self, client: S3Client, options: Mapping[str, Any], policy: RetryPolicy, plain: Transfer
    ) -> None:
        try:
            self._module: Any = import_module("obstore")
        except ImportError as error:
            raise ImportError(
                'transfer="obstore" needs obstore: pip install "accel-callbacks[obstore]"'
            ) from error
        check_options(options)
        self._client = client
        self._plain = plain
        self._make = partial(make_store, client, options, policy)
        self._store: Any = None

    @property
    def store(self) -> Any:
        """Return obstore's store, made when it is first needed."""
        if self._store is None:
            self._store = self._make()
        return self._store

    @contextmanager
    def upload(self, key: str, size: int | None) -> Iterator[Write]:
        """Upload an object in parts, a small one by a single request of the client."""
        if forked() or (size is not None and size <= STEP):
            with self._plain.upload(key, size) as write:
                yield write
            return
        store = self.store
        feed = Feed(part_size(size))
        thread = threading.Thread(
            target=feed.run, args=(lambda: self._put(store, key, feed),), daemon=True
        )
        thread.start()
        try:
            yield feed.write
            if size is not None and feed.written != size:
                raise CheckpointError(
                    f"{self._client.place.of(key)}: {feed.written} bytes instead of {size}"
                )
            feed.end(None)
            thread.join()
            feed.raise_failure()
            with told(self._client.place.of(key)):
                # obstore may have begun twice, if an answer was lost, and does not say so
                self._client.run(give_up_all(self._client, key))
        except BaseException as error:
            feed.end(error)
            thread.join()
            with told(self._client.place.of(key)):
                self._client.run(give_up_all(self._client, key))
            raise
        finally:
            feed.close()

    def _put(self, store: Any, key: str, feed: Feed) -> None:
        """Let obstore take the parts; it aborts the upload if the feed raises."""
        try:
            self._module.put(
                store,
                key,
                iter(feed),
                chunk_size=feed.part_size,
                max_concurrency=_AT_ONCE,
                use_multipart=True,
            )
        except Exception as error:
            raise self._explain(error, "uploading", key) from error

    def fetch(self, spans: Sequence[Span], key_of: Callable[[str], str], deliver: Deliver) -> None:
        """Read spans on several threads, each object in the version of its first answer."""
        if forked():
            self._plain.fetch(spans, key_of, deliver)
            return
        versions = Versions(self._client)
        store = self.store

        def read(index: int) -> None:
            span = spans[index]
            deliver(index, self._read(store, key_of(span.name), span, versions))

        for_each(read, range(len(spans)), _READERS)

    def _read(self, store: Any, key: str, span: Span, versions: Versions) -> memoryview[int]:
        """Read one span."""
        where = self._client.place.of(key)
        try:
            if span.end == span.begin:
                size, tag = self._client.run(head(self._client, key))
                data = memoryview(b"")
            else:
                size, tag, data = self._get(store, key, span)
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{where} is missing, though the manifest names it"
            ) from None
        except Exception as error:
            raise self._explain(error, "reading", key) from error
        versions.note(key, tag)
        if size < span.end or len(data) != span.end - span.begin:
            raise CorruptCheckpointError(f"{where}: truncated, ends before byte {span.end}")
        return data

    def _get(self, store: Any, key: str, span: Span) -> tuple[int, str, memoryview[int]]:
        """Ask for one span, again if the answer is cut short though the object is long enough."""
        for _ in range(self._client.policy.attempts):
            answer = self._module.get(store, key, options={"range": (span.begin, span.end)})
            size, tag = int(answer.meta["size"]), str(answer.meta["e_tag"] or "")
            data = memoryview(answer.bytes())
            if size < span.end or len(data) == span.end - span.begin:
                break
        return size, tag, data

    def _explain(self, error: Exception, doing: str, key: str) -> Exception:
        """Return what to raise for an error of obstore's."""
        if not type(error).__module__.startswith("obstore") and not isinstance(error, OSError):
            return error
        where = f"{doing} {self._client.place.of(key)} at {self._client.place.endpoint} failed"
        said = " ".join(str(error).split())[:600]
        if "416" in said and "Range" in said:
            return CorruptCheckpointError(f"{self._client.place.of(key)}: truncated: {said}")
        name = type(error).__name__
        if "ExpiredToken" in said:
            return StoreAccessError(f"{where}: the credentials have expired: get new ones ({said})")
        if name in ("PermissionDeniedError", "UnauthenticatedError"):
            return StoreAccessError(f"{where}: {said}; check the credentials and their rights")
        if name == "InvalidPathError":
            return ValueError(f'{where}: {said}; use transfer="fsspec" for such a path')
        return StoreUnavailableError(f"{where}: {name}: {said}")


def forked() -> bool:
    """Say whether obstore has begun in a parent of this process; it would hang in this one."""
    return _first_process() != os.getpid()


@lru_cache(maxsize=1)
def _first_process() -> int:
    """Return the process that asked first, in it and in those forked from it."""
    return os.getpid()
