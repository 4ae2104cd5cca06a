"""Save a model in the layout of Hugging Face: safetensors files and an index."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_io.errors import CheckpointError, UnsupportedStateError
from checkpoint_io.folder.removal import remove_all
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.names import new_save_id, parse_size
from checkpoint_io.format.safetensors import host_pieces, layout
from checkpoint_io.format.tree import TreeEncoder
from checkpoint_io.group import Outcome, ProcessGroupLike, SingleProcess, TorchGroup, agree
from checkpoint_io.progress import TransferProgress
from checkpoint_io.saver.collect import pack, tied_names
from checkpoint_io.sharding.dtensor import check_placements, in_mesh, is_dtensor
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.weights.find import INDEX, SINGLE

__all__ = ["save_model"]

_SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII)
_STEP = 16 * 1024 * 1024

Items = Sequence[tuple[str, torch.Tensor]]
FullTensor = Callable[[str], torch.Tensor]


def save_model(
    state_dict: Mapping[str, torch.Tensor],
    url: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    storage_options: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    group: ProcessGroupLike | None = None,
    progress: bool | None = None,
) -> list[str]:
    """Save a model's weights so that `safetensors` and `transformers` open them directly.

    Weights that fit `max_shard_size` become `model.safetensors`; larger ones become
    `model-00001-of-0000N.safetensors` and so on, with `model.safetensors.index.json`, which is
    written last. Tied tensors are stored once, under the first of their names in the state dict (an
    embedding, not the head that shares it); the others are noted in the file's metadata. Shards of
    an earlier save are removed afterwards.
    Since this layout has fixed names, only a single-file save replaces an older model atomically; a
    sharded save that is killed leaves no index rather than a mixture.

    Call it on one rank. If tensors are DTensors, or a `group` is given, it is a collective call:
    rank 0 gathers one tensor at a time and writes, and an error on one rank is raised on all.

    Args:
        state_dict: names to tensors (any device, any shape), plain or DTensors.
        url: the folder: a local path or any fsspec URL.
        max_shard_size: largest file, in bytes or as text ("5GB" = 5e9 bytes).
        storage_options: passed to the fsspec driver.
        metadata: text to add to each file's header; `format` is "pt" unless given.
        group: the ranks that call together; default: this process alone, or all ranks of
            `torch.distributed` if there are DTensors.
        progress: a progress bar; None shows one for a long save on a terminal.

    Returns:
        The names of the files written, the index last; on every rank.

    Raises:
        UnsupportedStateError: a value is not a dense tensor, or has a dtype the format lacks.
        CheckpointError: another rank failed, or holds other tensors.
        ImportError: the driver for this kind of URL is not installed.

    Example:
        >>> import torch
        >>> from checkpoint_io import save_model
        >>> save_model(torch.nn.Linear(2, 2).state_dict(), "memory://doc-hf/one")
        ['model.safetensors']
        >>> save_model(
        ...     {"a": torch.zeros(4), "b": torch.zeros(4)}, "memory://doc-hf/two", max_shard_size=16
        ... )[-1]
        'model.safetensors.index.json'
    """
    if group is None:
        group = TorchGroup() if any(map(is_dtensor, state_dict.values())) else SingleProcess()
    job = _ModelSave(state_dict, url, group)
    planned = job.agree(
        Outcome.of(lambda: job.plan(max_shard_size, metadata or {}, storage_options)), "plan"
    )
    if any(report != planned[0] for report in planned):
        raise CheckpointError(
            f"saving a model to {os.fspath(url)} failed, nothing was written: the ranks hold "
            "different DTensors; every rank must pass the state dict of the same model"
        )
    names: list[str] = job.agree(Outcome.of(lambda: job.write(progress)), "write")[0]
    return names


class _ModelSave:
    """One rank's part of `save_model`."""

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor],
        url: str | os.PathLike[str],
        group: ProcessGroupLike,
    ) -> None:
        self._state_dict = state_dict
        self._url = url
        self._group = group
        self._files: list[ModelFile] = []
        self._store: Store | None = None
        self._order: list[str] = []

    def agree(self, outcome: Outcome, step: str) -> list[Any]:
        """Gather the outcome of a step; raise on all ranks if it failed on any."""
        if outcome.error is not None and self._group.world_size == 1:
            raise outcome.error
        undone = ", nothing was written" if step == "plan" else ""
        headline = f"saving a model to {os.fspath(self._url)} failed{undone}"
        return agree(self._group, outcome, headline)

    def plan(
        self,
        max_shard_size: int | str,
        metadata: Mapping[str, str],
        storage_options: Mapping[str, Any] | None,
    ) -> list[Any]:
        """Check the tensors and plan the files; return the values that all ranks must share."""
        limit = parse_size(max_shard_size)
        checked = _require_tensors(self._state_dict)
        if self._group.rank == 0:
            # one name for each tied tensor, the first: a base model without the head needs it
            tied = tied_names(checked.items())
            items = [(key, tensor) for key, tensor in checked.items() if key not in tied]
            self._files = plan_files(items, tied, {"format": "pt", **metadata}, limit)
            self._store = open_store(self._url, storage_options)
            self._order = [key for file in self._files for key, _ in file.tensors]
        return check_spread(checked, self._group)

    def write(self, progress: bool | None) -> list[str] | None:
        """Write on rank 0; on the others, take part in gathering the DTensors."""
        sharded = [key for key in self._order if is_dtensor(self._state_dict[key])]
        gather = DTensorGather(self._state_dict, self._group.broadcast_object(sharded))
        try:
            if self._store is None:
                return None
            return write_files(self._store, self._files, gather.full, progress)
        finally:
            gather.finish()


