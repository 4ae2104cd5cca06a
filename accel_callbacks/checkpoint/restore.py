"""Restore a training state: open, check that it fits, read in place, apply."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
from accel_callbacks.checkpoint.memory_snapshots import is_snapshot
from accel_callbacks.checkpoint.open import (
    LoadFailed,
    open_folder,
    open_newest,
    open_one,
    process_group,
    together,
    unwrapped_failure,
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
from accel_callbacks.engines.optimizer_state import parameter_names
from accel_callbacks.errors import NO_MODEL, ResumeError
from accel_callbacks.gradients import local_part
from accel_callbacks.logging import notice

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.memory_snapshots import MemorySnapshots
    from accel_callbacks.engines.base import Strategy
    from checkpoint_io import CheckpointFolder, CheckpointReader, TensorView

__all__ = [
    "InPlaceReads",
    "LoadOptions",
    "find",
    "place_optimizer_state",
    "place_weights",
    "restore_from",
    "restore_newest",
    "training_state_in",
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
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.changes = False
        self._reader = reader
        self._pairs: list[tuple[TensorView, torch.Tensor]] = []
        self._targets: dict[tuple[Any, ...], tuple[str, str]] = {}  # memory to key and name
        self._storages: set[int] = set()

    def into(self, name: str, view: TensorView, target: torch.Tensor) -> None:
        """Add a view to be read into a tensor of a model; tied tensors are read once.

        Raises:
            ResumeError: two names are one tensor here, and two in the checkpoint.
        """
        local = local_part(target)
        memory = (_storage(local), local.storage_offset(), local.shape, local.stride())
        stored_key, first = self._targets.setdefault(memory, (view.stored_key, name))
        if local.numel() and first != name:
            if stored_key != view.stored_key:
                raise ResumeError(
                    f"{first!r} and {name!r} are one tensor in the model and two in the "
                    "checkpoint: tie them after loading, or load one of them with only=."
                )
            return
        self._storages.add(memory[0])
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
        if isinstance(saved, (list, tuple, deque)):
            items = current if isinstance(current, (list, tuple, deque)) else ()
            filled = [*items, *[None] * len(saved)]
            values = (
                self.replace(value, filled[i], parameter, key, part)
                for i, value in enumerate(saved)
            )
            return deque(values, saved.maxlen) if isinstance(saved, deque) else type(saved)(values)
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
        unshared = local.untyped_storage().nbytes() == local.nbytes
        return unshared and _storage(local) not in self._storages

    def run(self, progress: bool | None = None) -> None:
        """Read all views; every byte is verified before it is written."""
        self._reader.read(self._pairs, progress=progress)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_NEEDED = (*_KINDS, "precision", "run", "callbacks", "trackers")


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load; see ``Accelerator.load_state``."""

    selection: Selection = field(default_factory=Selection)
    strict: bool = False
    verify: str = "parts"
    progress: bool | None = None
    storage_options: Mapping[str, Any] | None = None
    accept: Callable[[CheckpointReader], None] | None = None  # collective, before anything is read
    memory: MemorySnapshots | None = None  # may hold what is newer than a folder's checkpoints


@dataclass
class _PendingLoad:
    """A load in progress: each stage below fills in what the next ones need.

    Attributes:
        training: the state that is restored.
        reader: the checkpoint.
        options: what is restored, and how.
        reads: the tensors to read in place, or into new memory, once everything fits.
        report: the names that are not restored.
        lazy: models and optimizers are among ``reads``, not among what is read first.
        first: the parts of both states that are read first.
        keys: the tensors of all parts.
        shards: views in the states of callbacks, with the sharded tensors that replace them.
        pairs: for a full check, views with tensors that are sharded as their targets are.
        state: the shared state; tensors that are not read yet are views.
        local: the state of this rank.
        window: the open window, whose gradients have been read into new memory.
        part: the selected part of ``state``.
        indices: the prepared objects to restore, by kind.
        weights: for models that load in their own way, by index.
        optimizer_states: by index.
    """

    training: TrainingState
    reader: CheckpointReader
    options: LoadOptions
    reads: InPlaceReads = field(init=False)
    report: RestoreReport = field(init=False)
    lazy: bool = False
    first: dict[str, Any] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    shards: list[tuple[TensorView, torch.Tensor]] = field(default_factory=list)
    pairs: list[tuple[TensorView, torch.Tensor]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] | None = None
    window: OpenWindow | None = None
    part: dict[str, Any] = field(default_factory=dict)
    indices: dict[str, list[int]] = field(default_factory=dict)
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)
    optimizer_states: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads = InPlaceReads(self.reader)
        self.report = RestoreReport(self.reader.path)

    @property
    def verifies_all(self) -> bool:
        """True for ``verify="full"``, which is collective: each byte is verified by one rank."""
        return self.options.verify == "full"


