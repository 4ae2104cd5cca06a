"""Any fsspec filesystem."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any, TypeVar

from checkpoint_io.errors import CheckpointConflictError, CheckpointError, CorruptCheckpointError
from checkpoint_io.format.names import MANIFEST
from checkpoint_io.storage.base import (
    OBJECT_STORES,
    REMOTE_SPAN,
    Deliver,
    Span,
    Write,
    child_name,
    is_child_name,
    probe_by_writing,
)
from checkpoint_io.storage.retry import RetryPolicy, retry
from checkpoint_io.threads import for_each

T = TypeVar("T")

_TRUE_RENAME = frozenset({"sftp", "ssh"})  # drivers whose mv() is one atomic request
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TAGS = ("generation", "ETag", "etag", "e_tag")
_replacing = Lock()  # a look and the put that follows are one step in this process


class Driver:
    """The filesystem of this process; a forked child gets one of its own.

    Attributes:
        threads: how many requests it takes at once.
        keeps_objects: whether a file is there only when it is complete, and folders are names.
        renames: whether its renames are atomic.
    """

    def __init__(
        self, filesystem: Any, policy: RetryPolicy, make: Callable[[], Any] | None = None
    ) -> None:
        self._policy = policy
        self._make = make or (lambda: filesystem)
        self._filesystem = filesystem
        self._pid = os.getpid()
        own = filesystem.protocol
        protocols = {own} if isinstance(own, str) else set(own)
        self.threads = 8 if getattr(filesystem, "async_impl", False) else 1
        self.keeps_objects = bool(protocols & OBJECT_STORES)
        self.renames = bool(protocols & _TRUE_RENAME)

    @property
    def fs(self) -> Any:
        """Return the filesystem."""
        if self._pid != os.getpid():
            self._filesystem, self._pid = self._make(), os.getpid()
        return self._filesystem

    def alone(self) -> AbstractContextManager[Any]:
        """Let one request at a time through to a driver that is not made for more.

        paramiko, for one, waits for ever when two threads ask it at once.
        """
        if self.threads > 1:
            return nullcontext()
        # one lock for each connection, whichever stores share it
        gate: AbstractContextManager[Any] = vars(self.fs).setdefault("_one_at_a_time", Lock())
        return gate

    def ask(self, action: Callable[[Any], T]) -> T:
        """Run a request, again while it fails for a reason that may pass."""
        return retry(self._policy, lambda: self.ask_once(action), is_transient)

    def ask_once(self, action: Callable[[Any], T]) -> T:
        """Run a request that must not be repeated."""
        with self.alone():
            fs = self.fs
            channel = _channel(fs)
            if channel is not None:  # paramiko would wait for ever
                channel.settimeout(self._policy.read_timeout)
            try:
                return action(fs)
            except Exception as error:
                if channel is not None and is_transient(error):
                    _connect_anew(fs)
                raise

    def token(self, path: str) -> str:
        """Return what tells this version of a file from others; FileNotFoundError without one."""
        info = self.ask(lambda fs: fs.info(path))
        for key in _TAGS:
            if info.get(key):
                return str(info[key])
        return str(self.ask(lambda fs: fs.ukey(path)))

    def take_back(self, file: Any, path: str) -> None:
        """Abort an upload; where what was written shows already, remove it."""
        with self.alone():
            if self.keeps_objects:
                _discard(file)
                return
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                self.fs.rm_file(path)

    def exclusively(self) -> Mapping[str, str]:
        """Return what asks pipe_file() to create only; nothing where it does not know how."""
        method = getattr(self.fs, "_pipe_file", None) or self.fs.pipe_file
        return {"mode": "create"} if "mode" in inspect.signature(method).parameters else {}


def is_transient(error: Exception) -> bool:
    """Say whether the same request may succeed later."""
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
    return any(isinstance(found, int) and found in _TRANSIENT_STATUS for found in status)


def _channel(fs: Any) -> Any:
    """Return the one connection of a driver that keeps one, as paramiko does; else None."""
    find = getattr(getattr(fs, "ftp", None), "get_channel", None)
    return find() if find is not None else None


def _connect_anew(fs: Any) -> None:
    """Replace a connection that broke or fell out of step: every later request would fail too.

    If that fails, so does the next request, which leads here again.
    """
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


class FsspecStore:
    """A folder behind a driver of fsspec: gs, abfs, sftp, memory, and whatever else there is."""

    can_rename = False  # object stores copy and delete instead, which is no commit
    span_bytes = REMOTE_SPAN

    def __init__(self, driver: Driver, path: str, url: str) -> None:
        self._driver = driver
        self._path = path.rstrip("/")
        self.url = url

    def _at(self, name: str) -> str:
        """Return the full path of a file in this folder."""
        return f"{self._path}/{name}"

    def _forget(self) -> None:
        """Drop what the driver remembers of this folder."""
        self._driver.fs.invalidate_cache(self._path)

    @contextmanager
    def create(self, name: str, size: int | None = None) -> Iterator[Write]:
        """Stream a new object; it is taken back, not published, if the block raises."""
        self._make_folder()
        file = self._driver.ask(lambda fs: fs.open(self._at(name), "wb"))
        written = 0

        def write(data: memoryview[int]) -> None:
            nonlocal written
            self._driver.ask_once(lambda _: file.write(data))
            written += len(data)

        try:
            yield write
            if size is not None and written != size:
                raise CheckpointError(
                    f"{self.url}/{name}: {written} bytes instead of the announced {size}"
                )
            self._driver.ask_once(lambda _: file.close())
        except BaseException:
            self._driver.take_back(file, self._at(name))
            raise

    def _make_folder(self) -> None:
        """Make the folder, where a file cannot be made without (object stores have none)."""
        if not self._driver.keeps_objects:
            with suppress(NotImplementedError):
                self._driver.ask_once(lambda fs: fs.makedirs(self._path, exist_ok=True))

    def token(self, name: str) -> str:
        """Return the generation or entity tag, or a digest of what else is known of the object."""
        self._forget()
        try:
            return self._driver.token(self._at(name))
        except FileNotFoundError:
            return ""

    def lock(self) -> AbstractContextManager[None]:
        """Do nothing: these stores have no locks; the manifest is looked at before it is put."""
        return nullcontext()

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        """Put the object by one request, or by a rename where that is atomic.

        Exclusive creation (`expected=""`) is asked of the driver. Over another version, the object
        is looked at before and after: that narrows the gap between two jobs, it does not close it.
        """
        with _replacing:
            if expected is not None and self.token(name) != expected:
                raise self._conflict(name)
            if self._driver.renames:
                self._put_by_rename(name, data, temporary)
            else:
                self._put(name, data, exclusive=expected == "")
            if expected is not None and self._read_whole(name) != data:
                raise self._conflict(name)

    def _conflict(self, name: str) -> CheckpointConflictError:
        """Say that another writer was first."""
        return CheckpointConflictError(
            f"{self.url}/{name} was changed by another save meanwhile: "
            "give each job a folder of its own"
        )

    def _put(self, name: str, data: bytes, exclusive: bool) -> None:
        """Put an object by one request."""
        self._make_folder()
        extra = self._driver.exclusively() if exclusive else {}
        try:
            self._driver.ask(lambda fs: fs.pipe_file(self._at(name), data, **extra))
        except FileExistsError:
            if self._read_whole(name) != data:  # else an earlier try arrived after all
                raise self._conflict(name) from None
        finally:
            self._forget()

    def _put_by_rename(self, name: str, data: bytes, temporary: str) -> None:
        """Write under another name, then rename over the old one."""
        with self.create(temporary, len(data)) as write:
            write(memoryview(data))
        self._driver.ask_once(lambda fs: fs.mv(self._at(temporary), self._at(name)))
        self._forget()

    def _read_whole(self, name: str) -> bytes:
        """Read a small object."""
        return bytes(self._driver.ask(lambda fs: fs.cat_file(self._at(name))))

    def rename(self, old: str, new: str) -> None:
        """Refuse: not atomic here."""
        raise CheckpointError(f"{self.url}: this store has no atomic rename")

    def fetch(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Read spans, several at a time where the driver can; a changed object is an error."""
        before = {name: self._seen(name) for name in {span.name for span in spans}}

        def read(index: int) -> None:
            span = spans[index]
            if span.end > before[span.name][0]:
                raise CorruptCheckpointError(
                    f"{self.url}/{span.name}: truncated, ends before byte {span.end}"
                )
            try:
                data = self._read(span.name, span.begin, span.end)
            except FileNotFoundError:  # a save that replaced it was faster
                raise self._missing(span.name) from None
            deliver(index, data)

        for_each(read, range(len(spans)), self._driver.threads)
        for name, seen in before.items():
            if self._seen(name) != seen:
                raise CorruptCheckpointError(
                    f"{self.url}/{name} was replaced while it was being read"
                )

    def _seen(self, name: str) -> tuple[int, str]:
        """Return size and token of a file that must be there."""
        try:
            with self.open(name) as reader:
                return reader.size, self.token(name)
        except FileNotFoundError:
            raise self._missing(name) from None

    def _missing(self, name: str) -> CorruptCheckpointError:
        """Say that a file is not there."""
        return CorruptCheckpointError(f"{self.url}/{name} is missing, though the manifest names it")

    def _read(self, name: str, begin: int, end: int) -> memoryview[int]:
        """Read exactly these bytes."""
        path = self._at(name)
        data = b""
        if end > begin:
            data = self._driver.ask(lambda fs: fs.cat_file(path, start=begin, end=end))
        if len(data) != end - begin:
            raise CorruptCheckpointError(
                f"{self.url}/{name}: truncated, bytes {begin} to {end} are not all there"
            )
        return memoryview(data)

    @contextmanager
    def open(self, name: str) -> Iterator[_Reader]:
        """Open an object for ranged reads."""
        self._forget()
        info = self._driver.ask(lambda fs: fs.info(self._at(name)))
        if info["type"] != "file":
            raise FileNotFoundError(self._at(name))
        yield _Reader(lambda begin, end: self._read(name, begin, end), int(info["size"]))

    def _names(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield base name and size of the entries of one kind, the folder's own marker excluded."""
        self._forget()
        try:
            entries = self._driver.ask(lambda fs: _listed(fs, self._path))
        except (FileNotFoundError, NotADirectoryError):
            return
        own = self._path.strip("/")
        for entry in entries:
            full = entry["name"].strip("/")
            if entry["type"] == kind and full != own:
                yield full.rsplit("/", 1)[-1], int(entry.get("size") or 0)

    def sizes(self) -> dict[str, int]:
        """List the objects directly below this folder."""
        return dict(self._names("file"))

    def folders(self) -> list[str]:
        """List the folders directly below this one, those that may be a folder's name."""
        return sorted(name for name, _ in self._names("directory") if is_child_name(name))

    def remove(self, name: str) -> None:
        """Delete one object."""
        with suppress(FileNotFoundError):
            self._driver.ask(lambda fs: fs.rm_file(self._at(name)))
        self._forget()

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete objects, a manifest at the front before the others."""
        first = 1 if names and names[0] == MANIFEST else 0
        for name in names[:first]:
            self.remove(name)
        others = range(first, len(names))
        for_each(lambda index: self.remove(names[index]), others, self._driver.threads)

    def abort_uploads(self, save_id: str) -> None:
        """Do nothing: these stores drop unfinished uploads by themselves, or keep none."""

    def probe(self) -> None:
        """Write, read back and remove a small object."""
        probe_by_writing(self)

    def remove_folder(self) -> None:
        """Remove the folder where folders are real and this one is empty."""
        if not self._driver.keeps_objects and "/" in self._path.strip("/"):
            with suppress(OSError, NotImplementedError):
                self._driver.ask_once(lambda fs: fs.rmdir(self._path))

    def child(self, name: str) -> FsspecStore:
        """Return the folder below this one."""
        path, url = self._at(child_name(name)), f"{self.url}/{name}"
        return FsspecStore(self._driver, path, url)


class _Reader:
    """Ranged reads of one object, without keeping a cursor."""

    def __init__(self, read: Callable[[int, int], memoryview[int]], size: int) -> None:
        self.read = read
        self.size = size


def _listed(fs: Any, path: str) -> list[Any]:
    """List a folder; fsspec's files in memory fail where another thread removes one meanwhile."""
    for _ in range(20):
        with suppress(KeyError):
            return list(fs.ls(path, detail=True))
    return list(fs.ls(path, detail=True))
