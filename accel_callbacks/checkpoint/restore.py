"""Restore a training state: open, check that it fits, read in place, apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks.callbacks.dispatch.instances import family
from accel_callbacks.checkpoint.compatibility import (
    check_classes,
    chosen_indices,
    compare_frozen,
    fitting_weights,
    naming_checkpoint,
    rank_part,
    warn_of_names,
)
from accel_callbacks.checkpoint.open import (
    LoadFailed,
    open_folder,
    open_newest,
    open_one,
    process_group,
    together,
)
from accel_callbacks.checkpoint.open_window import OpenWindow, read_window, restore_window
from accel_callbacks.checkpoint.project import number_of
from accel_callbacks.checkpoint.selection import Selection, all_keys
from accel_callbacks.checkpoint.trained_parameters import require_saved
from accel_callbacks.checkpoint.training_state import (
    RestoreReport,
    TrainingState,
    with_local_state,
)
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.rng import devices_of, restore_rng
from accel_callbacks.errors import NO_MODEL, ResumeError
from accel_callbacks.gradients import local_part
from accel_callbacks.logging import notice
from accel_callbacks.strategies.optimizer_state import parameter_names

if TYPE_CHECKING:
    from accel_callbacks.strategies.base import Strategy
    from checkpoint_io import CheckpointReader, TensorView

__all__ = [
    "Content",
    "InPlaceReads",
    "LoadOptions",
    "Ready",
    "apply",
    "find",
    "make_ready",
    "place_optimizer_state",
    "read_content",
    "restore_from",
    "restore_newest",
    "views_in",
]

_KINDS = ("models", "optimizers", "schedulers", "loaders")
_WHERE = "load_state"


NewPart = Callable[[tuple[int, ...], torch.dtype], "torch.Tensor | None"]


class InPlaceReads:
    """Collects pairs of a checkpoint's view and the tensor that it is read into, and reads them.

    Nothing is changed before :meth:`run`.

    Args:
        reader: the checkpoint.

    Attributes:
        changes: True if some of the memory is that of prepared objects.

    Example:
        >>> import torch
        >>> from accel_callbacks.checkpoint.restore import InPlaceReads
        >>> from checkpoint_io import open_checkpoint, save
        >>> _ = save("memory://doc-reads/c", {"weight": torch.ones(2)})
        >>> reader, here = open_checkpoint("memory://doc-reads/c"), torch.zeros(2)
        >>> reads = InPlaceReads(reader)
        >>> reads.into("weight", reader["weight"], here)
        >>> reads.run()
        >>> here
        tensor([1., 1.])
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.changes = False
        self._reader = reader
        self._pairs: list[tuple[TensorView, torch.Tensor]] = []
        self._places: dict[tuple[Any, ...], tuple[str, str]] = {}  # memory to key and name
        self._storages: set[int] = set()

    def into(self, name: str, view: TensorView, target: torch.Tensor) -> None:
        """Add a view to be read into a tensor of a model; tied tensors are read once.

        Raises:
            ResumeError: two names are one tensor here, and two in the checkpoint.
        """
        local = local_part(target)
        place = (_storage(local), local.storage_offset(), local.shape, local.stride())
        before = self._places.setdefault(place, (view.stored_key, name))
        if local.numel() and before[1] != name:
            if before[0] != view.stored_key:
                raise ResumeError(
                    f"{before[1]!r} and {name!r} are one tensor in the model and two in the "
                    "checkpoint: tie them after loading, or load one of them with only=."
                )
            return
        self._storages.add(place[0])
        self.changes = True
        self._pairs.append((view, target.detach()))

    def into_new(self, pairs: Iterable[tuple[TensorView, torch.Tensor]]) -> None:
        """Add views to be read into tensors that nothing else uses yet."""
        self._pairs.extend(pairs)

    @staticmethod
    def is_view(saved: Any) -> bool:
        """Return whether a part of a saved state is a view that is still to be read."""
        from checkpoint_io import TensorView

        return isinstance(saved, TensorView)

    def replace(
        self,
        saved: Any,
        current: Any = None,
        parameter: torch.Tensor | None = None,
        key: Any = None,
        part: NewPart | None = None,
    ) -> Any:
        """Return a part of a saved state with tensors in place of its views.

        A current tensor that fits is used again; else a new one is made.

        Args:
            saved: the part in the checkpoint.
            current: the same part of the current state, if there is one.
            parameter: the parameter that the part belongs to; without one, tensors are on the CPU.
            key: the name of the part.
            part: makes tensors of which a rank reads its part, by shape and dtype.
        """
        if isinstance(saved, Mapping):
            inner = current if isinstance(current, Mapping) else {}
            return {k: self.replace(v, inner.get(k), parameter, k, part) for k, v in saved.items()}
        if isinstance(saved, (list, tuple)):
            here = current if isinstance(current, (list, tuple)) else ()
            filled = [*here, *[None] * len(saved)]
            return type(saved)(
                self.replace(value, filled[i], parameter, key, part)
                for i, value in enumerate(saved)
            )
        if not self.is_view(saved):
            return saved
        return self._leaf(saved, current, parameter, key, part)

    def _leaf(
        self, view: TensorView, current: Any, parameter: Any, key: Any, part: NewPart | None
    ) -> Any:
        if view.is_array:
            return self._new(view, None, key).numpy()
        sharded = None if part is None else part(view.shape, view.dtype)
        if sharded is not None:
            self._pairs.append((view, sharded))
            return sharded
        if not self._reusable(current, view):
            return self._new(view, parameter, key)
        self._storages.add(_storage(local_part(current)))
        self.changes = True
        self._pairs.append((view, current.detach()))
        return current

    def _new(self, view: TensorView, parameter: torch.Tensor | None, key: Any) -> torch.Tensor:
        """Make a tensor for a state, sharded like its parameter if it has the same shape."""
        # torch moves the step count to where the optimizer wants it.
        if parameter is None or key == "step":
            target = torch.empty(view.shape, dtype=view.dtype, device="cpu")
        elif view.shape == tuple(parameter.shape):
            target = torch.empty_like(parameter, dtype=view.dtype, requires_grad=False)
        else:
            target = torch.empty(view.shape, dtype=view.dtype, device=parameter.device)
        self._pairs.append((view, target))
        return target

    def _reusable(self, current: Any, view: TensorView) -> bool:
        """Return whether a tensor fits, and shares its memory with no other."""
        if not isinstance(current, torch.Tensor) or current.is_meta:
            return False
        if tuple(current.shape) != view.shape or current.dtype != view.dtype:
            return False
        local = local_part(current)
        own = local.untyped_storage().nbytes() == local.nbytes
        return own and _storage(local) not in self._storages

    def run(self, progress: bool | None = None) -> None:
        """Read all views; every byte is verified before it is written."""
        self._reader.read(self._pairs, progress=progress)


