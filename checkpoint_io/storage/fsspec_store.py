"""A folder behind any fsspec driver: gs, abfs, sftp, memory, and so on."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any, TypeVar

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format.manifest import digest_matches
from checkpoint_io.format.names import MANIFEST
from checkpoint_io.storage.base import (
    OBJECT_STORES,
    Deliver,
    ObjectStore,
    Span,
    Write,
    child_name,
    conflict_error,
    is_child_name,
    missing_error,
    probe_by_writing,
    truncated_error,
)
from checkpoint_io.storage.retry import TRANSIENT_STATUS, RetryPolicy, retry
from checkpoint_io.threads import for_each, mapped

T = TypeVar("T")

_TRIES = 3  # to write a small object that arrives damaged
_TRUE_COPY = frozenset({"gs", "gcs", "s3", "s3a"})  # whose cp_file() is one step of the store
_TRUE_RENAME = frozenset({"sftp", "ssh"})  # drivers whose mv() is one atomic request
_TAGS = ("generation", "ETag", "etag", "e_tag")
_replacing = Lock()  # makes comparing and writing one step among the threads of this process


class FsspecStore(ObjectStore):
    """A folder behind an fsspec driver."""

    def __init__(self, driver: Driver, path: str, url: str) -> None:
        self._driver = driver
        self._path = path.rstrip("/")
        self.url = url
        self.can_remove = driver.removes
        self.compares = driver.is_private  # what one process alone sees needs no condition

    def _at(self, name: str) -> str:
        """Return the full path of a file in this folder."""
        return f"{self._path}/{name}"

    def _invalidate(self) -> None:
        """Drop the driver's cached listing of this folder."""
        self._driver.fs.invalidate_cache(self._path)

    @contextmanager
    def create(self, name: str, size: int | None = None) -> Iterator[Write]:
        """Stream a new object; abort the upload, or remove it, if the block raises."""
        self._make_folder()
        file = self._driver.request(lambda fs: fs.open(self._at(name), "wb"))
        written = 0

        def write(data: memoryview[int]) -> None:
            nonlocal written
            # never retried: a failed call may have written part of the data
            self._driver.request_once(lambda _: file.write(data))
            written += len(data)

        try:
            yield write
            if size is not None and written != size:
                raise CheckpointError(
                    f"{self.url}/{name}: {written} bytes instead of the announced {size}"
                )
            self._driver.request_once(lambda _: file.close())
        except BaseException:
            self._driver.abort(file, self._at(name))
            raise

    def _make_folder(self) -> None:
        """Create the folder, except on object stores, which have none."""
        if not self._driver.keeps_objects:
            with suppress(NotImplementedError):
                self._driver.request_once(lambda fs: fs.makedirs(self._path, exist_ok=True))

    def token(self, name: str) -> str:
        """Return the generation or entity tag, else a digest of the object's other properties."""
        self._invalidate()
        try:
            return self._driver.token(self._at(name))
        except FileNotFoundError:
            return ""

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        """Put the object by one request, or by a rename or copy where that is atomic.

        What is renamed or copied was read back before. Elsewhere the object is read back once it
        is in place, and the one before is put back if bits have flipped on the way: a kill at that
        moment leaves the damaged one.

        Exclusive creation (`expected=""`) is delegated to the driver. Replacing a given version
        compares before and after the write: that narrows the race between two jobs, but does not
        close it.
        """
        with _replacing:
            if expected is not None and self.token(name) != expected:
                raise conflict_error(f"{self.url}/{name}")
            if self._driver.renames:
                self._put_by_rename(name, data, temporary)
            elif self._driver.copies and expected != "":
                self._put_by_copy(name, data, temporary)
            else:
                self._put_checked(name, data, expected)
            if expected is not None and not self._holds(name, data):
                raise conflict_error(f"{self.url}/{name}")

    def _put_checked(self, name: str, data: bytes, expected: str | None) -> None:
        """Put an object and read it back; put the one before back if it arrived damaged."""
        before = None if expected == "" else self._content(name)
        exclusive = expected == ""
        for _ in range(_TRIES):
            self._put(name, data, exclusive)
            if self._holds(name, data):
                return
            stored = self._content(name)
            # what is a whole manifest is another save's, which has replaced ours meanwhile
            if expected is not None and (not digest_matches(data) or digest_matches(stored or b"")):
                raise conflict_error(f"{self.url}/{name}")
            self._put_back(name, before)
            exclusive = expected == ""
        raise _damage_error(f"{self.url}/{name}", "the one before is back in place")

    def _put_back(self, name: str, before: bytes | None) -> None:
        """Undo a put that arrived damaged."""
        if before is None:
            self.remove(name)
            return
        for _ in range(_TRIES):
            self._put(name, before, exclusive=False)
            if self._holds(name, before):
                return
        raise _damage_error(f"{self.url}/{name}", "so does the one before, which is lost")

    def _content(self, name: str) -> bytes | None:
        """Return the bytes of a small object, None if there is none."""
        try:
            return bytes(self._driver.request(lambda fs: fs.cat_file(self._at(name))))
        except FileNotFoundError:
            return None

    def _put(self, name: str, data: bytes, exclusive: bool) -> None:
        """Put an object by one request."""
        self._make_folder()
        extra = self._driver.create_only() if exclusive else {}
        try:
            self._driver.request(lambda fs: fs.pipe_file(self._at(name), data, **extra))
        except FileExistsError:
            # equal bytes: an earlier attempt of ours, whose answer was lost, had arrived after all
            if not self._holds(name, data):
                raise conflict_error(f"{self.url}/{name}") from None
        finally:
            self._invalidate()

    def _put_by_rename(self, name: str, data: bytes, temporary: str) -> None:
        """Write under another name, read that back, then rename over the old one."""

        def put() -> None:
            with self.create(temporary, len(data)) as write:
                write(memoryview(data))

        self._put_beside(temporary, data, put)
        self._driver.request_once(lambda fs: fs.mv(self._at(temporary), self._at(name)))
        self._invalidate()

    def _put_by_copy(self, name: str, data: bytes, temporary: str) -> None:
        """Put under another name, read that back, then let the store copy it over the old one."""
        self._put_beside(temporary, data, lambda: self._put(temporary, data, exclusive=False))
        try:
            self._driver.request(lambda fs: fs.cp_file(self._at(temporary), self._at(name)))
        finally:
            with suppress(Exception):  # the next save of the run removes it
                self.remove(temporary)
            self._invalidate()

    def _put_beside(self, temporary: str, data: bytes, put: Callable[[], None]) -> None:
        """Write a temporary object until it arrives as it was sent."""
        for _ in range(_TRIES):
            put()
            if self._holds(temporary, data):
                return
        with suppress(Exception):
            self.remove(temporary)
        raise _damage_error(f"{self.url}/{temporary}", "the one before is kept")

    def _holds(self, name: str, data: bytes) -> bool:
        """Return whether a small object has this content; other bytes are read once more."""
        path = self._at(name)
        if self._driver.request(lambda fs: fs.cat_file(path)) == data:
            return True
        self.forget(name)
        self._driver.reconnect()  # bits may flip on the way here, on one connection alone
        return bool(self._driver.request(lambda fs: fs.cat_file(path)) == data)

    def forget(self, name: str) -> None:
        """Drop the cached listing, and the copy of the file that a caching driver keeps."""
        self._invalidate()
        self._driver.forget(self._at(name))

    def reconnect(self) -> None:
        """Replace the filesystem by a new one, which has connections and caches of its own."""
        self._driver.reconnect()

    def fetch(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Read spans, several at a time where the driver can; a changed object is an error."""
        # fsspec cannot request bytes of a given version: compare before and after instead
        before = {name: self._version(name) for name in {span.name for span in spans}}

        def read(index: int) -> None:
            span = spans[index]
            if span.end > before[span.name][0]:
                raise truncated_error(f"{self.url}/{span.name}", span.end)
            try:
                data = self._read(span.name, span.begin, span.end)
            except FileNotFoundError:  # removed by a save that replaced the checkpoint
                raise missing_error(f"{self.url}/{span.name}") from None
            deliver(index, data)

        for_each(read, range(len(spans)), self._driver.threads)
        for name, version in before.items():
            if self._version(name) != version:
                raise CorruptCheckpointError(
                    f"{self.url}/{name} was replaced while it was being read"
                )

    def _version(self, name: str) -> tuple[int, str]:
        """Return size and token of a file; CorruptCheckpointError if it is missing."""
        try:
            with self.open(name) as reader:
                return reader.size, self.token(name)
        except FileNotFoundError:
            raise missing_error(f"{self.url}/{name}") from None

    def _read(self, name: str, begin: int, end: int) -> memoryview[int]:
        """Return exactly these bytes."""
        path = self._at(name)
        data = b""
        if end > begin:
            data = self._driver.request(lambda fs: fs.cat_file(path, start=begin, end=end))
        if len(data) != end - begin:
            raise CorruptCheckpointError(
                f"{self.url}/{name}: truncated, bytes {begin} to {end} are not all there"
            )
        return memoryview(data)

    @contextmanager
    def open(self, name: str) -> Iterator[_Reader]:
        """Open an object for ranged reads."""
        self._invalidate()
        info = self._driver.request(lambda fs: fs.info(self._at(name)))
        if info["type"] != "file":
            raise FileNotFoundError(self._at(name))
        yield _Reader(lambda begin, end: self._read(name, begin, end), int(info["size"]))

    def _names(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield base name and size of the entries of one type, without the folder's own marker."""
        self._invalidate()
        try:
            entries = self._driver.request(lambda fs: _list_entries(fs, self._path))
        except (FileNotFoundError, NotADirectoryError):
            return
        folder = self._path.strip("/")
        for entry in entries:
            full = entry["name"].strip("/")
            if entry["type"] == kind and full != folder:
                yield full.rsplit("/", 1)[-1], int(entry.get("size") or 0)

    def sizes(self) -> dict[str, int]:
        """List the objects directly below this folder."""
        return dict(self._names("file"))

    def folders(self) -> list[str]:
        """List the folders directly below this one whose names `child` accepts."""
        return sorted(name for name, _ in self._names("directory") if is_child_name(name))

    def versions(self, name: str) -> dict[str, str]:
        """List the folders, each with the token of its file of this name."""
        folders = self.folders()
        tokens = mapped(lambda at: self.child(at).token(name), folders, self._driver.threads)
        return dict(zip(folders, tokens, strict=True))

    def remove(self, name: str) -> None:
        """Delete one object."""
        try:
            self._driver.request(lambda fs: fs.rm_file(self._at(name)))
        except FileNotFoundError:
            pass
        except NotImplementedError:
            advice = "this store cannot delete: remove it where it is kept"
            raise CheckpointError(f"{self.url}/{name}: {advice}") from None
        self._invalidate()

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete objects; a leading manifest is gone before the others are deleted."""
        first = 1 if names and names[0] == MANIFEST else 0
        for name in names[:first]:
            self.remove(name)
        others = range(first, len(names))
        for_each(lambda index: self.remove(names[index]), others, self._driver.threads)

    def abort_uploads(self, save_id: str) -> None:
        """Do nothing: these stores discard unfinished uploads themselves, or keep none."""

    def probe(self) -> None:
        """Write, read back and remove a small object."""
        probe_by_writing(self)

    def remove_folder(self) -> None:
        """Remove this folder if it is empty, except on object stores, which have none."""
        if not self._driver.keeps_objects and "/" in self._path.strip("/"):
            with suppress(OSError, NotImplementedError):
                self._driver.request_once(lambda fs: fs.rmdir(self._path))

    def child(self, name: str) -> FsspecStore:
        """Return the store of a folder below this one."""
        path, url = self._at(child_name(name)), f"{self.url}/{name}"
        return FsspecStore(self._driver, path, url)


class _Reader:
    """Ranged reads of one object."""

    def __init__(self, read: Callable[[int, int], memoryview[int]], size: int) -> None:
        self.read = read
        self.size = size


def _damage_error(url: str, kept: str) -> CheckpointError:
    """Return the error for an object that arrives damaged each time."""
    return CheckpointError(
        f"{url} arrives damaged each time, and the store does not refuse it ({kept}): check the "
        "network and the memory of this machine"
    )


def _list_entries(fs: Any, path: str) -> list[Any]:
    """List the entries of a folder."""
    for _ in range(20):
        # fsspec's memory driver raises KeyError if another thread removes a file meanwhile
        with suppress(KeyError):
            return list(fs.ls(path, detail=True))
    return list(fs.ls(path, detail=True))


#: By process: a lock that another thread held at a fork stays locked in the child. fsspec makes a
#: memory filesystem for each thread, and all of them share the files.
_MEMORY_LOCKS: dict[int, AbstractContextManager[Any]] = {}


class Driver:
    """Requests to the fsspec filesystem of this process; a forked child creates its own.

    Attributes:
        threads: number of concurrent requests.
        keeps_objects: whether files appear only when complete, and folders are mere prefixes.
        is_private: whether only this process sees the files.
        renames: whether renames are atomic.
        copies: whether the store copies files itself, in one step.
        removes: whether files can be deleted, which http, for one, has no way to.
    """

    def __init__(
        self, filesystem: Any, policy: RetryPolicy, make: Callable[[], Any] | None = None
    ) -> None:
        self._policy = policy
        self._make = make or (lambda: filesystem)
        self._filesystem = filesystem
        self._pid = os.getpid()
        named = filesystem.protocol
        protocols = {named} if isinstance(named, str) else set(named)
        self.threads = 8 if getattr(filesystem, "async_impl", False) else 1
        self.keeps_objects = bool(protocols & OBJECT_STORES)
        self.is_private = "memory" in protocols
        self.renames = bool(protocols & _TRUE_RENAME)
        self.copies = bool(protocols & _TRUE_COPY)
        self.removes = _removes(filesystem)

    @property
    def fs(self) -> Any:
        """Return the filesystem of this process."""
        # sockets and event loops of the parent do not survive a fork
        if self._pid != os.getpid():
            self._filesystem, self._pid = self._make(), os.getpid()
        return self._filesystem

    def reconnect(self) -> None:
        """Use a new instance of the filesystem from the next request on, if one can be made."""
        with self.exclusive(), suppress(Exception):
            self._filesystem = _own_instance(self.fs)

    def forget(self, path: str) -> None:
        """Drop the copy of a file that a caching filesystem (such as blockcache) keeps."""
        fs = self.fs
        if hasattr(fs, "pop_from_cache"):
            with self.exclusive(), suppress(OSError, NotImplementedError):
                fs.pop_from_cache(path)

    def exclusive(self) -> AbstractContextManager[Any]:
        """Return a lock that serializes the requests to a driver that is not thread-safe.

        Paramiko, for one, hangs when two threads send requests at once.
        """
        if self.threads > 1:
            return nullcontext()
        if self.is_private:
            return _MEMORY_LOCKS.setdefault(os.getpid(), Lock())
        # kept on the filesystem: one lock per connection, however many stores share it; vars() of a
        # driver that caches is a view of its class
        attributes: dict[str, Any] = object.__getattribute__(self.fs, "__dict__")
        lock: AbstractContextManager[Any] = attributes.setdefault("_checkpoint_io_lock", Lock())
        return lock

    def request(self, action: Callable[[Any], T]) -> T:
        """Run a request; retry transient errors."""
        return retry(self._policy, lambda: self.request_once(action), is_transient)

    def request_once(self, action: Callable[[Any], T]) -> T:
        """Run a request that must not be retried."""
        with self.exclusive():
            fs = self.fs
            channel = _channel(fs)
            if channel is not None:  # paramiko has no timeout by default
                channel.settimeout(self._policy.read_timeout)
            try:
                return action(fs)
            except Exception as error:
                if channel is not None and is_transient(error):
                    _reconnect(fs)
                raise

    def token(self, path: str) -> str:
        """Return an identifier of a file's current version; FileNotFoundError if it is missing."""
        info = self.request(lambda fs: fs.info(path))
        for key in _TAGS:
            if info.get(key):
                return str(info[key])
        return str(self.request(lambda fs: fs.ukey(path)))

    def abort(self, file: Any, path: str) -> None:
        """Abort an upload; remove the file where unfinished ones are visible."""
        with self.exclusive():
            if self.keeps_objects:
                _discard(file)
                return
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                self.fs.rm_file(path)

    def create_only(self) -> Mapping[str, str]:
        """Return the arguments that make pipe_file() fail if the file exists, {} if it cannot."""
        method = getattr(self.fs, "_pipe_file", None) or self.fs.pipe_file
        return {"mode": "create"} if "mode" in inspect.signature(method).parameters else {}


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    # drivers that are not imported cannot have raised: no need to import them here
    wire = [TimeoutError, ConnectionError, EOFError]
    if (paramiko := sys.modules.get("paramiko")) is not None:
        wire.append(paramiko.SSHException)
    if (fsspec := sys.modules.get("fsspec.exceptions")) is not None:
        wire.append(fsspec.FSTimeoutError)
    if (aiohttp := sys.modules.get("aiohttp")) is not None:
        wire += [aiohttp.ClientConnectionError, aiohttp.ClientPayloadError]
    if isinstance(error, tuple(wire)) or str(error) == "Socket is closed":  # paramiko's OSError
        return True
    status = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return any(isinstance(code, int) and code in TRANSIENT_STATUS for code in status)


def _own_instance(fs: Any) -> Any:
    """Return a new filesystem with the options of this one, which fsspec gives to nobody else."""
    options = {**fs.storage_options, "skip_instance_cache": True}
    inner = getattr(fs, "fs", None)  # of a driver that hands requests on, as caches do
    if hasattr(inner, "storage_options"):
        inner = _own_instance(inner)
        if "fs" in options:
            options["fs"] = inner
    instance = type(fs)(*fs.storage_args, **options)
    if inner is not None and "fs" not in options:
        instance.fs = inner
    return instance


def _removes(fs: Any) -> bool:
    """Return whether a driver has a method of its own that deletes files."""
    base = ("fsspec.spec", "fsspec.asyn")
    modules = {kind.__module__ for kind in type(fs).__mro__}
    if "fsspec.implementations.cached" in modules:  # hands requests on to the driver that it caches
        return _removes(fs.fs)
    if modules.isdisjoint(base):
        return True
    methods = ("rm", "_rm", "rm_file", "_rm_file")
    classes = [kind for kind in type(fs).__mro__ if kind.__module__ not in base]
    return any(method in vars(kind) for kind in classes for method in methods)


def _channel(fs: Any) -> Any:
    """Return the connection of a driver that keeps a single one, as paramiko does; else None."""
    find = getattr(getattr(fs, "ftp", None), "get_channel", None)
    return find() if find is not None else None


def _reconnect(fs: Any) -> None:
    """Replace a connection after an error: on it, every later request would fail too."""
    # if reconnecting fails, so does the next request, which calls this again
    with suppress(Exception):
        fs.client.close()
    with suppress(Exception):
        fs._connect()


def _discard(file: Any) -> None:
    """Abort an upload so that neither close() nor the garbage collector publishes it."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True
