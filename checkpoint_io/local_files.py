"""Paths, renames and fsyncs of local files, on Linux, macOS and Windows."""

from __future__ import annotations

import errno
import ntpath
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

__all__ = [
    "absolute",
    "advised",
    "base_name",
    "local_path",
    "make_folders",
    "remove",
    "replace",
    "split_path",
    "sync_file",
    "sync_folder",
    "sync_path",
    "windows_advice",
]

FILE_IN_USE = (
    "another program has the file open: close it, or exclude the folder from the virus scanner "
    "and the indexer"
)
_LOCAL = ("file", "local")
_ACCESS_DENIED, _SHARING_VIOLATION = 5, 32  # winerror
_PATH_NOT_FOUND, _NAME_TOO_LONG = 3, 206  # winerror
_LONGEST_PATH = 259  # of Windows, without the terminating zero
_LONGEST_FOLDER = 247
_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.37)  # seconds


def local_path(url: str) -> str | None:
    """Return the path that a path or URL names on this machine, None for a remote URL.

    ``~`` is expanded; percent signs are part of the name, as they are for fsspec. On Windows,
    ``file:///C:/runs`` is ``C:/runs``, and a share is ``file:////server/share``.

    Example:
        >>> local_path("file:///runs/digits"), local_path("s3://bucket/digits")
        ('/runs/digits', None)
    """
    protocol, found, rest = url.partition("://")
    if not found:
        return os.path.expanduser(url)
    if protocol not in _LOCAL:
        return None
    if os.sep == "\\" and re.match("/[A-Za-z]:", rest):
        rest = rest[1:]
    return os.path.expanduser(rest)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path from the root on, with which a later ``os.chdir`` has nothing to do, or a URL.

    Example:
        >>> absolute("/runs/../runs/digits"), absolute("s3://bucket/digits")
        ('/runs/digits', 's3://bucket/digits')
    """
    text = os.fspath(path)
    if "://" in text:
        return text
    return os.path.abspath(os.path.expanduser(text))


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    r"""Return the folder of a path or URL, with its slash, and the name in it.

    The separators of a path are those of the operating system: on Windows, ``\`` and ``/``.

    Example:
        >>> split_path("runs/step-1/"), split_path("s3://bucket/run"), split_path("best")
        (('runs/', 'step-1'), ('s3://bucket/', 'run'), ('', 'best'))
    """
    text = os.fspath(path)
    slashes = "/" if "://" in text else f"/{os.sep}"
    trimmed = text.rstrip(slashes)
    begin = 1 + max(trimmed.rfind(slash) for slash in slashes)
    if os.sep == "\\" and "://" not in text:
        begin = max(begin, len(ntpath.splitdrive(trimmed)[0]))
    return trimmed[:begin], trimmed[begin:]


def base_name(path: str | os.PathLike[str]) -> str:
    """Return the last component of a path or URL.

    Example:
        >>> base_name("runs/step-1/"), base_name("file:///runs/step-2")
        ('step-1', 'step-2')
    """
    text = os.fspath(path)
    local = local_path(text)
    return split_path(text if local is None else local)[1]


def replace(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Rename a file, over an existing one, in one step.

    On Windows that fails while another program has either file open, as virus scanners have for a
    moment: it is tried again for about a second.

    Raises:
        PermissionError: a program still has the file open, or permission is missing.
    """
    with advised(os.fspath(new)):
        _retry(lambda: os.replace(old, new), new)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, which on Windows is tried again for about a second if it is open elsewhere."""
    with advised(os.fspath(path)):
        _retry(lambda: os.unlink(path), path)


def _retry(call: Callable[[], None], path: str | os.PathLike[str]) -> None:
    """Call, again after each pause as long as another program has the file open."""
    for pause in _PAUSES:
        try:
            return call()
        except PermissionError as error:
            if not _is_in_use(error, path):
                raise
        time.sleep(pause)
    return call()


def _is_in_use(error: OSError, path: str | os.PathLike[str]) -> bool:
    """Return whether Windows refused because another program has the file open."""
    code = getattr(error, "winerror", None)
    # "access denied" is also what it says of a folder, and of a file that is read-only
    return code == _SHARING_VIOLATION or (
        code == _ACCESS_DENIED and os.path.isfile(path) and os.access(path, os.W_OK)
    )


def windows_advice(error: OSError, path: str) -> str | None:
    """Return what to do about an error that only Windows raises, None for any other."""
    if _is_in_use(error, path):
        return FILE_IN_USE
    length = len(os.path.abspath(path))
    code = getattr(error, "winerror", None)
    if code == _NAME_TOO_LONG or (code == _PATH_NOT_FOUND and length > _LONGEST_FOLDER):
        return (
            f"the path has {length} characters, and Windows takes {_LONGEST_PATH} "
            f"({_LONGEST_FOLDER} for a folder) unless long paths are enabled (LongPathsEnabled in "
            "the registry): enable them, or use a folder with a shorter path"
        )
    return None


@contextmanager
def advised(path: str, by_errno: Mapping[int, str] | None = None) -> Iterator[None]:
    """Add advice to an OSError of the block that only Windows raises, or one with an errno."""
    try:
        yield
    except OSError as error:
        advice = windows_advice(error, path) or (by_errno or {}).get(error.errno or 0)
        if advice is None or advice in str(error) or FILE_IN_USE in str(error):
            raise
        code = error.errno or errno.EACCES
        text = f"{error.strerror or os.strerror(code)} ({advice})"
        # OSError picks the subclass by errno: PermissionError, FileNotFoundError, ...
        raise OSError(code, text, error.filename or path) from error


def make_folders(path: str) -> None:
    """Create a folder and its parents, and sync each parent that got a new entry."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        parent = os.path.dirname(path)
        if parent == path:
            break
        path = parent
    for folder in reversed(missing):
        with advised(folder):
            os.makedirs(folder, exist_ok=True)  # another rank may have created it
        sync_folder(os.path.dirname(folder))


def sync_file(descriptor: int) -> None:
    """Flush a file to the disk itself, past the kernel and the drive's cache."""
    if sys.platform != "win32":
        with suppress(ImportError, OSError):  # not supported by every filesystem
            import fcntl

            full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync stops at the drive's cache
            if full is not None:
                fcntl.fcntl(descriptor, full)
                return
    os.fsync(descriptor)


def sync_folder(path: str) -> None:
    """Make names that were created in or removed from a folder durable, where possible."""
    if os.name == "nt":
        return
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network filesystems do not support fsync on folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(descriptor)


def sync_path(path: str) -> None:
    """Flush a file that another library has written and closed."""
    # Windows flushes only what is open for writing
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