def _require_tensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors; raise UnsupportedStateError for values that a model file cannot hold."""
    checked: dict[str, torch.Tensor] = {}

    def keep(path: tuple[Any, ...], tensor: torch.Tensor) -> str:
        checked[path[0]] = tensor
        return ""

    encoder = TreeEncoder("state_dict", keep, sharded=True)
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or key == "__metadata__":
            raise UnsupportedStateError(
                f"state_dict[{key!r}] is not a tensor that a model file can hold: leave it out, "
                "or use checkpoint_io.save for a whole training state"
            )
        if is_dtensor(value):
            check_placements(value, f"state_dict[{key!r}]")
        encoder.encode(value, (key,))
    return checked


def check_spread(tensors: Mapping[str, torch.Tensor], group: ProcessGroupLike) -> list[list[Any]]:
    """Return names, shapes and dtypes of the DTensors; check that `group` can gather them."""
    sharded = []
    for name, tensor in tensors.items():
        if not is_dtensor(tensor):
            continue
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        if mesh.size() > group.world_size:
            raise CheckpointError(
                f"state_dict[{name!r}] is sharded over {mesh.size()} ranks, and "
                f"{group.world_size} take part: call save_model on all of them"
            )
        if group.rank == 0 and not in_mesh(tensor):
            raise CheckpointError(
                f"state_dict[{name!r}] is sharded over ranks without the one that writes (rank 0): "
                "pass a group whose first rank holds a part of it"
            )
        sharded.append([name, list(tensor.shape), str(tensor.dtype)])
    return sorted(sharded)


class DTensorGather:
    """Gathers DTensors one at a time, in the same order on every rank.

    Args:
        tensors: names to tensors on this rank.
        order: the names of the DTensors to gather; rank 0's order counts.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], order: Sequence[str]) -> None:
        self._tensors = tensors
        self._pending = [name for name in order if is_dtensor(tensors[name])]
        self._failed = False

    def full(self, name: str) -> torch.Tensor:
        """Return a tensor; gather it if it is a DTensor (memory for one at a time)."""
        tensor: Any = self._tensors[name]
        if not is_dtensor(tensor):
            return self._tensors[name]
        if self._pending.pop(0) != name:
            raise AssertionError(f"{name} is not the next tensor to be gathered")
        try:
            full: torch.Tensor = tensor.detach().full_tensor()
        except BaseException:
            self._failed = True  # the collectives are out of step: a further one could hang
            raise
        return full

    def finish(self) -> None:
        """Take part in all pending collectives, even if this rank has failed meanwhile."""
        # else a full disk on rank 0, for example, would leave the other ranks blocked in theirs
        while self._pending and not self._failed:
            name = self._pending[0]
            if in_mesh(self._tensors[name]):
                self.full(name)
            else:
                self._pending.pop(0)


