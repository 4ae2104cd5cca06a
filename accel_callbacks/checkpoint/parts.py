"""The parts of a training state: what each owner saves, and how it is restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.dispatch.instances import family
from accel_callbacks.checkpoint.compatibility import (
    check_classes,
    compare_frozen,
    fitting_weights,
    warn_of_names,
)
from accel_callbacks.checkpoint.in_place_reads import place_optimizer_state, place_weights
from accel_callbacks.checkpoint.open_window import WindowPart
from accel_callbacks.checkpoint.part import CheckpointPart, Load, Sections
from accel_callbacks.checkpoint.registered import RegisteredPart
from accel_callbacks.checkpoint.trained_parameters import require_saved
from accel_callbacks.checkpoint.training_state import TrainingState, numbered
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.rng import capture_rng, devices_of, restore_rng
from accel_callbacks.errors import NO_MODEL, ResumeError
from accel_callbacks.models.from_pretrained import pretrained_files
from accel_callbacks.strategy.optimizer_state import parameter_names
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from checkpoint_io import TensorView

__all__ = ["register_parts"]


def register_parts(training: TrainingState) -> None:
    """Register the parts that every training state has."""
    # They are captured and restored in this order. Random generators come first, since a stream
    # that is asked for its position may draw. The loaders follow the run, whose epoch tells whether
    # their pass is open, and the window follows the trackers, which first
    # write the row of before.
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
    ):
        training.register(kind(training))
    training.register(RegisteredPart(training.registered))


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
            load.pairs += _pair_sharded(
                self._training,
                ((f"{i}.{name}", view) for i, saved in weights for name, view in _items_of(saved)),
            )

    def check(self, load: Load) -> None:
        """Refuse weights of other models."""
        training = self._training
        if not load.options.selection.renames:  # the fingerprints have the names of the save
            compare_frozen(training, load.selected, load.indices[self.name], load.strict)
        # A load hook may take models out, and tells by that which are still to be loaded.
        if not training.pre_hooks.load_some:
            load.plans[self.name] = self._fit(load)

    def place(self, load: Load) -> None:
        """Read the weights into the memory of the models."""
        training = self._training
        # Hooks may have edited the state since it was checked.
        weights = load.plans[self.name] if load.lazy else self._fit(load)
        warn_of_names(load.report, load.strict)
        load.plans[self.name] = place_weights(
            training.strategy, training.models, weights, load.reads
        )

    def _fit(self, load: Load) -> dict[int, dict[str, Any]]:
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
            load.pairs += _pair_sharded(
                self._training, (named for saved in states for named in saved["state"].items())
            )

    def check(self, load: Load) -> None:
        """Refuse states of other optimizers, and optimizers of what no checkpoint would hold."""
        indices = load.indices[self.name]
        check_classes(self._training, load.selected, self.name, indices, load.strict)
        load.plans[self.name] = self._fit(load)
        if not load.options.selection.partial:
            require_saved(self._training, "load_state", ResumeError)

    def place(self, load: Load) -> None:
        """Read the states into the memory of the optimizers."""
        training = self._training
        states = load.plans[self.name] if load.lazy else self._fit(load)
        load.plans[self.name] = {
            index: place_optimizer_state(
                training.optimizers[index].optimizer, saved, load.reads, training.strategy
            )
            for index, saved in states.items()
        }

    def _fit(self, load: Load) -> dict[int, dict[str, Any]]:
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
        load.local = self._of_this_rank(load)

    def _of_this_rank(self, load: Load) -> dict[str, Any] | None:
        """Return what the checkpoint holds for this rank alone, as far as it is restored.

        With another number of data ranks that is only the random generators, on data ranks that
        exist on both sides (an open window is restored for any number, by `WindowPart`).

        Raises:
            ResumeError: the resume is not exact, and ``strict``.
        """
        state, local, ranks = load.selected, load.local, self._training.strategy.data
        copies = state.get("copies", 1)
        saved_ranks, data_ranks = load.reader.manifest.world_size // copies, ranks.world
        restored = local if saved_ranks == data_ranks else None
        prepared = {
            str(i): loader
            for i, loader in enumerate(self._training.loaders)
            if load.takes(f"loaders/{i}") and str(i) in state["loaders"]
        }
        problems = _stream_problems(prepared, state["loaders"], restored)
        text = "".join(f"a stream does not go on exactly: {problem}; " for problem in problems)
        if saved_ranks != data_ranks:
            unit = "processes" if copies == ranks.copies == 1 else "data ranks"
            change = f"was saved by {saved_ranks} {unit} and is loaded by {data_ranks}"
            text += _other_world(
                change, min(saved_ranks, data_ranks), exact=not problems, load=load
            )
            if local is not None:
                restored = {"rng": local["rng"]}
        if text and load.strict:
            raise ResumeError(text + "pass strict=False to accept that.")
        if text:
            warn(text.removesuffix("; ") + ".")
        return restored

    def restore(self, load: Load) -> None:
        """Go to the saved positions."""
        states = load.selected[self.name]
        for index in load.indices[self.name]:
            loader = self._training.loaders[index]
            state = _with_local_state(states, load.local, str(index))
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


def _is_empty(state: Mapping[str, Any]) -> bool:
    """Return whether nothing that is trained was saved; registered objects may be trained."""
    return not (state["models"] or state["registered"]["objects"])


def _with_classes(training: TrainingState, kind: str, states: Iterable[Any]) -> dict[str, Any]:
    """Return the section of a kind of objects, and that of their classes."""
    names = numbered(training.class_names(kind))
    return {kind: numbered(states), "classes": {kind: names}}


def _items_of(saved: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    """Return the weights of a model; none where a hook had left them out."""
    return () if saved is None else saved.items()


def _pair_sharded(
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


def _with_local_state(
    loaders: Mapping[str, Mapping[str, Any]], local: Mapping[str, Any] | None, key: str
) -> dict[str, Any]:
    """Return the state of a loader, with this rank's own part if there is one."""
    stream = ({} if local is None else local.get("streams", {})).get(key)
    return {**loaders[key], **({} if stream is None else {"stream": stream})}


def _stream_problems(
    prepared: Mapping[str, Any], loaders: Mapping[str, Any], local: Mapping[str, Any] | None
) -> list[str]:
    """Return why loaders that are resumed in mid-epoch cannot continue exactly.

    Args:
        prepared: the prepared loaders.
        loaders: their saved states.
        local: the state that this rank saved for itself, ``None`` if no rank of this index did.
    """
    states = {key: _with_local_state(loaders, local, key) for key in prepared}
    problems = {
        key: prepared[key].resume_problem(state)
        for key, state in states.items()
        if state["trained"] and not state["finished"] and state["position"]
    }
    return [problem for problem in problems.values() if problem is not None]


def _other_world(change: str, kept: int, *, exact: bool, load: Load) -> str:
    """Describe what another world size means for the rest of a run; empty if nothing.

    Args:
        change: the world sizes.
        kept: number of data ranks that exist on both sides.
        exact: loaders continue exactly.
        load: takes what is restored.
    """
    alike = "rank 0" if kept == 1 else f"ranks 0 to {kept - 1}"
    parts = []
    if exact and load.takes("loaders/0"):
        parts.append("the order of samples goes on exactly, but")
    if load.takes("rng"):
        parts.append(f"random generators are not restored, except on {alike};")
    start = f"the checkpoint {change}: "
    return start + " ".join(parts) + " " if parts and parts[-1].endswith(";") else ""
