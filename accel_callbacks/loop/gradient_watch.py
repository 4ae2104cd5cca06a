"""The gradients of one optimizer between backward and step: what cleared and what clipped them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from accel_callbacks.gradients import local_part
from accel_callbacks.precision import Precision

__all__ = ["GradientWatch"]

_KEPT = 2  # steps in a row after one whose gradients are still there
_NORMS = (2.0, float("inf"))


class GradientWatch:
    """Warns of gradients that were never cleared, and of those that were clipped while scaled.

    Args:
        optimizer: the optimizer as the user made it.
        precision: may scale losses, and with them gradients.
        warn: warns once of a kind of mistake.

    Example:
        >>> import torch, warnings
        >>> from accel_callbacks import Accelerator
        >>> accel, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     for _ in range(3):
        ...         accel.backward(model(torch.ones(1, 1)).sum())
        ...         optimizer.step()
        >>> "optimizer.zero_grad()" in str(caught[0].message)
        True
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        warn: Callable[[str, str], None],
    ) -> None:
        self._optimizer = optimizer
        self._precision = precision
        self._warn = warn
        self._kept_steps = 0
        self._kept = self._compared = False
        self._state: list[tuple[int, int]] = []
        self._norms: list[torch.Tensor] = []
        self._clipped: tuple[list[float], list[float]] | None = None

    def before_backward(self) -> None:
        """Note whether the gradients are those of the backward or step before."""
        self._compared = True
        self._kept = self._kept and bool(self._state) and self._state == self._current_state()

    def after_backward(self) -> None:
        """Note the gradients of a backward."""
        self._state = self._current_state()
        if self._precision.is_scaled(self._optimizer):
            self._norms = _norms(self._gradients())

    def check(self, *, known: bool) -> None:
        """Check a step that is about to be taken.

        Args:
            known: all gradients are those of backward passes noted here.
        """
        if self._precision.is_scaled(self._optimizer):
            self._check_clipped()
        if known and self._compared and self._kept:
            self._kept_steps += 1
        else:
            self._kept_steps = 0
        if self._kept_steps == _KEPT:
            self._warn(
                "zero_grad",
                f"{type(self._optimizer).__name__} took {_KEPT + 1} steps, and nothing cleared its "
                "gradients: each step adds those of all batches before. Call "
                "optimizer.zero_grad() after optimizer.step().",
            )
        self._state = self._current_state()
        self._kept, self._compared = True, False
        self._norms = []

    def _check_clipped(self) -> None:
        """Warn of gradients that had different norms after backward, and have the same one now."""
        # An operation that is linear, such as an average over ranks, is right on scaled gradients
        # too, but does not lead to the same norm in two steps.
        if not self._norms or self._state == self._current_state():
            return
        now = _norms(self._gradients())
        before, after = (torch.stack(norms).tolist() for norms in (self._norms, now))
        if not all(map(math.isfinite, before)):  # of a step that the scaler skips
            return
        previous, self._clipped = self._clipped, (before, after)
        if previous is None:
            return
        old_before, old_after = previous
        for old_norm, norm, old_clipped, clipped in zip(
            old_before, before, old_after, after, strict=True
        ):
            same = _is_near(old_clipped, clipped, 1e-3) and clipped < norm
            if same and not _is_near(old_norm, norm, 1e-2):
                self._warn(
                    "clipped",
                    f"the gradients of {type(self._optimizer).__name__} were clipped to "
                    f"{clipped:.3g} while they were scaled for {self._precision.name}, so that "
                    "next to nothing is left of them: in place of torch's functions call "
                    "accel.clip_grad_norm_ or accel.clip_grad_value_, which unscale them first.",
                )
                return

    def _gradients(self) -> Iterator[torch.Tensor]:
        groups = self._optimizer.param_groups
        gradients = (parameter.grad for group in groups for parameter in group["params"])
        return (gradient for gradient in gradients if gradient is not None)

    def _current_state(self) -> list[tuple[int, int]]:
        # Not the tensors, which would be kept in memory beside those of the next step.
        return [(id(gradient), gradient._version) for gradient in self._gradients()]


def _norms(gradients: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norms of what this rank has, without a collective."""
    parts = [local_part(gradient) for gradient in gradients if not gradient.is_sparse]
    parts = [part for part in parts if part.numel()]
    if not parts:
        return []
    return [torch.nn.utils.get_total_norm(parts, norm_type) for norm_type in _NORMS]


def _is_near(first: float, second: float, tolerance: float) -> bool:
    return abs(first - second) <= tolerance * max(abs(first), abs(second))