@dataclass(frozen=True)
class ModelFile:
    """A planned file: its name, its header, and its tensors in the order of their bytes."""

    name: str
    header: bytes
    tensors: Items

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.header) + sum(tensor.nbytes for _, tensor in self.tensors)


def plan_files(
    items: Items, tied: Mapping[str, str], labels: Mapping[str, str], limit: int
) -> list[ModelFile]:
    """Plan the files and their tensors; a model without tensors becomes one file, too."""
    shards = pack(items, limit) or [[]]
    total = len(shards)
    files = []
    for number, shard in enumerate(shards, 1):
        name = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        stored = {key for key, _ in shard}
        notes = {other: kept for other, kept in tied.items() if kept in stored}
        header, ordered, _ = layout(shard, {**notes, **labels})
        files.append(ModelFile(name, header, ordered))
    return files


def write_files(
    store: Store, files: Sequence[ModelFile], full: FullTensor, progress: bool | None
) -> list[str]:
    """Write all files, the index last; remove those of an earlier save; return the names."""
    with TransferProgress("saving", sum(file.size for file in files), progress) as bar:
        _publish(store, files, full, bar)
    names = [file.name for file in files]
    if len(files) > 1:
        weight_map = {key: file.name for file in files for key, _ in file.tensors}
        size = sum(tensor.nbytes for file in files for _, tensor in file.tensors)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        store.replace(INDEX, jsonio.dumps(index, INDEX), f"{INDEX}.{new_save_id()}.tmp")
        names.append(INDEX)
    present = store.sizes()
    # the index first: readers look for shards only if an index names them
    stale = [n for n in (INDEX, SINGLE, *sorted(present)) if n in present and n not in names]
    stale = list(dict.fromkeys(stale))
    remove_all(store, [n for n in stale if n in (INDEX, SINGLE) or _SHARD.fullmatch(n)])
    return names


def _publish(
    store: Store, files: Sequence[ModelFile], full: FullTensor, progress: TransferProgress
) -> None:
    """Write all files, under other names first where the store can rename."""
    mark = new_save_id()
    staged = {f.name: f"{f.name}.{mark}.tmp" if store.can_rename else f.name for f in files}
    sharded = len(files) > 1
    if sharded and not store.can_rename:
        store.remove(INDEX)  # without it, a save that is killed from here on is seen as unfinished
    try:
        for file in files:
            _write(store, staged[file.name], file, full, progress)
        if store.can_rename:
            if sharded:
                store.remove(INDEX)
            for name, temporary in staged.items():
                store.rename(temporary, name)
    except BaseException:
        for temporary in staged.values() if store.can_rename else ():
            with suppress(OSError):
                store.remove(temporary)
        raise


def _write(
    store: Store, name: str, file: ModelFile, full: FullTensor, progress: TransferProgress
) -> None:
    """Stream one safetensors file."""
    with store.create(name, file.size) as write:
        write(memoryview(file.header))
        progress.add(len(file.header))
        for key, _ in file.tensors:
            for piece in host_pieces(full(key)):
                for start in range(0, len(piece), _STEP):
                    part = piece[start : start + _STEP]
                    write(part)
                    progress.add(len(part))
