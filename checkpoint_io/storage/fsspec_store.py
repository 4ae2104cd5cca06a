"""A folder of checkpoint files on any fsspec filesystem that has no engine of its own here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    CorruptCheckpointError,
)
from checkpoint_io.format.names import MANIFEST
from checkpoint_io.storage.base import probe_by_writing
from checkpoint_io.stores.fsspec_driver import Driver
from checkpoint_io.stores.spans import REMOTE_SPAN, Deliver, Span, Write
from checkpoint_io.stores.urls import child_name, is_child_name
from checkpoint_io.threads import for_each

_replacing = Lock()  # a look and the put that follows are one step in this process


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
