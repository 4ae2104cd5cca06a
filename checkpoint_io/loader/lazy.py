"""An opened checkpoint: its trees and manifest at once, its tensors when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.tree import decode_tree
from checkpoint_io.loader.files import while_replaced
from checkpoint_io.loader.selection import nearest
from checkpoint_io.loader.source import Source
from checkpoint_io.loader.transfer import Want
from checkpoint_io.loader.verify import check_files
from checkpoint_io.pausing import collector_paused
from checkpoint_io.reading.leaves import as_leaf, replace_views, views_in
from checkpoint_io.reading.sinks import Bytes, Flat
from checkpoint_io.reading.tensor_view import TensorView
from checkpoint_io.saver.collect import is_shared, local_prefix
from checkpoint_io.storage.open import Store, open_store

__all__ = ["CheckpointReader", "TensorView", "open_checkpoint"]


def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointReader:
    """Open a checkpoint without reading its tensors.

    The manifest and the JSON of the shared state and of one rank's own are read and verified.

    Args:
        url: the folder of a checkpoint.
        rank: whose own state to open; default 0.
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
        _ = reader.state  # a bad one is an error now, not later
        return reader

    return while_replaced(store, opened)


class CheckpointReader:
    """An opened checkpoint; get one from `open_checkpoint`.

    Attributes:
        path: the URL that it was opened from.
        manifest: what the checkpoint consists of, with the caller's metadata.
        state: the shared state; its tensors are `TensorView`s.
        local_state: the opened rank's own state likewise, None if it saved none.

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
        own = manifest.rank_objects.get(rank)
        self._names = [manifest.shared_objects] + ([] if own is None else [own])
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
        """The rank's own state with views."""
        return self._with_views[1]

    @cached_property
    def _with_views(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return self.decoded(_Views(self.source, self._prefix))

    def decoded(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return both states with these tensors (by key) in them."""
        with collector_paused():
            states = [_decode(tree, tensors, where) for where, tree in self._trees]
        return states[0], states[1] if len(states) > 1 else None

    def keys(self) -> list[str]:
        """Return the keys of all shared tensors and of the opened rank's own, tied ones too."""
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
    ) -> None:
        """Check files against the manifest: sizes, and headers of files with tensors.

        Args:
            full: read and verify every byte of them as well.
            keys: only the files that hold these tensors; default None: all files of all ranks.
            progress: a bar with bytes per second; None shows one for a long check on a terminal.

        Raises:
            CorruptCheckpointError: a file is missing or differs; names it and a tensor in it.
        """
        files: Collection[int] = range(len(self.manifest.files))
        if keys is not None:
            files = self.files_of(keys)
        check_files(self.source, files, full=full, progress=progress)

    def files_of(self, keys: Iterable[str]) -> list[int]:
        """Return the indices of the files that hold some tensors, and of this reader's JSON."""
        found = {n for n, entry in enumerate(self.manifest.files) if entry.name in self._names}
        tensors, stored = self.manifest.tensors, self.manifest.aliases.get
        for key in keys:
            found.update([chunk.file for chunk in tensors[stored(key, key)].chunks])
        return sorted(found)

    def replaced(self) -> bool:
        """Say whether another save has replaced this checkpoint since it was opened."""
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
            pairs: views of this checkpoint, with the tensor (on any device) or DTensor to fill.
            cast: convert to the targets' dtypes; default False: another dtype is an error.
            progress: a bar with bytes per second; None shows one for a long read on a terminal.

        Raises:
            StateMismatchError: a target does not fit; nothing was changed.
            CorruptCheckpointError: bytes are not the ones saved; nothing was changed.
            TornLoadError: the read broke off after some targets had been written.
        """
        for view, _ in pairs:
            if not view.belongs_to(self.source):
                raise ValueError(f"{view!r} is a view of another checkpoint than {self.path}")
        keyed = [(view.key, target) for view, target in pairs]
        self.source.check_targets(keyed, cast)
        self.source.fill(keyed, progress=progress)

    def load_tree(self, tree: Any, *, progress: bool | None = False) -> Any:
        """Return a tree with its views read into new CPU tensors; tied views give one tensor.

        Args:
            tree: any part of `state` or `local_state`: views in dicts, lists, tuples and sets.
            progress: a bar with bytes per second; None shows one for a long read on a terminal.

        Raises:
            CorruptCheckpointError: bytes are not the ones saved.
        """
        with collector_paused():
            tensors = self.source.new_tensors(view.stored_key for view in views_in(tree))
        self.source.fill([], fresh=tensors.items(), progress=progress)
        with collector_paused():
            return replace_views(tree, lambda view: as_leaf(view, tensors[view.stored_key]))


class _Views(Mapping[str, Any]):
    """The tensors that the trees of one rank may refer to, as views."""

    def __init__(self, source: Source, prefix: str) -> None:
        self._source, self._prefix = source, prefix
        self._tensors, self._aliases = source.manifest.tensors, source.manifest.aliases

    def __getitem__(self, key: str) -> TensorView:
        if key not in self._tensors and key not in self._aliases:
            raise KeyError(key)
        if not is_shared(key) and not key.startswith(self._prefix):
            raise KeyError(key)
        return TensorView(self._source, key)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._tensors, *self._aliases))

    def __len__(self) -> int:
        return len(self._tensors) + len(self._aliases)


def _read_objects(source: Source, names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Read some JSON files, verified."""
    numbers = {entry.name: index for index, entry in enumerate(source.manifest.files)}
    found: list[Bytes] = []
    wants = []
    for name in names:
        index = numbers[name]
        entry = source.manifest.files[index]
        if entry.size > jsonio.MAX_JSON_BYTES:
            raise CorruptCheckpointError(
                f"{source.where(name)}: {entry.size} bytes of JSON are refused"
            )
        found.append(np.empty(entry.size, dtype=np.uint8))
        wants.append(Want(index, 0, entry.covered, entry.checksums, "", Flat(found[-1])))
    source.transfer(wants)
    return [(name, data.tobytes()) for name, data in zip(names, found, strict=True)]


def _parse(data: bytes, where: str) -> Any:
    """Return the state in a JSON file, still encoded."""
    with collector_paused():
        document = jsonio.loads(data, where)
    if not isinstance(document, dict) or "state" not in document:
        raise CorruptCheckpointError(f"{where}: holds no state")
    return document["state"]


def _decode(tree: Any, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Decode a state, which is a dict at its root."""
    state = decode_tree(tree, tensors, where)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{where}: the state is not a dict")
    return state
