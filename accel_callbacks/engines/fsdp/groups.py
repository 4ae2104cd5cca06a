"""The parameter groups inside of FSDP2: how they reduce, and gradients that they hold back.

A group that does not reduce keeps gradients where ``parameter.grad`` does not show them, and where
no optimizer clears them. torch has no public way to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch

__all__ = [
    "drop_held",
    "gather_through",
    "has_held",
    "has_whole_gradient",
    "is_idle",
    "parameter_groups",
    "reduce_held",
    "reducing",
    "take_up_loaded",
]


def parameter_groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP's parameter groups of a model, each once."""
    seen: set[int] = set()
    for state in _states(model):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 a state has one
            groups = [group for group in [state._fsdp_param_group] if group is not None]
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _states(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        ask = getattr(module, "_get_fsdp_state", None)
        if ask is not None:
            yield ask()


def take_up_loaded(model: torch.nn.Module) -> None:
    """Let FSDP's groups name the parameters that a load has put in the place of theirs.

    As ``from_pretrained`` of transformers does; torch would name them from the first forward on.

    Args:
        model: a sharded model.
    """
    for group in parameter_groups(model):
        for parameter in group.fsdp_params:
            place = parameter._module_info
            if getattr(place.module, place.param_name) is not parameter.sharded_param:
                parameter.reset_sharded_param()


def is_idle(module: Any) -> bool:
    """Return whether a sharded module is neither in a forward nor in a backward."""
    return bool(module._get_fsdp_state()._training_state.name == "IDLE")


@contextmanager
def reducing(
    model: torch.nn.Module, *, scatter: bool | None = None, all_reduce: bool | None = None
) -> Iterator[None]:
    """Context manager: set what backward reduces, and restore what was set before.

    Args:
        model: a sharded model.
        scatter: reduce and shard gradients over the ranks that share a replica.
        all_reduce: reduce them over the replicas.
    """
    before = [
        (group, group.reduce_grads, group.all_reduce_grads) for group in parameter_groups(model)
    ]
    for group, _, _ in before:
        if scatter is not None:
            group.reduce_grads = scatter
        if all_reduce is not None:
            group.all_reduce_grads = all_reduce
    try:
        yield
    finally:
        for group, scattered, reduced in before:
            group.reduce_grads, group.all_reduce_grads = scattered, reduced


def _holds(group: Any) -> bool:
    # Under HSDP, shards that are reduced over a replica and not yet over all of them; else whole
    # gradients of this rank.
    return group._partial_reduce_output is not None or _holds_unsharded(group)


def _holds_unsharded(group: Any) -> bool:
    return any(map(has_whole_gradient, group.fsdp_params))


def has_whole_gradient(parameter: Any) -> bool:
    """Return whether a rank has a gradient that is not reduced yet.

    Args:
        parameter: one of the ``fsdp_params`` of a group.
    """
    accumulated = parameter.unsharded_accumulated_grad
    return accumulated is not None or _whole_gradient(parameter) is not None


def _whole_gradient(parameter: Any) -> torch.Tensor | None:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return None if unsharded is None else unsharded.grad


def has_held(models: Iterable[torch.nn.Module], parameters: Collection[int]) -> bool:
    """Return whether a group with one of these parameters holds gradients back.

    Args:
        models: sharded models.
        parameters: the ids of sharded parameters.
    """
    return any(_holds(group) and _has(group, parameters) for group in _all(models))


def _has(group: Any, parameters: Collection[int]) -> bool:
    return any(id(parameter.sharded_param) in parameters for parameter in group.fsdp_params)


def drop_held(models: Iterable[torch.nn.Module], parameters: Collection[int]) -> None:
    """Drop the gradients that groups hold back for these parameters.

    Args:
        models: sharded models.
        parameters: the ids of sharded parameters.
    """
    for group in _all(models):
        if not _has(group, parameters):
            continue
        # One buffer for all parameters of the group, also those of another optimizer.
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if id(parameter.sharded_param) in parameters:
                parameter.unsharded_accumulated_grad = None
                if _whole_gradient(parameter) is not None:
                    parameter._unsharded_param.grad = None


def reduce_held(models: Iterable[torch.nn.Module]) -> None:
    """Collective: reduce gradients that are held back into ``parameter.grad``.

    Gradients of the rest of a window add to them, because a mean over ranks is linear.

    Args:
        models: sharded models.
    """
    for model in models:
        groups = list(parameter_groups(model))
        if not any(_holds(group) for group in groups):
            continue
        for group in groups:
            if group._partial_reduce_output is not None and not _holds_unsharded(group):
                # A reduction of zeros brings the sum of a shard over the replicas.
                for parameter in group.fsdp_params:
                    if parameter.sharded_param.requires_grad and hasattr(
                        parameter, "_unsharded_param"
                    ):
                        parameter.unsharded_accumulated_grad = torch.zeros(
                            parameter.sharded_param.shape,
                            dtype=parameter.reduce_dtype or parameter.orig_dtype,
                            device=group.device,
                        )
        with reducing(model, scatter=True, all_reduce=True), torch.no_grad():
            # What ends each backward: it reduces all groups that have gradients.
            model._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]


def _all(models: Iterable[torch.nn.Module]) -> Iterator[Any]:
    return (group for model in models for group in parameter_groups(model))


def gather_through(
    parameter: Any, cast: Callable[[torch.Tensor, Callable[[], int]], torch.Tensor]
) -> bool:
    """Let FSDP gather a parameter through a cast of its parts; return False where it cannot.

    Args:
        parameter: one of the ``fsdp_params`` of a group.
        cast: called with the part of this rank and a function that counts the writes to the
            parameter; returns a tensor in the memory of the part with the methods
            ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.
    """
    shard = parameter.sharded_param
    ranks = parameter.mesh_info.shard_mesh_size
    # FSDP takes a cast for parts of equal size, which are gathered from all ranks each time.
    if ranks == 1 or parameter._orig_size[0] % ranks:
        return False
    if parameter.post_forward_mesh_info not in (None, parameter.mesh_info):
        return False
    if hasattr(parameter, "_unsharded_param") or _is_cast(shard):  # for another Accelerator
        return False
    reset, parameter_ref = parameter.reset_sharded_param, ref(parameter)

    def writes() -> int:
        return int(parameter_ref().sharded_param._version)  # type: ignore[union-attr]

    def cast_part() -> None:
        reset()
        part = parameter.sharded_param
        if not _is_cast(part):
            part._local_tensor = cast(part._local_tensor, writes)

    # FSDP calls it where the part has become another tensor: one that is pinned, or loaded, or the
    # same memory after `model.to(device)`.
    parameter.reset_sharded_param = cast_part
    cast_part()
    parameter._init_extensions()
    return True


def _is_cast(shard: Any) -> bool:
    return hasattr(shard._local_tensor, "fsdp_pre_all_gather")
