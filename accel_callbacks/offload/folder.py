"""Offload folders in Accelerate's format: one file of raw bytes a tensor, and an index.

Ours have a checksum for each tensor in the index, which Accelerate ignores: so the weights of
another model, or of another time, are an error and not other results.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any, BinaryIO, NamedTuple

import torch

from accel_callbacks._siblings import require_neighbour
from accel_callbacks.local_files import make_folders, replace
from accel_callbacks.offload.tensors import (
    Device,
    as_device,
    is_absent,
    set_module_tensor_to_device,
)

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

Folder = str | os.PathLike[str]
Info = Mapping[str, Any]

_INDEX = "index.json"
_CHECKSUM = "xxh3"
_SHOWN = 3


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: Folder,
    index: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Write one tensor into an offload folder, in one step.

    Args:
        weight: a dense tensor with values, on any device.
        weight_name: its name; the file is named after it.
        offload_folder: an existing folder.
        index: gets the entry of the tensor; save it with :func:`save_offload_index`.

    Returns:
        ``index``.

    Raises:
        ValueError: the tensor has no values, is sharded or sparse, or its name is no file name.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks.utils import offload_weight
        >>> offload_weight(torch.ones(2), "scale", tempfile.mkdtemp(), {})["scale"]["shape"]
        [2]
    """
    require_neighbour("checkpoint_io")
    import xxhash

    from checkpoint_io.format.safetensors import host_pieces

    path = _file_of(offload_folder, weight_name)
    _require_values(weight, weight_name)
    digest = xxhash.xxh3_64()
    part = f"{path}.part"
    with open(part, "wb") as file:
        for piece in host_pieces(weight.detach()):
            digest.update(piece)
            file.write(piece)
        if not weight.numel():
            file.write(b"\0")  # numpy, with which Accelerate reads it, maps no empty file
    replace(part, path)
    if index is not None:
        dtype = str(weight.dtype).removeprefix("torch.")
        index[weight_name] = {
            "dtype": dtype,
            "shape": list(weight.shape),
            _CHECKSUM: digest.hexdigest(),
        }
    return index


def _file_of(folder: Folder, name: str) -> str:
    """Return the path of a tensor's file; names come from an index that others may have written."""
    if not name or any(part in name for part in ("/", "\\", "\0")):
        raise ValueError(f"{name!r} is no name of a tensor in an offload folder: it is a path.")
    return os.path.join(folder, f"{name}.dat")


def _require_values(weight: torch.Tensor, name: str) -> None:
    if is_absent(weight):
        raise ValueError(f"{name} has no values: load it first.")
    if weight.layout != torch.strided or hasattr(weight, "placements"):
        raise ValueError(
            f"{name} is sparse or sharded, which the format of offload folders does not have: give "
            "its dense, full tensor."
        )


def load_offloaded_weight(weight_file: Folder, weight_info: Info) -> torch.Tensor:
    """Read one tensor of an offload folder.

    Args:
        weight_file: its file.
        weight_info: its entry of the index: ``dtype``, ``shape``, and a checksum if we wrote it.

    Raises:
        checkpoint_io.CorruptCheckpointError: the file is missing, or has another size or other
            content than the entry says.

    Example:
        >>> import os, tempfile, torch
        >>> from accel_callbacks.utils import load_offloaded_weight, offload_weight
        >>> folder = tempfile.mkdtemp()
        >>> index = offload_weight(torch.ones(2), "scale", folder, {})
        >>> load_offloaded_weight(os.path.join(folder, "scale.dat"), index["scale"])
        tensor([1., 1.])
    """
    dtype, shape = _described(weight_info, os.fspath(weight_file))
    with _opened(weight_file) as file:
        _check_size(file, os.fspath(weight_file), dtype, shape)
        tensor = _read_into(file, os.fspath(weight_file), 0, dtype, shape)
    _check_content(tensor, weight_info, os.fspath(weight_file))
    return tensor


