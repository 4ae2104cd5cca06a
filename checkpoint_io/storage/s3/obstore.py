"""Upload and read large objects with obstore; other requests use the client of s3fs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.storage.base import Deliver, Span, Write, missing_error, truncated_error
from checkpoint_io.storage.retry import RetryPolicy
from checkpoint_io.storage.s3.client import (
    STEP,
    S3Client,
    StoreAccessError,
    StoreUnavailableError,
    WrongAnswer,
)
from checkpoint_io.storage.s3.download import Versions, head
from checkpoint_io.storage.s3.listing import abort_uploads_of
from checkpoint_io.storage.s3.parts import PartBudget, PartBuffer, process_budget
from checkpoint_io.storage.s3.upload import Transfer, warn_of_leftovers
from checkpoint_io.threads import for_each

_WRITERS = 8  # concurrent parts of one object
_READERS = 8
# Options that obstore honors: they concern s3fs alone, are translated by `make_store`, or reach
# obstore through the client that s3fs makes. Any other is an error, never silently lost.
_OPTIONS = frozenset(
    {
        "anon", "asynchronous", "cache_regions", "config_kwargs", "client_kwargs",
        "default_block_size", "default_cache_type", "default_fill_cache", "endpoint_url",
        "fixed_upload_size", "key", "listings_expiry_time", "local_expiry_check", "loop",
        "max_concurrency", "max_paths", "password", "profile", "requester_pays",
        "s3_additional_kwargs", "secret", "session", "skip_instance_cache", "token",
        "use_listings_cache", "use_ssl", "username", "version_aware",
    }
)  # fmt: skip
_CLIENT_KWARGS = frozenset(
    {
        "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url",
        "region_name", "use_ssl", "verify",
    }
)  # fmt: skip
_CONFIG_KWARGS = frozenset(
    {
        "connect_timeout", "max_pool_connections", "read_timeout", "region_name",
        "request_checksum_calculation", "response_checksum_validation", "retries", "s3",
    }
)  # fmt: skip
_CONFIG_S3 = frozenset({"addressing_style", "payload_signing_enabled"})
_S3_ADDITIONAL_KWARGS = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}


class ObstoreTransfer:
    """The engine that uses obstore; `plain` is the one for what obstore cannot do."""

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
        self._options, self._policy = options, policy

    @cached_property
    def store(self) -> Any:
        """Return obstore's store, created on first use."""
        return make_store(self._client, self._options, self._policy)

    @contextmanager
    def upload(self, key: str, size: int | None) -> Iterator[Write]:
        """Upload an object in parts; leave small ones to the other engine."""
        if forked() or (size is not None and size <= STEP):
            with self._plain.upload(key, size) as write:
                yield write
            return
        store, url = self.store, self._client.place.of(key)
        with process_budget().entered() as budget:
            feed = Feed(budget, PartBuffer(budget, url, size))
            put = partial(self._put, store, key, feed)
            thread = threading.Thread(target=feed.run, args=(put,), daemon=True)
            thread.start()
            try:
                yield feed.write
                feed.parts.check_complete()
                feed.end(None)
                thread.join()
                feed.raise_failure()
            except BaseException as error:
                feed.end(error)
                thread.join()
                raise
            finally:
                feed.close()
                # if an answer was lost, obstore has created a second upload without reporting it
                with warn_of_leftovers(url):
                    self._client.run(abort_uploads_of(self._client, key))

    def _put(self, store: Any, key: str, feed: Feed) -> None:
        """Pass the parts to obstore, which aborts the upload if the feed raises."""
        try:
            self._module.put(
                store,
                key,
                iter(feed),
                chunk_size=feed.parts.part_size,
                max_concurrency=_WRITERS,
                use_multipart=True,
            )
        except Exception as error:
            raise self._explain(error, "uploading", key) from error

    def fetch(self, spans: Sequence[Span], key_of: Callable[[str], str], deliver: Deliver) -> None:
        """Read spans on several threads, each object in the version that the first answer had."""
        if forked():
            self._plain.fetch(spans, key_of, deliver)
            return
        versions = Versions(self._client)
        store = self.store

        def read(index: int) -> None:
            span = spans[index]
            deliver(index, self._read(store, key_of(span.name), span, versions))

        for_each(read, range(len(spans)), _READERS)

    def reconnect(self) -> None:
        """Make a new store of obstore at the next use; it has connections of its own."""
        vars(self).pop("store", None)

    def _read(self, store: Any, key: str, span: Span, versions: Versions) -> memoryview[int]:
        """Read one span."""
        url = self._client.place.of(key)
        try:
            if span.end == span.begin:
                size, tag = self._client.run(head(self._client, key))
                data = memoryview(b"")
            else:
                size, tag, data = self._get(store, key, span)
        except FileNotFoundError:
            raise missing_error(url) from None
        except Exception as error:
            raise self._explain(error, "reading", key) from error
        versions.note(key, tag)
        if size < span.end or len(data) != span.end - span.begin:
            raise truncated_error(url, span.end)
        return data

    def _get(self, store: Any, key: str, span: Span) -> tuple[int, str, memoryview[int]]:
        """Request one span; return the object's size and entity tag, and the bytes."""
        # obstore does not notice an answer that ends early: retry if the object is long enough
        for _ in range(self._client.policy.attempts):
            answer = self._module.get(store, key, options={"range": (span.begin, span.end)})
            size, tag = int(answer.meta["size"]), str(answer.meta["e_tag"] or "")
            data = memoryview(answer.bytes())
            if size < span.end or len(data) == span.end - span.begin:
                break
        return size, tag, data

    def _explain(self, error: Exception, doing: str, key: str) -> Exception:
        """Return the error to raise in place of obstore's; others are returned unchanged."""
        if not type(error).__module__.startswith("obstore") and not isinstance(error, OSError):
            return error
        failure = f"{doing} {self._client.place.of(key)} at {self._client.place.endpoint} failed"
        text = " ".join(str(error).split())[:600]
        # only the text of obstore's errors has the status and the store's error code
        if "416" in text and "Range" in text:
            return CorruptCheckpointError(f"{self._client.place.of(key)}: truncated: {text}")
        name = type(error).__name__
        if "ExpiredToken" in text:
            return StoreAccessError(
                f"{failure}: the credentials have expired: get new ones ({text})"
            )
        if name in ("PermissionDeniedError", "UnauthenticatedError"):
            return StoreAccessError(
                f"{failure}: {text}; check the credentials and their permissions"
            )
        if name == "InvalidPathError":
            return ValueError(f'{failure}: {text}; use transfer="fsspec" for such a path')
        if "InvalidMultipartResponse" in text:
            return self._client.explain(WrongAnswer(text), doing, key)
        return StoreUnavailableError(f"{failure}: {name}: {text}")


