"""Weights in a folder of `torch.distributed.checkpoint`.

Its metadata is a pickle, which is read without being executed. Its tensors are read by torch's
restricted unpickler. Nothing in the metadata is trusted: before memory is allocated, every size in
it is compared with the files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.format.safetensors import MAX_HEADER
from checkpoint_io.loader.source import box_slices
from checkpoint_io.progress import TransferProgress
from checkpoint_io.sharding.boxes import cover_fault
from checkpoint_io.sharding.dtensor import is_dtensor, local_of
from checkpoint_io.sharding.planner import plan_reads
from checkpoint_io.storage.open import RangeReader, Store, child_name
from checkpoint_io.weights.foreign.inert_pickle import (
    Name,
    Record,
    describe_entry,
    natural_numbers,
    read_inert,
)
from checkpoint_io.weights.foreign.torch_pickle import read_restricted
from checkpoint_io.weights.source import Wanted, WeightFile, WeightInfo, sizes_of

DCP_METADATA = ".metadata"

_MAX_DEPTH = 64  # the dimensions that torch allows, and more levels than a state has
_MODELS = ("model", "models", "state_dict", "model_state_dict", "module", "app")
Path = tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """A box of a tensor, and the bytes of the file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor that is still to be read.

    Attributes:
        name: among those of its part.
        dtype: of the stored tensor.
        shape: likewise.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def is_array(self) -> bool:
        """Whether it was an array of numpy: those are saved as values."""
        return False


class DcpSource:
    """The tensors in one part of a state that `torch.distributed.checkpoint.save` wrote.

    Args:
        store: the folder, with its `.metadata`.
        part: keys that lead to the weights, joined by dots ("app.model"); default: follow "model"
            and the like, and a key that is the only one.
        tensorless: accept a part without tensors, such as the state of an optimizer.

    Raises:
        CheckpointNotFoundError: there is no such part.
        CorruptCheckpointError: the metadata is damaged, or a piece of a tensor is missing.
    """

    def __init__(self, store: Store, part: str | None = None, *, tensorless: bool = False) -> None:
        self._store = store
        self.where = store.url
        self.tied: dict[str, str] = {}
        metadata = _read_metadata(store)
        tensors = _table(metadata, "state_dict_metadata", self.where)
        self._planned = planned = metadata.fields.get("planner_data")
        paths = {key: _path_of(key, planned, self.where) for key in tensors}
        chosen = _choose(paths, part, self.where)
        storage = _storage(metadata, self.where)
        chunks = [e.fields.get("chunks") for e in tensors.values() if isinstance(e, Record)]
        if sum(len(rows) for rows in chunks if isinstance(rows, list)) > len(storage):
            raise CorruptCheckpointError(f"{self.where}/{DCP_METADATA} names more than is stored")
        self._pieces: dict[str, list[_Piece]] = {}
        self.infos: dict[str, WeightInfo] = {}
        self.skipped: list[str] = []
        self._keys = chosen
        self._storage = storage
        for name, key in chosen.items():
            entry = tensors[key]
            if isinstance(entry, Record) and entry.kind.endswith(".TensorStorageMetadata"):
                self.infos[name] = _info(entry, key, self.where)
                self._pieces[name] = _pieces(entry, key, storage, self.infos[name], self.where)
            else:
                self.skipped.append(name)
        if not self.infos and not tensorless:
            raise CheckpointNotFoundError(f"{self.where}: there is no tensor under {part!r}")
        _check_files(chain.from_iterable(self._pieces.values()), store)

    def tree(self) -> Any:
        """Return the part as it was saved, with a :class:`DcpTensor` for each tensor.

        Raises:
            CorruptCheckpointError: a value is damaged, or is an object of a class.
        """
        root: dict[Any, Any] = {}
        for name, key in self._keys.items():
            planned = self._planned.get(key) if isinstance(self._planned, dict) else None
            path = planned if isinstance(planned, tuple) else (key,)
            inner: Any = root
            with _describe_key(key, self.where):
                for word in path[:-1]:
                    inner = inner.setdefault(word, {})
                if path[-1] in inner:
                    raise ValueError("it is there twice")
            inner[path[-1]] = self._value(name, key)
        return _with_lists(root)

    def _value(self, name: str, key: str) -> Any:
        if name in self.infos:
            return DcpTensor(name, *self.infos[name])
        with _describe_key(key, self.where):
            file, begin, end = _place_of(self._storage[key, ()])
        return _read_part(WeightFile.at(self._store, file), begin, end)

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Assemble the pieces of each tensor in its target; of a DTensor, the local part."""
        for name, target in wanted:
            local = local_of(target) if is_dtensor(target) else target.detach()
            pieces = self._pieces[name]
            boxes = [(piece.offsets, piece.sizes) for piece in pieces]
            for box in plan_reads(self.infos[name].shape, boxes, target):
                stored = self._read_piece(name, pieces[box.chunk])
                place = box_slices(box.target_offsets, box.lengths)
                local[place].copy_(stored[box_slices(box.chunk_offsets, box.lengths)])
            progress.add(self.infos[name].nbytes)

    def _read_piece(self, name: str, piece: _Piece) -> torch.Tensor:
        """Read one piece; raise CorruptCheckpointError unless it is as the metadata describes."""
        file = WeightFile.at(self._store, piece.file)
        value = _read_part(file, piece.begin, piece.end)
        expected = self.infos[name].dtype, piece.sizes
        if (
            not isinstance(value, torch.Tensor)
            or value.layout != torch.strided
            or (value.dtype, tuple(value.shape)) != expected
        ):
            raise CorruptCheckpointError(
                f"{file.where}: at byte {piece.begin} there is not the part of {name} that the "
                "metadata describes; copy the folder again"
            )
        return value


def _read_part(file: WeightFile, begin: int, end: int) -> Any:
    """Return what torch has saved into a range of a file."""
    with file.open() as reader:
        if end > reader.size:
            raise CorruptCheckpointError(
                f"{file.where} is cut off: it has {reader.size} bytes of {end}; copy it again"
            )
        return read_restricted(_Part(reader, begin, end), file.where)


class _Part:
    """A range of an open file as a file."""

    def __init__(self, reader: RangeReader, begin: int, end: int) -> None:
        self._reader, self._begin, self.size = reader, begin, end - begin

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Return these bytes."""
        return self._reader.read(self._begin + begin, self._begin + end)


