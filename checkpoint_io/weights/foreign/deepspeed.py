"""Weights in a checkpoint folder of DeepSpeed, whose pickles are read without being executed.

ZeRO saves pieces of flat float32 vectors of all parameters, a file a rank. The tensors are byte
ranges of these files here, and only those that are asked for are read. Nothing in a pickle is
trusted: each size in it is compared with the files before memory is allocated.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format.safetensors import as_bytes
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.base import is_child_name
from checkpoint_io.storage.open import Store
from checkpoint_io.weights.foreign.inert_pickle import describe_entry, entries_of, natural_numbers
from checkpoint_io.weights.foreign.torch_archive import StoredTensor, TorchArchive
from checkpoint_io.weights.foreign.torch_pickle import refuse_repetition
from checkpoint_io.weights.source import Destination, Wanted, WeightFile, WeightInfo, sizes_of

__all__ = ["DeepSpeedSource", "deepspeed_folder"]

_LATEST = "latest"
_WHOLE = re.compile(r"(?P<rank>)mp_rank_(?P<part>\d+)_model_states\.pt", re.ASCII)
_PARTITIONED = re.compile(
    r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_model_states\.pt", re.ASCII
)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt", re.ASCII
)
_SPLIT = re.compile(r"layer_.*model_states\.pt|.*expp_rank_.*|.*_expert_.*", re.ASCII)
_GROUPS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


def deepspeed_folder(store: Store, present: Collection[str]) -> Store | None:
    """Return the folder that holds a checkpoint of DeepSpeed: this one, or the one of `latest`.

    Args:
        store: the folder.
        present: the names of its files.

    Returns:
        The folder with the files of the ranks; None if there is none.
    """
    if any(map(_is_model, present)):
        return store
    if _LATEST not in present:
        return None
    file = WeightFile.at(store, _LATEST)
    try:
        tag = file.read_bytes(256).decode("utf-8").strip()
    except (CorruptCheckpointError, UnicodeDecodeError):
        return None  # some other file of that name
    if not is_child_name(tag):
        return None
    tagged = store.child(tag)
    return tagged if any(map(_is_model, sizes_of(tagged))) else None


def _is_model(name: str) -> re.Match[str] | None:
    return _WHOLE.fullmatch(name) or _PARTITIONED.fullmatch(name)


class _Run(NamedTuple):
    """Bytes of a file that belong to a tensor."""

    file: WeightFile
    begin: int
    end: int


class _Layout(NamedTuple):
    """How a tensor is stored: its bytes are those of the runs, one after the other."""

    dtype: torch.dtype
    runs: list[_Run]


class _Vector:
    """Flat tensors of one rank, or of all ranks in turn, as one vector."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self._tensors = tensors
        self._starts = [0, *accumulate(tensor.numel for tensor in tensors)]
        self.numel = self._starts[-1]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError("its weights are not of one floating-point dtype")
        (self.dtype,) = dtypes

    def runs(self, first: int, count: int) -> Iterator[_Run]:
        """Yield the byte ranges of some elements.

        Raises:
            ValueError: the vector has fewer elements.
        """
        last = first + count
        if last > self.numel:
            raise ValueError(f"{last} elements are described, and {self.numel} are stored")
        number = bisect_right(self._starts, first) - 1
        while first < last:
            tensor, start = self._tensors[number], self._starts[number]
            end = min(last, self._starts[number + 1])
            base, size = tensor.begin, tensor.dtype.itemsize
            if end > first:
                yield _Run(tensor.file, base + (first - start) * size, base + (end - start) * size)
            first, number = max(first, end), number + 1