def forked() -> bool:
    """Return whether this process was forked after obstore was used: it would hang here."""
    return _first_process() != os.getpid()


@lru_cache(maxsize=1)
def _first_process() -> int:
    """Return the id of the first process that called this, inherited by its forked children."""
    return os.getpid()


class Feed:
    """An iterable of parts for obstore, filled by writes from another thread.

    Obstore sends the parts from the memory where they are, without a copy.
    """

    def __init__(self, budget: PartBudget, parts: PartBuffer) -> None:
        self.parts = parts
        self._budget = budget
        self._tickets: list[_Ticket] = []
        self._changed = threading.Condition()
        self._waiting: Any = None  # the next part for obstore
        self._ended = False
        self._cause: BaseException | None = None
        self._failure: BaseException | None = None
        self._done = False

    def run(self, put: Callable[[], None]) -> None:
        """Run the upload (in its thread) and keep its error for the writer."""
        try:
            put()
        except BaseException as error:
            self._failure = error
        with self._changed:
            self._done, self._waiting = True, None
            self._changed.notify_all()

    def write(self, data: memoryview[int]) -> None:
        """Copy bytes; wait until there is room for each full part."""
        for buffer, length in self.parts.fill(data):
            self._submit(buffer, length)

    def _submit(self, buffer: bytearray, length: int) -> None:
        """Pass a part to obstore, once the budget and obstore have room for it."""
        self.raise_failure()
        self._budget.acquire(length)
        ticket = _Ticket(self._budget, buffer, length)
        self._tickets.append(ticket)
        part = np.frombuffer(buffer, dtype=np.uint8)[:length]
        # Obstore has no callback per part, but drops its reference once a part has arrived.
        weakref.finalize(part, ticket.arrived).atexit = False
        with self._changed:
            while self._waiting is not None and not self._done:
                self._changed.wait()
            if not self._done:
                self._waiting = part
            self._changed.notify_all()
        self.raise_failure()

    def end(self, cause: BaseException | None) -> None:
        """Pass on the rest and end; with a cause, make the upload fail."""
        buffer, length = self.parts.take()
        if cause is None and length:
            self._submit(buffer, length)
        with self._changed:
            self._cause = cause
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Release the budget, also of parts that the traceback of an error still refers to."""
        for ticket in self._tickets:
            ticket.leave()
        self.parts.take()

    def raise_failure(self) -> None:
        """Raise the error of the upload, if it failed."""
        if self._failure is not None:
            raise self._failure

    def __iter__(self) -> Iterator[Any]:
        """Yield the parts as they come."""
        while True:
            with self._changed:
                while self._waiting is None and not self._ended:
                    self._changed.wait()
                if self._cause is not None:
                    raise RuntimeError("the writer failed") from self._cause
                part, self._waiting = self._waiting, None
                self._changed.notify_all()
            if part is None:
                return
            yield part
            part = None  # else this frame keeps a reference, and the part never counts as arrived


class _Ticket:
    """The share of the budget that one part takes."""

    def __init__(self, budget: PartBudget, buffer: bytearray, length: int) -> None:
        self._budget = budget
        self._buffer = buffer
        self._length = length
        self._left = False

    def arrived(self) -> None:
        """Release the share, and keep the memory for another part."""
        if not self._left:
            self._budget.keep(self._buffer)
        self.leave()

    def leave(self) -> None:
        """Release the share, once."""
        if not self._left:
            self._left = True
            self._budget.release(self._length)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that obstore would not honor."""
    config = options.get("config_kwargs") or {}
    extra = options.get("s3_additional_kwargs") or {}
    for path, section, known in (
        ("", options, _OPTIONS),
        ("client_kwargs.", options.get("client_kwargs") or {}, _CLIENT_KWARGS),
        ("config_kwargs.", config, _CONFIG_KWARGS),
        ("config_kwargs.s3.", config.get("s3") or {}, _CONFIG_S3),
        ("s3_additional_kwargs.", extra, frozenset(_S3_ADDITIONAL_KWARGS)),
    ):
        if unknown := sorted(set(section) - known):
            raise ValueError(
                f'storage_options: transfer="obstore" does not know {path}{unknown[0]}; '
                'leave it out or use transfer="fsspec"'
            )
    verify = (options.get("client_kwargs") or {}).get("verify")
    if verify not in (None, True, False):
        raise ValueError(
            'storage_options: transfer="obstore" takes True or False for client_kwargs.verify; '
            "it uses the certificates of the system"
        )


