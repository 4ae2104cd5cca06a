"""Code that only some ranks run: a forward of a sharded model there raises, in place of a hang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import class_of

__all__ = ["needs_all_ranks", "on_subset", "refuse_on_subset"]

# The name of the block that only some ranks run, if this thread is in one.
_SUBSET: ContextVar[str | None] = ContextVar("accel_callbacks_subset", default=None)
# Modules whose forward gathers weights. Global, because the decorators know no Accelerator.
_gathering: WeakSet[torch.nn.Module] = WeakSet()


def needs_all_ranks(modules: Iterable[torch.nn.Module]) -> None:
    """Note modules whose forward gathers weights from all ranks."""
    _gathering.update(modules)


@contextmanager
def on_subset(block: str) -> Iterator[None]:
    """Context manager: mark a block that some ranks run while the others do not.

    Modules of :func:`needs_all_ranks` cannot be called in it while their weights are sharded.

    Args:
        block: the name of the block, for the error.

    Example:
        >>> from accel_callbacks.distributed.rank_subset import on_subset, refuse_on_subset
        >>> with on_subset("report (main_process_only)"):
        ...     refuse_on_subset("Net.generate")
        Traceback (most recent call last):
        RuntimeError: Net.generate inside of report (main_process_only) would wait for ever: it \
gathers sharded weights from all ranks, and not all run that block. Call it on all ranks and use \
the result on one; or call accel.get_state_dict(model) on all ranks before, which returns the \
whole weights on rank 0, for a copy of the model that is not sharded.
    """
    token = _SUBSET.set(block)
    # Before the hooks that would gather the weights. Outside of the block they would cost time, and
    # a compiled module would have to be compiled with them.
    hooks = [
        module.register_forward_pre_hook(_refuse_forward, prepend=True) for module in _gathering
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _SUBSET.reset(token)


def refuse_on_subset(operation: str) -> None:
    """Raise in a block that only some ranks run, before the weights of all are gathered."""
    block = _SUBSET.get()
    if block is not None:
        raise RuntimeError(
            f"{operation} inside of {block} would wait for ever: it gathers sharded weights from "
            "all ranks, and not all run that block. Call it on all ranks and use the result on "
            "one; or call accel.get_state_dict(model) on all ranks before, which returns the whole "
            "weights on rank 0, for a copy of the model that is not sharded."
        )


def _refuse_forward(module: torch.nn.Module, args: Any) -> None:
    # Another thread may compute with a model of its own.
    if _SUBSET.get() is not None and any(map(_is_spread, module.parameters())):
        refuse_on_subset(f"the forward of {class_of(module).__name__}")


def _is_spread(parameter: Any) -> bool:
    """Return whether a parameter is sharded over more than one rank."""
    if not collectives.is_sharded(parameter):
        return False
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(placement.is_shard() and size > 1 for placement, size in sizes)
