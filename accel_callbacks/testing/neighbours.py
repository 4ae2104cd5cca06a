"""Callbacks that stand beside the one that is checked: they fail, save, or watch the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_callbacks.callbacks.base import EXIT_HOOKS, HOOKS

__all__ = ["Injected", "Neighbour", "Raises", "SavesEachPlace", "Witness"]

_AWAY = ("validation", "test", "log", "checkpoint", "exception", "preempt")
#: Hooks in which the models hold the weights that are trained.
_TRAINED = [
    hook for hook in HOOKS if hook not in EXIT_HOOKS and not any(word in hook for word in _AWAY)
]


class Injected(Exception):
    """The error that a check injects."""


class Neighbour:
    """Stands where the checked callback does: among the first, or among those that run last.

    Args:
        like: the checked callback.
        name: its state key.
    """

    def __init__(self, like: Any, name: str) -> None:
        self.runs_last = bool(getattr(like, "runs_last", False))
        self.state_key = name


class Raises(Neighbour):
    """Raises in one hook, while it is armed.

    Args:
        like: the checked callback.
        name: its state key.

    Attributes:
        raised: it has, since it was armed.
    """

    def __init__(self, like: Any, name: str) -> None:
        super().__init__(like, name)
        self.hook = ""
        self.raised = False
        for hook in HOOKS:
            setattr(self, hook, self._raiser(hook))

    def _raiser(self, hook: str) -> Callable[..., None]:
        def come(*args: Any) -> None:
            if self.hook == hook and not self.raised:
                self.raised = True
                raise Injected(f"{self.state_key} raises in {hook}")

        return come

    def arm(self, hook: str) -> None:
        """Raise the next time that this hook comes, once."""
        self.hook, self.raised = hook, False


class Witness(Neighbour):
    """Remembers the weights that are trained, wherever no evaluation has borrowed them.

    Args:
        like: the checked callback.
        earlier: the witness that is called before it, which sees what an error hides from this one.
    """

    def __init__(self, like: Any, earlier: Witness | None = None) -> None:
        super().__init__(like, "Witness" if earlier is None else "LateWitness")
        self.runs_last = self.runs_last and earlier is not None
        self.weights: dict[str, torch.Tensor] = {} if earlier is None else earlier.weights
        for hook in _TRAINED:
            setattr(self, hook, self._look)

    def _look(self, run: Any, model: Any, *args: Any) -> None:
        if not run.accelerator.loop.evaluating:
            self.weights.update((n, w.detach().clone()) for n, w in model.state_dict().items())

    def changed(self, model: torch.nn.Module) -> list[str]:
        """Names of the weights that are not those that were seen last."""
        now = model.state_dict()
        return [name for name, weight in self.weights.items() if not weight.equal(now[name])]


class SavesEachPlace:
    """Saves the training state at the end of each batch and each epoch, after everyone else.

    Args:
        root: folder or URL.
    """

    runs_last = True
    state_key = "SavesEachPlace"

    def __init__(self, root: str) -> None:
        self.root = root
        self.places: dict[str, str] = {}

    def on_train_batch_end(self, run: Any, model: Any, *args: Any) -> None:
        """A step is over."""
        self._save(run, f"step {run.global_step}, batch {run.batch_idx}")

    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        """An epoch is over."""
        self._save(run, f"the end of epoch {run.current_epoch}")

    def _save(self, run: Any, place: str) -> None:
        if place not in self.places:
            self.places[place] = f"{self.root}/{len(self.places)}"
            run.accelerator.save_state(self.places[place])
