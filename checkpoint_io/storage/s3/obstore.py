"""Large objects through obstore, which moves bytes outside of Python's interpreter."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.storage.retry import RetryPolicy
from checkpoint_io.storage.s3.client import STEP, S3Client
from checkpoint_io.storage.s3.download import Versions, head
from checkpoint_io.storage.s3.listing import give_up_all
from checkpoint_io.storage.s3.parts import part_size
from checkpoint_io.stores.obstore_feed import Feed
from checkpoint_io.stores.obstore_options import check_options, make_store
from checkpoint_io.stores.s3_errors import StoreAccessError, StoreUnavailableError
from checkpoint_io.stores.s3_transfer import Transfer
from checkpoint_io.stores.s3_upload import told
from checkpoint_io.stores.spans import Deliver, Span, Write
from checkpoint_io.threads import for_each

_AT_ONCE = 8  # parts of one object
_READERS = 8


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
