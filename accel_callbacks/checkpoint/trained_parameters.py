"""The parameters that prepared optimizers train: a checkpoint must hold all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.collectives.nested import is_container, leaves
from accel_callbacks.gradients import local_part
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = ["require_prepared_steps", "require_saved", "unsaved_parameters"]

_SHOWN = 3


def require_saved(
    training: TrainingState, action: str, error: type[RuntimeError] = RuntimeError
) -> None:
    """Raise if a prepared optimizer trains parameters that no checkpoint would hold.

    Held are the tensors of prepared models, and what registered objects and callbacks save. Hooks
    of the user that save may hold any, so that nothing is refused beside them.

    Args:
        training: the state that is saved or restored.
        action: the method that asks, for the message.
        error: the class to raise.
    """
    for optimizer, orphans in unsaved_parameters(training):
        raise error(f"{action}: {_describe(optimizer, orphans)}")


def unsaved_parameters(training: TrainingState) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the class of each optimizer with parameters that no checkpoint would hold, and these.

    Args:
        training: the state that is saved or restored.
    """
    held = _parameters_of_models(training)
    for optimizer in training.optimizers:
        orphans = [parameter for parameter in _trainable(optimizer) if id(parameter) not in held]
        if orphans and (orphans := _not_saved(training, orphans)):
            yield type(optimizer.optimizer).__name__, orphans


def require_prepared_steps(training: TrainingState) -> None:
    """Raise in a run, else warn once, if an optimizer has stepped that was not prepared.

    It counts if it trains a prepared model that has no other optimizer, or if no optimizer is
    prepared at all.

    Args:
        training: the state that is saved.
    """
    loop, steps = training.loop, training.loop.unprepared_steps
    texts = (_describe_unprepared(training, optimizer) for optimizer in steps.unprepared)
    text = next(filter(None, texts), None)
    for optimizer in steps.bypassed:
        text = (
            f"{type(optimizer).__name__} was stepped past the object that prepare() returned for "
            "it, so that nothing counts its steps: assign it, `optimizer = "
            "accel.prepare(optimizer)`, and call step() and zero_grad() of that."
        )
    for optimizer in steps.hooked:
        if any(optimizer.state.values()) and optimizer not in training.registered:
            steps.hooked.clear()  # once for all of them
            warn(
                f"save_state: {type(optimizer).__name__} steps within backward, and its state is "
                "not saved: accel.register_for_checkpointing(optimizer), for each of them."
            )
            break
    if text is None:
        return
    if loop.flags.fit_started and loop.run.identity is not None:
        raise RuntimeError(f"save_state: {text}")
    steps.forget()
    warn(f"save_state: {text}")


def _describe_unprepared(training: TrainingState, optimizer: torch.optim.Optimizer) -> str | None:
    """Return what to tell of an optimizer that steps and is not prepared, None for nothing."""
    held = _parameters_of_models(training)
    stepped = {id(p) for prepared in training.optimizers for p in _trainable(prepared)}
    trained = [parameter for parameter in _trainable(optimizer) if id(parameter) not in stepped]
    others = [parameter for parameter in trained if id(parameter) not in held]
    if optimizer in training.registered or not trained:
        return None
    lost = f"{type(optimizer).__name__} steps and was not prepared, so that its steps are not "
    if len(others) < len(trained):
        return f"{lost}counted and its state is not saved: `optimizer = accel.prepare(optimizer)`."
    if training.optimizers or not _not_saved(training, others):
        return None
    return (
        f"{lost}counted, and neither was its model, so that no checkpoint would hold what it "
        "learns: `model, optimizer, loader = accel.prepare(model, optimizer, loader)`."
    )


def _parameters_of_models(training: TrainingState) -> set[int]:
    return {id(parameter) for model in training.bare_models for parameter in model.parameters()}


def _trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter for parameter in held if parameter.requires_grad]


def _not_saved(training: TrainingState, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that are in no other part of a checkpoint either."""
    dispatch = training.loop.dispatch
    if training.pre_hooks.save_some or dispatch.saves_differ_between_ranks:
        return []
    parts = (
        # A parameter may be another view of the memory of a model.
        lambda: [[*model.parameters(), *model.buffers()] for model in training.bare_models],
        training.registered.state_dict,
        dispatch.state_dict,
    )
    for part in parts:
        saved = [leaf.value for leaf in leaves(part(), lambda value: not is_container(value))]
        parameters = [p for p in parameters if not any(_is_saved_as(leaf, p) for leaf in saved)]
        if not parameters:
            break
    return parameters


def _is_saved_as(leaf: Any, parameter: torch.Tensor) -> bool:
    """Return whether a leaf of a state is a parameter, or a copy of it or its only element."""
    local = local_part(parameter.detach())
    if local.is_meta:
        return False
    if isinstance(leaf, (int, float)):
        return local.numel() == 1 and local.item() == leaf
    if not isinstance(leaf, torch.Tensor):
        return False
    leaf = local_part(leaf.detach())
    if leaf.untyped_storage()._cdata == local.untyped_storage()._cdata:
        return True
    return leaf.shape == local.shape and torch.equal(leaf.to(local), local)


def _describe(optimizer: str, orphans: Sequence[torch.Tensor]) -> str:
    owner = _owner(orphans[0])
    shapes = listed((str(tuple(parameter.shape)) for parameter in orphans), _SHOWN)
    if owner is None:
        return (
            f"{optimizer} trains parameters that belong to no prepared model ({shapes}), and no "
            "checkpoint would hold them: put them into a torch.nn.Module and pass that to "
            "prepare(), or give an object whose state_dict() has them to "
            "accel.register_for_checkpointing(). If the model is prepared, make the optimizer of "
            "the parameters that it has now."
        )
    name = type(owner).__name__
    return (
        f"{optimizer} trains parameters of {name} ({shapes}), which was not prepared, and no "
        f"checkpoint would hold them: pass both to prepare() of this Accelerator, `model, "
        f"optimizer = accel.prepare(model, optimizer)`. Or, if {name} is not to be prepared, call "
        "accel.register_for_checkpointing() with it."
    )


def _owner(parameter: torch.Tensor) -> torch.nn.Module | None:
    """Return the largest module that has a parameter; it looks through all objects."""
    # By type, because isinstance asks proxies, which may import what they stand for.
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.Module)]
    owners = [module for module in modules if any(p is parameter for p in module.parameters())]
    return max(owners, key=lambda module: len(list(module.modules())), default=None)
