"""Divide the verification of a checkpoint between ranks: each byte is read by exactly one.

A rank claims what must be verified for it, and what it is about to read itself. Once every rank has
the claims of all, each verifies its share: what it alone reads, and a part of what several or none
of them read. So a rank of many reads little more than what is its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format.manifest import Chunk, Manifest
from checkpoint_io.loader.source import Source
from checkpoint_io.loader.transfer import Want
from checkpoint_io.loader.verify import check_headers
from checkpoint_io.threads import collector_paused

__all__ = ["Claim", "check_share", "claim_of", "deal"]

Integers = np.ndarray[Any, np.dtype[np.int64]]
Claim = Mapping[str, Any]
"""The digest of a rank's manifest, and as bytes of int64 pairs the ranges of the checkpoint that
must be verified for it (`needed`) and that it reads itself (`reads`). A position counts from the
start of the first file, as if the files followed each other."""


def claim_of(
    source: Source, files: Iterable[int], reads: Iterable[tuple[int, int, int]] = ()
) -> Claim:
    """Return a rank's claim, plain values for the other ranks.

    Args:
        source: the checkpoint.
        files: indices of the files of which every byte must be verified for this rank.
        reads: file, first and last byte (exclusive) of what the rank reads itself.
    """
    manifest, starts = source.manifest, _starts(source.manifest)
    return {
        "digest": manifest.digest,
        "needed": _pack((starts[n], starts[n] + manifest.files[n].size) for n in files),
        "reads": _pack((starts[n] + begin, starts[n] + end) for n, begin, end in reads),
    }


def check_share(
    source: Source,
    claims: Sequence[Claim | None],
    rank: int,
    *,
    progress: bool | None = False,
) -> None:
    """Verify one rank's share: headers against the manifest, and every byte.

    Args:
        source: the checkpoint.
        claims: of all ranks, in rank order; None of a rank that takes no share.
        rank: this rank.
        progress: a bar with bytes per second; None shows one for a long check on a terminal.

    Raises:
        CorruptCheckpointError: a part of this rank's share is damaged, or the ranks have opened
            different checkpoints.
    """
    submitted = [claim for claim in claims if claim is not None]
    if any(claim["digest"] != source.manifest.digest for claim in submitted):
        raise CorruptCheckpointError(
            f"{source.store.url} was replaced while the ranks opened it: load it again"
        )
    if not any(claim["needed"] for claim in submitted):
        return
    with collector_paused():
        parts = _Parts.of(source.manifest)
        owners = deal(parts.positions, parts.sizes, claims)
        heads, wants = parts.selected(np.flatnonzero(owners == rank), source.manifest)
    check_headers(source, heads)
    source.transfer(wants, progress=progress, label="verifying")


def deal(positions: Integers, sizes: Integers, claims: Sequence[Claim | None]) -> Integers:
    """Return the rank that verifies each part, -1 for one that no rank needs verified.

    A pure function of what all ranks know, so that they need not agree on its result. A part goes
    to one of the ranks that read it, or to any if none does, so that all verify about as much.

    Args:
        positions: of the first byte of each part, ascending.
        sizes: bytes of each part.
        claims: of all ranks; None of a rank that takes no share.
    """
    owners = np.full(len(positions), -1, dtype=np.int64)
    submitted = {rank: claim for rank, claim in enumerate(claims) if claim is not None}
    takers = list(submitted)
    needs = {claim["needed"] for claim in submitted.values()}  # mostly the same for all ranks
    needed = _sums(positions, [(1, _unpack(data)) for data in needs]) > 0
    reads = {rank: _unpack(claim["reads"]) for rank, claim in submitted.items()}
    # of each part: the sum of the marks of the ranks that read it, which names their set
    readers = _sums(positions, [(_mark(rank), ranges) for rank, ranges in reads.items()])
    wanted = np.flatnonzero(needed)
    if not wanted.size:
        return owners
    sets, first, numbers = np.unique(readers[wanted], return_index=True, return_inverse=True)
    ends = np.cumsum(np.bincount(numbers))
    groups = np.split(wanted[np.argsort(numbers, kind="stable")], ends[:-1])
    holds = {rank: _hits(reads[rank], positions[wanted[first]]) for rank in takers}
    candidates = [
        [rank for rank in takers if holds[rank][number]] or takers for number in range(len(sets))
    ]
    load = dict.fromkeys(takers, 0)
    # first what only one rank reads, last what no rank does, which evens out the rest
    for number in sorted(range(len(sets)), key=lambda n: (len(candidates[n]), first[n])):
        group, ranks = groups[number], candidates[number]
        edges = np.cumsum(_fill([load[rank] for rank in ranks], int(sizes[group].sum())))
        # a rank's are next to each other, for reads of many bytes at once
        middles = np.cumsum(sizes[group]) - sizes[group] // 2
        chosen = np.minimum(np.searchsorted(edges, middles, side="right"), len(ranks) - 1)
        owners[group] = np.array(ranks, dtype=np.int64)[chosen]
        for index, rank in enumerate(ranks):
            load[rank] += int(sizes[group][chosen == index].sum())
    return owners


def _fill(loads: Sequence[int], amount: int) -> list[int]:
    """Divide an amount so that the loads become as equal as possible."""
    lightest = sorted(loads)
    level, total = 0, amount + sum(lightest)
    for count in range(len(lightest), 0, -1):
        level = -(-total // count)
        if level >= lightest[count - 1]:
            break
        total -= lightest[count - 1]
    return [max(0, level - load) for load in loads]


def _mark(rank: int) -> int:
    """Return a number whose sums over different sets of ranks differ, but by a rare accident.

    Then a part is verified by a rank that does not read it.
    """
    digest = hashlib.blake2b(str(rank).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _sums(positions: Integers, weighted: Iterable[tuple[int, Integers]]) -> Any:
    """Return for each position the sum (modulo 2**64) of the weights of the ranges around it."""
    steps = np.zeros(len(positions) + 1, dtype=np.uint64)
    for weight, ranges in weighted:
        np.add.at(steps, np.searchsorted(positions, ranges[:, 0]), np.uint64(weight))
        np.subtract.at(steps, np.searchsorted(positions, ranges[:, 1]), np.uint64(weight))
    return np.cumsum(steps)[:-1]


class _Row(NamedTuple):
    """A chunk of a tensor, or the head of a file (without a chunk); an objects file is all head."""

    position: int
    size: int
    file: int
    key: str
    chunk: Chunk | None


class _Parts(NamedTuple):
    """The parts of all files that have a checksum, in the order of their bytes.

    A head is one part. `row` and `number` tell which part of which row each is.
    """

    rows: list[_Row]
    row: Integers
    number: Integers
    positions: Integers
    sizes: Integers

    @classmethod
    def of(cls, manifest: Manifest) -> _Parts:
        """Return the parts of a checkpoint."""
        starts, part = _starts(manifest), manifest.part_size
        rows = [
            _Row(starts[n], entry.covered, n, "", None) for n, entry in enumerate(manifest.files)
        ]
        for key, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                if chunk.checksums:
                    size = chunk.end - chunk.begin
                    rows.append(
                        _Row(starts[chunk.file] + chunk.begin, size, chunk.file, key, chunk)
                    )
        rows.sort(key=itemgetter(0))
        counts = np.array([1 if r.chunk is None else len(r.chunk.checksums) for r in rows], int)
        row = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.array([r.position for r in rows], dtype=np.int64)
        lengths = np.array([r.size for r in rows], dtype=np.int64)
        longest = np.where([r.chunk is None for r in rows], lengths, part)
        sizes = np.minimum(longest[row], lengths[row] - number * part)
        return cls(rows, row, number, begins[row] + number * part, sizes)

    def selected(self, indices: Integers, manifest: Manifest) -> tuple[list[int], list[Want]]:
        """Return the tensor files whose heads are among some parts, and reads of the others."""
        heads, wants = [], []
        row_numbers, starts = np.unique(self.row[indices], return_index=True)
        numbers = np.split(self.number[indices], starts[1:])
        for at, parts in zip(row_numbers.tolist(), numbers, strict=True):
            row = self.rows[at]
            if row.chunk is None:
                entry = manifest.files[row.file]
                if entry.kind == "tensors":
                    heads.append(row.file)
                else:
                    wants.append(Want(row.file, 0, entry.covered, entry.checksums, ""))
                continue
            _, _, _, begin, end, sums = row.chunk
            numbers_read = None if len(parts) == len(sums) else parts.tolist()
            wants.append(Want(row.file, begin, end, sums, row.key, parts=numbers_read))
        return heads, wants


def _starts(manifest: Manifest) -> list[int]:
    """Return the position of the first byte of each file."""
    starts, position = [], 0
    for entry in manifest.files:
        starts.append(position)
        position += entry.size
    return starts


def _pack(ranges: Iterable[tuple[int, int]]) -> bytes:
    """Return ranges in ascending order as bytes, those that touch joined."""
    joined: list[list[int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return np.array(joined, dtype="<i8").tobytes()


def _unpack(data: bytes) -> Integers:
    """Return packed ranges as rows of two columns."""
    return np.frombuffer(data, dtype="<i8").reshape(-1, 2).astype(np.int64)


def _hits(ranges: Integers, positions: Integers) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which positions lie in one of the ranges."""
    if not len(ranges):
        return np.zeros(len(positions), dtype=bool)
    at = np.searchsorted(ranges[:, 0], positions, side="right") - 1
    hits: np.ndarray[Any, np.dtype[np.bool_]] = (at >= 0) & (positions < ranges[at, 1])
    return hits