def views_in(tree: Any) -> Iterator[TensorView]:
    """Iterate the views in a part of a saved state.

    Example:
        >>> from accel_callbacks.checkpoint.restore import views_in
        >>> list(views_in({"lr": [0.1]}))
        []
    """
    if InPlaceReads.is_view(tree):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from views_in(item)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_NEEDED = (*_KINDS, "precision", "run", "callbacks", "trackers")


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load; see ``Accelerator.load_state``.

    Example:
        >>> from accel_callbacks.checkpoint.restore import LoadOptions
        >>> LoadOptions().verify
        'parts'
    """

    selection: Selection = field(default_factory=Selection)
    strict: bool = False
    verify: str = "parts"
    progress: bool | None = None
    storage_options: Mapping[str, Any] | None = None
    accept: Callable[[CheckpointReader], None] | None = None  # collective, before anything is read


class Content(NamedTuple):
    """The content of a checkpoint; if ``lazy``, models and optimizers are still to be read.

    So are the ``parts``, sharded tensors that are in the states of callbacks already. The gradients
    of the open window are read into new memory.
    """

    state: dict[str, Any]
    local: dict[str, Any] | None
    lazy: bool
    parts: list[tuple[TensorView, torch.Tensor]]
    window: OpenWindow | None


class Ready(NamedTuple):
    """The selected part of a checkpoint that fits.

    Attributes:
        state: the selected part.
        weights: for models that load in their own way, by index.
        optimizers: states whose tensors are read by ``reads``, by index.
        indices: the prepared objects to restore, by kind.
        local: the part of this rank.
        window: the open window.
        reads: the tensors to read in place.
        report: the names that are not restored.
    """

    state: dict[str, Any]
    weights: dict[int, dict[str, Any]]
    optimizers: dict[int, dict[str, Any]]
    indices: dict[str, list[int]]
    local: dict[str, Any] | None
    window: OpenWindow | None
    reads: InPlaceReads
    report: RestoreReport


class _Division(NamedTuple):
    """What of a checkpoint is read first, and what is read in place later.

    Attributes:
        state: the shared state, with views.
        first: the parts of both states that are read first.
        lazy: models and optimizers are not among them.
        keys: the tensors of all parts.
        parts: views of the states of callbacks with the sharded tensors in their place.
        sharded: for a full check, views with tensors that are sharded as their targets are.
    """

    state: dict[str, Any]
    first: dict[str, Any]
    lazy: bool
    keys: set[str]
    parts: list[tuple[TensorView, torch.Tensor]]
    sharded: list[tuple[TensorView, torch.Tensor]]


def _divide(training: TrainingState, reader: CheckpointReader, options: LoadOptions) -> _Division:
    """Divide a checkpoint into parts, without reading tensors.

    Raises:
        ResumeError: it holds no training state.
    """
    state: dict[str, Any] = dict(reader.state)
    if missing := [name for name in _NEEDED if name not in state]:
        raise ResumeError(
            f"{reader.path} holds no {missing[0]!r}: it was not written by save_state(). "
            "checkpoint_io.load reads it."
        )
    part = options.selection.apply(state)
    rest, in_place = {k: v for k, v in state.items() if k != "window"}, {}
    lazy = not _hooks_want_tensors(training)
    if lazy:
        in_place = {name: part[name] for name in ("models", "optimizers")}
        rest = {name: value for name, value in rest.items() if name not in in_place}
        rest["registered"] = part["registered"]
    first = {"state": rest, "local": reader.local_state}
    keys = {view.key for view in views_in([in_place, first, state.get("window")])}
    parts: list[tuple[TensorView, torch.Tensor]] = []
    if lazy and options.selection.takes("callbacks"):
        rest["callbacks"], parts = _with_parts(training, rest["callbacks"])
    sharded = [*parts, *_sharded(training, in_place)] if options.verify == "full" else []
    return _Division(state, first, lazy, keys, parts, sharded)


def _with_parts(
    training: TrainingState, states: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[TensorView, torch.Tensor]]]:
    """Return saved states of callbacks with new sharded tensors in place of some views, and both.

    Of averages of sharded weights a rank reads its part: whole ones are as large as the model.
    """
    states, pairs = dict(states), []
    for entry in training.loop.dispatch.entries:
        if not hasattr(entry.callback, "parts_to_read"):
            continue
        # Which of several of one class has which state is known once all has been read.
        for key in family(states, entry.base):
            state = states[key]
            parts = entry.callback.parts_to_read(state, training.bare_models)
            if parts:
                pairs += [(state["average"][name], part) for name, part in parts.items()]
                states[key] = {**state, "average": {**state["average"], **parts}}
    return states, pairs


def _sharded(
    training: TrainingState, in_place: Mapping[str, Any]
) -> Iterator[tuple[TensorView, torch.Tensor]]:
    """Pair views with the sharded parameters of their names: of these a rank reads its part."""
    from checkpoint_io.sharding import is_dtensor

    named: dict[str, torch.Tensor] = {}
    for index, model in enumerate(training.models):
        for name, value in training.strategy.local_state_dict(model).items():
            if isinstance(value, torch.Tensor) and is_dtensor(value):
                named[f"{index}.{name}"] = value
    for index, weights in in_place.get("models", {}).items():
        for name, view in (weights or {}).items():
            yield from _fitting(view, named.get(f"{index}.{name}"))
    for saved in in_place.get("optimizers", {}).values():
        for name, state in saved["state"].items():
            for view in views_in(state):
                yield from _fitting(view, named.get(name))


def _fitting(saved: Any, here: torch.Tensor | None) -> Iterator[tuple[TensorView, torch.Tensor]]:
    if here is not None and InPlaceReads.is_view(saved) and saved.shape == tuple(here.shape):
        yield saved, here


def read_content(
    training: TrainingState, reader: CheckpointReader, options: LoadOptions, divided: _Division
) -> Content:
    """Verify the checkpoint, and read all that is not read in place.

    With ``verify="full"`` it is collective, and each byte is verified by one rank.

    Raises:
        checkpoint_io.CheckpointError: it is damaged.
    """
    full = options.verify == "full"
    reader.check(
        full,
        keys=divided.keys,
        progress=options.progress if full else False,
        group=process_group(),
        pairs=divided.sharded,
    )
    loaded = reader.load_tree(divided.first)
    window = read_window(training, reader, loaded["local"], options.selection)
    state = {**divided.state, **loaded["state"]}
    return Content(state, loaded["local"], divided.lazy, divided.parts, window)


def _hooks_want_tensors(training: TrainingState) -> bool:
    return training.pre_hooks.load_some or bool(training.loop.dispatch.hooks["on_load_checkpoint"])


def make_ready(
    training: TrainingState, reader: CheckpointReader, content: Content, options: LoadOptions
) -> Ready:
    """Check that all fits, and load what may refuse the load: hooks and registered objects.

    Raises:
        ResumeError: it does not fit, or the resume is not exact and ``strict``.
    """
    selection, state = options.selection, content.state
    selection.check(all_keys(state))
    part = selection.apply(state)
    if training.models and _is_empty(state) and not selection.partial:
        raise ResumeError(NO_MODEL.format(reader.path))
    indices = {kind: chosen_indices(training, part, kind, selection) for kind in _KINDS}
    if not selection.renames:  # the fingerprints have the names of the save
        compare_frozen(training, part, indices["models"], options.strict)
    hooked = training.pre_hooks.load_some and bool(indices["models"])
    if not hooked:
        _weights(training, part, indices["models"], selection, RestoreReport(reader.path))
    local = rank_part(training, reader.manifest, part, content.local, selection, options.strict)
    check_classes(training, part, indices, options.strict)
    _optimizer_states(training, part, indices["optimizers"])
    if not selection.partial:
        require_saved(training, _WHERE, ResumeError)
    if selection.takes("callbacks"):
        dispatch = training.loop.dispatch
        dispatch.claim_keys(state["callbacks"], state.get("callback_options", {}))
    if not content.lazy:
        if hooked:
            left = {id(model) for model in training.pre_hooks.load(training.models, reader.path)}
            indices["models"] = [i for i in indices["models"] if id(training.models[i]) in left]
            _weights(training, part, indices["models"], selection, RestoreReport(reader.path))
        if selection.takes("callbacks"):
            training.loop.fire("on_load_checkpoint", state)  # which may edit it
        part = selection.apply(state)
    report = RestoreReport(reader.path)
    weights = _weights(training, part, indices["models"], selection, report)
    warn_of_names(report, options.strict)
    optimizers = _optimizer_states(training, part, indices["optimizers"])
    reads = InPlaceReads(reader)
    reads.into_new(content.parts)
    weights = _place_weights(training, weights, reads)
    optimizers = _place_states(training, optimizers, reads)
    registered = part["registered"]
    training.registered.load_state_dict(
        registered, strict=options.strict, chosen=lambda name: selection.takes(f"registered/{name}")
    )
    return Ready(part, weights, optimizers, indices, local, content.window, reads, report)


def _weights(
    training: TrainingState,
    part: Mapping[str, Any],
    indices: list[int],
    selection: Selection,
    report: RestoreReport,
) -> dict[int, dict[str, Any]]:
    return {i: fitting_weights(training, part, i, selection, report) for i in indices}


def _optimizer_states(
    training: TrainingState, part: Mapping[str, Any], indices: list[int]
) -> dict[int, dict[str, Any]]:
    names = parameter_names(training.bare_models)
    return {
        i: training.strategy.fit_optimizer_state(
            part["optimizers"][str(i)], training.optimizers[i].optimizer, names
        )
        for i in indices
    }


def _place_weights(
    training: TrainingState, weights: dict[int, dict[str, Any]], reads: InPlaceReads
) -> dict[int, dict[str, Any]]:
    """Add weights to be read in place; return those that their model loads itself."""
    given: dict[int, dict[str, Any]] = {}
    for index, saved in weights.items():
        model = training.models[index]
        plain = training.strategy.loads_in_place(model)
        if plain and all(reads.is_view(value) for value in saved.values()):
            here = training.strategy.local_state_dict(model)
            for name, view in saved.items():
                reads.into(name, view, here[name])
        else:
            part = partial(training.strategy.read_target, model)
            given[index] = reads.replace(saved, part=part)
    return given


def _place_states(
    training: TrainingState, optimizers: dict[int, dict[str, Any]], reads: InPlaceReads
) -> dict[int, dict[str, Any]]:
    """Return optimizer states with tensors to be read in place of views."""
    return {
        index: place_optimizer_state(
            training.optimizers[index].optimizer, saved, reads, training.strategy
        )
        for index, saved in optimizers.items()
    }


def place_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    reads: InPlaceReads,
    strategy: Strategy,
) -> dict[str, Any]:
    """Return a saved state by position with tensors to be read in place of its views.

    Args:
        optimizer: as the user made it; tensors of its state that fit are used again.
        saved: from ``Strategy.fit_optimizer_state``.
        reads: gets the tensors.
        strategy: knows which of them a rank reads in part.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    part = partial(strategy.read_target, optimizer)
    states = {
        place: reads.replace(
            state, optimizer.state.get(parameters[place]), parameters[place], part=part
        )
        for place, state in saved["state"].items()
    }
    return {**reads.replace({**saved, "state": {}}), "state": states}


