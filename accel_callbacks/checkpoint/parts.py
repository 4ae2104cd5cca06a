"""The parts of a training state: what each owner saves, and how it is restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.dispatch.instances import family
from accel_callbacks.checkpoint.compatibility import (
    check_classes,
    class_names,
    compare_frozen,
    fitting_weights,
    rank_part,
    warn_of_names,
    with_local_state,
)
from accel_callbacks.checkpoint.in_place_reads import place_optimizer_state, place_weights
from accel_callbacks.checkpoint.open_window import OpenWindow, read_window, restore_window
from accel_callbacks.checkpoint.part import CheckpointPart, Load, Sections
from accel_callbacks.checkpoint.trained_parameters import require_saved
from accel_callbacks.checkpoint.training_state import TrainingState, numbered
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.rng import capture_rng, devices_of, restore_rng
from accel_callbacks.errors import NO_MODEL, ResumeError
from accel_callbacks.gradients import parameters_of
from accel_callbacks.models.from_pretrained import pretrained_files
from accel_callbacks.strategy.optimizer_state import parameter_names

if TYPE_CHECKING:
    from checkpoint_io import TensorView

__all__ = ["register_parts"]


def register_parts(training: TrainingState) -> None:
    """Register the parts that every training state has."""
    for kind in (
        RandomPart,
        ModelsPart,
        OptimizersPart,
        SchedulersPart,
        PrecisionPart,
        RunPart,
        LoadersPart,
        CallbacksPart,
        TrackersPart,
        WindowPart,
        RegisteredPart,
    ):
        training.register(kind(training))


class _OfTraining(CheckpointPart):
    """A part of the objects of a training state."""

    always_saved = True

    def __init__(self, training: TrainingState) -> None:
        self._training = training

    def check(self, load: Load) -> None:
        """Refuse nothing."""


class _OfPreparedObjects(_OfTraining):
    """A part with an entry for each prepared object of a kind."""

    @property
    def prepared(self) -> int:
        """Number of the objects."""
        return len(getattr(self._training, self.name))


class RandomPart(_OfTraining):
    """The random generators of each rank.

    The first that is captured: a stream that is asked for its position may draw its next samples,
    which it draws again after a resume. Restored last, as others may draw while they are.
    """

    name = "rng"
    always_saved = False  # in what all ranks share

    def capture(self) -> Sections:
        """Return the state of the generators of this rank."""
        training = self._training
        stopped, copies = training.random_at_stop, training.strategy.data.copies
        rng = stopped[0] if stopped else capture_rng(training.device, devices_of(training.models))
        # Each data rank's local state is saved once a copy.
        return {"copies": copies} if copies > 1 else {}, {self.name: rng}

    def finish(self, load: Load) -> None:
        """Restore the generators."""
        if load.takes("rng") and load.local is not None and "rng" in load.local:
            training = self._training
            restore_rng(load.local["rng"], training.device, devices_of(training.models))


class ModelsPart(_OfPreparedObjects):
    """The weights of the prepared models, and the configurations that they were built from."""

    name = "models"

    def capture(self) -> Sections:
        """Return the weights, which are not copied."""
        training = self._training
        # A hook of FSDP puts the shards back, where a forward has left whole parameters.
        weights = [training.strategy.states.local_state_dict(model) for model in training.models]
        files = enumerate(map(pretrained_files, training.bare_models))
        shared: dict[str, Any] = {"models": numbered(weights)}
        if configured := {str(index): names for index, names in files if names}:
            shared["model_files"] = configured
        return shared, {}

    def plan(self, load: Load) -> None:
        """Read weights in place, if no hook is to be given tensors."""
        if self.prepared and _is_empty(load.state) and not load.options.selection.partial:
            raise ResumeError(NO_MODEL.format(load.reader.path))
        if not load.lazy:
            return
        load.leave_to_be_read_in_place(self.name)
        if load.verifies_all:
            weights = load.in_place[self.name].items()
            load.pairs += _sharded_targets(
                self._training,
                ((f"{i}.{name}", view) for i, saved in weights for name, view in _named(saved)),
            )

    def check(self, load: Load) -> None:
        """Refuse weights of other models."""
        training = self._training
        if not load.options.selection.renames:  # the fingerprints have the names of the save
            compare_frozen(training, load.selected, load.indices[self.name], load.strict)
        # A load hook may take models out, and tells by that which are still to be loaded.
        if not training.pre_hooks.load_some:
            load.plans[self.name] = self._fitting(load)

    def place(self, load: Load) -> None:
        """Read the weights into the memory of the models."""
        training = self._training
        # Hooks may have edited the state since it was checked.
        weights = load.plans[self.name] if load.lazy else self._fitting(load)
        warn_of_names(load.report, load.strict)
        load.plans[self.name] = place_weights(
            training.strategy, training.models, weights, load.reads
        )

    def _fitting(self, load: Load) -> dict[int, dict[str, Any]]:
        """Return the saved weights by the index of their model."""
        return {
            index: fitting_weights(
                self._training, load.selected, index, load.options.selection, load.report
            )
            for index in load.indices[self.name]
        }

    def restore(self, load: Load) -> None:
        """Load the weights of models that load in a way of their own."""
        strategy, models = self._training.strategy, self._training.models
        for index, weights in load.plans[self.name].items():
            current = strategy.states.local_state_dict(models[index])
            strategy.states.load_model_state_dict(models[index], {**current, **weights})


class OptimizersPart(_OfPreparedObjects):
    """The states of the prepared optimizers, by the names of their parameters."""

    name = "optimizers"

    def capture(self) -> Sections:
        """Return the states, whose tensors are not copied."""
        training = self._training
        names = parameter_names(training.bare_models)
        state_of = training.strategy.states.optimizer_state_dict
        states = [state_of(optimizer.optimizer, names) for optimizer in training.optimizers]
        return _with_classes(training, self.name, states), {}

    def plan(self, load: Load) -> None:
        """Read states in place, if no hook is to be given tensors."""
        if not load.lazy:
            return
        load.leave_to_be_read_in_place(self.name)
        if load.verifies_all:
            states = load.in_place[self.name].values()
            load.pairs += _sharded_targets(
                self._training, (named for saved in states for named in saved["state"].items())
            )

    def check(self, load: Load) -> None:
        """Refuse states of other optimizers, and optimizers of what no checkpoint would hold."""
        indices = load.indices[self.name]
        check_classes(self._training, load.selected, self.name, indices, load.strict)
        load.plans[self.name] = self._fitting(load)
        if not load.options.selection.partial:
            require_saved(self._training, "load_state", ResumeError)

    def place(self, load: Load) -> None:
        """Read the states into the memory of the optimizers."""
        training = self._training
        states = load.plans[self.name] if load.lazy else self._fitting(load)
        load.plans[self.name] = {
            index: place_optimizer_state(
                training.optimizers[index].optimizer, saved, load.reads, training.strategy
            )
            for index, saved in states.items()
        }

    def _fitting(self, load: Load) -> dict[int, dict[str, Any]]:
        """Return the saved states by position, by the index of their optimizer."""
        training = self._training
        names = parameter_names(training.bare_models)
        return {
            index: training.strategy.states.fit_optimizer_state(
                load.selected[self.name][str(index)], training.optimizers[index].optimizer, names
            )
            for index in load.indices[self.name]
        }

    def restore(self, load: Load) -> None:
        """Load the states."""
        training = self._training
        for index, state in load.plans[self.name].items():
            optimizer = training.optimizers[index].optimizer
            training.strategy.states.load_optimizer_state_dict(optimizer, state)


class SchedulersPart(_OfPreparedObjects):
    """The states of the prepared schedulers."""

    name = "schedulers"

    def capture(self) -> Sections:
        """Return the states."""
        states = [scheduler.state_dict() for scheduler in self._training.schedulers]
        return _with_classes(self._training, self.name, states), {}

    def check(self, load: Load) -> None:
        """Refuse states of other classes."""
        indices = load.indices[self.name]
        check_classes(self._training, load.selected, self.name, indices, load.strict)

    def restore(self, load: Load) -> None:
        """Load the states."""
        for index in load.indices[self.name]:
            scheduler = self._training.schedulers[index]
            saved = load.selected[self.name][str(index)]
            scheduler.load_state_dict(_same_types(scheduler, saved))


class PrecisionPart(_OfTraining):
    """The loss scale."""

    name = "precision"

    def capture(self) -> Sections:
        """Return the state of the loss scaler."""
        return {self.name: self._training.precision.state_dict()}, {}

    def restore(self, load: Load) -> None:
        """Load it."""
        self._training.precision.load_state_dict(load.selected[self.name])


class RunPart(_OfTraining):
    """The position of the run."""

    name = "run"

    def capture(self) -> Sections:
        """Return the position; a batch without a loader counts once it has worked."""
        loop = self._training.loop
        state = loop.run.state_dict()
        waiting = loop.own_batches.is_open and not loop.step.worked
        return {self.name: {**state, "batch_idx": state["batch_idx"] - waiting}}, {}

    def restore(self, load: Load) -> None:
        """Continue the saved run."""
        run = self._training.loop.run
        run.load_state_dict(load.selected[self.name])
        run.resumed_from = load.reader.path
        partial = load.options.selection.partial
        run.resumed_without_model = _is_empty(load.selected) and not partial


class LoadersPart(_OfPreparedObjects):
    """The positions of the prepared loaders; of streams, those of each rank."""

    name = "loaders"

    def capture(self) -> Sections:
        """Return the positions, with the generators as they were before streams were asked."""
        loaders, stopped = self._training.loaders, self._training.random_at_stop
        generators = stopped[1] if stopped else [loader.random_state() for loader in loaders]
        states = numbered([self._position(loader) for loader in loaders])
        for state, saved in zip(states.values(), generators, strict=False):
            state["order"]["generators"] = saved
        streams = {key: state["stream"] for key, state in states.items() if "stream" in state}
        of_rank = {key: stream for key, stream in streams.items() if "own" in stream}
        for key, stream in of_rank.items():
            states[key]["stream"] = {"own": stream["own"]}  # a note of it stays
        return {self.name: states}, {"streams": of_rank} if of_rank else {}

    def _position(self, loader: DataLoaderShard) -> dict[str, Any]:
        """Return the position of a loader.

        A batch that was delivered and not trained on yet is delivered again after a resume.
        """
        training, loop = self._training, self._training.loop
        waiting = loader in loop.position.active and loader.trained and not loop.step.worked
        return loader.state_dict(again=waiting and len(training.optimizers) > 0)

    def check(self, load: Load) -> None:
        """Refuse an inexact resume, if ``strict``; keep what of this rank is restored."""
        load.local = rank_part(
            self._training,
            load.reader.manifest,
            load.selected,
            load.local,
            load.options.selection,
            load.strict,
        )

    def restore(self, load: Load) -> None:
        """Go to the saved positions."""
        states = load.selected[self.name]
        for index in load.indices[self.name]:
            loader = self._training.loaders[index]
            state = with_local_state(states, load.local, str(index))
            loader.load_state_dict(state, strict=load.strict)
            if not load.selected["run"]["epoch_open"]:
                loader.end_pass()
            elif loader.done:
                loader.skip_next_pass()  # the open epoch has read it to the end


class CallbacksPart(_OfTraining):
    """The states of the callbacks."""

    name = "callbacks"

    def capture(self) -> Sections:
        """Return the states, with the options of callbacks that share a class."""
        training, dispatch = self._training, self._training.loop.dispatch
        states = training.strategy.states.stored(dispatch.state_dict(), training.models)
        shared = {self.name: states}
        if options := dispatch.options():
            shared["callback_options"] = options
        return shared, {}

    def plan(self, load: Load) -> None:
        """Read a part of averages of sharded weights: whole ones are as large as the model."""
        shards: list[tuple[TensorView, torch.Tensor]] = []
        if load.lazy and load.takes(self.name):
            load.first[self.name], shards = self._with_shards(load.first[self.name])
        load.plans[self.name] = shards
        if load.verifies_all:
            load.pairs += shards

    def _with_shards(
        self, saved: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[tuple[TensorView, torch.Tensor]]]:
        """Return states with new sharded tensors in place of some views, and both."""
        states, pairs = dict(saved), []
        for entry in self._training.loop.dispatch.entries:
            if not hasattr(entry.callback, "parts_to_read"):
                continue
            # Which of several of one class has which state is known once all has been read.
            for key in family(states, entry.base):
                state = states[key]
                shards = entry.callback.parts_to_read(state, self._training.bare_models)
                if shards:
                    pairs += [(state["average"][name], shard) for name, shard in shards.items()]
                    states[key] = {**state, "average": {**state["average"], **shards}}
        return states, pairs

    def check(self, load: Load) -> None:
        """Find out which callback has which state."""
        if load.takes(self.name):
            options = load.state.get("callback_options", {})
            self._training.loop.dispatch.claim_keys(load.state[self.name], options)

    def place(self, load: Load) -> None:
        """Read the shards of averages."""
        load.reads.into_new(load.plans[self.name])

    def restore(self, load: Load) -> None:
        """Load the states."""
        self._training.loop.dispatch.load_state_dict(load.selected[self.name])


class TrackersPart(_OfTraining):
    """What trackers continue their runs by."""

    name = "trackers"

    def capture(self) -> Sections:
        """Return the states."""
        return {self.name: self._training.tracking.state_dict()}, {}

    def restore(self, load: Load) -> None:
        """Continue the runs."""
        run = self._training.loop.run
        self._training.tracking.resume_run(load.selected[self.name], run)


class WindowPart(_OfTraining):
    """The open gradient window, or gradients that wait for a step outside of one."""

    name = "window"
    always_saved = False

    def capture(self) -> Sections:
        """Return the window with its gradients, none where nothing waits.

        Raises:
            RuntimeError: the engine keeps the gradients.
        """
        training, window = self._training, self._training.loop.window
        if window.is_open and training.strategy.gradients.keeps_gradients_apart:
            raise RuntimeError(
                "save_state inside of a gradient window: the engine keeps its gradients, and they "
                "would be lost. Save after optimizer.step() has ended the window."
            )
        gradients = self._waiting_gradients()
        # Averaged over the ranks already, so that any number of ranks can go on with them.
        sharded = {name: g for name, g in gradients.items() if collectives.is_sharded(g)}
        if not window.is_open and not gradients:
            return {}, {}
        state = {
            "position": window.position,
            "divisor": window.divisor,
            "normalizer": window.normalizer.state_dict(),
            "averaged_over": training.strategy.data.averaged_over,
            "gradients": {name: g for name, g in gradients.items() if name not in sharded},
            "logged": training.tracking.row.state_dict(),
        }
        return {self.name: {"gradients": sharded}} if sharded else {}, {self.name: state}

    def _waiting_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that wait for a step.

        These are all in an open window. Outside of one, a script may accumulate by itself: those of
        optimizers that have not stepped since the batch began.
        """
        training, loop = self._training, self._training.loop
        waiting = None  # all
        if not loop.window.is_open:
            left = [o for o in training.optimizers if o not in loop.stepped_in_batch()]
            if not left or training.strategy.gradients.keeps_gradients_apart:
                return {}
            waiting = {id(p) for optimizer in left for p in parameters_of([optimizer])}
        gradients: dict[str, torch.Tensor] = {}
        for index, model in enumerate(training.models):
            found = training.strategy.states.open_gradients(model)
            for name, parameter in training.strategy.unwrap(model).named_parameters():
                # One without memory here is of another rank, which steps together with this one.
                mine = waiting is None or id(parameter) in waiting or parameter.is_meta
                if name in found and mine:
                    gradients[f"{index}.{name}"] = found[name]
        return gradients

    def plan(self, load: Load) -> None:
        """Read the shared gradients by themselves: a rank reads its part."""
        load.in_place[self.name] = load.first.pop(self.name, None)

    def read(self, load: Load) -> None:
        """Read the gradients into new memory."""
        load.plans[self.name] = read_window(
            self._training, load.reader, load.local, load.options.selection
        )

    def restore(self, load: Load) -> None:
        """Continue the window, or begin a new one."""
        window: OpenWindow | None = load.plans[self.name]
        restore_window(self._training, window)


