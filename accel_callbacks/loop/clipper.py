"""Clipping in the first steps, with a warning of parameters from a used-up iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import torch

from accel_callbacks.loop.bare_steps import BareSteps
from accel_callbacks.strategy import Gradients

__all__ = ["CheckedClipping", "NotedClipping"]


class CheckedClipping:
    """Clips as the gradients of a strategy do, and warns of a used-up iterator of parameters.

    Args:
        gradients: clips.
        bare_steps: compares gradients, which clipping changes.
        warn: warns once of a kind of mistake.

    Example:
        >>> import torch, warnings
        >>> from accel_callbacks import Accelerator
        >>> parameters = torch.nn.Linear(1, 1).parameters()
        >>> optimizer = torch.optim.SGD(parameters)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     norm = Accelerator(cpu=True).clip_grad_norm_(parameters, 1.0)
        >>> "model.parameters() anew" in str(caught[0].message)
        True
    """

    def __init__(
        self, gradients: Gradients, bare_steps: BareSteps, warn: Callable[[str, str], None]
    ) -> None:
        self._gradients = gradients
        self._bare_steps = bare_steps
        self._warn = warn

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm and return it."""
        with self._bare_steps.clipping():
            return self._gradients.clip_grad_norm_(self._unused(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        with self._bare_steps.clipping():
            self._gradients.clip_grad_value_(self._unused(parameters), clip_value)

    def _unused(self, parameters: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Return the parameters, none if they come from an iterator at its end."""
        if not _is_used_up(parameters):
            return parameters
        self._warn(
            "used up",
            "the parameters to clip come from an iterator that was used before and yields nothing "
            "any more, so that no gradient is clipped: pass model.parameters() anew in each step, "
            "or keep a list, `parameters = list(model.parameters())`.",
        )
        return []  # torch would warn again of an empty generator, with less to go by


class NotedClipping:
    """Clips as another one does, and tells the total norms.

    Args:
        clipping: clips.
        note: called with each norm.
    """

    def __init__(
        self, clipping: Gradients | CheckedClipping, note: Callable[[torch.Tensor], None]
    ) -> None:
        self.clipping = clipping
        self._note = note

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm and return it."""
        norm = self.clipping.clip_grad_norm_(parameters, max_norm, norm_type)
        self._note(norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        self.clipping.clip_grad_value_(parameters, clip_value)


def _is_used_up(parameters: Any) -> bool:
    """Return whether an iterator has ended before; one that is empty from the start has not."""
    if isinstance(parameters, GeneratorType):
        return parameters.gi_frame is None
    if isinstance(parameters, (filter, map)):
        arguments: Any = parameters.__reduce__()[1]
        return any(map(_is_used_up, arguments[1:]))  # after the function
    return False