def make_store(client: S3Client, options: Mapping[str, Any], policy: RetryPolicy) -> Any:
    """Create obstore's store for the bucket of the client."""
    module: Any = import_module("obstore.store")
    meta = client.run(client.connected()).meta
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
        settings[_S3_ADDITIONAL_KWARGS[name]] = value
    provider: dict[str, Any] = {}
    if options.get("anon"):
        settings["skip_signature"] = True
    else:
        # asked anew whenever they expire: those of s3fs, always current
        provider["credential_provider"] = lambda: client.run(_credentials(client))
    retry_config = {
        "max_retries": policy.attempts - 1,
        "retry_timeout": timedelta(seconds=policy.deadline),
        "backoff": {
            "init_backoff": timedelta(seconds=policy.base_delay),
            "max_backoff": timedelta(seconds=policy.max_delay),
            "base": 2,
        },
    }
    return module.S3Store(
        client.bucket,
        config=settings,
        client_options=_client_options(options, meta, policy),
        retry_config=retry_config,
        **provider,
    )


def _client_options(options: Mapping[str, Any], meta: Any, policy: RetryPolicy) -> dict[str, Any]:
    """Return obstore's options for the connection."""
    # a request moves a part of 16 MiB at most, for which twice the read timeout is allowed
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


async def _credentials(client: S3Client) -> dict[str, Any]:
    """Return the credentials of the client of s3fs, refreshed if necessary."""
    signer = (await client.connected())._request_signer
    frozen = await signer._credentials.get_frozen_credentials()
    expires = getattr(signer._credentials, "_expiry_time", None)
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": expires,
    }
