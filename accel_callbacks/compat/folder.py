"""Offload folders in Accelerate's format: one file of raw bytes a tensor, and an index.

Ours have a checksum for each tensor in the index, which Accelerate ignores: so the weights of
another model, or of another time, are an error and not other results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from accel_callbacks.compat.tensors import set_module_tensor_to_device
from accel_callbacks.models.offload.assignment import Place, device_of
from accel_callbacks.models.offload.placeholder import is_absent
from accel_callbacks.models.offload.source import (
    FileIdentity,
    StoredTensor,
    StoredWeights,
    WeightReadError,
    unreadable,
)
from checkpoint_io.local_files import make_folders, replace

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "StoredIndex",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "names_in",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
    "stored_in_index",
]

Folder = str | os.PathLike[str]
Entry = Mapping[str, Any]
Index = Mapping[str, Entry]

_INDEX = "index.json"
CHECKSUM = "xxh3"


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: Folder,
    index: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Write one tensor into an offload folder, atomically.

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
    replace(part, path)  # a file of this name is whole, or that of before
    if index is not None:
        dtype = str(weight.dtype).removeprefix("torch.")
        index[weight_name] = {
            "dtype": dtype,
            "shape": list(weight.shape),
            CHECKSUM: digest.hexdigest(),
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


def load_offloaded_weight(weight_file: Folder, weight_info: Entry) -> torch.Tensor:
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
    with _as_corrupt():
        stored, identity = _raw(os.path.abspath(weight_file), weight_info)
        (tensor,) = StoredWeights({"": stored}, {stored.path: identity}).read([""])
        _check_content(tensor, weight_info, stored.path)
    return tensor


@contextmanager
def _as_corrupt() -> Iterator[None]:
    """Context manager: raise the error of a damaged checkpoint for weights that cannot be read."""
    try:
        yield
    except WeightReadError as error:
        from checkpoint_io import CorruptCheckpointError

        raise CorruptCheckpointError(str(error)) from None


def _digest(tensor: torch.Tensor) -> str:
    import xxhash

    from checkpoint_io.format.safetensors import host_pieces

    digest = xxhash.xxh3_64()
    for piece in host_pieces(tensor.detach()):
        digest.update(piece)
    return digest.hexdigest()


def _check_content(tensor: torch.Tensor, entry: Entry, path: str) -> None:
    if CHECKSUM in entry and _digest(tensor) != entry[CHECKSUM]:
        raise WeightReadError(
            f"{path} holds other bytes than were offloaded to it: it is damaged, or another model "
            "was offloaded into this folder since. Give each model a folder of its own"
        )


class StoredIndex:
    """The places of the weights of an index, each looked up at its first use.

    Args:
        index: name to ``{"dtype", "shape"}`` of ``<folder>/<name>.dat``, or to
            ``{"safetensors_file", "weight_name"}``.
        folder: where files of raw bytes are.
        replaceable: a file with another one's name, size and time is the same version.
    """

    def __init__(self, index: Index, folder: Folder | None, replaceable: bool = True) -> None:
        self._index = index
        self._folder = folder
        self._replaceable = replaceable
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._identities: dict[str, FileIdentity] = {}

    def located(self, names: Iterable[str]) -> StoredWeights:
        """Look these weights up; return all that have been looked up.

        Raises:
            WeightReadError: a file is missing, or not as the index describes it.
        """
        for name in names:
            if name not in self._tensors:
                self._locate(name, self._index[name])
        return StoredWeights(self._tensors, self._identities)

    def _locate(self, name: str, entry: Entry) -> None:
        file = entry.get("safetensors_file")
        if file is None:
            if self._folder is None:
                raise WeightReadError(
                    f"{name}: the index names no file for it, and there is no folder."
                )
            stored, identity = _raw(_file_of(self._folder, name), entry)
            self._note(stored.path, identity)
            self._tensors[name] = stored
            return
        path = os.path.realpath(file)
        if path not in self._headers:
            self._note(path, FileIdentity.of(path))
            self._headers[path] = _header(path)
        key = entry.get("weight_name", name)
        if key not in self._headers[path]:
            raise WeightReadError(f"{path} has no tensor {key!r}, which the index names.")
        self._tensors[name] = self._headers[path][key]

    def _note(self, path: str, identity: FileIdentity) -> None:
        inode = 0 if self._replaceable else os.stat(path).st_ino
        self._identities[path] = identity._replace(inode=inode)


def stored_in_index(index: Index | None, folder: Folder | None) -> StoredWeights | None:
    """Return the weights of an offload folder, or of an index without one.

    Args:
        index: see :class:`StoredIndex`; by default that of the folder.
        folder: where files of raw bytes are.

    Returns:
        Where they are; None if there is neither an index nor a folder with one.

    Raises:
        WeightReadError: a file is missing, or not as the index describes it.
    """
    if index is None and folder is not None:
        index = _read_index(folder)
    return None if index is None else StoredIndex(index, folder).located(index)


def _raw(path: str, entry: Entry) -> tuple[StoredTensor, FileIdentity]:
    """Return the tensor of a file, after checking the size of the file."""
    dtype = getattr(torch, str(entry.get("dtype")).removeprefix("torch."), None)
    shape = entry.get("shape")
    is_shape = isinstance(shape, (list, tuple)) and all(
        isinstance(length, int) and length >= 0 for length in shape
    )
    if not isinstance(dtype, torch.dtype) or not is_shape:
        raise WeightReadError(
            f"{path}: its entry in the index has no valid dtype and shape: {dict(entry)}"
        )
    stored = StoredTensor(path, 0, dtype, tuple(shape))  # type: ignore[arg-type]
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if status.st_size != stored.nbytes and not (stored.nbytes == 0 and status.st_size == 1):
        raise WeightReadError(
            f"{path} has {status.st_size} bytes, and by the index {stored.nbytes}: {dtype} of "
            f"shape {stored.shape} needs {stored.nbytes}. It is truncated, or of another model: "
            "offload the model again, into a folder of its own."
        )
    return stored, FileIdentity(status.st_size, status.st_mtime_ns, "")


def names_in(path: str) -> dict[int, str]:
    """Return the names of the tensors in a safetensors file, by the first byte of each."""
    return {stored.begin: name for name, stored in _header(path).items()}


def _header(path: str) -> Mapping[str, StoredTensor]:
    from checkpoint_io.format.safetensors import DTYPES
    from checkpoint_io.storage.local import LocalStore
    from checkpoint_io.weights.safetensors import read_header
    from checkpoint_io.weights.source import WeightFile

    folder, name = os.path.split(path)
    _, slots = read_header(WeightFile.at(LocalStore(folder), name))
    return {
        key: StoredTensor(path, slot.begin, DTYPES[slot.dtype], tuple(slot.shape))
        for key, slot in slots.items()
        if slot.dtype in DTYPES
    }


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: Folder) -> None:
    """Add entries to the index of an offload folder, atomically.

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
    with _as_corrupt():
        entries = {**(_read_index(offload_folder) or {}), **index}
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(entries, file, indent=2)
    replace(f"{path}.part", path)


