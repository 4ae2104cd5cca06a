"""One folder of files, on a local disk or behind fsspec: the only door to storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.local import LocalStore

Write = Callable[["memoryview[int]"], None]

_EXTRAS = {
    "s3": "s3", "s3a": "s3",
    "gs": "gcs", "gcs": "gcs",
    "abfs": "azure", "abfss": "azure", "az": "azure", "adl": "azure",
}  # fmt: skip


class RangeReader(Protocol):
    """An open file that is read by byte ranges."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Return exactly these bytes (valid until the next call), or raise if some are absent."""


class Store(Protocol):
    """A folder that holds one checkpoint, or the folder of such folders."""

    url: str
    can_rename: bool

    def create(self, name: str) -> AbstractContextManager[Write]:
        """Write a new file, durable when the block ends; a block that raises publishes nothing."""

    def replace(self, name: str, data: bytes, temporary: str) -> None:
        """Put a small file in place in one atomic step, over an older one if there is one."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file inside the folder atomically (only where `can_rename`)."""

    def open(self, name: str) -> AbstractContextManager[RangeReader]:
        """Open a file for reading; FileNotFoundError if there is none."""

    def sizes(self) -> dict[str, int]:
        """List the regular files of the folder; empty if there is no such folder."""

    def folders(self) -> list[str]:
        """List the names of the folders in this folder, sorted."""

    def remove(self, name: str) -> None:
        """Remove a file; none there is fine."""

    def remove_folder(self) -> None:
        """Remove this folder if nothing is left in it."""

    def child(self, name: str) -> Store:
        """Return the store of a folder inside this one."""


def open_store(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """Open the folder that a URL or path names, with the storage driver it needs."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise ValueError(f"a checkpoint's place must be a path or a URL, not {url!r}")
    protocol = text.split("://", 1)[0] if "://" in text else "file"
    options = dict(storage_options or {})
    if protocol in _EXTRAS:
        # a cached listing hides what other processes wrote
        options.setdefault("use_listings_cache", False)
    try:
        filesystem, path = url_to_fs(text, **options)
    except ImportError as error:
        raise ImportError(_driver_advice(protocol, text)) from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStore(path)
    return FsspecStore(filesystem, path, text.rstrip("/"))


def _driver_advice(protocol: str, url: str) -> str:
    """Say which package to install for a protocol."""
    if extra := _EXTRAS.get(protocol):
        return f'{url} needs a storage driver: pip install "accel-callbacks[{extra}]"'
    return f"{url} needs the fsspec driver for {protocol}://; install the package that provides it"


def child_name(name: str) -> str:
    """Refuse a name that would leave its folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"not a plain folder name: {name!r}")
    return name


class FsspecStore:
    """A folder on any fsspec filesystem whose objects appear whole when their upload completes."""

    can_rename = False  # object stores copy and delete instead, which is no commit

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._fs = filesystem
        self._path = path.rstrip("/")
        self.url = url

    def _at(self, name: str) -> str:
        """Return the full path of a file in this folder."""
        return f"{self._path}/{name}"

    @contextmanager
    def create(self, name: str) -> Iterator[Write]:
        """Stream a new object; it is aborted, not published, if the block raises."""
        if self._has_real_folders():
            with suppress(NotImplementedError):
                self._fs.makedirs(self._path, exist_ok=True)
        file = self._fs.open(self._at(name), "wb")
        try:
            yield file.write
            file.close()
        except BaseException:
            _discard(file)
            raise

    def _has_real_folders(self) -> bool:
        """Say whether folders must be made before files (object stores have none)."""
        protocols = self._fs.protocol
        names = (protocols,) if isinstance(protocols, str) else tuple(protocols)
        return not any(name in _EXTRAS for name in names)

    def replace(self, name: str, data: bytes, temporary: str) -> None:
        """Put the object by one request."""
        self._fs.pipe_file(self._at(name), data)
        self._fs.invalidate_cache(self._path)

    def rename(self, old: str, new: str) -> None:
        """Refuse: not atomic here."""
        raise CheckpointError(f"{self.url}: this store has no atomic rename")

    @contextmanager
    def open(self, name: str) -> Iterator[RangeReader]:
        """Open an object for ranged reads."""
        self._fs.invalidate_cache(self._path)
        info = self._fs.info(self._at(name))
        if info["type"] != "file":
            raise FileNotFoundError(self._at(name))
        yield _FsspecReader(self._fs, self._at(name), int(info["size"]))

    def _entries(self) -> list[dict[str, Any]]:
        """List the folder afresh, past every cache."""
        self._fs.invalidate_cache(self._path)
        try:
            return list(self._fs.ls(self._path, detail=True))
        except FileNotFoundError:
            return []

    def _names(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield base name and size of the entries of one kind, the folder's own marker excluded."""
        own = self._path.strip("/")
        for entry in self._entries():
            full = entry["name"].strip("/")
            if entry["type"] == kind and full != own:
                yield full.rsplit("/", 1)[-1], int(entry.get("size") or 0)

    def sizes(self) -> dict[str, int]:
        """List the objects directly below this prefix."""
        return dict(self._names("file"))

    def folders(self) -> list[str]:
        """List the common prefixes directly below this one."""
        return sorted(name for name, _ in self._names("directory"))

    def remove(self, name: str) -> None:
        """Delete one object."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))
        self._fs.invalidate_cache(self._path)

    def remove_folder(self) -> None:
        """Remove the folder where folders are real and this one is empty."""
        if self._has_real_folders() and "/" in self._path.strip("/"):
            with suppress(OSError, NotImplementedError):
                self._fs.rmdir(self._path)

    def child(self, name: str) -> FsspecStore:
        """Return the folder below this one."""
        return FsspecStore(self._fs, self._at(child_name(name)), f"{self.url}/{name}")


class _FsspecReader:
    """Ranged reads of one remote object, without keeping a cursor."""

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._fs = filesystem
        self._path = path
        self.size = size

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Fetch exactly these bytes."""
        data = self._fs.cat_file(self._path, start=begin, end=end) if end > begin else b""
        if len(data) != end - begin:
            raise CorruptCheckpointError(
                f"{self._path}: truncated, bytes {begin} to {end} are not all there"
            )
        return memoryview(data)


def _discard(file: Any) -> None:
    """Abort an upload so that neither close() nor the garbage collector publishes it."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True
