"""Encode state trees as JSON, and decode them: a closed set of types, with tensors by key."""

from __future__ import annotations

import base64
import binascii
import collections
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from checkpoint_io.errors import CorruptCheckpointError, UnsupportedStateError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.safetensors import NAMES
from checkpoint_io.sharding.dtensor import check_placements, is_dtensor

# Deep enough for any state dict; shallow enough for JSON parsers, and to detect cycles.
MAX_DEPTH = 100

MAX_BITS = 10_000  # Python's JSON parser refuses an int of many more digits
_AS_THEY_ARE = frozenset((type(None), bool, str))  # JSON has them, and they do not change
_STRIDED, _TENSOR = torch.strided, torch.Tensor
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Path = tuple[Any, ...]
StoreTensor = Callable[[Path, torch.Tensor], str]


def encode_plain(value: Any, root: str) -> Any:
    """Encode a tree without tensors (metadata)."""

    def refuse(path: Path, tensor: torch.Tensor) -> str:
        raise UnsupportedStateError(
            f"{show(root, path)} is a tensor or an array; {root} takes plain values: "
            "use .item() or .tolist()"
        )

    return TreeEncoder(root, refuse).encode(value)


def show(root: str, path: Path) -> str:
    """Format a path as a user would index it."""
    return root + "".join(f"[{key!r}]" for key in path)


class TreeEncoder:
    """Encodes one state tree as strict JSON; each tensor goes to `store`, which returns its key.

    The result shares no list or dict with the state, so it does not change with it. DTensors are
    accepted only with `sharded`.
    """

    def __init__(self, root: str, store: StoreTensor, *, sharded: bool = False) -> None:
        self._root = root
        self._sharded = sharded
        self._store = store

    def encode(self, value: Any, path: Path = ()) -> Any:
        """Return the JSON form of a value at a path."""
        encoder = _ENCODERS.get(type(value))
        return encoder(self, value, path) if encoder else self._encode_other(value, path)

    def _encode_other(self, value: Any, path: Path) -> Any:
        """Encode a value of a less common type."""
        if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):
            return self.encode(number, path)
        if isinstance(value, Mapping):
            return self._dict(value, path)
        if self._sharded and isinstance(value, torch.Tensor) and is_dtensor(value):
            return self._dtensor(value, path)
        raise self._refusal(value, path)

    def _same(self, value: Any, path: Path) -> Any:
        """Return a value that JSON has."""
        return value

    def _refusal(self, value: Any, path: Path) -> UnsupportedStateError:
        """Return an error that names the value, its path and a remedy."""
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

    def _tensor_refusal(self, value: torch.Tensor, path: Path) -> UnsupportedStateError:
        """Return an error for a tensor that is not strided, or of another dtype."""
        if value.layout is not _STRIDED or value.is_quantized or value.is_meta:
            return self._refusal(value, path)
        return UnsupportedStateError(
            f"{show(self._root, path)} has dtype {value.dtype}, which safetensors cannot "
            "hold: convert it (complex128: torch.view_as_real)"
        )

    def _int(self, value: int, path: Path) -> Any:
        """Return an int; raise if it is too long for Python's JSON parser."""
        if value.bit_length() > MAX_BITS:
            raise UnsupportedStateError(
                f"{show(self._root, path)} is an integer of {value.bit_length()} bits: "
                "store it as bytes"
            )
        return value

    def _float(self, value: float, path: Path) -> Any:
        """Encode a float; those that JSON lacks get a tag."""
        return value if math.isfinite(value) else {"$float": str(value)}

    def _check_depth(self, path: Path) -> None:
        """Raise if what is in the container at a path is nested too deeply."""
        if len(path) >= MAX_DEPTH:
            raise UnsupportedStateError(
                f"{show(self._root, path[:4])}... is nested deeper than {MAX_DEPTH} levels "
                "(or contains itself): flatten it"
            )

    def _items(self, value: Any, path: Path) -> list[Any]:
        """Encode the elements of a sequence."""
        if not value:
            return []
        self._check_depth(path)
        # A state may hold a list of 100,000 numbers: those are checked together.
        kinds = set(map(type, value))
        if kinds <= _AS_THEY_ARE:
            return list(value)
        if kinds == {int} and max(map(int.bit_length, value)) <= MAX_BITS:
            return list(value)
        return [
            item if type(item) in _AS_THEY_ARE else self.encode(item, (*path, index))
            for index, item in enumerate(value)
        ]

    def _tuple(self, value: Any, path: Path) -> Any:
        """Encode a tuple under its tag."""
        return {"$tuple": self._items(value, path)}

    def _deque(self, value: collections.deque[Any], path: Path) -> Any:
        """Encode a deque under its tag, with its longest length."""
        return {"$deque": [value.maxlen, self._items(value, path)]}

    def _set(self, value: Any, path: Path) -> Any:
        """Encode a set under its tag, in an order independent of hashing."""
        # Python's hashes of text differ from process to process; a state's bytes must not.
        items = self._items(value, path)
        return {f"${type(value).__name__}": sorted(items, key=lambda i: jsonio.dumps(i, "a set"))}

    def _dict(self, value: Mapping[Any, Any], path: Path) -> Any:
        """Encode a mapping as an object, or as pairs if some key is not a plain string."""
        if not value:
            return {}
        self._check_depth(path)
        if all(type(key) is str and key[:1] != "$" for key in value):
            return {
                key: item if type(item) in _AS_THEY_ARE else self.encode(item, (*path, key))
                for key, item in value.items()
            }
        return {
            "$dict": [
                [self._key(key, path), self.encode(item, (*path, key))]
                for key, item in value.items()
            ]
        }

    def _key(self, key: Any, path: Path) -> Any:
        """Encode a key; raise for a tensor, which hashes by identity."""
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
        """Store a tensor; encode its key."""
        if value.dtype not in NAMES or value.layout is not _STRIDED or value.is_meta:
            raise self._tensor_refusal(value, path)
        # A state has many tensors, most of them detached already. To detach a DTensor of other
        # ranks makes a new one, so that tied ones would no longer be.
        whole = type(value) is _TENSOR or hasattr(value, "device_mesh")
        plain = whole and not value.requires_grad
        return {"$tensor": self._store(path, value if plain else value.detach())}

    def _dtensor(self, value: Any, path: Path) -> Any:
        """Store a DTensor; raise if its placements are not supported."""
        check_placements(value, show(self._root, path))
        return self._tensor(value, path)

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


