"""Weights in local files: the place of each tensor's bytes, and reads into memory."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

__all__ = [
    "FileIdentity",
    "Reads",
    "Stored",
    "StoredTensor",
    "StoredWeights",
    "WeightReadError",
    "plan_reads",
]

_PIECE = 8 << 20  # bytes of one read
_READ_AHEAD = 128 << 10  # bytes that the system reads as one request by itself
_AT_ONCE = 2  # reads of a unit: the disk has the next one before the last one has ended
_PAGE = 4096  # what O_DIRECT asks of addresses, lengths and offsets
_ALIGNMENT = 64  # as torch allocates, so that kernels give the same bits
_GAP = 1 << 20  # bytes of other tensors that are read along past the page cache
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_DIRECT = getattr(os, "O_DIRECT", 0)
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class WeightReadError(RuntimeError):
    """Stored weights cannot be read, or are not those that the model was dispatched with.

    Example:
        >>> from accel_callbacks.models.offload.source import WeightReadError
        >>> issubclass(WeightReadError, RuntimeError)
        True
    """


class StoredTensor(NamedTuple):
    """A tensor in a local file.

    Args:
        path: the file.
        begin: offset of its first byte.
        dtype: as it is stored.
        shape: as it is stored.
    """

    path: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class FileIdentity(NamedTuple):
    """The identity of a version of a file.

    Args:
        size: in bytes.
        modified: nanoseconds.
        head: a digest of its first bytes, the header of a safetensors file; empty of other files.
        inode: 0 if a copy of the file in its place is the same version.
    """

    size: int
    modified: int
    head: str
    inode: int = 0

    @classmethod
    def of(cls, path: str) -> FileIdentity:
        """Return the identity of a file.

        Raises:
            WeightReadError: it cannot be read.
        """
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                length = int.from_bytes(file.read(8), "little")
                file.seek(0)
                head = hashlib.sha256(file.read(8 + min(length, _PIECE))).hexdigest()
        except OSError as error:
            raise unreadable(path, error) from None
        return cls(status.st_size, status.st_mtime_ns, head)

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether a file is this version, by its status."""
        if status.st_size != self.size or status.st_mtime_ns != self.modified:
            return False
        return not self.inode or status.st_ino == self.inode


def unreadable(path: str, error: OSError) -> WeightReadError:
    """Return the error for a file of weights that cannot be opened."""
    if error.errno in _NO_DESCRIPTORS:
        return WeightReadError(
            f"{path}: {error.strerror}: raise the limit with `ulimit -n`, or close files that are "
            "not needed."
        )
    is_missing = isinstance(error, FileNotFoundError)
    return WeightReadError(
        f"{path}{' is missing' if is_missing else ''}: {error.strerror}: the weights of a "
        "dispatched model are streamed from there; put the file back, or offload the model again."
    )


class Stored(NamedTuple):
    """A weight in a file, with the version of the file.

    Args:
        tensor: where it is.
        identity: of the file.
    """

    tensor: StoredTensor
    identity: FileIdentity

    def mapped(self) -> torch.Tensor:
        """Return the weight as a view of its mapped file."""
        return StoredWeights.of({"": self}).mapped("")


