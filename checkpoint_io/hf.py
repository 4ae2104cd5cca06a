"""Model weights in the layout that the Hugging Face libraries open: safetensors and an index."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from checkpoint_io import jsonio
from checkpoint_io.collect import identity, pack
from checkpoint_io.commit import remove_files
from checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedStateError,
)
from checkpoint_io.files import open_listed
from checkpoint_io.manifest import PART_SIZE
from checkpoint_io.names import new_save_id
from checkpoint_io.parts import Scatter
from checkpoint_io.sizes import parse_size
from checkpoint_io.store import RangeReader, Store, open_store
from checkpoint_io.tensorfile import (
    MAX_HEADER,
    Slot,
    as_bytes,
    contents,
    empty,
    layout,
    parse_header,
)
from checkpoint_io.tree import TreeEncoder

__all__ = ["load_model_state", "save_model"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII)
_PLAIN = re.compile(r"[^/\\\0]+\.safetensors", re.ASCII)

Items = list[tuple[str, torch.Tensor]]


def save_model(
    state_dict: Mapping[str, torch.Tensor],
    url: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    storage_options: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Save a model's weights so that `safetensors` and `transformers` open them directly.

    Weights that fit `max_shard_size` become `model.safetensors`; larger ones become
    `model-00001-of-0000N.safetensors` and so on, with `model.safetensors.index.json`, which is
    written last. Tied tensors are stored once, under the first of their names in sorted order; the
    others are noted in the file's metadata. Shards of an earlier save are removed afterwards.
    This layout has fixed names, so only a single-file save replaces an older model in one step; a
    sharded one that is killed leaves no index rather than a mix. Call it on one rank.

    Args:
        state_dict: names to tensors (any device, any shape).
        url: the folder: a local path or any fsspec URL.
        max_shard_size: largest file, in bytes or as text ("5GB" = 5e9 bytes).
        storage_options: passed to the fsspec driver.
        metadata: text to put into each file's header; `format` is "pt" unless given.

    Returns:
        The names of the files written, the index last.

    Raises:
        UnsupportedStateError: a value is no dense tensor, or has a dtype the format lacks.
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
    limit = parse_size(max_shard_size)
    items, tied = _untie(state_dict)
    store = open_store(url, storage_options)
    plan = _plan(items, limit)
    labels = {"format": "pt", **(metadata or {})}
    _publish(store, [(n, shard, _notes(shard, tied, labels)) for n, shard in plan.items()])
    names = list(plan)
    if len(names) > 1:
        weight_map = {key: n for n, shard in plan.items() for key, _ in shard}
        size = sum(tensor.nbytes for _, tensor in items)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        store.replace(INDEX, jsonio.dumps(index, INDEX), f"{INDEX}.{new_save_id()}.tmp")
        names.append(INDEX)
    present = store.sizes()
    # the index first: without it nobody looks for the shards it names
    stale = [n for n in (INDEX, SINGLE, *sorted(present)) if n in present and n not in names]
    remove_files(store, [n for n in stale if n in (INDEX, SINGLE) or _SHARD.fullmatch(n)])
    return names


def _plan(items: Items, limit: int) -> dict[str, Items]:
    """Name the files and say what goes into each; a model without tensors is a file too."""
    shards = pack(items, limit) or [[]]
    total = len(shards)
    if total == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{total:05d}.safetensors": s for n, s in enumerate(shards, 1)}


def _untie(state_dict: Mapping[str, torch.Tensor]) -> tuple[Items, dict[str, str]]:
    """Keep one name of each tied tensor; return what to store, and the other names."""
    checked: dict[str, torch.Tensor] = {}

    def keep(path: tuple[Any, ...], tensor: torch.Tensor) -> str:
        checked[path[0]] = tensor
        return ""

    encoder = TreeEncoder("state_dict", keep)
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or key == "__metadata__":
            raise UnsupportedStateError(
                f"state_dict[{key!r}] is not a tensor that a model file can hold: leave it out, "
                "or use checkpoint_io.save for a whole training state"
            )
        encoder.encode(value, (key,))
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for key in sorted(checked):
        mark = identity(checked[key])
        if mark is not None and first.setdefault(mark, key) != key:
            tied[key] = first[mark]
    return [(key, tensor) for key, tensor in checked.items() if key not in tied], tied


def _notes(shard: Items, tied: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Return a shard's header metadata: the caller's, and the tied names of its tensors."""
    stored = {key for key, _ in shard}
    return {**{name: kept for name, kept in tied.items() if kept in stored}, **labels}


