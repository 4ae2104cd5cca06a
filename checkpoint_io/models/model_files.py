"""Model files in the layout of the Hugging Face libraries: planned, written, then put in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from checkpoint_io.folder.removal import remove_all
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.names import new_save_id
from checkpoint_io.format.safetensors import host_pieces, layout
from checkpoint_io.progress import TransferProgress
from checkpoint_io.saver.collect import pack
from checkpoint_io.storage.open import Store
from checkpoint_io.weights.find import INDEX, SINGLE

_SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII)
_STEP = 16 * 1024 * 1024

Items = Sequence[tuple[str, torch.Tensor]]
Whole = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class ModelFile:
    """One file to come: its name, its header, and its tensors in the order of their bytes."""

    name: str
    header: bytes
    tensors: Items

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return len(self.header) + sum(tensor.nbytes for _, tensor in self.tensors)


def plan_files(
    items: Items, tied: Mapping[str, str], labels: Mapping[str, str], limit: int
) -> list[ModelFile]:
    """Name the files and say what goes into each; a model without tensors is a file too."""
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
    store: Store, files: Sequence[ModelFile], whole: Whole, progress: bool | None
) -> list[str]:
    """Write all files, the index last, and remove those of an earlier save; return the names."""
    with TransferProgress("saving", sum(file.size for file in files), progress) as bar:
        _publish(store, files, whole, bar)
    names = [file.name for file in files]
    if len(files) > 1:
        weight_map = {key: file.name for file in files for key, _ in file.tensors}
        size = sum(tensor.nbytes for file in files for _, tensor in file.tensors)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        store.replace(INDEX, jsonio.dumps(index, INDEX), f"{INDEX}.{new_save_id()}.tmp")
        names.append(INDEX)
    present = store.sizes()
    # the index first: without it nobody looks for the shards it names
    stale = [n for n in (INDEX, SINGLE, *sorted(present)) if n in present and n not in names]
    stale = list(dict.fromkeys(stale))
    remove_all(store, [n for n in stale if n in (INDEX, SINGLE) or _SHARD.fullmatch(n)])
    return names


def _publish(
    store: Store, files: Sequence[ModelFile], whole: Whole, progress: TransferProgress
) -> None:
    """Write all files, under other names first where the store can rename."""
    mark = new_save_id()
    staged = {f.name: f"{f.name}.{mark}.tmp" if store.can_rename else f.name for f in files}
    sharded = len(files) > 1
    if sharded and not store.can_rename:
        store.remove(INDEX)  # from here on a killed save is seen as unfinished
    try:
        for file in files:
            _write(store, staged[file.name], file, whole, progress)
    except BaseException:
        for temporary in staged.values() if store.can_rename else ():
            with suppress(OSError):
                store.remove(temporary)
        raise
    if store.can_rename:
        if sharded:
            store.remove(INDEX)
        for name, temporary in staged.items():
            store.rename(temporary, name)


def _write(
    store: Store, name: str, file: ModelFile, whole: Whole, progress: TransferProgress
) -> None:
    """Stream one safetensors file."""
    with store.create(name, file.size) as write:
        write(memoryview(file.header))
        progress.add(len(file.header))
        for key, _ in file.tensors:
            for piece in host_pieces(whole(key)):
                for start in range(0, len(piece), _STEP):
                    part = piece[start : start + _STEP]
                    write(part)
                    progress.add(len(part))
