"""Load a checkpoint: match names, check everything, then read."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from checkpoint_io.errors import StateMismatchError
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.safetensors import dtype_of
from checkpoint_io.loader.files import manifest_of, retry_if_replaced
from checkpoint_io.loader.lazy import (
    CheckpointReader,
    TensorView,
    as_leaf,
    open_checkpoint,
    pair_leaves,
    replace_views,
    views_in,
)
from checkpoint_io.loader.selection import (
    Only,
    Rename,
    match_names,
    renamer,
    reusable,
    selector,
    unmatched_patterns,
)
from checkpoint_io.loader.share import Claim, check_share
from checkpoint_io.loader.source import PlannedRead
from checkpoint_io.loader.verify import check_files
from checkpoint_io.saver.collect import free_key, shared_key
from checkpoint_io.sharding.dtensor import is_dtensor
from checkpoint_io.storage.open import open_store
from checkpoint_io.threads import collector_paused

__all__ = ["Checkpoint", "CheckpointReader", "load", "open_checkpoint", "read_manifest"]

T = TypeVar("T")
# A generator that is sent what all ranks yielded, in rank order, and returns the result.
Steps = Generator[Any, Any, T]

VERIFY = ("parts", "full", "sizes")


def load(
    url: str | os.PathLike[str],
    *,
    rank: int = 0,
    into: Mapping[Any, Any] | None = None,
    only: Only | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    verify: Literal["parts", "full", "sizes"] = "parts",
    cast: bool = False,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Load the shared state and one rank's local state; verify every byte before it is used.

    No process group is needed, however many ranks saved: each rank reads what it needs.

    Args:
        url: the folder of a checkpoint.
        rank: the rank whose `local_state` to return; default 0. None for a rank that saved none.
        into: a dict like the saved state, or some of its top-level keys, with tensors (on any
            device), DTensors or numpy arrays to be filled in place; of a DTensor only this rank's
            part is read. Plain values in it are not changed: the saved ones are in the returned
            state, which holds the given tensors. Saved tensors outside of its top-level keys are
            loaded as new ones.
        only: the saved names to load: a glob pattern over keys such as `models/0/*` (`*` also
            matches `/`), several, or a function. Default None: all. Tensors that are not selected
            are returned as `TensorView`s, which can be read later.
        rename: with `into`: prefixes of saved keys mapped to their names there, or a function.
        strict: True (default): a name in `into` that was not saved, a saved name below the
            top-level keys of `into` without a target there, or a pattern that matches nothing, is
            an error that names the nearest names. False: they are listed in the result.
        verify: "parts" (default) checks sizes and headers before anything is changed, then each
            part of 1 MiB before it is copied; "full" checks every byte of the files it needs
            before anything is changed; "sizes" checks sizes alone.
        cast: convert to the dtypes of `into`; default False: another dtype is an error.
        progress: a bar with bytes per second; default None: for a long load on a terminal.
        storage_options: passed to the fsspec driver.

    Returns:
        A `Checkpoint`; new tensors are on the CPU, with the saved dtypes and shapes.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint at `url`.
        CorruptCheckpointError: a file is missing or differs; the message names it.
        StateMismatchError: names, shapes or dtypes do not fit `into`; nothing was changed.
        TornLoadError: the load failed after some tensors in `into` had been written.
        ManifestVersionError: this package cannot read the version that wrote it.

    Example:
        >>> import torch
        >>> from checkpoint_io import load, save
        >>> state = {"model": {"w": torch.arange(3)}, "optimizer": {"m": torch.zeros(3)}}
        >>> _ = save("memory://doc-reader/l", state)
        >>> load("memory://doc-reader/l").state["model"]["w"]
        tensor([0, 1, 2])
        >>> weights = torch.zeros(3, dtype=torch.int64)
        >>> _ = load("memory://doc-reader/l", into={"model": {"w": weights}}, only="model/*")
        >>> weights
        tensor([0, 1, 2])
    """
    # by default rank 0 alone shows a bar
    shown = False if progress is None and rank else progress
    request = Request(into, only, rename, strict, verify, cast, shown)
    return load_request(url, rank, request, storage_options)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        path: the URL that it was loaded from.
        state: the shared state; tensors are on the CPU (or the ones passed as `into`), tied
            tensors are one tensor again. Tensors that were not selected are `TensorView`s.
        local_state: the local state of the requested rank, None if it saved none.
        manifest: the files and tensors of the checkpoint, with the caller's metadata.
        missing: with `strict=False`: names in `into` (or patterns) for which nothing was saved.
        unexpected: with `strict=False`: saved names without a target in `into`.

    Example:
        >>> from checkpoint_io import load, save
        >>> _ = save("memory://doc-reader/c", {"step": 3}, local_state={"seen": 96})
        >>> checkpoint = load("memory://doc-reader/c")
        >>> checkpoint.state, checkpoint.local_state
        ({'step': 3}, {'seen': 96})
    """

    path: str
    state: dict[str, Any]
    local_state: dict[str, Any] | None
    manifest: Manifest
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def read_manifest(
    url: str | os.PathLike[str],
    *,
    tensors: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Read and check the manifest of a checkpoint, without its data.

    Args:
        url: the folder of a checkpoint.
        tensors: False reads the entries of the tensors, which are most of the manifest of a large
            model, only when they are asked for; default True.
        storage_options: passed to the fsspec driver.

    Returns:
        The manifest; its digest and all its entries have been checked. Without `tensors`, the
        entries of the tensors are checked when they are read; CorruptCheckpointError if another
        save has replaced the checkpoint by then.

    Raises:
        CheckpointNotFoundError: there is no manifest at `url`.
        CorruptCheckpointError: the manifest is damaged or not acceptable.
        ManifestVersionError: this package cannot read the version that wrote it.

    Example:
        >>> from checkpoint_io import read_manifest, save
        >>> _ = save("memory://doc-reader/m", {"lr": 0.1}, metadata={"step": 200})
        >>> read_manifest("memory://doc-reader/m").metadata["step"]
        200
    """
    return manifest_of(open_store(url, storage_options), tensors=tensors)


