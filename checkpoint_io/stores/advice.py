"""What to do about an error of the local filesystem."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

_ROOM = "make room, or save to another place"
_RIGHTS = "look at its owner and mode, or save to another place"
_ADVICE = {
    errno.ENOSPC: f"the disk is full: {_ROOM}",
    errno.EDQUOT: f"the quota is used up: {_ROOM}",
    errno.EFBIG: "a file may not be that large there (see ulimit -f): save with a smaller "
    "max_shard_size, or raise the limit",
    errno.EROFS: "the filesystem is mounted read-only: save to another place",
    errno.EACCES: f"no right to do that there: {_RIGHTS}",
    errno.EPERM: f"no right to do that there: {_RIGHTS}",
    errno.EIO: "the device failed: see the kernel's log, and save to another place",
    errno.ENOENT: "the folder is gone, removed by somebody meanwhile: save again, to a place "
    "that is left alone",
    errno.ESTALE: "the network filesystem lost it: mount it again, then save again",
    errno.ENOTDIR: "a file is where a folder has to be: remove it, or save to another place",
    errno.EEXIST: "there is one of that name already, which is not overwritten: remove it, or "
    "save to another place",
}


def advised(error: OSError, path: str) -> OSError:
    """Return the same kind of error with the path and what to do; the same object if it has both.

    Raise it `from` the one given.
    """
    advice = _ADVICE.get(error.errno or 0)
    if advice is None or advice in str(error):
        return error
    said = error.strerror or os.strerror(error.errno or 0)
    # the number picks the class: PermissionError, FileNotFoundError, ...
    return OSError(error.errno, f"{said} ({advice})", error.filename or path)


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Add advice to an error of the filesystem in the block."""
    try:
        yield
    except OSError as error:
        better = advised(error, path)
        if better is error:
            raise
        raise better from error