class RegisteredPart(_OfTraining):
    """Objects that the user has registered; they load before the rest, as they may refuse."""

    name = "registered"
    always_saved = False  # by the first versions

    def capture(self) -> Sections:
        """Return the states."""
        return {self.name: self._training.registered.state_dict()}, {}

    def plan(self, load: Load) -> None:
        """Read what is selected alone, if no hook is to be given all."""
        if load.lazy:
            load.first[self.name] = load.selected[self.name]

    def place(self, load: Load) -> None:
        """Load the objects."""
        self._training.registered.load_state_dict(
            load.selected[self.name],
            strict=load.strict,
            chosen=lambda name: load.takes(f"registered/{name}"),
        )

    def undone_by_a_failure(self) -> AbstractContextManager[None]:
        """Return a context that loads the objects' states of before, if it raises."""
        return self._training.registered.all_or_nothing()


def _is_empty(state: Mapping[str, Any]) -> bool:
    """Return whether nothing that is trained was saved; registered objects may be trained."""
    return not (state["models"] or state["registered"]["objects"])


def _with_classes(training: TrainingState, kind: str, states: Iterable[Any]) -> dict[str, Any]:
    """Return the section of a kind of objects, and that of their classes."""
    names = numbered(class_names(training, kind))
    return {kind: numbered(states), "classes": {kind: names}}


def _named(saved: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    """Return the weights of a model; none where a hook had left them out."""
    return () if saved is None else saved.items()


def _sharded_targets(
    training: TrainingState, saved: Iterable[tuple[str, Any]]
) -> Iterator[tuple[TensorView, torch.Tensor]]:
    """Pair views with the sharded parameters of their names: of these a rank reads its part.

    Args:
        training: the models.
        saved: trees of views by ``"<number of the model>.<name>"``.
    """
    from checkpoint_io.loader import views_in
    from checkpoint_io.sharding import is_dtensor

    parameters: dict[str, torch.Tensor] = {}
    for index, model in enumerate(training.models):
        for name, tensor in training.strategy.states.local_state_dict(model).items():
            if isinstance(tensor, torch.Tensor) and is_dtensor(tensor):
                parameters[f"{index}.{name}"] = tensor
    for name, tree in saved:
        parameter = parameters.get(name)
        if parameter is not None:
            for view in views_in(tree):
                if view.shape == tuple(parameter.shape):
                    yield view, parameter


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
