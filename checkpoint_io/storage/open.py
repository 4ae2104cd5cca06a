"""Open the store that a URL or path needs; the only entry point to storage."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from checkpoint_io.local_files import local_path
from checkpoint_io.storage.base import (
    OBJECT_STORES,
    RangeReader,
    Store,
    child_name,
    driver_advice,
    protocol_of,
)
from checkpoint_io.storage.fsspec_store import Driver, FsspecStore
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.retry import RetryPolicy

__all__ = ["FsspecStore", "RangeReader", "Store", "child_name", "open_store"]


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    retry: RetryPolicy | None = None,
) -> Store:
    """Open the folder that a URL or path names; `storage_options` go to its fsspec driver."""
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise ValueError(f"a checkpoint's location must be a path or a URL, not {url!r}")
    options = dict(storage_options or {})
    if "transfer" in options:
        raise ValueError(
            "storage_options: transfer was removed in 0.2.0: s3fs moves the bytes of s3:// URLs, "
            "so leave it out"
        )
    if not options and os.name == "posix" and ":" not in text:
        return LocalStore(text)  # as fsspec would say, after ten times as long
    if os.sep == "\\" and (local := local_path(text)) is not None:
        return LocalStore(local)  # drives and shares; fsspec takes some of them for relative paths
    protocol = protocol_of(text)
    if protocol in OBJECT_STORES:
        # a cached listing hides what other processes wrote
        options.setdefault("use_listings_cache", False)
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    policy = retry or RetryPolicy()
    try:
        if protocol in ("s3", "s3a"):
            from checkpoint_io.storage.s3.store import open_s3

            if (store := open_s3(text, options, policy)) is not None:
                return store
        filesystem, path = url_to_fs(text, **options)
    except ImportError as error:
        if "accel-callbacks[" in str(error):
            raise
        raise ImportError(driver_advice(text)) from error
    except ValueError:
        from fsspec.registry import available_protocols

        if protocol in (known := available_protocols()):
            raise
        close = difflib.get_close_matches(protocol, known, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}://?" if close else ""
        raise ValueError(
            f"{text}: no filesystem of fsspec has the protocol {protocol}://.{hint}"
        ) from None
    # fsspec decides, not the text of the URL: any protocol may be registered for local files
    if isinstance(filesystem, LocalFileSystem):
        return LocalStore(path)
    driver = Driver(filesystem, policy, lambda: url_to_fs(text, **options)[0])
    return FsspecStore(driver, path, text.rstrip("/"))
