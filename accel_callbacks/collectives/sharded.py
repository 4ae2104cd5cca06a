"""Sharded tensors (DTensors), gathered one at a time and made of full ones; sharded modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch

from accel_callbacks.collectives.group import explained

__all__ = [
    "class_of",
    "copy_part",
    "full_tensor",
    "gather_sharded",
    "is_sharded",
    "needs_all_ranks",
    "on_subset",
    "refuse_on_subset",
    "shard_like",
]


def is_sharded(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing torch's module of it.

    Example:
        >>> import torch
        >>> from accel_callbacks.collectives import is_sharded
        >>> is_sharded(torch.ones(1))
        False
    """
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def class_of(module: Any) -> type:
    """Return the class of an object; of a sharded module, that before it was sharded.

    ``fully_shard`` puts a class of its own, ``FSDP<name>``, in place of a module's.
    """
    kinds = type(module).__mro__
    sharded = len(kinds) > 2 and kinds[1].__name__ == "FSDPModule"
    return kinds[2] if sharded else kinds[0]


@explained("gather")
def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Collective over the mesh of a DTensor: return the whole tensor, on each rank.

    Args:
        tensor: any tensor; one that is not sharded is returned detached.

    Example:
        >>> import torch
        >>> from accel_callbacks.collectives import full_tensor
        >>> full_tensor(torch.ones(1))
        tensor([1.])
    """
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        full: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def gather_sharded(tensors: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Collective: return tensors with full ones in host memory in place of DTensors.

    They are gathered one after the other, so that a rank that keeps none holds one at a time.

    Args:
        tensors: names to tensors (or other objects, which stay as they are), with the same
            DTensors in the same order on all ranks.
        keep: this rank wants the result; else it is empty.

    Returns:
        Tensors on the CPU, in memory of their own; tied ones are one tensor.

    Example:
        >>> import torch
        >>> from accel_callbacks.collectives import gather_sharded
        >>> gather_sharded({"weight": torch.ones(1)}, keep=True)
        {'weight': tensor([1.])}
    """
    gathered: dict[str, Any] = {}
    seen: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, value in tensors.items():
        full = full_tensor(value) if is_sharded(value) else value
        if not keep:
            continue
        if not isinstance(full, torch.Tensor):
            gathered[name] = full
            continue
        # Ties are looked up after the collective: all ranks must gather the same tensors, and one
        # whose part is empty does not see them.
        key = _memory(value) or (name,)
        if key not in seen:
            # A copy: of a tensor on the CPU it would be the memory that is trained.
            seen[key] = full.detach().to("cpu", copy=True)
        gathered[name] = seen[key]
    return gathered


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what is equal for tensors that are one view of one memory, None without memory."""
    local: Any = tensor.detach()
    local = local.to_local() if is_sharded(tensor) else local
    if local.numel() == 0 or local.layout is not torch.strided:
        return None
    try:
        storage = local.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # of a subclass without a storage
        return None
    return storage, local.storage_offset(), tuple(local.stride()), tuple(tensor.shape), tensor.dtype


def shard_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a full tensor, equal on all ranks, sharded as another tensor is; not collective.

    Args:
        full: on any device; a DTensor is returned as it is.
        like: a DTensor of the same shape; with a plain tensor ``full`` is returned.

    Example:
        >>> import torch
        >>> from accel_callbacks.collectives import shard_like
        >>> shard_like(torch.ones(1), torch.zeros(1))
        tensor([1.])
    """
    if not is_sharded(like) or is_sharded(full):
        return full
    part = torch.empty_like(like.detach(), dtype=full.dtype)
    copy_part(part, full.detach())
    return part


@torch.no_grad()
def copy_part(
    target: torch.Tensor, whole: torch.Tensor, first_row: int = 0, last_row: int | None = None
) -> None:
    """Copy this rank's part of a tensor, or of some rows of it.

    torch's ``distribute_tensor`` does not know unequal parts under FSDP and tensor parallelism.

    Args:
        target: a DTensor, or a plain tensor, which takes all.
        whole: the rows, converted to the dtype and device of the target.
        first_row: their place in the tensor.
        last_row: their end, that of the tensor by default.

    Example:
        >>> import torch
        >>> from accel_callbacks.collectives import copy_part
        >>> target = torch.zeros(3)
        >>> copy_part(target, torch.ones(1), first_row=1, last_row=2)
        >>> target
        tensor([0., 1., 0.])
    """
    from checkpoint_io.weights import Destination, Rows, WeightInfo

    shape = tuple(target.shape)
    end = (shape[0] if shape else 1) if last_row is None else last_row
    destination = Destination(WeightInfo(whole.dtype, shape), target)
    destination.put(Rows(first_row, end), whole)
    torch.autograd.graph.increment_version(target)


# --- code that only some ranks run: a forward of a sharded model there raises, in place of a hang

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
        >>> from accel_callbacks.collectives.sharded import on_subset, refuse_on_subset
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
    if not is_sharded(parameter):
        return False
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(placement.is_shard() and size > 1 for placement, size in sizes)
