"""Copy the files of snapshots between the memory of machines, and check what arrives."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch

from accel_callbacks.checkpoint.async_save import SaveGroup

__all__ = ["Holding", "copy_files", "holding_of"]

_PIECE = 4 * 2**20  # bytes of one message


class Holding(NamedTuple):
    """What a machine holds of a snapshot.

    Attributes:
        sizes: bytes of its files, by name.
        saved: those of all files, as the manifest says; empty without a manifest.
        metadata: of the manifest.
    """

    sizes: dict[str, int]
    saved: dict[str, int]
    metadata: dict[str, object]


class _Copy(NamedTuple):
    """A file that one rank sends to another."""

    source: int
    target: int
    file: str
    nbytes: int


def holding_of(folder: str) -> Holding:
    """Return what this machine holds of the snapshot in a folder."""
    from checkpoint_io import CheckpointError, read_manifest
    from checkpoint_io.format.names import MANIFEST, kind_of

    sizes: dict[str, int] = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            ours = entry.name == MANIFEST or kind_of(entry.name) is not None
            if ours and entry.is_file(follow_symlinks=False):
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    try:
        manifest = read_manifest(folder, tensors=False)
    except CheckpointError:
        sizes.pop(MANIFEST, None)
        return Holding(sizes, {}, {})
    saved = {file.name: file.size for file in manifest.files}
    return Holding(sizes, {**saved, MANIFEST: sizes[MANIFEST]}, dict(manifest.metadata))


def copy_files(
    folder: str,
    holdings: Mapping[int, Holding],
    wanted: Mapping[int, Collection[str]],
    group: SaveGroup,
) -> None:
    """Collective: copy files to the machines that want them, and verify these there.

    Args:
        folder: of the snapshot on this machine.
        holdings: what each machine holds, by the rank that copies for it.
        wanted: the names of files that each of these ranks is to have.
        group: the ranks.

    Raises:
        checkpoint_io.CheckpointError: a machine did not get what it wanted, and has removed it.
    """
    from checkpoint_io.group import Outcome, agree

    copies = _plan(holdings, wanted)
    received = [copy.file for copy in copies if copy.target == group.rank]
    problem: OSError | None = None
    for copy in copies:
        try:
            if copy.source == group.rank:
                _send(copy, folder, group)
            elif copy.target == group.rank:
                _receive(copy, folder, group)
        except OSError as error:
            problem = error

    def check() -> None:
        if problem is not None:
            raise problem
        if received:
            _verify(folder, received)

    outcome = Outcome.of(check)
    if outcome.error is not None:
        for file in received:
            with suppress(OSError):
                os.unlink(os.path.join(folder, file))
    agree(group, outcome, f"{os.path.basename(folder)} was not copied between the machines")


def _plan(holdings: Mapping[int, Holding], wanted: Mapping[int, Collection[str]]) -> list[_Copy]:
    """Return the copies to make, in an order that all ranks follow."""
    from checkpoint_io import CheckpointError
    from checkpoint_io.format.names import MANIFEST

    saved = next(holding.saved for holding in holdings.values() if holding.saved)
    places = {rank: place for place, rank in enumerate(holdings)}
    copies = []
    for target, files in wanted.items():
        for file in files:
            sources = [r for r, held in holdings.items() if held.sizes.get(file) == saved[file]]
            if target not in sources:
                if not sources:
                    raise CheckpointError(f"no machine holds {file} any more")
                copies.append(_Copy(sources[0], target, file, saved[file]))
    # Each rank makes its copies one at a time: those of every second machine go on side by side.
    # The order is total, as sets of names have another one in each process.
    return sorted(copies, key=lambda c: (c.file != MANIFEST, places[c.source] % 2, c))


def _send(copy: _Copy, folder: str, group: SaveGroup) -> None:
    """Send a file in pieces; what cannot be read is sent as zeros, because the other side counts.

    Raises:
        OSError: it could not be read, and all pieces were sent.
    """
    problem: OSError | None = None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(os.path.join(folder, copy.file), "rb", buffering=0))
        except OSError as error:
            problem = error
        for piece in _pieces(copy.nbytes):
            if problem is None:
                try:
                    file.readinto(piece.numpy().data)
                except OSError as error:
                    problem = error
            group.send(piece, copy.target)
    if problem is not None:
        raise problem


def _receive(copy: _Copy, folder: str, group: SaveGroup) -> None:
    """Receive a file in pieces; all of them, also after one could not be written.

    Raises:
        OSError: it could not be written, and all pieces were received.
    """
    path, problem = os.path.join(folder, copy.file), None
    with ExitStack() as stack:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                os.unlink(path)  # a part of an earlier copy
            file = stack.enter_context(open(path, "xb", buffering=0))
        except OSError as error:
            problem = error
        for piece in _pieces(copy.nbytes):
            group.receive(piece, copy.source)
            if problem is None:
                try:
                    file.write(piece.numpy().data)
                except OSError as error:
                    problem = error
    if problem is not None:
        raise problem


def _pieces(nbytes: int) -> Iterator[torch.Tensor]:
    """Yield a buffer for each piece of a file."""
    for begin in range(0, nbytes, _PIECE):
        yield torch.zeros(min(_PIECE, nbytes - begin), dtype=torch.uint8, device="cpu")


def _verify(folder: str, files: Sequence[str]) -> None:
    """Compare the bytes of files with the checksums of the manifest.

    Raises:
        checkpoint_io.CheckpointError: some differ, or the manifest does not know the name.
    """
    from checkpoint_io import CorruptCheckpointError, read_manifest
    from checkpoint_io.format.names import MANIFEST
    from checkpoint_io.loader.source import Source
    from checkpoint_io.loader.verify import check_files
    from checkpoint_io.storage.open import open_store

    manifest = read_manifest(folder)
    indices = {file.name: index for index, file in enumerate(manifest.files)}
    names = [file for file in files if file != MANIFEST]
    if unknown := [name for name in names if name not in indices]:
        raise CorruptCheckpointError(f"{folder}: {unknown[0]} is not a file of this snapshot")
    check_files(Source(open_store(folder), manifest), [indices[n] for n in names], full=True)
