"""State trees to JSON and back: a closed set of types, tensors taken out and referred to."""

from __future__ import annotations

import base64
import binascii
import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from checkpoint_io import jsonio
from checkpoint_io.dtypes import NAMES
from checkpoint_io.errors import CorruptCheckpointError, UnsupportedStateError

# Deep enough for any state dict, shallow enough for every JSON parser and for cycles to be found.
MAX_DEPTH = 100

Path = tuple[Any, ...]
StoreTensor = Callable[[Path, torch.Tensor], str]


def encode_plain(value: Any, root: str) -> Any:
    """Encode a tree that must not hold tensors (metadata)."""

    def refuse(path: Path, tensor: torch.Tensor) -> str:
        raise UnsupportedStateError(
            f"{show(root, path)} is a tensor or an array; {root} takes plain values: "
            "use .item() or .tolist()"
        )

    return TreeEncoder(root, refuse).encode(value)


def show(root: str, path: Path) -> str:
    """Write a path the way a user would index it."""
    return root + "".join(f"[{key!r}]" for key in path)


class TreeEncoder:
    """Turns one state tree into strict JSON; each tensor goes to `store`, which returns its key."""

    def __init__(self, root: str, store: StoreTensor) -> None:
        self._root = root
        self._store = store
        self._encoders: dict[type, Callable[[Any, Path], Any]] = {
            **dict.fromkeys((type(None), bool, str), lambda value, path: value),
            int: self._int,
            float: self._float,
            list: lambda value, path: self._items(value, path),
            **dict.fromkeys((tuple, torch.Size), self._tagged_items("$tuple")),
            **dict.fromkeys((dict, collections.OrderedDict, collections.defaultdict), self._dict),
            set: self._set("$set"),
            frozenset: self._set("$frozenset"),
            **dict.fromkeys((bytes, bytearray), self._bytes),
            torch.dtype: self._dtype,
            np.ndarray: self._ndarray,
            **dict.fromkeys((torch.Tensor, torch.nn.Parameter), self._tensor),
        }

    def encode(self, value: Any, path: Path = ()) -> Any:
        """Return the JSON form of a value at a path."""
        if len(path) > MAX_DEPTH:
            raise UnsupportedStateError(
                f"{show(self._root, path[:4])}... is nested deeper than {MAX_DEPTH} levels "
                "(or contains itself): flatten it"
            )
        if isinstance(value, np.generic):
            value = value.item()
        encoder = self._encoders.get(type(value))
        if encoder is None and isinstance(value, Mapping):
            encoder = self._dict
        if encoder is None:
            raise self._unsupported(value, path)
        return encoder(value, path)

    def _unsupported(self, value: Any, path: Path) -> UnsupportedStateError:
        """Say what cannot be saved, where it is and what to do."""
        kind = type(value)
        advice = (
            "gather it first, for example with .full_tensor() or .to_dense()"
            if isinstance(value, torch.Tensor)
            else "save its state_dict() or its plain values instead (no object is pickled), "
            "or leave it out"
        )
        return UnsupportedStateError(
            f"{show(self._root, path)} is a {kind.__module__}.{kind.__qualname__}, "
            f"which a checkpoint cannot hold: {advice}"
        )

    def _int(self, value: int, path: Path) -> Any:
        """Pass an int that every JSON parser of this language accepts."""
        if value.bit_length() > 10_000:
            raise UnsupportedStateError(
                f"{show(self._root, path)} is an integer of {value.bit_length()} bits: "
                "store it as bytes"
            )
        return value

    def _float(self, value: float, path: Path) -> Any:
        """Tag the floats that JSON does not have."""
        return value if math.isfinite(value) else {"$float": str(value)}

    def _items(self, value: Any, path: Path) -> list[Any]:
        """Encode the elements of a sequence."""
        return [self.encode(item, (*path, index)) for index, item in enumerate(value)]

    def _tagged_items(self, tag: str) -> Callable[[Any, Path], Any]:
        """Encode a sequence under a tag."""
        return lambda value, path: {tag: self._items(value, path)}

    def _set(self, tag: str) -> Callable[[Any, Path], Any]:
        """Encode a set under a tag, in an order that does not depend on hashing."""
        return lambda value, path: {
            tag: sorted(self._items(value, path), key=lambda item: jsonio.dumps(item, "a set"))
        }

    def _dict(self, value: Mapping[Any, Any], path: Path) -> Any:
        """Encode a mapping as an object, or as pairs if its keys are not plain strings."""
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {
            "$dict": [
                [self._key(key, path), self.encode(item, (*path, key))]
                for key, item in value.items()
            ]
        }

    def _key(self, key: Any, path: Path) -> Any:
        """Encode a key; a tensor hashes by identity, so it cannot be one."""
        if isinstance(key, torch.Tensor):
            raise UnsupportedStateError(
                f"{show(self._root, path)} has a tensor as a key: use a string or an int"
            )
        return self.encode(key, (*path, key))

    def _bytes(self, value: bytes | bytearray, path: Path) -> Any:
        """Encode bytes in base64."""
        return {"$bytes": base64.b64encode(value).decode("ascii")}

    def _dtype(self, value: torch.dtype, path: Path) -> Any:
        """Encode a torch dtype by its name."""
        return {"$dtype": str(value).removeprefix("torch.")}

    def _tensor(self, value: torch.Tensor, path: Path) -> Any:
        """Hand a tensor over and refer to it."""
        tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise self._unsupported(value, path)
        if tensor.dtype not in NAMES:
            raise UnsupportedStateError(
                f"{show(self._root, path)} has dtype {tensor.dtype}, which safetensors cannot "
                "hold: convert it (complex128: torch.view_as_real)"
            )
        return {"$tensor": self._store(path, tensor)}

    def _ndarray(self, value: np.ndarray[Any, Any], path: Path) -> Any:
        """Store a numeric array as a tensor."""
        array = np.asarray(value, order="C", dtype=value.dtype.newbyteorder("="))
        try:
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        except TypeError:
            tensor = None
        if tensor is None or tensor.dtype not in NAMES:
            raise UnsupportedStateError(
                f"{show(self._root, path)} is a numpy array of {value.dtype}, which a checkpoint "
                "cannot hold: convert it to numbers, or to a list"
            )
        return {"$ndarray": self._store(path, tensor)}