# --- the metadata ---------------------------------------------------------------------------


def _read_metadata(store: Store) -> Record:
    """Return the content of `.metadata`."""
    file = WeightFile.at(store, DCP_METADATA)
    metadata = file.parse(read_inert, MAX_HEADER)
    if not isinstance(metadata, Record) or not metadata.kind.endswith(".Metadata"):
        raise CorruptCheckpointError(
            f"{file.where} is not the metadata of torch.distributed.checkpoint"
        )
    return metadata


def _table(metadata: Record, name: str, location: str) -> dict[Any, Any]:
    """Return one of the tables of the metadata."""
    table = metadata.fields.get(name)
    if not isinstance(table, dict):
        raise CorruptCheckpointError(f"{location}/{DCP_METADATA} has no table {name}")
    return table


def _path_of(key: Any, planned: Any, location: str) -> Path:
    """Return the keys that lead to an entry in the state; a flat name is a single key."""
    path = planned.get(key) if isinstance(planned, dict) else None
    if not isinstance(path, tuple) or not path:
        path = (key,)
    if isinstance(key, str) and len(path) <= _MAX_DEPTH:
        words = tuple(str(word) for word in path if isinstance(word, (str, int)))
        # lengths first: joining words of a hostile path could take more memory than there is
        if sum(map(len, words)) < len(key) + len(path) and ".".join(words) == key:
            return words
    raise CorruptCheckpointError(
        f"{location}/{DCP_METADATA}: an entry is not where its name says; copy the folder again"
    )


def _choose(paths: Mapping[str, Path], part: str | None, location: str) -> dict[str, str]:
    """Return the names of the weights, each with the key under which it is stored."""
    prefix: Path = tuple(part.split(".")) if part else ()
    matching = {key: path for key, path in paths.items() if path[: len(prefix)] == prefix}
    while part is None:
        first = {path[len(prefix)] for path in matching.values() if len(path) > len(prefix) + 1}
        flat = any(len(path) == len(prefix) + 1 for path in matching.values())
        step = next((name for name in _MODELS if name in first), None)
        if step is None and len(first) == 1 and not flat and prefix in ((), ("models",)):
            (step,) = first
        if step is None:
            break
        prefix = (*prefix, step)
        matching = {key: path for key, path in matching.items() if path[: len(prefix)] == prefix}
    names = {".".join(path[len(prefix) :]): key for key, path in matching.items()}
    if not names or "" in names:
        top = sorted({path[0] for path in paths.values()})
        raise CheckpointNotFoundError(
            f"{location}: its state has no part {part!r}; it has {', '.join(top[:8])}"
        )
    return names


