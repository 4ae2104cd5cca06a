"""Gradients of the models of one strategy: computed, averaged over ranks, clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel_callbacks.gradients import has_gradients

__all__ = ["Gradients"]


class Gradients:
    """The gradients of one strategy's models, as on a single device.

    An engine overrides what it averages over ranks, or keeps elsewhere than in ``parameter.grad``.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> gradients = Accelerator(cpu=True).strategy.gradients
        >>> gradients.backward((weight * 4).sum())
        >>> gradients.has_gradients(torch.optim.SGD([weight]))
        True
    """

    # --- how ranks depend on each other -------------------------------------------------------

    @property
    def trains_together(self) -> bool:
        """True if no rank can take a step with a prepared model without the others."""
        return False

    @property
    def allows_unfreezing(self) -> bool:
        """True if parameters may be frozen and unfrozen after ``setup`` of the strategy."""
        return True

    def mark_unsynced(self, model: torch.nn.Module) -> None:
        """Note that ranks may train this model without averaging from now on.

        Raises:
            ValueError: they cannot train it apart.
        """
        return None

    def join(
        self, models: Sequence[Any], follow: Callable[[Callable[[Any], Any]], None]
    ) -> AbstractContextManager[None]:
        """Return a context in which ranks may have unequal numbers of batches.

        Args:
            models: the wrapped models that are trained in it.
            follow: called at its end, on all ranks, if some took fewer steps than others: with a
                function that takes a state, the same on all ranks, and returns that of the rank
                that took all steps; there it is the state itself.
        """
        return nullcontext()

    @property
    def keeps_gradients_apart(self) -> bool:
        """True if the gradients of an open window cannot be brought into ``parameter.grad``."""
        return False

    # --- backward -----------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def averages(self, model: torch.nn.Module) -> bool:
        """Return whether a backward through this model would average its gradients now."""
        return False

    def no_sync(
        self, model: torch.nn.Module, *, in_window: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context in which backward does not synchronize gradients.

        Args:
            model: a prepared model.
            in_window: for all but the last backward of a gradient window, where an engine may
                choose to synchronize a part of them each time.
        """
        return nullcontext()

    def trigger_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward synchronizes after forwards in :meth:`no_sync`."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Collective: bring the gradients of an open window into ``parameter.grad``.

        An engine may hold some back until the end of the window.
        """
        return None

    # --- before a step ------------------------------------------------------------------------

    def has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether there are gradients that the optimizer would step with, or add up."""
        return has_gradients(optimizer)

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop gradients for this optimizer that are not in ``parameter.grad`` yet."""
        return None

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse one of the first steps of an optimizer, if it would train nothing.

        Raises:
            RuntimeError: the optimizer holds no parameter that is trained.
        """
        return None

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm and return it."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def join_norms(
        self, norms: Mapping[str, torch.Tensor], norm_type: float
    ) -> dict[str, torch.Tensor]:
        """Collective where ranks have different layers: return the norms of all, by name.

        Args:
            norms: of the gradients here.
            norm_type: the ``p`` of the norms; those of one name are parts of one.
        """
        return dict(norms)
