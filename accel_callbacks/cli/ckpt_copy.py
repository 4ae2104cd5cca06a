"""``accel ckpt cp``: copy a checkpoint to another store, verifying its checksums on the way.

Files that were copied completely stay if a copy fails, and the next one verifies and keeps them.
The manifest is written last: without it the target is no checkpoint.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

import checkpoint_io
from accel_callbacks.cli.parser import CommandError
from accel_callbacks.terminal_text import printable, size_of
from checkpoint_io import Manifest
from checkpoint_io.folder import extra_files
from checkpoint_io.format import MANIFEST, parse_manifest, same_manifest, save_id_of, temporary_name
from checkpoint_io.loader import Bytes, Source, Want, check_sizes, manifest_of
from checkpoint_io.local_files import base_name, local_path, split_path
from checkpoint_io.storage import Store, open_store, protocol_of

WINDOW = 32 << 20
_PIECE = 8 << 20


class _Run(NamedTuple):
    """A range of bytes with its checksums: the head of a file, or a chunk of a tensor."""

    begin: int
    end: int
    checksums: tuple[str, ...]
    label: str


class _Shifted:
    """Sink that writes the bytes of a run to their position in a window of the file."""

    def __init__(self, window: Bytes, shift: int) -> None:
        self._window, self._shift = window, shift

    def take(self, offset: int, data: Bytes) -> None:
        """Copy the bytes that start `offset` bytes after the start of the run."""
        at = self._shift + offset
        self._window[at : at + data.size] = data


class _Pieces:
    """Verified bytes of a file in pieces; the next is read while the caller writes the current."""

    def __init__(self, source: Source, index: int) -> None:
        self._source, self._index = source, index

    def __iter__(self) -> Iterator[memoryview[int]]:
        windows = list(self._windows())
        with ThreadPoolExecutor(1) as pool:
            ahead = [pool.submit(self._read, window) for window in windows[:1]]
            for number in range(len(windows)):
                data = ahead.pop().result()
                if number + 1 < len(windows):
                    ahead.append(pool.submit(self._read, windows[number + 1]))
                yield data.data

    def _runs(self) -> list[_Run]:
        """List the runs of the file, in order."""
        manifest, index = self._source.manifest, self._index
        entry = manifest.files[index]
        head = _Run(0, entry.covered, entry.checksums, "")
        chunks = [
            _Run(chunk.begin, chunk.end, chunk.checksums, key)
            for key, chunk in manifest.tensors_of_file(index)
            if chunk.end > chunk.begin
        ]
        return [head, *chunks]

    def _windows(self) -> Iterator[list[tuple[_Run, range]]]:
        """Split the file into windows of at most `WINDOW` bytes, at boundaries of parts."""
        size = self._source.manifest.part_size
        room = max(1, WINDOW // size)
        window: list[tuple[_Run, range]] = []
        held = 0
        for run in self._runs():
            done = 0
            while done < len(run.checksums):
                count = min(room - held, len(run.checksums) - done)
                window.append((run, range(done, done + count)))
                done, held = done + count, held + count
                if held >= room:
                    yield window
                    window, held = [], 0
        if window:
            yield window

    def _read(self, window: list[tuple[_Run, range]]) -> Bytes:
        """Read and verify one window."""
        size = self._source.manifest.part_size
        first, parts = window[0]
        last, tail = window[-1]
        begin = first.begin + parts.start * size
        end = min(last.end, last.begin + tail.stop * size)
        data = np.empty(end - begin, dtype=np.uint8)
        wants = [
            Want(
                *(self._index, run.begin, run.end, run.checksums, run.label),
                sink=_Shifted(data, run.begin - begin),
                parts=numbers,
            )
            for run, numbers in window
        ]
        self._source.transfer(wants)
        return data


def copy(args: Namespace, options: Mapping[str, Any], target_options: Mapping[str, Any]) -> int:
    """Copy the checkpoint, and print the place of the copy."""
    place, target = args.place, args.target
    if target.endswith("/") or ("://" not in target and target.endswith(os.sep)):
        path = local_path(place)
        target += base_name(place if path is None else os.path.abspath(path))  # such as "."
    if not target_options and protocol_of(place) == protocol_of(target):
        target_options = options
    origin, goal = open_store(args.place, options), open_store(target, target_options)
    if not args.force:
        refuse_held(split_path(goal.url)[0], target_options)
    data, manifest = _manifest(origin)
    if place_of(goal).startswith(f"{place_of(origin)}/"):
        raise CommandError(
            f"{target} is inside of {args.place}, and a checkpoint cannot be copied into itself: "
            "name a TARGET outside of it; nothing was copied",
            1,
        )
    try:
        if not _Copy(Source(origin, manifest), goal, data, args.progress or None).run():
            print(printable(f"{target} is that checkpoint already"), file=sys.stderr)
    except (CommandError, checkpoint_io.CheckpointConflictError):
        raise
    except (checkpoint_io.CheckpointError, OSError, KeyboardInterrupt) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        again = f"{target} is no checkpoint yet; the same command goes on where this one ended"
        raise CommandError(f"{why}; {again}", 130 if why == "interrupted" else 1) from error
    if args.read_back:
        checkpoint_io.verify(target, storage_options=target_options)
    print(printable(f"{target} ({len(manifest.files)} files, {size_of(manifest.nbytes)})"))
    return 0


def refuse_held(folder: str, options: Mapping[str, Any]) -> None:
    """Raise CommandError if a run that lives holds the lease of a folder."""
    if folder.endswith("://"):  # of buckets
        return
    try:
        holder = checkpoint_io.Lease(folder, storage_options=options).find_holder()
    except checkpoint_io.LeaseError as error:
        raise CommandError(f"{error}, or add --force; nothing was changed", 1) from error
    if holder is not None:
        raise CommandError(
            f"{folder} is in use by {holder}, which is alive: end that run first, or add --force; "
            "nothing was changed",
            1,
        )


def place_of(store: Store) -> str:
    """Return the same text for two names of one place: of a path, with links resolved."""
    protocol = protocol_of(store.url)
    if protocol == "file":
        return os.path.realpath(store.url).replace(os.sep, "/").rstrip("/")
    return f"{protocol}://{store.url.removeprefix(f'{protocol}://').strip('/')}"


def _manifest(origin: Store) -> tuple[bytes, Manifest]:
    """Return the manifest, as bytes and parsed."""
    manifest_of(origin)  # raises a better error for a place without one
    with origin.open(MANIFEST) as reader:
        data = bytes(reader.read(0, reader.size))
    return data, parse_manifest(data, f"{origin.url}/{MANIFEST}")


class _Copy:
    """Copies files that the goal lacks, then the manifest."""

    def __init__(self, source: Source, goal: Store, data: bytes, progress: bool | None) -> None:
        self._source, self._goal, self._data, self._progress = source, goal, data, progress
        self._manifest = source.manifest

    def run(self) -> bool:
        """Copy; return False if the goal has this checkpoint already."""
        check_sizes(self._source.store, self._manifest)
        try:
            return self._copy_under_lock()
        except BaseException:
            self._goal.remove_folder()  # made by the lock; only an empty one is removed
            raise

    def _copy_under_lock(self) -> bool:
        """Copy under the lock of the goal, which saves of this machine take as well."""
        with self._goal.lock():
            token = self._goal.token(MANIFEST)
            if token and self._is_there():
                check_sizes(self._goal, self._manifest)
                return False
            if token:
                raise CommandError(
                    f"{self._goal.url} holds another checkpoint: accel ckpt rm removes it", 1
                )
            self._refuse_other_content()
            self._files()
            check_sizes(self._goal, self._manifest)
            self._goal.replace(
                MANIFEST, self._data, temporary_name(self._manifest.id), expected=token
            )
            if not self._is_there():
                raise checkpoint_io.CheckpointConflictError(
                    f"another save wrote to {self._goal.url} at the same time: give each its own"
                )
        return True

    def _refuse_other_content(self) -> None:
        """Refuse a folder with other content, such as checkpoints: `cp` would copy into it."""
        known = extra_files(self._manifest)
        names = [name for name in self._goal.sizes() if not save_id_of(name) and name not in known]
        others = sorted(name for name in names if not name.startswith(".")) + self._goal.folders()
        if others:
            shown = printable(", ".join(others[:3])) + (", ..." if len(others) > 3 else "")
            advice = "a / at the end of TARGET copies into it"
            raise CommandError(f"{self._goal.url} holds other things ({shown}): {advice}", 1)

    def _is_there(self) -> bool:
        """Return whether the goal has exactly this manifest."""
        with self._goal.open(MANIFEST) as reader:
            return same_manifest(self._data, reader)

    def _files(self) -> None:
        """Copy the files that are missing, then extra files of the checkpoint."""
        present = self._goal.sizes()
        total = self._manifest.nbytes
        with checkpoint_io.TransferProgress("copying", total, self._progress) as bar:
            for index, entry in enumerate(self._manifest.files):
                if entry.name in present and self._is_complete(index):
                    bar.add(entry.size)
                    continue
                self._goal.remove(entry.name)
                with self._goal.create(entry.name, entry.size) as write:
                    for piece in _Pieces(self._source, index):
                        write(piece)
                        bar.add(len(piece))
        for name in extra_files(self._manifest):
            self._extra(name)

    def _is_complete(self, index: int) -> bool:
        """Return whether a file from an earlier copy is complete, by its checksums."""
        copy = Source(self._goal, self._manifest)
        with suppress(checkpoint_io.CorruptCheckpointError):
            check_sizes(self._goal, self._manifest, [index])
            for _ in _Pieces(copy, index):
                pass
            return True
        return False

    def _extra(self, name: str) -> None:
        """Copy an extra file, which has no checksums."""
        with suppress(FileNotFoundError), self._source.store.open(name) as reader:
            self._goal.remove(name)
            with self._goal.create(name, reader.size) as write:
                for begin in range(0, reader.size, _PIECE):
                    write(reader.read(begin, min(begin + _PIECE, reader.size)))
