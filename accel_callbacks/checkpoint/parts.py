"""The parts of a training state: what each owner saves, and how it is restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.dispatch.instances import family
from accel_callbacks.checkpoint.compatibility import (
    check_classes,
    compare_frozen,
    fitting_weights,
    warn_of_names,
)
from accel_callbacks.checkpoint.in_place_reads import place_optimizer_state, place_weights
from accel_callbacks.checkpoint.part import CheckpointPart, Load, Sections
from accel_callbacks.checkpoint.registered import RegisteredPart
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.checkpoint.trained_parameters import require_saved
from accel_callbacks.checkpoint.training_state import TrainingState, numbered
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.rng import capture_rng, devices_of, restore_rng
from accel_callbacks.errors import NO_MODEL, ResumeError
from accel_callbacks.gradients import parameters_of
from accel_callbacks.models.from_pretrained import pretrained_files
from accel_callbacks.strategy.optimizer_state import parameter_names
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from checkpoint_io import CheckpointReader, TensorView

__all__ = [
    "WindowPart",
    "register_parts",
]


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


# --- windowPart: the open gradient window, restored on any number of ranks and any sharding ------


class _Window(NamedTuple):
    """An open window, as this rank restores it.

    Attributes:
        state: its position, divisor and normalizer, and the row that is being logged.
        gradients: by ``"<model>.<name>"``, each sharded as its parameter is.
    """

    state: dict[str, Any]
    gradients: dict[str, torch.Tensor]


class WindowPart(CheckpointPart):
    """The open gradient window, or gradients that wait for a step outside of one.

    Args:
        training: the window, and the parameters that have the gradients.
    """

    name = "window"

    def __init__(self, training: TrainingState) -> None:
        self._training = training

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
        gradients = self._gradients_to_save()
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

    def _gradients_to_save(self) -> dict[str, torch.Tensor]:
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

    def check(self, load: Load) -> None:
        """Refuse nothing: most checkpoints hold no open window."""

    def plan(self, load: Load) -> None:
        """Read the shared gradients by themselves: a rank reads its part."""
        load.in_place[self.name] = load.first.pop(self.name, None)

    def read(self, load: Load) -> None:
        """Read the gradients into new memory, as the memory of now is in use until all fits."""
        load.plans[self.name] = self._read(load)

    def _read(self, load: Load) -> _Window | None:
        """Read the open window of a checkpoint, None if it has none; not collective.

        Gradients that are sharded hold the mean over all ranks, and each rank reads its part. Those
        of a replica (DDP) are the rank's own until the window ends. Other ranks, or another
        sharding, restore their mean over the ranks of the save, to which it would have led.

        Raises:
            checkpoint_io.CheckpointError: it is damaged.
        """
        training, reader, local = self._training, load.reader, load.local
        selection = load.options.selection
        # The ranks enter and leave windows together, so that none has one if this rank has not.
        if not selection.takes("window") or (local is not None and "window" not in local):
            return None
        parameters = {
            f"{index}.{name}": parameter
            for index, model in enumerate(training.bare_models)
            for name, parameter in model.named_parameters()
            if not parameter.is_meta  # of another rank
        }
        saved = reader.manifest.world_size // reader.state.get("copies", 1)
        ranks = training.strategy.data
        same = saved == ranks.world
        window = local.get("window") if same and local is not None else None
        if window is not None and window.get("averaged_over", saved) != ranks.averaged_over:
            window = None  # each rank had seen a part of the tokens of its data rank alone
        names = () if window is None else map(selection.weight, window["gradients"])
        sharded = any(collectives.is_sharded(parameters.get(name)) for name in names)
        if window is not None and not sharded:
            gradients = {
                name: gradient.to(parameters[name].device)
                for saved_name, gradient in window["gradients"].items()
                if (name := selection.weight(saved_name)) in parameters
            }
            state = window
        else:
            parts = _windows_of_all(reader)
            if not parts:
                return None
            gradients = _means(parts, parameters, selection)
            state = _combine(parts, ranks.averaged_over)
            state["logged"] = local["window"]["logged"] if local and "window" in local else None
        if training.strategy.gradients.keeps_gradients_apart:
            raise ResumeError(
                f"{reader.path} was saved inside of a gradient window, and this engine does not "
                'take its gradients: load it with only=lambda key: key != "window", which begins '
                "the window anew, or with another engine."
            )
        shared = reader.state.get("window", {}).get("gradients", {})
        gradients |= _read(reader, shared, parameters, selection)
        before, now = state.get("averaged_over", saved), ranks.averaged_over
        if state["normalizer"]["pending"] and before != now:
            # Losses of a normalizer are sums: it multiplies their mean by the number of ranks.
            for gradient in gradients.values():
                gradient.mul_(before / now)
        return _Window(state, gradients)

    def restore(self, load: Load) -> None:
        """Continue the saved window, or begin a new one."""
        training, saved = self._training, load.plans[self.name]
        window = training.loop.window
        window.close()
        window.normalizer.forget()
        window.dirty = False
        # Those of the window that is left, which an engine may hold beside parameter.grad.
        for optimizer in training.optimizers:
            training.strategy.gradients.drop_gradients(optimizer.optimizer)
        gradients = {} if saved is None else saved.gradients
        for index, model in enumerate(training.bare_models):
            for name, parameter in model.named_parameters():
                parameter.grad = gradients.get(f"{index}.{name}")
        if saved is not None:
            window.position, window.divisor = saved.state["position"], saved.state["divisor"]
            # Without a position, they are of a script that accumulates by itself.
            window.sync, window.touched = window.position == 0, True
            window.normalizer.load_state_dict(saved.state["normalizer"])
        logged = None if saved is None else saved.state.get("logged")
        training.tracking.row.load_state_dict(logged, training.loop.run)


def _windows_of_all(reader: CheckpointReader) -> list[tuple[CheckpointReader, dict[str, Any]]]:
    """Return the windows of all ranks of the save, with views; none if no window was open."""
    import checkpoint_io

    windows = []
    for rank in range(reader.manifest.world_size):
        rank_reader = checkpoint_io.CheckpointReader(reader.source.store, reader.manifest, rank)
        window = (rank_reader.local_state or {}).get("window")
        if window is None:  # the ranks enter and leave windows together
            return []
        windows.append((rank_reader, window))
    return windows


def _means(
    parts: list[tuple[CheckpointReader, dict[str, Any]]],
    parameters: Mapping[str, torch.Tensor],
    selection: Selection,
) -> dict[str, torch.Tensor]:
    """Return the means of the gradients over the ranks of the save; none counts as zero."""
    sums: dict[str, torch.Tensor] = {}
    for reader, window in parts:  # one rank after the other: gradients of two are in memory
        for name, gradient in _read(reader, window["gradients"], parameters, selection).items():
            sums[name] = sums[name].add_(gradient) if name in sums else gradient
    return {name: total.div_(len(parts)) for name, total in sums.items()}


def _read(
    reader: CheckpointReader,
    views: Mapping[str, TensorView],
    parameters: Mapping[str, torch.Tensor],
    selection: Selection,
) -> dict[str, torch.Tensor]:
    """Read gradients of the parameters here; of sharded ones, the part of this rank."""
    gradients: dict[str, torch.Tensor] = {}
    pairs = []
    for name, view in views.items():
        parameter = parameters.get(selection.weight(name))
        if parameter is None or tuple(parameter.shape) != view.shape:
            continue
        gradient = torch.empty_like(parameter, dtype=view.dtype, requires_grad=False)
        gradients[selection.weight(name)] = gradient
        pairs.append((view, gradient))
    if pairs:
        reader.read(pairs, progress=False)
    return gradients


def _combine(
    parts: list[tuple[CheckpointReader, dict[str, Any]]], averaged_over: int
) -> dict[str, Any]:
    """Return the state of a window for each of another number of ranks.

    Args:
        parts: the windows of all ranks of the save.
        averaged_over: number of ranks here that read different data.
    """
    first = dict(parts[0][1])
    world = len(parts)
    total = sum(window["normalizer"]["total"] for _, window in parts)
    # Copies of a data rank have counted the same units.
    counted = total * first.get("averaged_over", world) / world
    first["normalizer"] = {**first["normalizer"], "total": counted / averaged_over}
    return first
