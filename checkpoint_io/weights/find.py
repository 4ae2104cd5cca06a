"""Find out which format of weights a file or folder holds, and open them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.names import MANIFEST, save_id_of
from checkpoint_io.format.safetensors import MAX_HEADER
from checkpoint_io.loader.lazy import TensorView, open_checkpoint
from checkpoint_io.local_files import local_path, split_path
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.local import local_folder
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.weights.foreign.dcp import DCP_METADATA, DcpSource
from checkpoint_io.weights.foreign.deepspeed import DeepSpeedSource, deepspeed_folder
from checkpoint_io.weights.foreign.torch_pickle import TorchSource
from checkpoint_io.weights.safetensors import SafetensorsSource
from checkpoint_io.weights.source import Wanted, WeightFile, WeightInfo, WeightSource, sizes_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
_SAFETENSORS = re.compile(r"[^/\\\0]+\.safetensors", re.ASCII)
_TORCH = re.compile(r"[^/\\\0]+\.(?:bin|pt|pth|ckpt)", re.ASCII)
_INDEX = re.compile(r"[^/\\\0]+\.json", re.ASCII)
_SHARD = re.compile(r".+-[0-9]+-of-0*(?:[2-9]|[1-9][0-9]+)\.[a-z]+", re.ASCII)


def open_weights(
    url: str | os.PathLike[str], model_index: int, storage_options: Mapping[str, Any] | None
) -> WeightSource:
    """Open the weights in a file, an index or a folder.

    Raises:
        CheckpointNotFoundError: there are none.
        CorruptCheckpointError: they are damaged, or an index refers to files outside of its folder.
    """
    text = os.fspath(url)
    folder, name = _split(text)
    if name is None:
        return _open_folder(open_store(text, storage_options), model_index, storage_options)
    store = open_store(folder, storage_options)
    if name not in sizes_of(store):
        raise CheckpointNotFoundError(f"no file {text}: check the path")
    return _open_file(store, name)


def _split(text: str) -> tuple[str, str | None]:
    """Return folder and file name of a path or URL; None for the file if it names a folder."""
    folder, name = split_path(text)
    is_file = any(kind.fullmatch(name) for kind in (_SAFETENSORS, _TORCH, _INDEX))
    if (path := local_path(text)) is not None:
        is_file = os.path.isfile(path) or (is_file and not os.path.isdir(path))
    return (folder or ".", name) if is_file else (text, None)


def _open_folder(
    store: Store, model_index: int, storage_options: Mapping[str, Any] | None
) -> WeightSource:
    """Open the weights in a folder; formats that need no unpickling come first."""
    present = sizes_of(store)
    for name in (SINGLE, INDEX):
        if name in present:
            return _open_file(store, name)
    if MANIFEST in present:
        return CheckpointSource(store.url, model_index, storage_options)
    if DCP_METADATA in present:
        return DcpSource(store)
    for name in (TORCH_SINGLE, TORCH_INDEX):
        if name in present:
            return _open_file(store, name)
    if (tagged := deepspeed_folder(store, present)) is not None:
        return DeepSpeedSource(tagged)
    for kind in (r".+\.index\.json", r".+\.safetensors", r".+\.(?:bin|pt|pth)"):
        # a single shard, left by a killed save or copy, is not the model
        names = [
            n
            for n in present
            if re.fullmatch(kind, n) and not save_id_of(n) and not _SHARD.fullmatch(n)
        ]
        if len(names) == 1:
            return _open_file(store, names[0])
    listed = ", ".join(sorted(present)[:5]) or "no files"
    tracked = any(name.endswith(".dvc") for name in present)
    advice = "run `dvc pull` there" if tracked else "check the path, or name the file"
    raise CheckpointNotFoundError(
        f"no {SINGLE} and no {INDEX} in {store.url}, and no single other file of weights "
        f"(it has {listed}): {advice}"
    )


def _open_file(store: Store, name: str) -> WeightSource:
    """Open one file, or the files that an index names."""
    file = WeightFile.at(store, name)
    if _INDEX.fullmatch(name):
        weight_map = _weight_map(file)
        labels = sorted(set(weight_map.values()))
        files = [WeightFile.at(store, label) for label in labels]
        if all(_is_below(label, _SAFETENSORS) for label in labels):
            return SafetensorsSource(file.where, files, weight_map)
        return TorchSource(file.where, files, weight_map)
    is_torch = _TORCH.fullmatch(name) or not (_SAFETENSORS.fullmatch(name) or _is_header(file))
    return TorchSource(file.where, [file]) if is_torch else SafetensorsSource(file.where, [file])


def _is_header(file: WeightFile) -> bool:
    """Return whether a file begins as safetensors do: the length of the header, then the header."""
    with file.open() as reader:
        return bytes(reader.read(0, min(9, reader.size)))[8:] == b"{"


def _weight_map(file: WeightFile) -> dict[str, str]:
    """Return the map of an index from names to files; refuse mixed formats, and ways out."""
    document = file.parse(jsonio.loads, MAX_HEADER)
    # some writers leave the map bare
    weight_map = document.get("weight_map", document) if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(
            f"{file.where}: it has no weight_map, so it is no index of weights"
        )
    kinds = [_TORCH] if file.label.endswith(".bin.index.json") else [_SAFETENSORS, _TORCH]
    if file.label.endswith(".safetensors.index.json"):
        kinds = [_SAFETENSORS]  # an index of a safe format must not lead to pickles
    for kind in kinds:
        if all(isinstance(n, str) and _is_below(n, kind) for n in weight_map.values()):
            return weight_map
    names = sorted(set(map(repr, weight_map.values())))
    raise CorruptCheckpointError(
        f"{file.where}: its weight_map is not usable: it names {', '.join(names[:3]):.300}, and "
        "only files of its own format are followed, in its folder or in folders there"
    )


def _is_below(label: str, kind: re.Pattern[str]) -> bool:
    """Return whether a path of an index stays in its folder, and ends in a name of this kind."""
    # an index is downloaded text: it must not choose which files of this machine are read
    path = PurePosixPath(label)
    leads_out = path.is_absolute() or ".." in path.parts or os.path.splitdrive(label)[0]
    return not leads_out and not set(label) & {"\\", "\0"} and bool(kind.fullmatch(path.name))


class CheckpointSource:
    """The weights under `models/<index>` of a checkpoint, or under `model`.

    Args:
        url: the checkpoint.
        model_index: the number of the model.
        storage_options: passed to the fsspec driver.

    Raises:
        CheckpointNotFoundError: it has no such model.
        CorruptCheckpointError: a file does not match the manifest.
    """

    def __init__(
        self, url: str, model_index: int, storage_options: Mapping[str, Any] | None
    ) -> None:
        self._reader = open_checkpoint(url, storage_options=storage_options)
        self.where = self._reader.path
        tree = _model_in(self._reader.state, model_index, self.where)
        self._views = {key: view for key, view in tree.items() if isinstance(view, TensorView)}
        self._reader.check(keys=[view.key for view in self._views.values()])
        first: dict[str, str] = {}
        names = {key: first.setdefault(v.stored_key, key) for key, v in self._views.items()}
        self.tied = {key: kept for key, kept in names.items() if key != kept}
        self.infos = {
            key: WeightInfo(view.dtype, tuple(view.shape))
            for key, view in self._views.items()
            if key not in self.tied
        }

    def local_bytes(self) -> dict[str, tuple[str, int]] | None:
        """Return path and first byte of each tensor that is whole; None unless files are local.

        What is read from there is not verified.
        """
        folder = local_folder(self._reader.source.store)
        if folder is None:
            return None
        manifest = self._reader.manifest
        places = {}
        for key in self.infos:
            entry = manifest.tensors[self._views[key].stored_key]
            if len(entry.chunks) == 1 and entry.chunks[0].shape == entry.shape:
                chunk = entry.chunks[0]
                file = os.path.join(folder, manifest.files[chunk.file].name)
                places[key] = (file, chunk.begin)
        return places

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Read into the targets; every byte is verified."""
        self._reader.read(
            [(self._views[k], target) for k, target in wanted], cast=True, progress=False
        )
        progress.add(sum(self.infos[key].nbytes for key, _ in wanted))


def _model_in(state: Mapping[str, Any], index: int, location: str) -> Mapping[Any, Any]:
    """Return the state dict of one model in the state of a checkpoint."""
    models = state.get("models")
    if isinstance(models, Mapping):
        model = models.get(str(index), models.get(index))
    elif isinstance(models, (list, tuple)):
        model = models[index] if 0 <= index < len(models) else None
    else:
        model = state.get("model") if index == 0 else None
    if model is None:
        raise CheckpointNotFoundError(
            f"{location} has no model {index}: its state has "
            f"{', '.join(map(str, state)) or 'nothing'}; model_index= selects one of models/0, "
            "models/1, ..."
        )
    if not isinstance(model, Mapping) or not all(isinstance(key, str) for key in model):
        raise CorruptCheckpointError(
            f"{location}: its model {index} is not a dict of names to tensors"
        )
    return model