def decode_tree(value: Any, tensors: Mapping[str, torch.Tensor] | None, where: str) -> Any:
    """Rebuild a tree; `tensors` holds those it may refer to, `where` goes into errors."""
    try:
        return _Decoder(tensors or {}, where).decode(value)
    except RecursionError:
        raise CorruptCheckpointError(f"{where}: the state is nested too deeply") from None


class _Decoder:
    """The inverse of `TreeEncoder`, suspicious of its input."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        self._tensors = tensors
        self._where = where
        self._tags: dict[str, Callable[[Any], Any]] = {
            "$tensor": self._tensor,
            "$ndarray": lambda key: self._tensor(key).numpy(),
            "$tuple": lambda items: tuple(self._items(items)),
            "$set": lambda items: set(self._items(items)),
            "$frozenset": lambda items: frozenset(self._items(items)),
            "$dict": self._pairs,
            "$float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
            "$bytes": lambda text: base64.b64decode(text, validate=True),
            "$dtype": self._dtype,
        }

    def decode(self, value: Any) -> Any:
        """Return what a JSON value stands for."""
        if isinstance(value, list):
            return self._items(value)
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item) for key, item in value.items()}
        if len(value) != 1 or tag not in self._tags:
            raise CorruptCheckpointError(f"{self._where}: unknown tag {tag!r:.80}")
        try:
            return self._tags[tag](value[tag])
        except (TypeError, ValueError, KeyError, binascii.Error) as error:
            raise CorruptCheckpointError(
                f"{self._where}: bad value under {tag} ({error!r:.200})"
            ) from None

    def _items(self, items: Any) -> list[Any]:
        """Decode a JSON array."""
        if not isinstance(items, list):
            raise TypeError("not a list")
        return [self.decode(item) for item in items]

    def _pairs(self, pairs: Any) -> dict[Any, Any]:
        """Decode a list of key and value pairs."""
        result = {}
        for pair in pairs:
            key, item = pair
            result[self.decode(key)] = self.decode(item)
        if len(result) != len(pairs):
            raise ValueError("a key comes twice")
        return result

    def _tensor(self, key: Any) -> torch.Tensor:
        """Look a tensor up."""
        return self._tensors[key]

    def _dtype(self, name: Any) -> torch.dtype:
        """Look a dtype up by name, among dtypes only."""
        found = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(found, torch.dtype):
            raise ValueError(f"no dtype {name!r:.80} in this torch")
        return found
