"""Writing to an open file, past the page cache where the filesystem lets us."""

from __future__ import annotations

import errno
import os

ALIGNMENT = 4096  # of memory, place and length; a filesystem that asks for more gets buffered IO
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def write_all(descriptor: int, data: memoryview[int]) -> None:
    """Write every byte; the kernel may take fewer than asked."""
    while data:
        data = data[os.write(descriptor, data) :]


def _switch_direct(descriptor: int, on: bool) -> bool:
    """Turn direct IO on or off; False if this system or filesystem has none.

    Set on the open file and not by open(), which leaves a new file behind where it refuses.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return True


class DirectOutput:
    """Appends aligned buffers to a file with direct IO, and what does not fit that without it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.direct = _switch_direct(descriptor, True)

    def write(self, data: memoryview[int]) -> None:
        """Append bytes that start at a page of memory."""
        done = self._write_direct(data[: len(data) // ALIGNMENT * ALIGNMENT]) if self.direct else 0
        if done < len(data):
            self.stop_direct()  # from here on the place in the file is not aligned
            write_all(self._descriptor, data[done:])

    def _write_direct(self, data: memoryview[int]) -> int:
        """Write as much as goes directly; return how much that was."""
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except OSError as error:
                # some filesystems say so only now, and all after a write that ended off a block
                if error.errno in _REFUSALS:
                    break
                raise
        return done

    def stop_direct(self) -> None:
        """Go on through the page cache."""
        if self.direct:
            self.direct = False
            _switch_direct(self._descriptor, False)
