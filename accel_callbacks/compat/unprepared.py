"""Parameters that an optimizer trains outside of the prepared models, as parts of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_callbacks.checkpoint.trained_parameters import unsaved_parameters
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = ["UnpreparedParameters", "is_unprepared", "register_unprepared"]


class UnpreparedParameters:
    """The parameters, in the order in which they were found."""

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters by their position."""
        return {str(index): p.detach() for index, p in enumerate(self.parameters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the parameters.

        Args:
            state: from :meth:`state_dict`.

        Raises:
            ValueError: it has others.
        """
        here, there = self.state_dict(), state
        if _shapes(here) != _shapes(there):
            raise ValueError(
                "the state has trained parameters of no prepared model with the shapes "
                f"{_shapes(there)}, and here they have {_shapes(here)}: make the optimizer of the "
                "same ones, or prepare their model when a state is saved and when it is loaded."
            )
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                parameter.copy_(state[str(index)])


def is_unprepared(registered: Any) -> bool:
    """Return whether a registered object is one of :func:`register_unprepared`."""
    return isinstance(registered, UnpreparedParameters)


def _shapes(state: Mapping[str, torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(state[name].shape) for name in sorted(state, key=int)]


def register_unprepared(training: TrainingState) -> None:
    """Let a state have all parameters that optimizers train, and warn once of those it lacked.

    Args:
        training: the state that is saved or restored.
    """
    for optimizer, parameters in unsaved_parameters(training):
        shapes = listed((str(tuple(parameter.shape)) for parameter in parameters), 3)
        warn(
            f"{optimizer} trains parameters of no prepared model ({shapes}). save_state() saves "
            "them too, and load_state() restores them, but their gradients are not averaged over "
            "processes: `model, optimizer = accelerator.prepare(model, optimizer)`."
        )
        known = [each for each in training.registered.objects if is_unprepared(each)]
        holder = known[0] if known else UnpreparedParameters()
        holder.parameters += parameters
        training.registered.add(unprepared_parameters=holder)
