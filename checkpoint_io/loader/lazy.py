"""Open a checkpoint without reading its tensors, and read whole tensors or slices later."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.safetensors import dtype_of
from checkpoint_io.format.tree import decode_tree
from checkpoint_io.group import Outcome, ProcessGroupLike
from checkpoint_io.loader.files import retry_if_replaced
from checkpoint_io.loader.selection import nearest
from checkpoint_io.loader.share import Claim, check_share, claim_of
from checkpoint_io.loader.source import Source, nbytes_of, wants_for
from checkpoint_io.loader.transfer import Bytes, Flat, Want
from checkpoint_io.loader.verify import check_files
from checkpoint_io.saver.collect import is_shared, local_prefix
from checkpoint_io.sharding.boxes import Axes, Axis
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.threads import collector_paused

__all__ = ["CheckpointReader", "TensorView", "open_checkpoint"]

Path = tuple[Any, ...]


def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointReader:
    """Open a checkpoint without reading its tensors.

    The manifest, the JSON of the shared state and that of one rank's local state are read and
    verified.

    Args:
        url: the folder of a checkpoint.
        rank: the rank whose local state to open; default 0.
        storage_options: passed to the fsspec driver.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint at `url`.
        CorruptCheckpointError: the manifest or the JSON is damaged; the message names the file.
        ManifestVersionError: a newer version of this package wrote it.

    Example:
        >>> import torch
        >>> from checkpoint_io import open_checkpoint, save
        >>> _ = save("memory://doc-views/o", {"model": {"w": torch.arange(6)}, "step": 3})
        >>> reader = open_checkpoint("memory://doc-views/o")
        >>> reader.state
        {'model': {'w': TensorView('model/w', I64, shape=(6,))}, 'step': 3}
        >>> reader["model/w"][2:4]
        tensor([2, 3])
    """
    store = open_store(url, storage_options)

    def opened(manifest: Manifest) -> CheckpointReader:
        reader = CheckpointReader(store, manifest, rank)
        _ = reader.state  # decode now, so that damaged JSON is an error here and not later
        return reader

    return retry_if_replaced(store, opened)


class CheckpointReader:
    """An opened checkpoint; get one from `open_checkpoint`.

    Attributes:
        path: the URL that it was opened from.
        manifest: the files and tensors of the checkpoint, with the caller's metadata.
        state: the shared state; its tensors are `TensorView`s.
        local_state: the local state of the opened rank, likewise; None if it saved none.

    Raises:
        CorruptCheckpointError: the JSON of a state is damaged.

    Example:
        >>> import torch
        >>> from checkpoint_io import open_checkpoint, save
        >>> state = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.zeros(2)}}
        >>> _ = save("memory://doc-views/r", state)
        >>> reader = open_checkpoint("memory://doc-views/r")
        >>> reader.keys()
        ['model/w', 'optimizer/m']
        >>> reader.load_tree(reader.state["model"])
        {'w': tensor([1., 1.])}
        >>> weights = torch.zeros(2)
        >>> reader.read([(reader["model/w"], weights)])
        >>> weights
        tensor([1., 1.])
    """

    def __init__(self, store: Store, manifest: Manifest, rank: int = 0) -> None:
        self.path = store.url
        self.manifest = manifest
        self.source = Source(store, manifest)  # for the rest of this package
        self._prefix = local_prefix(rank)
        local_objects = manifest.rank_objects.get(rank)
        self._names = [manifest.shared_objects] + ([] if local_objects is None else [local_objects])
        self._trees = [
            (self.source.where(name), _parse(data, self.source.where(name)))
            for name, data in _read_objects(self.source, self._names)
        ]

    @property
    def state(self) -> dict[str, Any]:
        """The shared state with views."""
        return self._with_views[0]

    @property
    def local_state(self) -> dict[str, Any] | None:
        """The rank's local state with views."""
        return self._with_views[1]

    @cached_property
    def _with_views(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return self.decoded({key: TensorView(self.source, key) for key in self.keys()})

    def of_rank(self, rank: int) -> CheckpointReader:
        """Return a reader of the same checkpoint with another rank's local state.

        Args:
            rank: the rank that saved it.

        Raises:
            CorruptCheckpointError: its JSON is damaged.
        """
        other = CheckpointReader(self.source.store, self.manifest, rank)
        _ = other.state  # as open_checkpoint does
        return other

    def decoded(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return both states, with these tensors (by key) in place of references."""
        with collector_paused():
            states = [decode_tree(tree, tensors, label) for label, tree in self._trees]
        for (label, _), state in zip(self._trees, states, strict=True):
            if not isinstance(state, dict):
                raise CorruptCheckpointError(f"{label}: the state is not a dict")
        return states[0], states[1] if len(states) > 1 else None

    def keys(self) -> list[str]:
        """Return the keys of all shared tensors and of the rank's local ones, with tied names."""
        known = (*self.manifest.tensors, *self.manifest.aliases)
        return [key for key in known if is_shared(key) or key.startswith(self._prefix)]

    def __getitem__(self, key: str) -> TensorView:
        """Return the view of a tensor, of any rank; KeyError names the nearest key."""
        if key not in self.manifest.tensors and key not in self.manifest.aliases:
            close = nearest(key, self.keys())
            raise KeyError(f"no tensor {key!r} in {self.path}" + f"; {close!r}?" * bool(close))
        return TensorView(self.source, key)

    def __contains__(self, key: object) -> bool:
        return key in self.manifest.tensors or key in self.manifest.aliases

    def __repr__(self) -> str:
        return f"CheckpointReader({self.path!r}, {len(self.manifest.tensors)} tensors)"

    def check(
        self,
        full: bool = False,
        *,
        keys: Iterable[str] | None = None,
        progress: bool | None = False,
        group: ProcessGroupLike | None = None,
        pairs: Sequence[tuple[TensorView, torch.Tensor]] = (),
    ) -> None:
        """Check files against the manifest: sizes, and headers of files with tensors.

        Args:
            full: read and verify every byte of them as well.
            keys: only the files that hold these tensors; default None: all files of all ranks.
            progress: a bar with bytes per second; None shows one for a long check on a terminal.
            group: the ranks that verify together, each byte on one of them; with `full` the call
                is collective then. An error is raised only on the rank that finds the damage: let
                the ranks agree before any goes on. Default None: this rank verifies all.
            pairs: with `group`: what this rank is about to read, as in `read`. It verifies that,
                unless other ranks read it too, and a share of what no rank reads.

        Raises:
            CorruptCheckpointError: a file is missing or differs; names the file and its tensors.
        """
        files: Collection[int] = range(len(self.manifest.files))
        if keys is not None:
            files = self.files_of(keys)
        if not full or group is None or group.world_size == 1:
            check_files(self.source, files, full=full, progress=progress)
            return
        outcome = Outcome.of(lambda: self._claim(files, pairs))
        # a rank that fails has nothing to verify, and must not keep the others waiting
        claims = group.all_gather_object(outcome.value)
        if outcome.error is not None:
            raise outcome.error
        check_share(self.source, claims, group.rank, progress=progress)

    def _claim(
        self, files: Collection[int], pairs: Sequence[tuple[TensorView, torch.Tensor]]
    ) -> Claim:
        """Check the sizes of some files, and return what must be verified of them."""
        check_files(self.source, files, headers=False)
        return self.claim(
            files, self.source.ranges_of((view.key, target) for view, target in pairs)
        )

    def claim(self, files: Collection[int], reads: Sequence[tuple[int, int, int]]) -> Claim:
        """Return a rank's claim; the JSON of this reader was verified when it was opened."""
        unread = [n for n in files if self.manifest.files[n].name not in self._names]
        return claim_of(self.source, unread, reads)

    def files_of(self, keys: Iterable[str]) -> list[int]:
        """Return the indices of the files that hold some tensors or this reader's JSON."""
        files_read = {n for n, entry in enumerate(self.manifest.files) if entry.name in self._names}
        tensors, stored = self.manifest.tensors, self.manifest.aliases.get
        for key in keys:
            files_read.update([chunk.file for chunk in tensors[stored(key, key)].chunks])
        return sorted(files_read)

    def replaced(self) -> bool:
        """Return whether another save has replaced this checkpoint since it was opened."""
        return self.source.replaced()

    def read(
        self,
        pairs: Sequence[tuple[TensorView, torch.Tensor]],
        *,
        cast: bool = False,
        progress: bool | None = None,
    ) -> None:
        """Read tensors into existing ones, in as few transfers as possible.

        Shapes, dtypes and coverage of all targets are checked before the first byte is read.

        Args:
            pairs: views of this checkpoint, each with a tensor (on any device) or DTensor to fill.
            cast: convert to the targets' dtypes; default False: another dtype is an error.
            progress: a bar with bytes per second; None shows one for a long read on a terminal.

        Raises:
            StateMismatchError: a target does not fit; nothing was changed.
            CorruptCheckpointError: bytes are not the ones saved; nothing was changed.
            TornLoadError: the read failed after some targets had been written.
        """
        for view, _ in pairs:
            if view._source is not self.source:
                raise ValueError(f"{view!r} is a view of another checkpoint, not of {self.path}")
        keyed = [(view.key, target) for view, target in pairs]
        self.source.check_targets(keyed, cast)
        self.source.read_into(keyed, progress=progress)

    def load_tree(self, tree: Any, *, progress: bool | None = False) -> Any:
        """Return a tree with its views read into new CPU tensors; tied views become one tensor.

        Args:
            tree: any part of `state` or `local_state`: views in dicts, lists, tuples and sets.
            progress: a bar with bytes per second; None shows one for a long read on a terminal.

        Raises:
            CorruptCheckpointError: bytes are not the ones saved.
        """
        with collector_paused():
            tensors = self.source.new_tensors(view.stored_key for view in views_in(tree))
        self.source.read_into([], fresh=tensors.items(), progress=progress)
        with collector_paused():
            return replace_views(tree, lambda view: as_leaf(view, tensors[view.stored_key]))


def _read_objects(source: Source, names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Read and verify some JSON files."""
    numbers = {entry.name: index for index, entry in enumerate(source.manifest.files)}
    buffers: list[Bytes] = []
    wants = []
    for name in names:
        index = numbers[name]
        entry = source.manifest.files[index]
        if entry.size > jsonio.MAX_JSON_BYTES:
            raise CorruptCheckpointError(
                f"{source.where(name)}: {entry.size} bytes of JSON are refused"
            )
        buffers.append(np.empty(entry.size, dtype=np.uint8))
        wants.append(Want(index, 0, entry.covered, entry.checksums, "", Flat(buffers[-1])))
    source.transfer(wants)
    return [(name, data.tobytes()) for name, data in zip(names, buffers, strict=True)]


def _parse(data: bytes, label: str) -> Any:
    """Return the state in a JSON file, still encoded."""
    with collector_paused():
        document = jsonio.loads(data, label)
    if not isinstance(document, dict) or "state" not in document:
        raise CorruptCheckpointError(f"{label}: there is no state in it")
    return document["state"]


class TensorView:
    """A stored tensor that has not been read; indexing it reads only the bytes it needs.

    Views come from a `CheckpointReader` and can be used as long as the checkpoint exists.

    Attributes:
        key: its name in the checkpoint.
        is_array: whether it was saved from a numpy array; `load_tree` then returns one.

    Example:
        >>> import torch
        >>> from checkpoint_io import open_checkpoint, save
        >>> _ = save("memory://doc-view/v", {"w": torch.arange(12).reshape(3, 4)})
        >>> view = open_checkpoint("memory://doc-view/v")["w"]
        >>> view.dtype, view.shape, view.nbytes
        (torch.int64, (3, 4), 96)
        >>> view[1:, ::2]
        tensor([[ 4,  6],
                [ 8, 10]])
        >>> bool((view.read_into(torch.zeros(3, 4, dtype=torch.int64)) == view.read()).all())
        True
    """

    __slots__ = ("_source", "is_array", "key")

    def __init__(self, source: Source, key: str, is_array: bool = False) -> None:
        self._source = source
        self.key = key
        self.is_array = is_array

    @property
    def dtype(self) -> torch.dtype:
        """The saved dtype; CheckpointError if this torch does not have it."""
        return dtype_of(self._source.entry(self.key).dtype, self.key)

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape, however many ranks wrote it."""
        return self._source.entry(self.key).shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return nbytes_of(self._source.entry(self.key))

    @property
    def stored_key(self) -> str:
        """The key under which the bytes are stored; tied tensors share one."""
        return self._source.stored(self.key)

    def __repr__(self) -> str:
        name = self._source.entry(self.key).dtype
        return f"TensorView({self.key!r}, {name}, shape={self.shape})"

    def numpy(self) -> TensorView:
        """Return a view of the same tensor that `load_tree` reads as a numpy array."""
        return TensorView(self._source, self.key, is_array=True)

    def read(self) -> torch.Tensor:
        """Read and verify the whole tensor; return a new one on the CPU.

        Raises:
            CorruptCheckpointError: its bytes are missing or not the ones saved.
        """
        tensors = self._source.new_tensors([self.key])
        self._source.read_into([], fresh=tensors.items())
        return tensors[self.stored_key]

    def read_into(self, target: torch.Tensor, *, cast: bool = False) -> torch.Tensor:
        """Read into a tensor on any device, or into this rank's part of a DTensor.

        Args:
            target: a tensor of the saved shape. Of a DTensor only the local part is read.
            cast: convert to the target's dtype; default False: another dtype is an error.

        Returns:
            The target.

        Raises:
            StateMismatchError: shape or dtype differ; nothing was changed.
            CorruptCheckpointError: the bytes are not the ones saved; nothing was changed.
            TornLoadError: the same, but part of the target had already been written.
        """
        pairs = [(self.key, target)]
        self._source.check_targets(pairs, cast)
        self._source.read_into(pairs)
        return target

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of the tensor, by ints, slices with a positive step, and `...`.

        Only the parts (of 1 MiB) that hold a selected element are read.

        Raises:
            IndexError: an index is out of range, or of another kind.
            ValueError: a slice has a negative step.
        """
        entry = self._source.entry(self.key)
        axes, kept = parse_index(index, entry.shape)
        box = tuple(axis.length for axis in axes)
        target = torch.empty(box, dtype=self.dtype, device="cpu")
        part = self._source.manifest.part_size
        self._source.transfer(wants_for(entry, self.key, target, part, axes))
        return target.reshape([axes[dim].length for dim in kept])


def parse_index(index: Any, shape: tuple[int, ...]) -> tuple[Axes, list[int]]:
    """Return the box that a basic index selects, and the dimensions that it keeps."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [n for n, item in enumerate(items) if item is Ellipsis]
    missing = len(shape) - (len(items) - len(dots))
    if len(dots) > 1 or missing < 0:
        raise IndexError(f"{index!r:.200} does not index a tensor of shape {shape}")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * missing
    axes = tuple(_axis(item, length) for item, length in zip(items, shape, strict=True))
    return axes, [dim for dim, item in enumerate(items) if isinstance(item, slice)]


def _axis(item: Any, length: int) -> Axis:
    """Return the axis that an int or a slice selects."""
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        if step < 0:
            raise ValueError("a view takes steps of 1 or more: read() it and use torch.flip")
        return Axis(start, len(range(start, stop, step)), step if step < length else 1)
    try:
        if isinstance(item, bool):  # an int in Python, but a mask in torch
            raise TypeError
        number = operator.index(item)
    except TypeError:
        raise IndexError(
            f"a view takes ints, slices and ..., not {type(item).__name__}: "
            "read() it and index the tensor"
        ) from None
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of range for a dimension of {length}")
    return Axis(number % length, 1)


def views_in(tree: Any) -> Iterator[TensorView]:
    """Yield the views in a tree, in its order."""
    if isinstance(tree, TensorView):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from views_in(item)
    elif isinstance(tree, (list, tuple, deque, set, frozenset)):
        for item in tree:
            yield from views_in(item)


def replace_views(tree: Any, value: Callable[[TensorView], Any]) -> Any:
    """Return the same tree with a value in place of each view."""
    if isinstance(tree, TensorView):
        return value(tree)
    if isinstance(tree, dict):
        return {key: replace_views(item, value) for key, item in tree.items()}
    if isinstance(tree, deque):
        return deque((replace_views(item, value) for item in tree), tree.maxlen)
    if isinstance(tree, (list, tuple, set, frozenset)):
        return type(tree)(replace_views(item, value) for item in tree)
    return tree


def as_leaf(view: TensorView, tensor: torch.Tensor) -> Any:
    """Return a tensor, or a numpy array if it was saved from one."""
    return tensor.numpy() if view.is_array else tensor


def pair_leaves(tree: Any, saved: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield each leaf of the caller's tree with its path and what was saved there (or None)."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from pair_leaves(item, _child(saved, key), (*path, key))
    elif isinstance(tree, (list, tuple, deque)):
        for index, item in enumerate(tree):
            yield from pair_leaves(item, _child(saved, index), (*path, index))
    else:
        yield path, tree, saved


def _child(saved: Any, key: Any) -> Any:
    """Return the item of a saved dict or sequence under a key, None if there is none."""
    if isinstance(saved, dict):
        return saved.get(key)
    if isinstance(saved, (list, tuple, deque)) and type(key) is int and key < len(saved):
        return saved[key]
    return None