class DeepSpeedSource:
    """The weights in a checkpoint of DeepSpeed, in the precision that its optimizer steps with.

    Args:
        store: the folder with the files of the ranks (`mp_rank_00_model_states.pt`, or
            `zero_pp_rank_0_mp_rank_00_model_states.pt` and so on).

    Attributes:
        stage: of ZeRO: 0, 2 (also for 1, whose files are the same), or 3.
        ranks: number of ranks that saved it.
        step: number of optimizer steps, None if it is not known.
        nbytes: size of all files.

    Raises:
        CheckpointError: it is split by tensor or pipeline parallelism, or has experts.
        CorruptCheckpointError: a file is missing, damaged, or not as DeepSpeed writes it.
    """

    def __init__(self, store: Store) -> None:
        self.where = store.url
        self.infos: dict[str, WeightInfo] = {}
        self.tied: dict[str, str] = {}
        self._stored: dict[str, _Layout] = {}
        names = sizes_of(store)
        self.nbytes = sum(names.values())
        _refuse_split(names, self.where)
        self._optimizers = [TorchArchive(file) for file in _files(store, names, _OPTIMIZER)]
        states, self.stage, self.ranks = [], 0, 1
        if self._optimizers:
            with _describe_part(self.where, "the optimizer states"):
                states = [
                    entries_of(entries_of(archive.content)["optimizer_state_dict"])
                    for archive in self._optimizers
                ]
                counts = states[0]["partition_count"]
                self.ranks = max(natural_numbers(counts if isinstance(counts, list) else [counts]))
                self.stage = 3 if _GROUPS[3] in states[0] else 2
            _require_ranks(self._optimizers, self.ranks, self.where)
        kind = _PARTITIONED if self.stage == 3 else _WHOLE
        self._models = [TorchArchive(file) for file in _files(store, names, kind)]
        _require_ranks(self._models, self.ranks if self.stage == 3 else 1, self.where)
        with _describe_part(self.where, "the model states"):
            contents = [entries_of(archive.content) for archive in self._models]
            step = contents[0].get("global_steps")
            self.step = step if isinstance(step, int) else None
        if self.stage:
            with _describe_part(self.where, "the optimizer states"):
                self._locate_trained(contents[0], states)
        if self.stage == 3:
            with _describe_part(self.where, "the frozen parameters"):
                self._locate_frozen(contents)
        with _describe_part(self.where, "the module"):
            self._locate_whole(contents[0])
        with _describe_part(self.where, "the shared parameters"):
            for name, kept in entries_of(contents[0].get("shared_params") or {}).items():
                if isinstance(kept, str) and kept in self.infos and name != kept:
                    self.infos.pop(name, None)
                    self.tied[name] = kept
        refuse_repetition(sum(info.nbytes for info in self.infos.values()), self.nbytes, self.where)

    def _add(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, runs: Iterable[_Run]
    ) -> None:
        if name in self.infos:
            raise ValueError(f"{name:.80} is described twice")
        self._stored[name] = _Layout(dtype, list(runs))
        self.infos[name] = WeightInfo(dtype, shape)

    def _locate_trained(
        self, content: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
    ) -> None:
        groups = [
            [archive.tensor(value) for value in state[_GROUPS[self.stage]]]
            for archive, state in zip(self._optimizers, states, strict=True)
        ]
        shapes = content["param_shapes"]
        shapes = [entries_of(group) for group in (shapes if isinstance(shapes, list) else [shapes])]
        if self.stage == 3:
            self._locate_partitions(shapes, groups)
            return
        paddings = states[0].get("param_alignment_paddings") or [None] * len(shapes)
        for parts, names, gaps in zip(zip(*groups, strict=True), shapes, paddings, strict=True):
            self._locate_group(_Vector(parts), names, gaps)

    def _locate_partitions(
        self, shapes: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[StoredTensor]]
    ) -> None:
        """Locate the parameters of stage 3: each is cut over all ranks, and padded."""
        vectors = [_Vector(tensors) for tensors in groups]
        offset = 0
        for name, size in (item for names in shapes for item in names.items()):
            shape = natural_numbers(size)
            rest = count = math.prod(shape)
            part = -(-count // self.ranks)
            runs: list[_Run] = []
            for vector in vectors:
                runs += vector.runs(offset, min(part, rest))
                rest -= min(part, rest)
            self._add(name, shape, vectors[0].dtype, runs)
            offset += part
        for vector in vectors:
            if vector.numel != offset:
                raise ValueError(f"{offset} elements are described, and {vector.numel} are stored")

    def _locate_group(self, vector: _Vector, names: Mapping[str, Any], paddings: Any) -> None:
        """Locate a group's parameters of stages 1 and 2, whose one vector is cut over all ranks."""
        gaps = [0] * len(names) if paddings is None else paddings
        offset = 0
        for (name, size), gap in zip(names.items(), gaps, strict=True):
            shape = natural_numbers(size)
            count = math.prod(shape)
            self._add(name, shape, vector.dtype, vector.runs(offset, count))
            offset += count + natural_numbers([gap])[0]
        unit = 2 * self.ranks  # DeepSpeed pads to it, and saves the padding or not
        if -(-offset // unit) != -(-vector.numel // unit):
            raise ValueError(f"{offset} elements are described, and {vector.numel} are stored")

    def _locate_frozen(self, contents: Sequence[Mapping[str, Any]]) -> None:
        """Locate the parameters of stage 3 that are not trained."""
        shapes = entries_of(contents[0].get("frozen_param_shapes") or {})
        if not shapes:
            return
        fragments = [entries_of(content["frozen_param_fragments"]) for content in contents]
        for name, size in shapes.items():
            shape = natural_numbers(size)
            pieces = [
                archive.tensor(tensors[name])
                for archive, tensors in zip(self._models, fragments, strict=True)
            ]
            vector = _Vector(pieces)
            self._add(name, shape, vector.dtype, vector.runs(0, math.prod(shape)))

    def _locate_whole(self, content: Mapping[str, Any]) -> None:
        """Locate what the main file has whole: buffers, and but for stage 3 frozen parameters."""
        module = entries_of(content["module"])
        buffers = {name for name in content.get("buffer_names") or () if isinstance(name, str)}
        chosen = buffers & module.keys() if self.stage == 3 else module.keys()
        first: dict[tuple[Any, ...], str] = {}
        # the trained ones first: further names of them are tied
        for name in sorted(chosen, key=lambda name: name not in self.infos):
            tensor = self._models[0].tensor(module[name])
            place = (tensor.begin, tensor.dtype, tensor.shape)
            if tensor.numel and first.setdefault(place, name) != name:
                self.tied[name] = first[place]
            elif name not in self._stored:
                end = tensor.begin + tensor.numel * tensor.dtype.itemsize
                self._add(name, tensor.shape, tensor.dtype, [_Run(tensor.file, tensor.begin, end)])
                if self.stage and name in buffers and tensor.dtype.is_floating_point:
                    # as DeepSpeed's own zero_to_fp32 restores them
                    self.infos[name] = WeightInfo(torch.float32, tensor.shape)

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Assemble each tensor in its target, in blocks; of a DTensor, only the local part."""
        for name, target in wanted:
            stored = self._stored[name]
            destination = Destination(WeightInfo(stored.dtype, self.infos[name].shape), target)
            for rows in destination.blocks():
                host = destination.host(rows)
                _fill(as_bytes(host), stored.runs, rows.first * destination.row_bytes)
                destination.put(rows, host)
            progress.add(self.infos[name].nbytes)


def _fill(memory: torch.Tensor, runs: Sequence[_Run], first: int) -> None:
    """Read the bytes of runs from `first` on, as many as the memory takes."""
    target, start = memory.numpy(), 0
    last = first + len(target)
    for run in runs:
        low, high = max(first, start), min(last, start + run.end - run.begin)
        if low < high:
            with run.file.open() as reader:
                data = reader.read(run.begin + low - start, run.begin + high - start)
            target[low - first : high - first] = np.frombuffer(data, dtype=np.uint8)
        start += run.end - run.begin


# --- the files --------------------------------------------------------------------------------


def _files(store: Store, names: Iterable[str], kind: re.Pattern[str]) -> list[WeightFile]:
    """Return the files of a kind by rank."""
    ranks = {name: match for name in names if (match := kind.fullmatch(name))}
    ordered = sorted(ranks, key=lambda name: int(ranks[name]["rank"] or 0))
    return [WeightFile.at(store, name) for name in ordered]


def _require_ranks(archives: Sequence[TorchArchive], count: int, location: str) -> None:
    """Raise CorruptCheckpointError unless there is a file of each rank."""
    labels = [archive.file.label for archive in archives]
    kinds = [re.sub(r"(?<=zero_pp_rank_)\d+", "N", label) for label in labels]
    if len(labels) != count or len(set(kinds)) != 1 or len(set(labels)) != count:
        raise CorruptCheckpointError(
            f"{location}: {count} ranks have written it, and files of {len(labels)} are there "
            f"({', '.join(labels[:3]) or 'none'}): copy all files again"
        )


def _refuse_split(names: Iterable[str], location: str) -> None:
    """Raise CheckpointError for models that are cut by more than ZeRO."""
    for name in names:
        match = _is_model(name) or _OPTIMIZER.fullmatch(name)
        if (match is not None and int(match["part"])) or _SPLIT.fullmatch(name):
            raise CheckpointError(
                f"{location} is split by tensor or pipeline parallelism, or has experts "
                f"({name:.80}), and ZeRO's data parallelism alone is read: make one file of it "
                "with DeepSpeed's own tools, such as ds_to_universal.py"
            )


def _describe_part(location: str, part: str) -> AbstractContextManager[None]:
    """Raise CorruptCheckpointError, with the part of the checkpoint, for an error in the block."""
    return describe_entry(f"{location}: {part} are not as DeepSpeed writes them")
