"""Which URLs are folders and files of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["local_path", "writable_folder"]


def local_path(url: str) -> str | None:
    """The path that a URL means on this machine, None if it is elsewhere.

    Example:
        >>> from accel_callbacks.local_path import local_path
        >>> local_path("file:///runs/digits"), local_path("s3://bucket/digits")
        ('/runs/digits', None)
    """
    protocol, found, rest = url.partition("://")
    if found and protocol not in ("file", "local"):
        return None
    return os.path.expanduser(rest if found else url)


@contextmanager
def writable_folder(url: str) -> Iterator[str]:
    """A folder for files beside a checkpoint: there while the block runs, where it is local.

    Gives the path, or the URL of a folder that is elsewhere. Where the block raises, a folder
    that is empty is removed again.

    Example:
        >>> import os, tempfile
        >>> from accel_callbacks.local_path import writable_folder
        >>> with writable_folder(tempfile.mkdtemp() + "/step-1") as folder:
        ...     os.path.isdir(folder)
        True
    """
    path = local_path(url)
    if path is None:
        yield url
        return
    from checkpoint_io.storage.local import make_folders

    path = os.path.abspath(path)
    make_folders(path)
    try:
        yield path
    except BaseException:
        with suppress(OSError):
            os.rmdir(path)
        raise