def _divide(load: _PendingLoad) -> None:
    """Decide which parts are read first, and which are read in place; read no tensors.

    Raises:
        ResumeError: the checkpoint holds no training state.
    """
    from checkpoint_io.loader import views_in

    training, reader, selection = load.training, load.reader, load.options.selection
    load.state = training_state_in(reader, _NEEDED, "checkpoint_io.load reads it.")
    part = selection.apply(load.state)
    rest = {name: state for name, state in load.state.items() if name != "window"}
    in_place: dict[str, Any] = {}
    # hooks are given tensors, which they may change
    hooks = training.loop.dispatch.hooks["on_load_checkpoint"]
    load.lazy = not (training.pre_hooks.load_some or hooks)
    if load.lazy:
        in_place = {name: part[name] for name in ("models", "optimizers")}
        rest = {name: state for name, state in rest.items() if name not in in_place}
        rest["registered"] = part["registered"]
    load.first = {"state": rest, "local": reader.local_state}
    load.keys = {view.key for view in views_in([in_place, load.first, load.state.get("window")])}
    if load.lazy and selection.takes("callbacks"):
        rest["callbacks"], load.shards = _with_shards(training, rest["callbacks"])
    if load.verifies_all:
        load.pairs = [*load.shards, *_sharded_targets(training, in_place)]


def training_state_in(
    reader: CheckpointReader, sections: Iterable[str], advice: str
) -> dict[str, Any]:
    """Return the shared state of a checkpoint with views.

    Raises:
        ResumeError: one of these sections is not in it.
    """
    state: dict[str, Any] = dict(reader.state)
    if missing := [name for name in sections if name not in state]:
        raise ResumeError(
            f"{reader.path} holds no {missing[0]!r}: it was not written by save_state(). {advice}"
        )
    return state


