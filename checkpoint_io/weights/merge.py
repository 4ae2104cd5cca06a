"""Convert weights of any format to safetensors files, with one tensor in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    UnsupportedStateError,
)
from checkpoint_io.folder.folder import CheckpointFolder
from checkpoint_io.format.names import MANIFEST, parse_size
from checkpoint_io.format.safetensors import NAMES
from checkpoint_io.local_files import split_path
from checkpoint_io.progress import TransferProgress
from checkpoint_io.saver.collect import tied_names
from checkpoint_io.storage.local import local_folder
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.weights.find import INDEX, SINGLE, open_weights
from checkpoint_io.weights.foreign.dcp import DCP_METADATA, DcpSource
from checkpoint_io.weights.foreign.deepspeed import deepspeed_folder
from checkpoint_io.weights.foreign.torch_pickle import TorchSource
from checkpoint_io.weights.save import plan_files, write_files
from checkpoint_io.weights.source import WeightInfo, WeightSource, sizes_of


@dataclass(frozen=True)
class Merged:
    """The result of `merge_weights`.

    Args:
        files: names of the files written, the index last.
        tensors: number of tensors stored.
        tied: number of further names of them.
        nbytes: size of the tensors.
        skipped: names of entries that are not tensors.
    """

    files: list[str]
    tensors: int
    tied: int
    nbytes: int
    skipped: list[str] = field(default_factory=list)


def merge_weights(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    model_index: int = 0,
    part: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> Merged:
    """Write weights of any format in the layout of `save_model`.

    Args:
        source: any path or URL that `load_model` reads.
        destination: another folder: a local path or any fsspec URL.
        dtype: the dtype to convert floating-point tensors to; default: unchanged.
        max_shard_size: largest file, in bytes or as text ("5GB" = 5e9 bytes).
        overwrite: replace an existing model.
        model_index: number of the model in a checkpoint of this package.
        part: keys of the part to read of a `torch.distributed.checkpoint` folder.
        storage_options: passed to the fsspec drivers of both.
        progress: a progress bar; None shows one for a long save on a terminal.

    Raises:
        CheckpointNotFoundError: there are no weights; the error names folders nearby that do.
        CheckpointConflictError: the destination has a model, or is the source.
        CorruptCheckpointError: the source is damaged; nothing was replaced.
        UnsupportedStateError: a tensor has a dtype that safetensors lacks.
    """
    limit = parse_size(max_shard_size)
    weights = _open(os.fspath(source), part, model_index, storage_options)
    store = open_store(destination, storage_options)
    _check_destination(weights, store, overwrite)
    tied = dict(weights.tied)
    if isinstance(weights, TorchSource):  # names in files of torch.save may share a tensor
        tied = {**tied_names((name, weights.tensor(name)) for name in weights.infos), **tied}
    infos = {
        key: _target_info(key, info, dtype)
        for key, info in weights.infos.items()
        if key not in tied
    }
    items = [(key, torch.empty(i.shape, dtype=i.dtype, device="meta")) for key, i in infos.items()]
    with TransferProgress("reading", 0, False) as quiet:

        def whole(name: str) -> torch.Tensor:
            info = infos[name]
            target = torch.empty(info.shape, dtype=info.dtype, device="cpu")
            weights.read([(name, target)], quiet)
            return target

        files = write_files(
            store, plan_files(items, tied, {"format": "pt"}, limit), whole, progress
        )
    total = sum(tensor.nbytes for _, tensor in items)
    return Merged(files, len(items), len(tied), total, getattr(weights, "skipped", []))


def _open(
    url: str, part: str | None, model_index: int, options: Mapping[str, Any] | None
) -> WeightSource:
    """Open the source; if it has no weights, name folders in it that do in the error."""
    try:
        if part is None:
            return open_weights(url, model_index, options)
        store = open_store(url, options)
        if DCP_METADATA not in sizes_of(store):
            raise CheckpointNotFoundError(
                f"{url} has no {DCP_METADATA} of torch.distributed.checkpoint, so no part {part!r}"
            )
        return DcpSource(store, part)
    except CheckpointNotFoundError as error:
        near = _near(url, options)
        raise CheckpointNotFoundError(f"{error}{near}") from error


def _near(url: str, options: Mapping[str, Any] | None) -> str:
    """Return the folders in a folder that hold weights, as an addition to an error."""
    try:
        newest = CheckpointFolder(url, storage_options=options).latest()
        if newest is not None:
            return f"; it is a folder of checkpoints, of which {newest.path} is the newest"
        store = open_store(url, options)
        signs = {SINGLE, INDEX, DCP_METADATA, MANIFEST}
        files = {name: sizes_of(store.child(name)) for name in store.folders()}
        names = [
            name
            for name, present in files.items()
            if signs & present.keys() or deepspeed_folder(store.child(name), present) is not None
        ]
    except Exception:  # only a hint is lost
        return ""
    return f"; there are weights in its {', '.join(names[:3])}" if names else ""


def _check_destination(source: WeightSource, store: Store, overwrite: bool) -> None:
    """Raise CheckpointConflictError for the source itself, and for a folder that is in use."""
    files = getattr(source, "files", [])
    # what links lead to is read until the end
    places = {source.where.rstrip("/"), *(file.store.url for file in files)}
    if files:  # it is a file among them, or their index
        folder, _ = split_path(source.where)
        places.add(folder.rstrip("/") or folder)
    destination = store.url.rstrip("/") or store.url
    if local_folder(store) is not None:
        places, destination = (
            {os.path.realpath(place) for place in places if place},
            os.path.realpath(destination),
        )
    if destination in places:
        raise CheckpointConflictError(
            f"{store.url} is the folder that is read: name another destination"
        )
    present = store.sizes()
    other = deepspeed_folder(store, present) is not None
    if other or MANIFEST in present or DCP_METADATA in present:
        raise CheckpointConflictError(f"{store.url} holds a checkpoint: name another folder")
    model = [n for n in present if n in (SINGLE, INDEX) or n.endswith(".safetensors")]
    if model and not overwrite:
        raise CheckpointConflictError(
            f"{store.url} has {sorted(model)[0]} already: name another folder, or add --overwrite"
        )


def _target_info(key: str, info: WeightInfo, dtype: torch.dtype | None) -> WeightInfo:
    """Return shape and dtype with which a tensor is written."""
    wanted = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
    if wanted not in NAMES:
        raise UnsupportedStateError(
            f"{key} is {info.dtype}, which safetensors files cannot hold: convert it first"
        )
    return WeightInfo(wanted, info.shape)