@dataclass(frozen=True)
class StoredWeights:
    """Tensors in local files, by name.

    Args:
        tensors: where they are.
        identities: of their files, by path.
    """

    tensors: Mapping[str, StoredTensor]
    identities: Mapping[str, FileIdentity] = field(default_factory=dict)
    _maps: weakref.WeakValueDictionary[str, mmap.mmap] = field(
        default_factory=weakref.WeakValueDictionary, repr=False, compare=False
    )

    @classmethod
    def of(cls, stored: Mapping[str, Stored]) -> StoredWeights:
        """Return weights by name."""
        return cls(
            {name: weight.tensor for name, weight in stored.items()},
            {weight.tensor.path: weight.identity for weight in stored.values()},
        )

    def at(self, name: str) -> Stored:
        """Return the place of a weight."""
        tensor = self.tensors[name]
        return Stored(tensor, self.identities[tensor.path])

    @classmethod
    def of_checkpoint(cls, checkpoint: str | os.PathLike[str]) -> StoredWeights:
        """Return the tensors of a checkpoint in local safetensors files; tied names included.

        Args:
            checkpoint: what ``load_checkpoint_in_model`` takes.

        Raises:
            ValueError: it is not in local safetensors files.
            checkpoint_io.CheckpointError: it is missing or damaged.
        """
        from checkpoint_io.weights import open_weights

        source = open_weights(checkpoint, 0, None)
        stored = cls.of_source(source)
        if stored is None:
            raise ValueError(
                f"{os.fspath(checkpoint)}: weights are streamed from local safetensors files only. "
                "Copy it to a local disk, or convert it with `accel merge-weights`; or give no "
                "part of the model to the disk."
            )
        tied = {name: stored.tensors[stored_name] for name, stored_name in source.tied.items()}
        return cls({**stored.tensors, **tied}, stored.identities)

    @classmethod
    def of_source(cls, source: Any, names: Collection[str] | None = None) -> StoredWeights | None:
        """Return the tensors of an open checkpoint, with the identities of their files as they are.

        Args:
            source: what ``checkpoint_io.weights.open_weights`` returns.
            names: of tensors; all by default.

        Returns:
            Where they are; None if they are not whole in local files.
        """
        locate = getattr(source, "local_bytes", None)
        places = locate() if locate is not None else None
        if places is None:
            return None
        tensors = {
            name: StoredTensor(
                path, begin, source.infos[name].dtype, tuple(source.infos[name].shape)
            )
            for name, (path, begin) in places.items()
            if names is None or name in names
        }
        return cls(tensors).identified()

    def identified(self) -> StoredWeights:
        """Return a copy with the current identities of all files."""
        paths = sorted({tensor.path for tensor in self.tensors.values()})
        return StoredWeights(self.tensors, {path: FileIdentity.of(path) for path in paths})

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return copies of tensors; each file is opened once, and read in its order."""
        tensors: dict[str, torch.Tensor] = {}
        reader = Reader(self)
        try:
            for name in sorted(names, key=lambda name: self.tensors[name][:2]):
                stored = self.tensors[name]
                memory = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
                reader.read(stored, memory)
                tensors[name] = memory.view(stored.dtype).view(stored.shape)
        finally:
            reader.close()
        return [tensors[name] for name in names]

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of its mapped file: no memory, until it is read or written to.

        What is written to it does not reach the file.
        """
        stored = self.tensors[name]
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        memory = self._maps.get(stored.path)
        if memory is None:  # one mapping for all tensors of a file, as long as one of them lives
            with self.open(stored.path) as file:
                memory = _map(file.fileno())
            self._maps[stored.path] = memory
        whole = memoryview(memory)
        if stored.begin + stored.nbytes > len(whole):
            raise WeightReadError(
                f"{stored.path}: truncated, {name} ends at byte {stored.begin + stored.nbytes} of "
                f"{len(whole)}. Copy the file again."
            )
        # A storage of its own, so that torch.save writes this tensor and not the file.
        part = torch.frombuffer(
            whole[stored.begin : stored.begin + stored.nbytes], dtype=torch.uint8
        )
        if part.data_ptr() % stored.dtype.itemsize:
            part = part.clone()
        return part.view(stored.dtype).view(stored.shape)

    def open(self, path: str, flags: int = 0) -> OpenFile:
        """Open one of the files; raise WeightReadError if it was replaced."""
        return OpenFile(path, self.identities.get(path), flags)

    def tensor_at(self, path: str, position: int) -> str:
        """Return the tensor that has this byte, with its file, for errors."""
        for name, stored in self.tensors.items():
            if stored.path == path and 0 <= position - stored.begin < max(stored.nbytes, 1):
                return f"{name} in {path}"
        return path

    def __getstate__(self) -> dict[str, Any]:
        """Drop the mapped files."""
        return {**self.__dict__, "_maps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _maps=weakref.WeakValueDictionary())

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeights:
        """Return the object itself, which is immutable."""
        return self


def _map(descriptor: int) -> mmap.mmap:
    """Map a whole file, copy-on-write."""
    if sys.platform != "linux":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    # Without a reserve, which Linux refuses for files that are larger than memory and swap.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE | no_reserve, prot=protection)


class OpenFile:
    """A file that is open for reading, with a check that it was not replaced.

    Args:
        path: the file.
        identity: what it was; not checked if None.
        flags: of :func:`os.open`.

    Raises:
        WeightReadError: it cannot be opened, or is another file than it was.
    """

    def __init__(self, path: str, identity: FileIdentity | None, flags: int = 0) -> None:
        self.path = path
        self.identity = identity
        try:
            self._descriptor = os.open(path, os.O_RDONLY | _FLAGS | flags)
        except OSError as error:
            if error.errno == errno.EINVAL:  # no direct reads there
                raise
            raise unreadable(path, error) from None
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def check(self) -> None:
        """Raise WeightReadError if the file has changed since the model was dispatched."""
        status, was = os.fstat(self._descriptor), self.identity
        if was is not None and not was.is_of(status):
            raise _has_changed(self.path, was, status)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _has_changed(path: str, was: FileIdentity, status: os.stat_result) -> WeightReadError:
    return WeightReadError(
        f"{path} has changed since the model was dispatched ({was.size} bytes then, "
        f"{status.st_size} now): its weights are other ones, or those of another model that was "
        "written there. Dispatch the model again, and give each model a folder of its own."
    )


class _Piece(NamedTuple):
    """Bytes of a file that are read by one request.

    Args:
        path: the file.
        begin: offset in the file.
        place: offset in the buffer.
        nbytes: to read; whole pages of direct reads.
        needed: the first of these; the rest may be past the end of the file.
    """

    path: str
    begin: int
    place: int
    nbytes: int
    needed: int


class _Move(NamedTuple):
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Reads:
    """The plan of reads that fill one buffer with tensors.

    Args:
        nbytes: of the buffer.
        places: offset of each tensor in the buffer, by name.
        pieces: what to read.
        moves: tensors to move after reading, first to last.
        direct: read past the page cache.
        stored_bytes: of the tensors, without what is read along.
    """

    nbytes: int
    places: Mapping[str, int]
    pieces: Sequence[_Piece]
    moves: Sequence[_Move]
    direct: bool
    stored_bytes: int


def plan_reads(tensors: Mapping[str, StoredTensor], direct: bool) -> Reads:
    """Return the plan to fill a buffer with tensors, each at a multiple of 64 bytes.

    Args:
        tensors: what is wanted.
        direct: past the page cache, where whole pages are read.
    """
    unique: dict[StoredTensor, list[str]] = {}
    for name, stored in tensors.items():
        unique.setdefault(stored, []).append(name)
    ordered = sorted(unique, key=lambda stored: (stored.path, stored.begin))
    direct = bool(direct and _DIRECT)
    pieces: list[_Piece] = []
    moves: list[_Move] = []
    if direct:
        nbytes, places, pieces, moves = _plan_direct(ordered)
    else:
        nbytes, places, pieces = _plan_buffered(ordered)
    return Reads(
        nbytes,
        {name: places[stored] for stored, names in unique.items() for name in names},
        pieces,
        moves,
        direct,
        sum(stored.nbytes for stored in ordered),
    )


def _plan_buffered(
    ordered: Sequence[StoredTensor],
) -> tuple[int, dict[StoredTensor, int], list[_Piece]]:
    """Plan reads of each tensor to its place."""
    places: dict[StoredTensor, int] = {}
    pieces: list[_Piece] = []
    position = 0
    for stored in ordered:
        places[stored] = position
        for offset in range(0, stored.nbytes, _PIECE):
            nbytes = min(_PIECE, stored.nbytes - offset)
            begin = stored.begin + offset
            pieces.append(_Piece(stored.path, begin, position + offset, nbytes, nbytes))
        position = aligned_up(position + stored.nbytes)
    return position, places, pieces


def _runs(ordered: Sequence[StoredTensor], most: int) -> list[list[StoredTensor]]:
    """Return the tensors that follow each other in a file, with gaps of at most so many bytes."""
    runs: list[list[StoredTensor]] = []
    for stored in ordered:
        last = runs[-1][-1] if runs else None
        gap = -1 if last is None else stored.begin - (last.begin + last.nbytes)
        if last is not None and last.path == stored.path and gap <= most:
            runs[-1].append(stored)
        else:
            runs.append([stored])
    return runs


def _plan_direct(
    ordered: Sequence[StoredTensor],
) -> tuple[int, dict[StoredTensor, int], list[_Piece], list[_Move]]:
    """Plan direct reads of whole pages, and moves of tensors that are unaligned in their file."""
    places: dict[StoredTensor, int] = {}
    pieces: list[_Piece] = []
    moves: list[_Move] = []
    position = 0
    for run in _runs(ordered, _GAP):
        low, high = run[0].begin, max(stored.begin + stored.nbytes for stored in run)
        begin = low - low % _PAGE
        aligned = all(stored.begin % _ALIGNMENT == 0 for stored in run)
        # Tensors only move toward the front, each by less than the room that is left for it.
        start = aligned_up(position + (0 if aligned else _ALIGNMENT * len(run)), _PAGE)
        for offset in range(0, high - begin, _PIECE):
            needed = min(_PIECE, high - begin - offset)
            nbytes = aligned_up(needed, _PAGE)
            pieces.append(_Piece(run[0].path, begin + offset, start + offset, nbytes, needed))
        at = position
        for stored in run:
            read_to = start + stored.begin - begin
            places[stored] = read_to if aligned else at
            if not aligned:
                moves.append(_Move(read_to, at, stored.nbytes))
                at = aligned_up(at + stored.nbytes)
        position = start + aligned_up(high - begin, _PAGE)
    return position, places, pieces, moves


def aligned_up(value: int, step: int = _ALIGNMENT) -> int:
    """Round up to a multiple of a step, by default the alignment for bitwise equal kernels."""
    return -(-value // step) * step


class Reader:
    """Fill buffers from files, which stay open in between.

    Args:
        weights: the files, with what they were.
        on_progress: called with the number of bytes after each read.
    """

    _MOST_FILES = 64

    def __init__(
        self, weights: StoredWeights, on_progress: Callable[[int], None] = lambda count: None
    ) -> None:
        self._weights = weights
        self._on_progress = on_progress
        self._files: dict[tuple[str, bool], OpenFile] = {}  # the last used one last
        self._lock = threading.Lock()
        self.reading: str | None = None  # the file, for the message of one who waits

    def fill(self, reads: Reads, memory: torch.Tensor) -> int:
        """Read tensors into a buffer; return the number of bytes that were read.

        Args:
            reads: how.
            memory: bytes in host memory, page-aligned.

        Raises:
            WeightReadError: a file is damaged, gone, or another than it was.
        """
        view, base = memory.numpy().data, memory.data_ptr()

        def read(piece: _Piece) -> int:
            return self._read(piece, view[piece.place : piece.place + piece.nbytes], reads.direct)

        total, moves = 0, deque(reads.moves)
        for piece, count in zip(reads.pieces, _in_order(read, reads.pieces), strict=True):
            total += count
            # While the next pieces are read. Targets may overlap with sources, but not with them.
            _move(moves, base, piece.place + piece.needed)
        self.reading = None
        return total

    def read(self, stored: StoredTensor, memory: torch.Tensor) -> None:
        """Read one tensor into memory of its size; split a large one into parallel reads."""
        self.fill(plan_reads({"": stored}, direct=False), memory)

    def _read(self, piece: _Piece, target: memoryview[int], direct: bool) -> int:
        self.reading = piece.path
        with self._lock:
            file = self._open(piece.path, direct)
        if piece.needed > _READ_AHEAD and not direct:
            # As one request: read-ahead fills the page cache in steps, up to twice as slowly.
            _advise(file, "POSIX_FADV_WILLNEED", piece.begin, piece.needed)
        done = 0
        while done < piece.nbytes:
            try:
                count = _pread_into(file.fileno(), target[done:], piece.begin + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # this file system has no direct reads
                    return self._read(piece, target, False)
                place = self._weights.tensor_at(piece.path, piece.begin + done)
                raise WeightReadError(
                    f"{place}: {error.strerror} at byte {piece.begin + done}: check the disk"
                ) from None
            done += count
            with self._lock:
                self._on_progress(count)
            if not count or (direct and count % _PAGE):  # the end of the file
                break
        if done < piece.needed:
            file.check()
            raise WeightReadError(
                f"{self._weights.tensor_at(piece.path, piece.begin + done)}: truncated, it ends "
                f"at byte {piece.begin + done}; it was complete when the model was "
                "dispatched. Copy the file again."
            )
        # After the read too: bytes of a file that changed meanwhile are not used.
        file.check()
        return done

    def _open(self, path: str, direct: bool) -> OpenFile:
        """Return a file that is open, and still the one that the weights were found in."""
        file = self._files.pop((path, direct), None)
        if file is not None:
            file.check()
        else:
            # The least recently used one: the few that are read at once are never that.
            if len(self._files) >= self._MOST_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = self._open_anew(path, direct)
        self._files[path, direct] = file
        return file

    def _open_anew(self, path: str, direct: bool) -> OpenFile:
        was = self._weights.identities.get(path)
        # Size and time are those of before, maybe, and the tensors elsewhere in the file.
        if was is not None and was.head and FileIdentity.of(path).head != was.head:
            raise WeightReadError(
                f"{path} has changed since the model was dispatched: its header is another one. "
                "Dispatch the model again."
            )
        if direct:
            try:
                return self._weights.open(path, _DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        file = self._weights.open(path)
        if not direct:
            # Reads twice as far ahead as for others.
            _advise(file, "POSIX_FADV_SEQUENTIAL", 0, 0)
        return file

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _advise(file: OpenFile, advice: str, begin: int, nbytes: int) -> None:
    """Tell the system how a range of a file will be read, where it takes advice."""
    if sys.platform not in ("win32", "darwin") and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, nbytes, getattr(os, advice))


def _in_order(read: Callable[[_Piece], int], pieces: Sequence[_Piece]) -> Iterator[int]:
    """Yield the result of each read, in order, from parallel threads."""
    if len(pieces) < 2:
        yield from map(read, pieces)
        return
    left = deque(range(len(pieces)))
    results: list[SimpleQueue[int | BaseException]] = [SimpleQueue() for _ in pieces]

    def work() -> None:
        while left:
            try:
                number = left.popleft()
            except IndexError:
                return
            try:
                results[number].put(read(pieces[number]))
            except BaseException as error:
                left.clear()
                results[number].put(error)

    # Not of a pool, whose threads the end of the process waits for, even if the disk hangs.
    threads = [
        threading.Thread(target=work, name=f"offload-reader-{number}", daemon=True)
        for number in range(min(_AT_ONCE, len(pieces)))
    ]
    for thread in threads:
        thread.start()
    try:
        for result in results:
            outcome = result.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        left.clear()
        for thread in threads:
            thread.join()


def _move(moves: deque[_Move], base: int, end: int) -> None:
    """Move the bytes read so far toward the front of memory."""
    while moves and moves[0].source < end:
        move = moves.popleft()
        nbytes = min(move.nbytes, end - move.source)
        ctypes.memmove(base + move.target, base + move.source, nbytes)
        if nbytes < move.nbytes:
            rest = _Move(move.source + nbytes, move.target + nbytes, move.nbytes - nbytes)
            moves.appendleft(rest)


def _pread_into(descriptor: int, target: memoryview[int], offset: int) -> int:
    """Read into memory; return the number of bytes."""
    if hasattr(os, "preadv"):
        count: int = os.preadv(descriptor, [target], offset)
        return count
    os.lseek(descriptor, offset, os.SEEK_SET)
    data = os.read(descriptor, len(target))
    target[: len(data)] = data
    return len(data)