def _read_index(folder: Folder) -> Index | None:
    """Return the index of a folder, None if it has none."""
    path = os.path.join(folder, _INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WeightReadError(f"{path} is no index of an offload folder: {error}") from None
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise WeightReadError(f"{path} is no index of an offload folder: it has no entries by name")
    return index


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
    with _as_corrupt():
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
    model: torch.nn.Module, index: Index | None, offload_folder: Folder
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
    for name, info in (index or {}).items():
        value = load_offloaded_weight(_file_of(offload_folder, name), info)
        set_module_tensor_to_device(model, name, "cpu", value=value)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of some modules, and of tensors by name.

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
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if any(module in ("", name) or name.startswith(f"{module}.") for module in submodule_names)
    }


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

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a file holds other values than these."""
        check = getattr(self.dataset, "check", None)
        if check is not None:
            check(f"{self.prefix}{name}", tensor)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace values, in memory."""
        put = getattr(self.dataset, "put", None)
        if put is not None:
            put(f"{self.prefix}{name}", tensor)
        elif isinstance(self.dataset, MutableMapping):
            _put_values(self.dataset, f"{self.prefix}{name}", tensor)
        else:
            raise RuntimeError(
                f"{self.prefix}{name} was changed in place while it was fetched, and "
                f"{type(self.dataset)} cannot store it: use a dict, or do not offload it."
            )