def apply(training: TrainingState, ready: Ready, selection: Selection) -> None:
    """Apply the selected part; tensors that are read in place have been read before."""
    state, indices = ready.state, ready.indices
    for index, weights in ready.weights.items():
        kept = training.strategy.local_state_dict(training.models[index])
        training.strategy.load_model_state_dict(training.models[index], {**kept, **weights})
    for index, saved in ready.optimizers.items():
        training.strategy.load_optimizer_state_dict(training.optimizers[index].optimizer, saved)
    for index in indices["schedulers"]:
        scheduler = training.schedulers[index]
        scheduler.load_state_dict(_same_types(scheduler, state["schedulers"][str(index)]))
    if selection.takes("precision"):
        training.precision.load_state_dict(state["precision"])
    _restore_place(training, ready, selection)
    if selection.takes("callbacks"):
        training.loop.dispatch.load_state_dict(state["callbacks"])
    if selection.takes("trackers"):
        training.tracking.resume_run(state["trackers"], training.loop.run)
    local = ready.local or {}
    if selection.takes("window"):
        restore_window(training, ready.window)
    if "rng" in local and selection.takes("rng"):
        restore_rng(local["rng"], training.device, devices_of(training.models))


def _restore_place(training: TrainingState, ready: Ready, selection: Selection) -> None:
    """Restore the position of the run and of its loaders."""
    state, run = ready.state, training.loop.run
    if selection.takes("run"):
        run.load_state_dict(state["run"])
        run.resumed_from = ready.report.path
        run.resumed_without_model = _is_empty(state) and not selection.partial
    for index in ready.indices["loaders"]:
        loader = training.loaders[index]
        loader.load_state_dict(with_local_state(state["loaders"], ready.local, str(index)))
        if not state["run"]["epoch_open"]:
            loader.end_pass()
        elif loader.done:
            loader.skip_next_pass()  # the open epoch has read it to the end


