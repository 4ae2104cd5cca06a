"""Map pages of files into a buffer, from the page cache and without a copy."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import sys

__all__ = ["PAGE", "is_supported", "map_pages", "unmap_pages"]

PAGE = mmap.PAGESIZE
_FIXED = 0x10  # MAP_FIXED
_POPULATE_READ = 22  # MADV_POPULATE_READ, from Linux 5.14 on


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


@functools.cache
def is_supported() -> bool:
    """Return whether this system can populate mapped pages without touching them."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    try:
        page = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _bring(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE)
    except (OSError, AttributeError):
        return False
    return True


def map_pages(address: int, nbytes: int, descriptor: int, offset: int) -> None:
    """Map pages of a file over memory, and populate them before returning.

    What is written there does not reach the file. Whoever owns the memory frees it as before.

    Args:
        address: of memory that nobody uses, a multiple of the page size.
        nbytes: a multiple of the page size.
        descriptor: of the file, open for reading.
        offset: in the file, a multiple of the page size.

    Raises:
        OSError: the file ends earlier, its disk fails, or its file system has no mappings. The
            memory is not to be read before it is replaced anew.
    """
    if sys.platform != "linux":
        raise OSError("pages are mapped on Linux only")
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    _map(address, nbytes, protection, mmap.MAP_PRIVATE, descriptor, offset)
    # As one request: what faults read ahead comes in steps, and was up to three times as slow.
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
    # Not by touching them, which is a signal where the disk fails.
    _bring(address, nbytes)


def unmap_pages(address: int, nbytes: int) -> None:
    """Map anonymous memory, all zeros, over memory.

    Args:
        address: of memory that nobody uses, a multiple of the page size.
        nbytes: a multiple of the page size.
    """
    if sys.platform == "linux" and nbytes:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _map(address, nbytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def _map(
    address: int, nbytes: int, protection: int, flags: int, descriptor: int, offset: int
) -> None:
    if address % PAGE or nbytes % PAGE or offset % PAGE:
        raise ValueError(f"{address}, {nbytes} and {offset} are to be multiples of {PAGE}")
    mapped = _library().mmap(address, nbytes, protection, flags | _FIXED, descriptor, offset)
    if mapped != address:
        raise _error()


def _bring(address: int, nbytes: int) -> None:
    if _library().madvise(address, nbytes, _POPULATE_READ) != 0:
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