def _described(info: Info, where: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of an entry, checked."""
    dtype = getattr(torch, str(info.get("dtype")).removeprefix("torch."), None)
    shape = info.get("shape")
    is_shape = isinstance(shape, (list, tuple)) and all(
        isinstance(one, int) and one >= 0 for one in shape
    )
    if not isinstance(dtype, torch.dtype) or not is_shape:
        raise _corrupt(
            f"{where}: its entry in the index has no valid dtype and shape: {dict(info)}"
        )
    return dtype, tuple(shape)  # type: ignore[arg-type]


def _corrupt(text: str) -> Exception:
    require_neighbour("checkpoint_io")
    from checkpoint_io import CorruptCheckpointError

    return CorruptCheckpointError(text)


def _opened(path: Folder) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise _corrupt(
            f"{os.fspath(path)} is missing, though weights of a model are offloaded to it: offload "
            "the model again"
        ) from None


def _check_size(file: BinaryIO, where: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size, expected = os.fstat(file.fileno()).st_size, math.prod(shape) * dtype.itemsize
    if size != expected and not (expected == 0 and size == 1):
        raise _corrupt(
            f"{where} has {size} bytes, and {dtype} of shape {shape} needs {expected}: it is "
            "truncated, or of another model. Offload the model again, into a folder of its own"
        )


def _read_into(
    file: BinaryIO, where: str, begin: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Read a tensor that begins at a byte of a file."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if not tensor.numel():
        return tensor
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    file.seek(begin)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise _corrupt(f"{where} ends {len(view) - done} bytes too early")
        done += count
    return tensor


def _digest(tensor: torch.Tensor) -> str:
    import xxhash

    from checkpoint_io.format.safetensors import host_pieces

    digest = xxhash.xxh3_64()
    for piece in host_pieces(tensor.detach()):
        digest.update(piece)
    return digest.hexdigest()


def _check_content(tensor: torch.Tensor, info: Info, where: str) -> None:
    if _CHECKSUM in info and _digest(tensor) != info[_CHECKSUM]:
        raise _corrupt(
            f"{where} holds other bytes than were offloaded to it: it is damaged, or another model "
            "was offloaded into this folder since. Give each model a folder of its own"
        )


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: Folder) -> None:
    """Add entries to the index of an offload folder, in one step.

    Args:
        index: entries by name, from :func:`offload_weight`; nothing is written without any.
        offload_folder: the folder.

    Example:
        >>> import os, tempfile, torch
        >>> from accel_callbacks.utils import offload_weight, save_offload_index
        >>> folder = tempfile.mkdtemp()
        >>> save_offload_index(offload_weight(torch.ones(2), "scale", folder, {}), folder)
        >>> sorted(os.listdir(folder))
        ['index.json', 'scale.dat']
    """
    if not index:
        return
    path = os.path.join(offload_folder, _INDEX)
    entries = {**(_read_index(offload_folder) or {}), **index}
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(entries, file, indent=2)
    replace(f"{path}.part", path)


def _read_index(folder: Folder) -> dict[str, Any] | None:
    """Return the index of a folder, None if it has none."""
    path = os.path.join(folder, _INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _corrupt(f"{path} is no index of an offload folder: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise _corrupt(f"{path} is no index of an offload folder: it has no entries by name")
    return found


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write tensors into an offload folder, which is made if it is not there.

    Args:
        save_dir: the folder. Weights of the same model that are there are replaced.
        state_dict: tensors by name.

    Raises:
        ValueError: the folder holds a tensor of another shape or dtype under one of the names: it
            is another model's. Nothing was written.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks.utils import OffloadedWeightsLoader, offload_state_dict
        >>> folder = tempfile.mkdtemp()
        >>> offload_state_dict(folder, {"scale": torch.ones(2)})
        >>> OffloadedWeightsLoader(save_folder=folder)["scale"]
        tensor([1., 1.])
    """
    make_folders(os.path.abspath(save_dir))
    present = _read_index(save_dir) or {}
    for name, tensor in state_dict.items():
        _file_of(save_dir, name)
        _require_values(tensor, name)
        entry = present.get(name)
        wanted = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if entry is not None and {key: entry.get(key) for key in wanted} != wanted:
            raise ValueError(
                f"{os.fspath(save_dir)} holds the weights of another model: its {name} is "
                f"{entry.get('dtype')} of shape {entry.get('shape')}, and this one's "
                f"{wanted['dtype']} of shape {wanted['shape']}. Give each model a folder of its "
                "own, or remove this one."
            )
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(
    model: torch.nn.Module, index: Mapping[str, Info] | None, offload_folder: Folder
) -> None:
    """Read weights of an offload folder into a model, on the CPU.

    Args:
        model: the model.
        index: the entries of what is read, by the names of parameters and buffers.
        offload_folder: the folder.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks.utils import load_offloaded_weights, offload_weight
        >>> folder, layer = tempfile.mkdtemp(), torch.nn.Linear(2, 1, bias=False, device="meta")
        >>> index = offload_weight(torch.ones(1, 2), "weight", folder, {})
        >>> load_offloaded_weights(layer, index, folder)
        >>> layer.weight.tolist()
        [[1.0, 1.0]]
    """
    entries = index or {}
    scales = {name for name in entries if name.endswith("SCB")}
    for name, info in entries.items():
        if name in scales:
            continue
        beside = name.replace("weight", "SCB") if "weight" in name else ""
        statistics = None
        if beside in scales:
            path = _file_of(offload_folder, beside)
            statistics = load_offloaded_weight(path, entries[beside])
        set_module_tensor_to_device(
            model,
            name,
            "cpu",
            value=load_offloaded_weight(_file_of(offload_folder, name), info),
            fp16_statistics=statistics,
        )


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of some modules, and of tensors that are named themselves.

    Args:
        state_dict: tensors by name.
        submodule_names: names of modules or tensors; ``""`` is all.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import extract_submodules_state_dict
        >>> state = {"h.1.weight": torch.ones(1), "h.10.weight": torch.ones(1)}
        >>> list(extract_submodules_state_dict(state, ["h.1"]))
        ['h.1.weight']
    """
    wanted = set(submodule_names)
    return {name: one for name, one in state_dict.items() if wanted & set(_paths(name))}


def _paths(name: str) -> Iterator[str]:
    """Yield a name and the modules that it is in."""
    yield ""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


class PrefixedDataset(Mapping[str, Any]):
    """The entries of a map whose names begin with a prefix, by the rest of their names.

    Args:
        dataset: the whole map.
        prefix: such as ``"layers.0."``.

    Example:
        >>> from accel_callbacks.utils import PrefixedDataset
        >>> dict(PrefixedDataset({"a.weight": 1, "a.bias": 2, "b.bias": 3}, "a."))
        {'weight': 1, 'bias': 2}
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixedDataset:
        """Copy what is in memory under the prefix alone; files are shared."""
        if isinstance(self.dataset, OffloadedWeightsLoader):
            return PrefixedDataset(self.dataset.copied(self.prefix, memo), self.prefix)
        own = {key: self.dataset[key] for key in self.dataset if key.startswith(self.prefix)}
        return PrefixedDataset(deepcopy(own, memo), self.prefix)

    def fetch(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return several tensors, read together from files."""
        whole = [f"{self.prefix}{name}" for name in names]
        if isinstance(self.dataset, OffloadedWeightsLoader):
            return self.dataset.fetch(whole)
        return [self.dataset[name] for name in whole]

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor; one in a file without reading it before it is used."""
        if isinstance(self.dataset, OffloadedWeightsLoader):
            return self.dataset.mapped(f"{self.prefix}{name}")
        found: torch.Tensor = self[name]
        return found

    def held(self, name: str) -> torch.Tensor | None:
        """Return a tensor that is in memory, None for one in a file."""
        if isinstance(self.dataset, OffloadedWeightsLoader):
            return self.dataset.held(f"{self.prefix}{name}")
        return self[name] if isinstance(self.dataset, dict) else None

    def is_stored(self, name: str) -> bool:
        """Return whether a tensor is in a file."""
        loader = self.dataset
        return isinstance(loader, OffloadedWeightsLoader) and loader.is_stored(self.prefix + name)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a file holds other values than these."""
        if isinstance(self.dataset, OffloadedWeightsLoader):
            self.dataset.check(f"{self.prefix}{name}", tensor)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep other values, in memory."""
        if isinstance(self.dataset, OffloadedWeightsLoader):
            self.dataset.put(f"{self.prefix}{name}", tensor)
        elif isinstance(self.dataset, MutableMapping):
            self.dataset[f"{self.prefix}{name}"] = tensor
        else:
            raise TypeError(f"{type(self.dataset).__name__} cannot keep other values for {name}.")


class _Identity(NamedTuple):
    """What changes if a file is replaced or rewritten."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, stat: os.stat_result) -> _Identity:
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Tensors by name: in memory, in an offload folder, or in safetensors files.

    A file that has changed since this was made is an error. Headers of safetensors files are read
    once.

    Args:
        state_dict: tensors in memory, which come before those in files.
        save_folder: the offload folder.
        index: entries by name; those of the folder if ``None``. One with ``"safetensors_file"`` is
            in that file, under ``"weight_name"`` or its own name, and gets the ``"dtype"``.
        device: the device on which tensors from safetensors files are returned.

    Raises:
        ValueError: no argument says where weights are.
        checkpoint_io.CorruptCheckpointError: the folder has no index, or a damaged one.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import OffloadedWeightsLoader
        >>> OffloadedWeightsLoader({"scale": torch.ones(2)})["scale"]
        tensor([1., 1.])
    """

    def __init__(
        self,
        state_dict: MutableMapping[str, torch.Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Info] | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "weights are in a state_dict, in a save_folder, or where an index says: give one."
            )
        self.state_dict: MutableMapping[str, torch.Tensor] = (
            {} if state_dict is None else state_dict
        )
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = _read_index(save_folder)
            if index is None:
                raise _corrupt(
                    f"{os.fspath(save_folder)} has no {_INDEX}: nothing is offloaded there"
                )
        self.index: Mapping[str, Info] = {} if index is None else index
        self.device = device
        self._changed: dict[str, torch.Tensor] = {}
        self._verified: set[str] = set()
        self._slots: dict[str, dict[str, Any]] = {}  # headers of safetensors files
        self._seen: dict[str, _Identity] = {}
        self._note_folder()

    def _note_folder(self) -> None:
        """Note the files of a folder without checksums, as Accelerate writes it."""
        bare = {
            f"{name}.dat"
            for name, info in self.index.items()
            if _CHECKSUM not in info and info.get("safetensors_file") is None
        }
        if not bare or self.save_folder is None:
            return
        with os.scandir(self.save_folder) as entries:
            for entry in entries:
                if entry.name in bare:
                    path = os.path.join(self.save_folder, entry.name)
                    self._seen[path] = _Identity.of(os.stat(path))

    @property
    def all_keys(self) -> list[str]:
        """The names, those in memory first."""
        return list(dict.fromkeys([*self.state_dict, *self.index]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.index) + sum(1 for name in self.state_dict if name not in self.index)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.fetch([key])[0]

    def copied(self, prefix: str, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        """Return a loader of the same files with copies of what is in memory under a prefix."""
        new = type(self).__new__(type(self))
        vars(new).update(vars(self), _verified=set(self._verified))
        for kept, own in (("state_dict", self.state_dict), ("_changed", self._changed)):
            some = {key: one for key, one in own.items() if key.startswith(prefix)}
            vars(new)[kept] = deepcopy(some, memo)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        return self.copied("", memo)

    def held(self, name: str) -> torch.Tensor | None:
        """Return a tensor that is in memory, None for one in a file."""
        return self._changed.get(name, self.state_dict.get(name))

    def is_stored(self, name: str) -> bool:
        """Return whether a tensor is in a file."""
        return self.held(name) is None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep other values, in memory; files are not written."""
        held = self.held(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            with torch.no_grad():
                held.copy_(tensor)
        else:
            self._changed[name] = tensor

    def fetch(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return several tensors; each safetensors file is opened once, and read in its order."""
        found: dict[str, torch.Tensor] = {}
        by_file: dict[str, list[tuple[int, str]]] = {}
        for name in names:
            held = self.held(name)
            if held is not None:
                found[name] = held
                continue
            info = self.index[name]
            path = info.get("safetensors_file")
            if path is None:
                found[name] = self._read_raw(name, info)
            else:
                slot = self._slot(str(path), str(info.get("weight_name", name)))
                by_file.setdefault(str(path), []).append((slot.begin, name))
        for path, places in by_file.items():
            with self._same(path) as file:
                for begin, name in sorted(places):
                    found[name] = self._read_slot(file, path, begin, name)
        return [found[name] for name in names]

    def _read_raw(self, name: str, info: Info) -> torch.Tensor:
        """Read a file of the folder; its content is checked the first time."""
        path = self._raw_path(name)
        dtype, shape = _described(info, path)
        with self._same(path) as file:
            _check_size(file, path, dtype, shape)
            tensor = _read_into(file, path, 0, dtype, shape)
        if name not in self._verified:
            _check_content(tensor, info, path)
            self._verified.add(name)
        return tensor

    def _raw_path(self, name: str) -> str:
        if self.save_folder is None:
            raise ValueError(f"{name} is in an offload folder: give save_folder.")
        return _file_of(self.save_folder, name)

    def _read_slot(self, file: BinaryIO, path: str, begin: int, name: str) -> torch.Tensor:
        from checkpoint_io.format.safetensors import DTYPES

        slot = self._slot(path, str(self.index[name].get("weight_name", name)))
        tensor = _read_into(file, path, begin, DTYPES[slot.dtype], slot.shape)
        return self._finished(tensor, self.index[name])

    def _finished(self, tensor: torch.Tensor, info: Info) -> torch.Tensor:
        """Return a tensor of a safetensors file in the dtype of its entry, on the device."""
        if "dtype" in info:
            tensor = tensor.to(getattr(torch, str(info["dtype"]).removeprefix("torch.")))
        return tensor if self.device is None else tensor.to(as_device(self.device))

    def _same(self, path: str) -> BinaryIO:
        """Open a file; raise if it is not the one that was opened before."""
        file = _opened(path)
        now = _Identity.of(os.fstat(file.fileno()))
        if self._seen.setdefault(path, now) != now:
            file.close()
            raise _corrupt(
                f"{path} has changed since the model was offloaded to it: another model, or "
                "another checkpoint, was written there. Give each model a folder of its own"
            )
        return file

    def _slot(self, path: str, name: str) -> Any:
        """Return where a tensor is in a safetensors file."""
        if path not in self._slots:
            require_neighbour("checkpoint_io")
            from checkpoint_io.format.safetensors import MAX_HEADER, parse_header

            with self._same(path) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if length > min(MAX_HEADER, size - 8):
                    raise _corrupt(f"{path}: its header does not fit the file")
                self._slots[path] = parse_header(file.read(length), size, path)[1]
        if name not in self._slots[path]:
            raise _corrupt(f"{path} has no tensor {name!r}, though the index says so")
        return self._slots[path][name]

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor; one in a file is mapped, and read where it is used.

        Writing into it does not change the file.
        """
        held = self.held(name)
        if held is not None:
            return held
        info = self.index[name]
        path = info.get("safetensors_file")
        if path is None:
            path = self._raw_path(name)
            dtype, shape = _described(info, path)
            begin, end = 0, math.prod(shape) * dtype.itemsize
            with self._same(path) as file:
                _check_size(file, path, dtype, shape)
        else:
            from checkpoint_io.format.safetensors import DTYPES

            slot = self._slot(str(path), str(info.get("weight_name", name)))
            dtype, shape, begin, end = DTYPES[slot.dtype], slot.shape, slot.begin, slot.end
            self._same(str(path)).close()
        if begin == end or begin % dtype.itemsize:
            return self[name]
        storage: Any = torch.UntypedStorage.from_file(str(path), False, end)
        steps = torch.empty(shape, device="meta").stride()
        whole: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu").set_(
            storage, begin // dtype.itemsize, shape, steps
        )
        return whole if info.get("safetensors_file") is None else self._finished(whole, info)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a file holds other values than those of a tensor."""
        if name not in self.index or not self.is_stored(name):
            return
        info = self.index[name]
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if _CHECKSUM in info and info.get("dtype") == dtype and info.get("shape") == shape:
            same = _digest(tensor) == info[_CHECKSUM]
        else:
            stored = self[name]
            same = stored.shape == tensor.shape and _same_values(stored, tensor)
        if not same:
            where = info.get("safetensors_file") or self.save_folder
            raise ValueError(
                f"{name} has other values in {where} than in the model that is offloaded there: "
                "these are the weights of another model. Give each model a folder of its own, or "
                "build the model under init_empty_weights() to take the weights that are there."
            )


def _same_values(stored: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether values are the same, in the dtype of the one or of the other."""
    host = tensor.detach().to("cpu")
    return _digest(stored.to(host.dtype)) == _digest(host) or (
        _digest(host.to(stored.dtype)) == _digest(stored.to("cpu"))
    )