def _is_empty(state: Mapping[str, Any]) -> bool:
    """Return whether nothing that is trained was saved; registered objects may be trained."""
    return not (state["models"] or state["registered"]["objects"])


def _same_types(scheduler: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert plain dicts back to Counters, such as the milestones of MultiStepLR."""
    inner = getattr(scheduler, "_schedulers", [])
    restored: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            value = [_same_types(one, own) for one, own in zip(inner, value, strict=True)]
        elif isinstance(getattr(scheduler, key, None), Counter):
            value = Counter(value)
        restored[key] = value
    return restored


def find(
    training: TrainingState, place: str, options: LoadOptions, *, newest: bool
) -> CheckpointReader | None:
    """Collective: open the checkpoint to restore, without reading its tensors.

    Args:
        training: whose save in the background is waited for.
        place: the path of a checkpoint, or a folder of them.
        options: of the restore.
        newest: ``place`` is a folder; return the newest in it that opens, None if it has none.

    Raises:
        checkpoint_io.CheckpointError: it is missing or damaged.
        RemoteError: another rank failed.
    """
    training.loop.saves.wait()
    try:
        if newest:
            return open_newest(open_folder(place, options.storage_options))
        return open_one(place, options.storage_options)
    except LoadFailed as failed:
        raise failed.error from failed.error.__cause__


def restore_from(
    training: TrainingState,
    url: str,
    options: LoadOptions,
    reader: CheckpointReader | None = None,
) -> str:
    """Collective: restore the checkpoint at a URL, opened before or not; return its path.

    Raises:
        ResumeError: it does not fit (nothing was changed), or is not exact and ``strict``.
        checkpoint_io.CheckpointError: it is missing or damaged.
        RemoteError: another rank failed.
    """
    training.loop.saves.wait()
    try:
        if reader is None:
            reader = open_one(url, options.storage_options)
        return _load_or_reload(training, reader, url, options)
    except LoadFailed as failed:
        raise failed.error from failed.error.__cause__


def restore_newest(
    training: TrainingState,
    root: str,
    options: LoadOptions,
    skip: Iterable[str] = (),
    first: CheckpointReader | None = None,
) -> str | None:
    """Collective: restore the newest valid checkpoint of a folder; return None if it has none.

    One that is found to be damaged, even midway, is skipped with a notice. Those in ``skip`` are
    not tried; ``first`` is the newest, if it was opened before.

    Raises:
        ResumeError: it does not fit, or is not exact and ``strict``.
        checkpoint_io.CorruptCheckpointError: all checkpoints are damaged.
        RemoteError: another rank failed.
    """
    training.loop.saves.wait()
    tried = list(skip)
    folder = open_folder(root, options.storage_options)
    try:
        reader = open_newest(folder, tried) if first is None else first
        while reader is not None:
            try:
                return _load_or_reload(training, reader, reader.path, options)
            except LoadFailed as failed:
                if not failed.damaged:
                    raise
                tried.append(reader.path)
                notice(f"passed over {reader.path}: {failed}")
            reader = open_newest(folder, tried)
    except LoadFailed as failed:
        raise failed.error from failed.error.__cause__
    return None


def _load_or_reload(
    training: TrainingState, reader: CheckpointReader, url: str, options: LoadOptions
) -> str:
    """Load; load again if a save replaced the checkpoint while it was read."""
    try:
        return _load(training, reader, options)
    except LoadFailed as failed:
        newer = None if failed.changed or not failed.damaged else _newer(reader, url, options)
        if newer is None:
            raise
        return _load(training, newer, options)


def _newer(reader: CheckpointReader, url: str, options: LoadOptions) -> CheckpointReader | None:
    """Collective: return the checkpoint that has replaced this one, None if none has."""
    try:
        found = open_one(url, options.storage_options)
    except LoadFailed:
        return None
    return None if found.manifest.id == reader.manifest.id else found


def _load(training: TrainingState, reader: CheckpointReader, options: LoadOptions) -> str:
    """Read what is small, check that all fits, read the rest in place, apply it.

    Raises:
        LoadFailed: a rank could not read a part.
    """
    if options.accept is not None:
        options.accept(reader)
    reader = _of_own_data(training, reader)
    division = partial(_divide, training, reader, options)
    # a rank that raises here must not leave the others in the collective of a full check
    divided = together(_WHERE, division) if options.verify == "full" else None
    content = together(
        _WHERE, lambda: read_content(training, reader, options, divided or division())
    )
    with training.registered.all_or_nothing():
        with shared_failure(_WHERE), naming_checkpoint(reader.path):
            ready = make_ready(training, reader, content, options)
        _read_in_place(training, ready, options.progress)
    with shared_failure(_WHERE):
        apply(training, ready, options.selection)
    training.loop.half_loaded = None
    training.load_report = ready.report
    training.project.count_from(number_of(reader.path))
    if options.selection.takes("callbacks") and options.selection.takes("run"):
        for saver in training.loop.savers:
            if hasattr(saver, "resumed"):
                saver.resumed(training.loop.run)
    return reader.path


def _of_own_data(training: TrainingState, reader: CheckpointReader) -> CheckpointReader:
    """Return a reader of the local state of a rank that had read the data of this one.

    Collective, if another number of ranks shared a model in the run that saved.

    Raises:
        LoadFailed: a rank could not read it.
    """
    saved, strategy = reader.state.get("copies", 1), training.strategy
    if saved == strategy.copies:
        return reader
    copy = strategy.topology.rank % strategy.copies
    rank = strategy.data_rank * saved + copy % saved
    return together(_WHERE, lambda: reader.of_rank(rank))


def _read_in_place(training: TrainingState, ready: Ready, progress: bool | None) -> None:
    """Read into the memory of models and optimizers; after a failure the run refuses to step."""
    before = training.loop.half_loaded
    training.loop.half_loaded = ready.report.path
    try:
        together(_WHERE, partial(ready.reads.run, progress), changes=ready.reads.changes)
    except LoadFailed as failed:
        if not failed.changed:
            training.loop.half_loaded = before
        raise