@dataclass(frozen=True)
class Request:
    """The checked arguments of `load`."""

    into: Mapping[Any, Any] | None = None
    only: Only | None = None
    rename: Rename | None = None
    strict: bool = True
    verify: str = "parts"
    cast: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.verify not in VERIFY:
            raise ValueError(f"verify= is one of {', '.join(VERIFY)}, not {self.verify!r}")
        if self.into is not None and not isinstance(self.into, Mapping):
            raise TypeError(
                f"into= is a dict like the saved state, not a {type(self.into).__name__}"
            )
        if self.rename is not None and self.into is None:
            raise ValueError("rename= maps saved names to those in into=, which is missing")
        object.__setattr__(self, "only", reusable(self.only))  # a generator can be consumed once

    @property
    def whole(self) -> bool:
        """True if all is read into new tensors, the most frequent case, which needs no views."""
        return self.into is None and self.only is None


@dataclass
class _Plan:
    """The saved tensors to read into the caller's targets, and those to read into new ones."""

    targets: dict[str, Any] = field(default_factory=dict)  # the caller's targets by saved key
    fresh: dict[str, None] = field(default_factory=dict)  # an ordered set of saved keys
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def load_request(
    url: str | os.PathLike[str],
    rank: int,
    request: Request,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Load on this rank alone; see `load`."""
    store = open_store(url, storage_options)
    return retry_if_replaced(
        store, lambda manifest: read_checkpoint(CheckpointReader(store, manifest, rank), request)
    )


def read_checkpoint(reader: CheckpointReader, request: Request) -> Checkpoint:
    """Read what was requested; check everything that can be checked before the first write."""
    loading = Loading(reader, request)
    loading.check()
    return loading.read()


def load_in_steps(
    url: str,
    rank: int,
    group_rank: int,
    request: Request,
    storage_options: Mapping[str, Any] | None = None,
) -> Steps[Checkpoint]:
    """Load on several ranks, which verify "full" together: each byte on one of them.

    A generator: every rank passes each value that it yields to the others, and sends it what all of
    them yielded, in rank order. Nothing is written to a target before the last step, which begins
    only after the steps before have succeeded on all ranks.

    Args:
        url: the folder of a checkpoint.
        rank: the rank whose `local_state` to return.
        group_rank: this rank among those that load.
        request: what to load; may differ between the ranks.
        storage_options: passed to the fsspec driver.

    Raises:
        CheckpointError: as `load` does, and if a save replaces the checkpoint meanwhile.
    """
    store = open_store(url, storage_options)

    def plan(manifest: Manifest) -> Loading:
        loading = Loading(CheckpointReader(store, manifest, rank), request)
        loading.check(full=False)
        return loading

    loading = retry_if_replaced(store, plan)
    claims = yield loading.claim()
    loading.check_share(claims, group_rank)
    # A barrier: no rank writes to its targets before all have verified their shares. All decide by
    # the same claims, so that they take the same number of steps.
    if any(claim["needed"] for claim in claims):
        yield None
    return loading.read()


class Loading:
    """A load whose targets fit; nothing of its tensors has been read.

    Args:
        reader: the opened checkpoint.
        request: what to load.
    """

    def __init__(self, reader: CheckpointReader, request: Request) -> None:
        self._reader, self._request = reader, request
        self._plan: _Plan | None = None
        self._targets: dict[str, torch.Tensor] = {}
        self._keys = reader.keys() if request.whole else []  # to read into new tensors
        if not request.whole:
            new = request.into is None
            with collector_paused():
                plan = _plan_new(reader, request) if new else _plan_into(reader, request)
            self._plan, self._keys = plan, list(plan.fresh)
            self._targets = {key: _as_tensor(key, value) for key, value in plan.targets.items()}
            reader.source.check_targets(self._targets.items(), request.cast)
        self._files = reader.files_of([*self._targets, *self._keys])

    def check(self, full: bool = True) -> None:
        """Check the files as requested; without `full` this leaves verify="full" to the ranks."""
        request = self._request
        wants_full = request.verify == "full"
        check_files(
            self._reader.source,
            self._files,
            headers=request.verify == "parts" or (wants_full and full),
            full=wants_full and full,
            progress=request.progress,
        )

    def claim(self) -> Claim:
        """Return what the ranks have to verify for this one, and what it reads itself."""
        files = self._files if self._request.verify == "full" else []
        return self._reader.claim(files, self._read_plan.transfer.ranges())

    def check_share(self, claims: Sequence[Claim | None], rank: int) -> None:
        """Verify this rank's share of what the ranks claim."""
        check_share(self._reader.source, claims, rank, progress=self._request.progress)

    def read(self) -> Checkpoint:
        """Read into the targets and into new tensors."""
        # From here on a failure leaves a mixture in the targets, see `Source.run`.
        reader, plan, tensors = self._reader, self._plan, {**self._by_stored, **self._fresh}
        self._read_plan.run(self._request.progress)
        if plan is None:
            with collector_paused():
                stored = reader.manifest.aliases.get
                known = {key: tensors[stored(key, key)] for key in self._keys}
            state, local_state = reader.decoded(known)
            return Checkpoint(reader.path, state, local_state, reader.manifest)

        def value(view: TensorView) -> Any:
            if view.key in plan.targets:
                return plan.targets[view.key]
            return as_leaf(view, tensors[view.stored_key]) if view.key in plan.fresh else view

        with collector_paused():
            state = replace_views(reader.state, value)
            local = replace_views(reader.local_state, value)
        missing, unexpected = tuple(plan.missing), tuple(plan.unexpected)
        return Checkpoint(reader.path, state, local, reader.manifest, missing, unexpected)

    @cached_property
    def _by_stored(self) -> dict[str, torch.Tensor]:
        """The targets by stored key.

        A saved tensor that is tied to one of these is not read again but is this one, unless the
        caller's is sharded or of another dtype.
        """
        source = self._reader.source
        return {
            source.stored(key): target
            for key, target in self._targets.items()
            if not is_dtensor(target) and target.dtype == dtype_of(source.entry(key).dtype, key)
        }

    @cached_property
    def _fresh(self) -> dict[str, torch.Tensor]:
        """The new tensors by stored key; made after the sizes of the files were checked."""
        aliases = self._reader.manifest.aliases
        with collector_paused():
            new = dict.fromkeys(aliases.get(key, key) for key in self._keys)
            return self._reader.source.new_tensors(key for key in new if key not in self._by_stored)

    @cached_property
    def _read_plan(self) -> PlannedRead:
        return self._reader.source.plan_read(
            list(self._targets.items()),
            fresh=self._fresh.items(),
            check=self._request.verify != "sizes",
        )


def _plan_new(reader: CheckpointReader, request: Request) -> _Plan:
    """Plan to read all selected tensors into new ones."""
    views = [*views_in(reader.state), *views_in(reader.local_state)]
    keys = [view.key for view in views]
    missing = unmatched_patterns(request.only, keys, reader.path, request.strict)
    selected = selector(request.only)
    return _Plan(fresh={key: None for key in keys if selected(key)}, missing=missing)


def _plan_into(reader: CheckpointReader, request: Request) -> _Plan:
    """Plan to read into the caller's tensors those of the same name."""
    assert request.into is not None
    wanted, replaced = _targets_by_key(request.into, reader.state)
    translate, selected = renamer(request.rename), selector(request.only)
    roots = {shared_key((key,)) for key in request.into}
    keys = list(dict.fromkeys(view.key for view in views_in(reader.state)))
    # below the caller's top-level keys every saved tensor should have a target
    scope = [k for k in keys if k not in replaced and translate(k).split("/", 1)[0] in roots]
    matched = match_names(wanted, scope, request.only, request.rename)
    if request.strict:
        matched.require(reader.path)
    in_scope = set(scope)
    local = [view.key for view in views_in(reader.local_state)]
    others = [key for key in keys if key not in in_scope] + local
    unmatched = unmatched_patterns(request.only, [*keys, *local], reader.path, request.strict)
    return _Plan(
        targets={saved: wanted[name] for name, saved in matched.pairs},
        fresh={key: None for key in others if selected(key)},
        missing=matched.missing + unmatched,
        unexpected=matched.unexpected,
    )


def _targets_by_key(into: Mapping[Any, Any], saved: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the caller's tensors by key, and the keys where the caller has a plain value."""
    wanted: dict[str, Any] = {}
    replaced: set[str] = set()
    for path, leaf, saved_leaf in pair_leaves(into, saved):
        if not isinstance(leaf, (torch.Tensor, np.ndarray)):
            replaced.update(view.key for view in views_in(saved_leaf))
            continue
        # the view knows its key; one is built only for a path that the saved tree lacks
        name = saved_leaf.key if isinstance(saved_leaf, TensorView) else shared_key(path)
        wanted[free_key(name, wanted)] = leaf
    return wanted, replaced


def _as_tensor(key: str, value: Any) -> torch.Tensor:
    """Return the caller's tensor; for a numpy array, a tensor that shares its memory."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        if value.flags.writeable:
            return torch.from_numpy(value)
    except TypeError:
        pass
    raise StateMismatchError(
        f"tensor {key}: the numpy array to load into is read-only or of a type that a checkpoint "
        f"cannot hold ({value.dtype}); nothing was changed"
    )
