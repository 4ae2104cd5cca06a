"""Hooks of the user's that save or load some models in their own way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["PreHooks"]

Hook = Callable[..., Any]


class PreHooks:
    """The hooks around models in ``save_state`` and ``load_state``, in the order of registering.

    Example:
        >>> from accel_callbacks.pre_hooks import PreHooks
        >>> hooks = PreHooks()
        >>> handle = hooks.on_load(lambda models, input_dir: models.clear())
        >>> hooks.load(["a model"], "runs/step-1")
        []
        >>> handle.remove()
        >>> hooks.load(["a model"], "runs/step-1")
        ['a model']
    """

    def __init__(self) -> None:
        self._before_save: OrderedDict[int, Hook] = OrderedDict()
        self._before_load: OrderedDict[int, Hook] = OrderedDict()

    def on_save(self, hook: Hook) -> RemovableHandle:
        """Add ``hook(models, weights, output_dir)``."""
        return _add(self._before_save, hook, "hook(models, weights, output_dir)")

    def on_load(self, hook: Hook) -> RemovableHandle:
        """Add ``hook(models, input_dir)``."""
        return _add(self._before_load, hook, "hook(models, input_dir)")

    @property
    def save_some(self) -> bool:
        """Whether hooks run in a save."""
        return bool(self._before_save)

    @property
    def load_some(self) -> bool:
        """Whether hooks run in a load."""
        return bool(self._before_load)

    def save(
        self, models: Iterable[torch.nn.Module], weights: Iterable[Any], output_dir: str
    ) -> list[Any]:
        """Call the hooks; the weights of each model as they left them, None for one taken out.

        Raises:
            ValueError: a hook took weights out and put others in, so that it cannot be said
                which belong to which model.
        """
        models, weights = list(models), list(weights)
        owners = list(range(len(models)))  # owners[i]: whose weights weights[i] are
        left = list(models)
        result: list[Any] = list(weights)
        for hook in list(self._before_save.values()):
            before = list(weights)
            hook(left, weights, output_dir)
            owners = _owners_after(hook, owners, before, weights)
        for index in range(len(models)):
            kept = index in owners and any(one is models[index] for one in left)
            result[index] = weights[owners.index(index)] if kept else None
        return result

    def load(self, models: Iterable[Any], input_dir: str) -> list[Any]:
        """Call the hooks; the models that they did not take out, which are still to be loaded."""
        left = list(models)
        for hook in list(self._before_load.values()):
            hook(left, input_dir)
        return left


def _add(hooks: OrderedDict[int, Hook], hook: Hook, form: str) -> RemovableHandle:
    if not callable(hook):
        raise TypeError(f"{hook!r} cannot be called: pass a function {form}.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _owners_after(hook: Hook, owners: list[int], before: list[Any], after: list[Any]) -> list[int]:
    """Whose weights are left: known by the very objects, or by place where all are there."""
    known = {id(one): owner for one, owner in zip(before, owners, strict=True)}
    if any(id(one) not in known for one in after):
        if len(after) == len(before):
            return owners
        name = getattr(hook, "__qualname__", repr(hook))
        raise ValueError(
            f"the save hook {name} left {len(after)} of {len(before)} weights, some of them new: "
            "edit or replace them in their place, or take out what the hook saves itself."
        )
    return [known[id(one)] for one in after]
