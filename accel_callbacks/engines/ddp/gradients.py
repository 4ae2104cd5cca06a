"""Gradients that DistributedDataParallel averages in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks import collectives
from accel_callbacks.engines.ddp.join import join_uneven
from accel_callbacks.engines.ddp.reduction import Reductions
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.strategy.gradients import Gradients

__all__ = ["AveragedGradients"]


class AveragedGradients(Gradients):
    """Gradients of replicas.

    Args:
        options: of the wrappers.
        device: of this rank.

    Attributes:
        apart: the models that ranks train without averaging, as in LocalSGD.
    """

    def __init__(self, options: DistributedDataParallelKwargs, device: torch.device) -> None:
        self._options = options
        self._device = device
        # That the models average in. Weak: a script that destroys it must be able to free it.
        self._group: ReferenceType[Any] | None = None
        self._reductions = Reductions()
        self.apart: WeakSet[torch.nn.Module] = WeakSet()

    def watch(self, model: DistributedDataParallel) -> None:
        """Note a new wrapper, which averages in the default group of now."""
        self._group = ref(dist.group.WORLD)
        self._reductions.watch(model)

    @property
    def trains_together(self) -> bool:
        """True once a model is averaged, unless ranks train it apart, as in LocalSGD."""
        return self._group is not None and not self.apart

    @property
    def allows_unfreezing(self) -> bool:
        """True with ``find_unused_parameters``; without it DDP waits for each gradient."""
        return bool(self._options.find_unused_parameters)

    def mark_unsynced(self, model: torch.nn.Module) -> None:
        """Note that ranks train a model apart."""
        self.apart.add(model)

    def join(
        self, models: Sequence[Any], follow: Callable[[Callable[[Any], Any]], None]
    ) -> AbstractContextManager[None]:
        """Return torch's ``Join`` around the models that have gradients to average."""
        averaged = [model for model in models if _is_averaged(model)]
        return join_uneven(averaged, follow, self._device)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients.

        Raises:
            RuntimeError: the models average in a process group that the script has destroyed.
        """
        # ``self`` stands for a group that was freed: None would be equal to a group that is absent.
        if self._group is not None and (self._group() or self) is not dist.group.WORLD:
            collectives.world_size()  # raises if there is no group
            raise RuntimeError(
                "backward: the process group of the prepared models was destroyed, and another one "
                "made: make a new Accelerator, and prepare again, on all processes."
            )
        super().backward(loss, **kwargs)

    def averages(self, model: torch.nn.Module) -> bool:
        """Return False for models that DDP does not wrap, and in ``no_sync``."""
        return isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync

    def no_sync(
        self, model: torch.nn.Module, *, in_window: bool = False
    ) -> AbstractContextManager[Any]:
        """Return DDP's own ``no_sync`` for models that it wraps."""
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return super().no_sync(model, in_window=in_window)

    def trigger_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Prepare the reducer as a forward outside of ``no_sync`` would have done."""
        if isinstance(model, DistributedDataParallel):
            return _sync_in_backward(model)
        return super().trigger_sync(model)


def _is_averaged(model: Any) -> bool:
    """Return whether DDP averages a model of ``join_uneven_inputs``; one that is frozen has none.

    Raises:
        TypeError: it is trained, and not averaged.
    """
    if isinstance(model, Joinable):
        return True
    is_module = isinstance(model, torch.nn.Module)
    if is_module and not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    raise TypeError(
        f"join_uneven_inputs got a {type(model).__name__} that averages nothing between "
        "processes: pass models as prepare() returned them."
    )


@contextmanager
def _sync_in_backward(model: DistributedDataParallel) -> Iterator[None]:
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = True
    # A forward outside of no_sync ends with this; without it the reducer expects no gradient.
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync = before