def _publish(store: Store, files: list[tuple[str, Items, dict[str, str]]]) -> None:
    """Write all files, under other names first where the store can rename."""
    mark = new_save_id()
    staged = {name: f"{name}.{mark}.tmp" if store.can_rename else name for name, _, _ in files}
    sharded = len(files) > 1
    if sharded and not store.can_rename:
        store.remove(INDEX)  # from here on a killed save is seen as unfinished
    try:
        for name, items, notes in files:
            _write(store, staged[name], items, notes)
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


def _write(store: Store, name: str, items: Items, notes: Mapping[str, str]) -> None:
    """Stream one safetensors file."""
    header, ordered, _ = layout(items, notes)
    with store.create(name) as write:
        for piece in contents(header, ordered):
            for start in range(0, len(piece), PART_SIZE):
                write(piece[start : start + PART_SIZE])


def load_model_state(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Load model weights in the Hugging Face layout, by whomever they were written.

    Args:
        url: the folder that holds `model.safetensors`, or the index and its shards.
        storage_options: passed to the fsspec driver.

    Returns:
        Names to new CPU tensors; tied names that `save_model` noted share one tensor.

    Raises:
        CheckpointNotFoundError: the folder has neither file.
        CorruptCheckpointError: a file is missing, damaged, or named outside the folder. (This
            layout has no checksums: use `save` where flipped bits must be found.)

    Example:
        >>> import torch
        >>> from checkpoint_io import load_model_state, save_model
        >>> _ = save_model({"w": torch.ones(2)}, "memory://doc-hf/load")
        >>> load_model_state("memory://doc-hf/load")
        {'w': tensor([1., 1.])}
    """
    store = open_store(url, storage_options)
    present = store.sizes()
    if SINGLE in present:  # the order in which transformers looks
        return _read(store, SINGLE)
    if INDEX not in present:
        raise CheckpointNotFoundError(f"no {SINGLE} and no {INDEX} in {store.url}: check the path")
    weight_map = _weight_map(store)
    state: dict[str, torch.Tensor] = {}
    for name in sorted(set(weight_map.values())):
        for key, tensor in _read(store, name).items():
            if weight_map.get(key, name) == name:
                state[key] = tensor
    if absent := weight_map.keys() - state.keys():
        raise CorruptCheckpointError(
            f"{store.url}: the shards do not hold {', '.join(sorted(absent)[:3])}, "
            f"though {INDEX} says so; save the model again"
        )
    return state


def _weight_map(store: Store) -> dict[str, str]:
    """Read the index; its file names must be plain ones."""
    with open_listed(store, INDEX) as reader:
        if reader.size > MAX_HEADER:
            raise CorruptCheckpointError(f"{store.url}/{INDEX}: {reader.size} bytes is no index")
        document = jsonio.loads(bytes(reader.read(0, reader.size)), f"{store.url}/{INDEX}")
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and _PLAIN.fullmatch(name) for name in weight_map.values()
    ):
        raise CorruptCheckpointError(f"{store.url}/{INDEX}: its weight_map is not usable")
    return weight_map


def _read(store: Store, name: str) -> dict[str, torch.Tensor]:
    """Read one safetensors file, tied names included."""
    where = f"{store.url}/{name}"
    with open_listed(store, name) as reader:
        metadata, slots = _header(reader, where)
        state = {key: empty(slot.dtype, slot.shape, where) for key, slot in slots.items()}
        ranges = [(slot.begin, slot.end, as_bytes(state[key])) for key, slot in slots.items()]
        scatter = Scatter(ranges)
        for begin in range(0, reader.size, PART_SIZE):
            scatter.feed(begin, reader.read(begin, min(begin + PART_SIZE, reader.size)))
    tied = {key: state[kept] for key, kept in metadata.items() if kept in state and key != "format"}
    return {**tied, **state}


def _header(reader: RangeReader, where: str) -> tuple[dict[str, str], dict[str, Slot]]:
    """Read and check the header of a safetensors file."""
    length = int.from_bytes(bytes(reader.read(0, min(8, reader.size))), "little")
    if length > min(MAX_HEADER, reader.size - 8):
        raise CorruptCheckpointError(f"{where}: its header does not fit the file")
    return parse_header(bytes(reader.read(8, 8 + length)), reader.size, where)