# Functions by type, not bound methods on the instance: those would form a reference cycle, and
# keep the tensors of a state alive until the next garbage collection.
_ENCODERS: dict[type, Callable[[TreeEncoder, Any, Path], Any]] = {
    **dict.fromkeys(_AS_THEY_ARE, TreeEncoder._same),
    int: TreeEncoder._int,
    float: TreeEncoder._float,
    list: TreeEncoder._items,
    **dict.fromkeys((tuple, torch.Size), TreeEncoder._tuple),
    collections.deque: TreeEncoder._deque,
    **dict.fromkeys((dict, collections.OrderedDict, collections.defaultdict), TreeEncoder._dict),
    **dict.fromkeys((set, frozenset), TreeEncoder._set),
    **dict.fromkeys((bytes, bytearray), TreeEncoder._bytes),
    torch.dtype: TreeEncoder._dtype,
    np.ndarray: TreeEncoder._ndarray,
    **dict.fromkeys((torch.Tensor, torch.nn.Parameter), TreeEncoder._tensor),
}


def decode_tree(value: Any, tensors: Mapping[str, torch.Tensor] | None, label: str) -> Any:
    """Decode a tree that may refer to `tensors`; `label` names it in errors."""
    try:
        return _Decoder(tensors or {}, label).decode(value)
    except RecursionError:
        raise CorruptCheckpointError(f"{label}: the state is nested too deeply") from None


class _Decoder:
    """The inverse of `TreeEncoder`; the input is not trusted."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        self._tensors = tensors
        self._label = label

    def decode(self, value: Any) -> Any:
        """Decode a JSON value."""
        if type(value) is dict and len(value) == 1:  # the fast path: most leaves are tensors
            key = value.get("$tensor")
            if type(key) is str and key in self._tensors:
                return self._tensors[key]
        if isinstance(value, list):
            return self._items(value)
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item) for key, item in value.items()}
        if len(value) != 1 or tag not in _DECODERS:
            raise CorruptCheckpointError(f"{self._label}: unknown tag {tag!r:.80}")
        try:
            return _DECODERS[tag](self, value[tag])
        except (TypeError, ValueError, KeyError, binascii.Error) as error:
            raise CorruptCheckpointError(
                f"{self._label}: bad value under {tag} ({error!r:.200})"
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

    def _deque(self, parts: Any) -> collections.deque[Any]:
        """Decode a longest length, which is None for no limit, and items."""
        limit, items = parts
        if limit is not None and (type(limit) is not int or not len(items) <= limit <= sys.maxsize):
            raise ValueError(f"no longest length of {len(items)} items: {limit!r:.80}")
        return collections.deque(self._items(items), limit)

    def _tensor(self, key: Any) -> torch.Tensor:
        """Return a tensor by its key."""
        return self._tensors[key]

    def _dtype(self, name: Any) -> torch.dtype:
        """Return a dtype by its name; raise for any other attribute of torch."""
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype {name!r:.80} in this torch")
        return dtype


_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$tensor": _Decoder._tensor,
    "$ndarray": lambda decoder, key: decoder._tensor(key).numpy(),
    "$tuple": lambda decoder, items: tuple(decoder._items(items)),
    "$deque": _Decoder._deque,
    "$set": lambda decoder, items: set(decoder._items(items)),
    "$frozenset": lambda decoder, items: frozenset(decoder._items(items)),
    "$dict": _Decoder._pairs,
    "$float": lambda decoder, name: _FLOATS[name],
    "$bytes": lambda decoder, text: base64.b64decode(text, validate=True),
    "$dtype": _Decoder._dtype,
}
