"""BorrowedWeights: lend the weights of a checkpoint to models, and put theirs back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.checkpoint.compatibility import compare_frozen, fitting_weights
from accel_callbacks.checkpoint.in_place_reads import InPlaceReads, place_weights
from accel_callbacks.checkpoint.open import open_one, together, unwrapped_failure
from accel_callbacks.checkpoint.part import RestoreReport
from accel_callbacks.checkpoint.restore import training_state_in
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import ResumeError
from accel_callbacks.gradients import local_part
from accel_callbacks.placeholder import Placeholder, kept_elsewhere

if TYPE_CHECKING:
    from checkpoint_io import CheckpointReader

__all__ = ["BorrowedWeights"]

_WHERE = "evaluate"
_SECTIONS = ("models", "callbacks")
_ADVICE = "load_checkpoint_in_model(model, path) loads the weights of a model."
Weights = dict[int, dict[str, Any]]


class BorrowedWeights(AbstractContextManager[str]):
    """Context in which models hold the weights of a checkpoint; collective where it is entered.

    Where a callback averages weights and evaluations use its average, the averages of the
    checkpoint are lent. At the exit, which is not collective, parameters and buffers are put back
    bitwise. Nothing else of the training state is read or changed.

    Args:
        training: the training state.
        models: prepared models, or the models as the user built them.
        url: the checkpoint.
        storage_options: for the filesystem behind the URL.

    Raises:
        ValueError: a model is not prepared.
        ResumeError: the checkpoint does not fit the models.
        checkpoint_io.CheckpointError: it is missing, unfinished or corrupt.
        RemoteError: another rank failed.
    """

    def __init__(
        self,
        training: TrainingState,
        models: Sequence[torch.nn.Module],
        url: str,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._training = training
        self._models = models
        self._url = url
        self._storage_options = storage_options
        self._stack = ExitStack()

    def __enter__(self) -> str:
        self._training.loop.saves.wait()
        with unwrapped_failure():
            reader = open_one(self._url, self._storage_options)
            state = together(_WHERE, partial(training_state_in, reader, _SECTIONS, _ADVICE))
            with ExitStack() as stack:
                self._borrow(reader, state, stack)
                self._stack = stack.pop_all()
        return reader.path

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _borrow(self, reader: CheckpointReader, state: Mapping[str, Any], stack: ExitStack) -> None:
        """Keep the weights, and replace them; what undoes it is added to the stack."""
        training, reads = self._training, InPlaceReads(reader)
        with shared_failure(_WHERE):
            indices = self._indices()
            hooked = training.pre_hooks.load_some
            for callback in training.loop.dispatch.callbacks:
                if hasattr(callback, "saved_averages"):
                    stack.enter_context(callback.set_aside())
            # A load hook gets all models, and may write to each.
            kept = range(len(training.models)) if hooked else indices
            stack.enter_context(_restore_afterwards(training, kept))
            stack.enter_context(_refuse_changes(training, reader.path))
            if hooked:
                left = set(map(id, training.pre_hooks.load(training.models, reader.path)))
                indices = [i for i in indices if id(training.models[i]) in left]
            weights = self._weights_of(reader.path, state, indices)
            # the float32 averages of half-precision weights
            converted: list[tuple[torch.Tensor, torch.Tensor]] = []
            loaded_by_model = place_weights(
                training.strategy, training.models, weights, reads, converted
            )
        together(_WHERE, partial(_read, reader, reads, weights), changes=reads.changes)
        with shared_failure(_WHERE), torch.no_grad():
            for index, saved in loaded_by_model.items():
                current = training.strategy.states.local_state_dict(training.models[index])
                training.strategy.states.load_model_state_dict(
                    training.models[index], {**current, **saved}
                )
            for target, value in converted:
                local_part(target).data.copy_(local_part(value))

    def _indices(self) -> list[int]:
        """Return the numbers of the models in the checkpoint."""
        prepared = zip(self._training.models, self._training.bare_models, strict=True)
        numbers = {id(model): i for i, both in enumerate(prepared) for model in both}
        if unknown := [model for model in self._models if id(model) not in numbers]:
            raise ValueError(
                f"{type(unknown[0]).__name__} is not prepared, so it is not known which model of "
                "the checkpoint it is: pass what prepare() returned."
            )
        return sorted({numbers[id(model)] for model in self._models})

    def _weights_of(self, path: str, state: Mapping[str, Any], indices: Sequence[int]) -> Weights:
        """Return the saved weights of each model, with the averages in their place.

        Raises:
            ResumeError: they do not fit.
        """
        training = self._training
        if absent := [i for i in indices if str(i) not in state["models"]]:
            raise ResumeError(
                f"{path} has {len(state['models'])} models, and model {absent[0]} is evaluated: "
                "prepare the models in the order of the run that saved it."
            )
        report, every = RestoreReport(path), Selection()
        weights = {i: fitting_weights(training, state, i, every, report) for i in indices}
        compare_frozen(training, state, indices, strict=False)
        for index, averages in self._averages(state["callbacks"]).items():
            if index in weights:
                current = training.strategy.states.local_state_dict(training.models[index])
                weights[index].update({n: v for n, v in averages.items() if n in current})
        return weights

    def _averages(self, saved: Mapping[str, Any]) -> Weights:
        """Return the averages of the first callback whose average evaluations use."""
        for entry in self._training.loop.dispatch.entries:
            if hasattr(entry.callback, "saved_averages") and entry.key in saved:
                bare = self._training.bare_models
                averages: Weights = entry.callback.saved_averages(saved[entry.key], bare)
                if averages:
                    return averages
        return {}


def _read(reader: CheckpointReader, reads: InPlaceReads, weights: Weights) -> None:
    from checkpoint_io.loader import views_in

    reader.check(keys={view.key for view in views_in(weights)})
    reads.run()
    # Casts of the weights from before, inside of the caller's autocast.
    torch.clear_autocast_cache()


@contextmanager
def _refuse_changes(training: TrainingState, path: str) -> Iterator[None]:
    """Refuse steps, saves and loads, which would mix up the two states."""
    step = training.loop.step

    def refuse_step(action: str) -> None:
        if action == "step":  # a backward may be of something else
            step.require_own_weights(action)

    before = step.borrowed, step.before_work
    step.borrowed, step.before_work = path, refuse_step
    try:
        yield
    finally:
        step.borrowed, step.before_work = before


@contextmanager
def _restore_afterwards(training: TrainingState, indices: Sequence[int]) -> Iterator[None]:
    """Put all parameters and buffers of models back at the end, bitwise and in place."""
    access = training.strategy.states
    modules = [m for i in indices for m in training.bare_models[i].modules()]
    buffers = [(m, name, b) for m in modules for name, b in m._buffers.items()]
    parameters = [parameter for m in modules for parameter in m._parameters.values()]
    held = [*parameters, *(buffer for _, _, buffer in buffers)]
    held = [tensor for tensor in held if not isinstance(tensor, Placeholder)]
    held += [tensor for i in indices for tensor in kept_elsewhere(training.bare_models[i])]
    tensors = {id(tensor): tensor for tensor in held if tensor is not None}
    copies = {key: local_part(tensor).detach().clone() for key, tensor in tensors.items()}
    loading = [training.models[i] for i in indices if not access.loads_in_place(training.models[i])]
    # What a model saves beside tensors is put back in its own way.
    states = [(model, _copy_state(access.local_state_dict(model))) for model in loading]
    try:
        yield
    finally:
        for model, state in states:
            access.load_model_state_dict(model, state)
        # The buffer object too: a forward may have assigned another one.
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        for key, tensor in tensors.items():
            local_part(tensor).data.copy_(copies[key])
        torch.clear_autocast_cache()


def _copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