def _storage(metadata: Record, location: str) -> dict[tuple[str, tuple[int, ...]], Record]:
    """Return the storage entry of each piece by its key and its offset in the tensor."""
    table = _table(metadata, "storage_data", location)
    entries: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, place in table.items():
        if isinstance(index, Record) and isinstance(place, Record):
            key, offset = index.fields.get("fqn"), index.fields.get("offset")
            if isinstance(key, str):
                with _describe_key(key, location):
                    entries[key, () if offset is None else natural_numbers(offset)] = place
    return entries


def _check_files(pieces: Iterable[_Piece], store: Store) -> None:
    """Raise CorruptCheckpointError if files are too short for the pieces that they should hold."""
    present, claimed = sizes_of(store), Counter[str]()
    for piece in pieces:
        url, size = f"{store.url}/{piece.file}", present.get(piece.file)
        claimed[piece.file] += piece.end - piece.begin
        if size is None:
            raise CorruptCheckpointError(
                f"{url} is missing, though {DCP_METADATA} names it: copy all files again"
            )
        if piece.end > size or claimed[piece.file] > size:
            WeightFile.at(store, piece.file).require_content()
            raise CorruptCheckpointError(
                f"{url} is cut off, or not of this folder: by {DCP_METADATA} it holds "
                f"{max(piece.end, claimed[piece.file])} bytes, and it has {size}; copy it again"
            )


def _describe_key(key: str, location: str) -> AbstractContextManager[None]:
    """Raise CorruptCheckpointError, with the tensor's key, for an error in the block."""
    return describe_entry(f"{location}/{DCP_METADATA}: its entry of {key!r:.80} is not understood")


def _info(entry: Record, key: str, location: str) -> WeightInfo:
    """Return dtype and shape of a tensor."""
    with _describe_key(key, location):
        properties = entry.fields["properties"]
        stored = properties.state
        name = stored["dtype"] if isinstance(stored, dict) else stored[0]
        dtype = getattr(torch, name.text.removeprefix("torch.")) if isinstance(name, Name) else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError("its dtype is unknown")
        return WeightInfo(dtype, natural_numbers(entry.fields["size"]))


def _pieces(
    entry: Record,
    key: str,
    storage: Mapping[tuple[str, tuple[int, ...]], Record],
    info: WeightInfo,
    location: str,
) -> list[_Piece]:
    """Return the pieces of a tensor; raise unless they fill it without overlap."""
    with _describe_key(key, location):
        pieces = []
        if math.prod(max(n, 1) for n in info.shape) * info.dtype.itemsize >= 2**63:
            raise ValueError("no tensor is that large")
        chunks = entry.fields["chunks"]
        if not isinstance(chunks, list):
            raise ValueError("its pieces are not a list")
        for chunk in chunks:
            offsets, sizes = (
                natural_numbers(chunk.fields["offsets"]),
                natural_numbers(chunk.fields["sizes"]),
            )
            if 0 in sizes:
                continue  # torch stores nothing for it, or nothing worth reading
            place = storage.get((key, offsets)) or storage[key, ()]
            file, begin, end = _place_of(place)
            if end - begin < math.prod(sizes) * info.dtype.itemsize:
                raise ValueError("a piece is longer than its bytes")
            pieces.append(_Piece(offsets, sizes, file, begin, end))
        fault = cover_fault(info.shape, [(piece.offsets, piece.sizes) for piece in pieces])
        if fault is not None:
            raise ValueError(f"its pieces do not cover it exactly once: {fault}")
        return pieces


def _place_of(place: Record) -> tuple[str, int, int]:
    """Return a file, and where the bytes of an entry begin and end in it."""
    if place.fields.get("transform_descriptors"):
        raise ValueError("it is compressed by an extension, which is not supported")
    begin, length = int(place.fields["offset"]), int(place.fields["length"])
    if begin < 0 or length < 0:
        raise ValueError("its bytes end before they begin")
    if not isinstance(file := place.fields["relative_path"], str):
        raise ValueError("its file has no name")
    return child_name(file), begin, begin + length


def _with_lists(tree: Any) -> Any:
    """Return a tree with lists in place of dicts by position."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_with_lists(tree[position]) for position in sorted(tree)]
    return {key: _with_lists(value) for key, value in tree.items()}
