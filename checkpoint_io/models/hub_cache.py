"""The one kind of link that is followed: the download cache of the Hugging Face hub.

Its snapshots consist of relative links into the `blobs` folder beside them.
"""

from __future__ import annotations

import os
import re

_BLOB = re.compile(r"(?:\.\./)+blobs/([0-9a-f]{40}(?:[0-9a-f]{24})?)", re.ASCII)


def blobs_of(folder: str) -> dict[str, tuple[str, str]]:
    """Return, for the files of a snapshot, the folder and name of the blob that each is."""
    folder = os.path.abspath(folder)
    head, found_snapshots, _ = folder.rpartition(f"{os.sep}snapshots{os.sep}")
    if not found_snapshots:
        return {}
    blobs = os.path.join(head, "blobs")
    found = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for name in names:
        if (blob := _blob(folder, name, blobs)) is not None:
            found[name] = (blobs, blob)
    return found


def _blob(folder: str, name: str, blobs: str) -> str | None:
    """Return the name of the blob that a link stands for, None if it leads anywhere else."""
    try:
        target = os.readlink(os.path.join(folder, name))
    except OSError:  # no link
        return None
    match = _BLOB.fullmatch(target)
    if match is None or os.path.normpath(os.path.join(folder, target)) != os.path.join(
        blobs, match[1]
    ):
        return None
    return match[1]