def _put_values(
    tensors: MutableMapping[str, torch.Tensor], name: str, tensor: torch.Tensor
) -> None:
    """Replace the values of a tensor in memory, in place where they are alike."""
    held = tensors.get(name)
    if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
        tensors[name] = tensor
    elif held.data_ptr() != tensor.data_ptr():  # else it was written itself
        with torch.no_grad():
            held.copy_(tensor)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Tensors by name: in memory, in an offload folder, or in safetensors files.

    A file that has changed since this was made is an error. Headers of safetensors files are read
    once.

    Args:
        state_dict: tensors in memory, which come before those in files; it gets those that are
            changed later.
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
        index: Index | None = None,
        device: Place | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "weights are in a state_dict, in a save_folder, or where an index says: give one."
            )
        self.state_dict: MutableMapping[str, torch.Tensor] = (
            {} if state_dict is None else state_dict
        )
        self.save_folder = save_folder
        with _as_corrupt():
            if index is None and save_folder is not None:
                index = _read_index(save_folder)
                if index is None:
                    raise WeightReadError(
                        f"{os.fspath(save_folder)} has no {_INDEX}: nothing is offloaded there"
                    )
        self.index: Index = {} if index is None else index
        self.device = device
        self._verified: set[str] = set()
        self._stored = StoredIndex(self.index, save_folder, replaceable=False)
        self._note_folder()

    def _note_folder(self) -> None:
        """Record the identities of files without checksums, as Accelerate writes them."""
        if self.save_folder is None:
            return
        for name, entry in self.index.items():
            if CHECKSUM not in entry and entry.get("safetensors_file") is None:
                with suppress(WeightReadError, ValueError):  # told when it is asked for
                    self._stored.located([name])

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
        if key in self.state_dict:
            return self.state_dict[key]
        with _as_corrupt():
            # A digest is compared once: after that the identity of the file tells of another one.
            weights = self._locate(key)
            (tensor,) = weights.read([key])
            if key not in self._verified:
                _check_content(tensor, self.index[key], weights.tensors[key].path)
                self._verified.add(key)
        return self._convert(key, tensor)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace values, in memory; files are not written."""
        _put_values(self.state_dict, name, tensor)

    def _locate(self, name: str) -> StoredWeights:
        if self.save_folder is None and self.index[name].get("safetensors_file") is None:
            raise ValueError(f"{name} is in an offload folder: give save_folder.")
        return self._stored.located([name])

    def _convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a safetensors file in the dtype of its entry, on the device."""
        entry = self.index[name]
        if entry.get("safetensors_file") is None:
            return tensor
        if "dtype" in entry:
            tensor = tensor.to(getattr(torch, str(entry["dtype"]).removeprefix("torch.")))
        return tensor if self.device is None else tensor.to(device_of(self.device))

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a file holds other values than those of a tensor."""
        if name not in self.index or name in self.state_dict:
            return
        info = self.index[name]
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if CHECKSUM in info and info.get("dtype") == dtype and info.get("shape") == shape:
            same = _digest(tensor) == info[CHECKSUM]
        else:
            stored = self[name]
            same = stored.shape == tensor.shape and _same_values(stored, tensor)
        if not same:
            place = info.get("safetensors_file") or self.save_folder
            raise ValueError(
                f"{name} has other values in {place} than in the model that is offloaded there: "
                "these are the weights of another model. Give each model a folder of its own, or "
                "build the model under init_empty_weights() to take the weights that are there."
            )


def _same_values(stored: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether values are equal, in the dtype of either."""
    host = tensor.detach().to("cpu")
    return _digest(stored.to(host.dtype)) == _digest(host) or (
        _digest(host.to(stored.dtype)) == _digest(stored.to("cpu"))
    )