def _with_shards(
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
            shards = entry.callback.parts_to_read(state, training.bare_models)
            if shards:
                pairs += [(state["average"][name], shard) for name, shard in shards.items()]
                states[key] = {**state, "average": {**state["average"], **shards}}
    return states, pairs


def _sharded_targets(
    training: TrainingState, in_place: Mapping[str, Any]
) -> Iterator[tuple[TensorView, torch.Tensor]]:
    """Pair views with the sharded parameters of their names: of these a rank reads its part."""
    from checkpoint_io.loader import views_in
    from checkpoint_io.sharding import is_dtensor

    parameters: dict[str, torch.Tensor] = {}
    for index, model in enumerate(training.models):
        for name, tensor in training.strategy.states.local_state_dict(model).items():
            if isinstance(tensor, torch.Tensor) and is_dtensor(tensor):
                parameters[f"{index}.{name}"] = tensor
    saved = [
        (f"{index}.{name}", weight)
        for index, weights in in_place.get("models", {}).items()
        for name, weight in (weights or {}).items()
    ]
    for optimizer in in_place.get("optimizers", {}).values():
        saved += optimizer["state"].items()
    for name, tree in saved:
        parameter = parameters.get(name)
        if parameter is not None:
            for view in views_in(tree):
                if view.shape == tuple(parameter.shape):
                    yield view, parameter


def _read_first(load: _PendingLoad) -> None:
    """Verify the checkpoint, and read all that is not read in place.

    Raises:
        checkpoint_io.CheckpointError: it is damaged.
    """
    if not load.verifies_all:
        _divide(load)  # else all ranks have done so, before the collective of the check
    load.reader.check(
        load.verifies_all,
        keys=load.keys,
        progress=load.options.progress if load.verifies_all else False,
        group=process_group(),
        pairs=load.pairs,
    )
    tensors = load.reader.load_tree(load.first)
    load.state |= tensors["state"]
    load.local = tensors["local"]
    load.window = read_window(load.training, load.reader, load.local, load.options.selection)


def _fit(load: _PendingLoad) -> None:
    """Check that all fits, and load what may refuse the load: hooks and registered objects.

    Raises:
        ResumeError: it does not fit, or the resume is not exact and ``strict``.
    """
    training, selection, strict = load.training, load.options.selection, load.options.strict
    selection.check(all_keys(load.state))
    part = load.part = selection.apply(load.state)
    if training.models and _is_empty(load.state) and not selection.partial:
        raise ResumeError(NO_MODEL.format(load.reader.path))
    indices = load.indices = {
        kind: chosen_indices(training, part, kind, selection) for kind in _KINDS
    }
    if not selection.renames:  # the fingerprints have the names of the save
        compare_frozen(training, part, indices["models"], strict)
    hooked = training.pre_hooks.load_some and bool(indices["models"])
    weights = {} if hooked else _fitting_weights(load)
    load.local = rank_part(training, load.reader.manifest, part, load.local, selection, strict)
    check_classes(training, part, indices, strict)
    states = _fitting_optimizer_states(load)
    if not selection.partial:
        require_saved(training, _WHERE, ResumeError)
    if selection.takes("callbacks"):
        dispatch = training.loop.dispatch
        dispatch.claim_keys(load.state["callbacks"], load.state.get("callback_options", {}))
    if not load.lazy:
        if hooked:
            left = {
                id(model) for model in training.pre_hooks.load(training.models, load.reader.path)
            }
            indices["models"] = [i for i in indices["models"] if id(training.models[i]) in left]
            _fitting_weights(load)
        if selection.takes("callbacks"):
            training.loop.fire("on_load_checkpoint", load.state)
        # Again, as hooks may have edited the state since it was checked.
        part = load.part = selection.apply(load.state)
        load.report = RestoreReport(load.reader.path)
        weights, states = _fitting_weights(load), _fitting_optimizer_states(load)
    warn_of_names(load.report, strict)
    load.reads.into_new(load.shards)
    load.weights = place_weights(training, weights, load.reads)
    load.optimizer_states = {
        index: place_optimizer_state(
            training.optimizers[index].optimizer, saved, load.reads, training.strategy
        )
        for index, saved in states.items()
    }
    training.registered.load_state_dict(
        part["registered"],
        strict=strict,
        chosen=lambda name: selection.takes(f"registered/{name}"),
    )


def _fitting_weights(load: _PendingLoad) -> dict[int, dict[str, Any]]:
    selection = load.options.selection
    return {
        index: fitting_weights(load.training, load.part, index, selection, load.report)
        for index in load.indices["models"]
    }


def _fitting_optimizer_states(load: _PendingLoad) -> dict[int, dict[str, Any]]:
    training = load.training
    names = parameter_names(training.bare_models)
    return {
        index: training.strategy.states.fit_optimizer_state(
            load.part["optimizers"][str(index)], training.optimizers[index].optimizer, names
        )
        for index in load.indices["optimizers"]
    }


def place_weights(
    training: TrainingState,
    weights: dict[int, dict[str, Any]],
    reads: InPlaceReads,
    converted: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> dict[int, dict[str, Any]]:
    """Add weights to be read in place; return those that their model loads itself.

    Args:
        training: the models.
        weights: saved weights by the index of their model, which fit.
        reads: gets the views and their targets.
        converted: gets targets of another dtype, each with the tensor that is read for it.
    """
    loaded_by_model: dict[int, dict[str, Any]] = {}
    for index, saved in weights.items():
        model = training.models[index]
        plain = training.strategy.states.loads_in_place(model)
        if plain and all(map(reads.is_view, saved.values())):
            targets = training.strategy.states.local_state_dict(model)
            for name, view in saved.items():
                target = targets[name]
                if converted is None or target.dtype == view.dtype:
                    reads.into(name, view, target)
                else:
                    converted.append((target, reads.replace(view, parameter=target)))
        else:
            part = partial(training.strategy.states.read_target, model)
            loaded_by_model[index] = reads.replace(saved, part=part)
    return loaded_by_model


def place_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    reads: InPlaceReads,
    strategy: Strategy,
) -> dict[str, Any]:
    """Return a saved state by position with tensors to be read in place of its views.

    Args:
        optimizer: as the user made it; tensors of its state that fit are used again.
        saved: from ``StateAccess.fit_optimizer_state``.
        reads: gets the tensors.
        strategy: knows which of them a rank reads in part.
    """
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    part = partial(strategy.states.read_target, optimizer)
    states = {
        place: reads.replace(
            state,
            optimizer.state.get(parameters.get(place, place)),
            parameters.get(place),
            part=part,
        )
        for place, state in saved["state"].items()
    }
    # The groups apart: a learning rate may be a tensor, and belongs to no parameter.
    return {**reads.replace({**saved, "state": {}}), "state": states}


def _read_in_place(load: _PendingLoad) -> None:
    """Read into the memory of models and optimizers; after a failure the run refuses to step."""
    loop = load.training.loop
    # Set before the first byte: an interrupt leaves a mixture as an error does.
    before, loop.half_loaded = loop.half_loaded, load.reader.path
    try:
        together(_WHERE, partial(load.reads.run, load.options.progress), changes=load.reads.changes)
    except LoadFailed as failed:
        if not failed.changed:
            loop.half_loaded = before
        raise


def _apply(load: _PendingLoad) -> None:
    """Apply the selected part; tensors that are read in place have been read before."""
    training, selection, part = load.training, load.options.selection, load.part
    states = training.strategy.states
    for index, weights in load.weights.items():
        current = states.local_state_dict(training.models[index])
        states.load_model_state_dict(training.models[index], {**current, **weights})
    for index, state in load.optimizer_states.items():
        states.load_optimizer_state_dict(training.optimizers[index].optimizer, state)
    for index in load.indices["schedulers"]:
        scheduler = training.schedulers[index]
        scheduler.load_state_dict(_same_types(scheduler, part["schedulers"][str(index)]))
    if selection.takes("precision"):
        training.precision.load_state_dict(part["precision"])
    _restore_position(load)
    if selection.takes("callbacks"):
        training.loop.dispatch.load_state_dict(part["callbacks"])
    if selection.takes("trackers"):
        training.tracking.resume_run(part["trackers"], training.loop.run)
    if selection.takes("window"):
        restore_window(training, load.window)
    local = load.local or {}
    if "rng" in local and selection.takes("rng"):
        restore_rng(local["rng"], training.device, devices_of(training.models))


def _restore_position(load: _PendingLoad) -> None:
    """Restore the position of the run and of its loaders."""
    training, selection, part = load.training, load.options.selection, load.part
    if selection.takes("run"):
        run = training.loop.run
        run.load_state_dict(part["run"])
        run.resumed_from = load.reader.path
        run.resumed_without_model = _is_empty(part) and not selection.partial
    for index in load.indices["loaders"]:
        loader = training.loaders[index]
        state = with_local_state(part["loaders"], load.local, str(index))
        loader.load_state_dict(state, strict=load.options.strict)
        if not part["run"]["epoch_open"]:
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
            value = [_same_types(*pair) for pair in zip(inner, value, strict=True)]
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
    with unwrapped_failure():
        if newest:
            return _open_newest(open_folder(place, options.storage_options), options)
        return open_one(place, options.storage_options)


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
    with unwrapped_failure():
        if reader is None:
            reader = open_one(url, options.storage_options)
        return _load_or_reload(training, reader, url, options)


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
    with unwrapped_failure():
        reader = _open_newest(folder, options, tried) if first is None else first
        while reader is not None:
            try:
                # Without a checkpoint to fall back to, the run starts over from untouched objects.
                verify = "full" if is_snapshot(reader.path) else options.verify
                return _load_or_reload(
                    training, reader, reader.path, replace(options, verify=verify)
                )
            except LoadFailed as failed:
                if not failed.damaged:
                    raise
                tried.append(reader.path)
                notice(f"passed over {reader.path}: {failed}")
            reader = _open_newest(folder, options, tried)
    return None


def _open_newest(
    folder: CheckpointFolder, options: LoadOptions, tried: Collection[str] = ()
) -> CheckpointReader | None:
    """Collective: open the newest checkpoint of a folder, or of the memory beside it."""
    if options.memory is None:
        return open_newest(folder, tried)
    return options.memory.open_newest(folder, tried)


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
        newer = open_one(url, options.storage_options)
    except LoadFailed:
        return None
    return None if newer.manifest.id == reader.manifest.id else newer


def _load(training: TrainingState, reader: CheckpointReader, options: LoadOptions) -> str:
    """Read what is small, check that all fits, read the rest in place, apply it.

    Raises:
        LoadFailed: a rank could not read a part.
    """
    if options.accept is not None:
        options.accept(reader)
    load = _PendingLoad(training, _of_own_data(training, reader), options)
    if load.verifies_all:
        # a rank that raises here must not leave the others in the collective of a full check
        together(_WHERE, partial(_divide, load))
    together(_WHERE, partial(_read_first, load))
    with training.registered.all_or_nothing():
        with shared_failure(_WHERE), naming_checkpoint(reader.path):
            _fit(load)
        _read_in_place(load)
    with shared_failure(_WHERE):
        _apply(load)
    training.loop.half_loaded = None
    training.loop.run.epoch_unknown = True
    training.load_report = load.report
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
    saved, ranks = reader.state.get("copies", 1), training.strategy.data
    if saved == ranks.copies:
        return reader
    copy = training.strategy.topology.rank % ranks.copies
    rank = ranks.rank * saved + copy % saved
    return together(_WHERE, lambda: reader.of_rank(rank))
