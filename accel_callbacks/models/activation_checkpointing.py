"""Activation checkpointing: keep the inputs of blocks, and recompute the rest in backward."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from accel_callbacks.errors import nearest
from accel_callbacks.models.compile import refuse_scripted, regions

__all__ = ["CheckpointedForward", "apply_activation_checkpointing", "checkpoint_with"]

#: ``True``, every n-th block, ``"selective"``, operators to save, or a policy of torch.
CheckpointingPolicy = bool | int | str | Collection[Any] | Callable[..., Any]
Blocks = Collection[Any] | Callable[[torch.nn.Module], bool]

_SELECTIVE = "selective"
#: Products and attention: their outputs take more time to compute again than memory to keep.
_COSTLY = (
    *("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "convolution.default"),
    *("_scaled_mm.default", "_scaled_dot_product_flash_attention.default"),
    *("_scaled_dot_product_flash_attention_for_cpu.default",),
    *("_scaled_dot_product_efficient_attention.default",),
    *("_scaled_dot_product_cudnn_attention.default", "_flash_attention_forward.default"),
    *("_scaled_dot_product_attention_math.default", "_efficient_attention_forward.default"),
)
#: What ``torch.utils.checkpoint.checkpoint`` would take for options of its own.
_RESERVED = frozenset(inspect.signature(checkpoint).parameters) - {"args", "kwargs"}
# What layers of transformers call their cache, by release.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def apply_activation_checkpointing(
    model: torch.nn.Module,
    policy: CheckpointingPolicy = True,
    *,
    blocks: Blocks | None = None,
    preserve_rng_state: bool = True,
    offload: bool = False,
) -> list[str]:
    """Recompute blocks in backward instead of keeping their activations.

    Names, parameters and hooks of the modules stay as they are: only the forward of the instance
    is replaced. Gradients are bitwise those without it, as long as a block computes the same twice.
    Call it before ``prepare``, so that blocks are compiled with it; a second call replaces the
    first.

    Args:
        model: the model, which is changed in place.
        policy: ``True`` for all blocks; ``n`` for every n-th one; ``"selective"`` for all blocks,
            which keep the outputs of matrix products and attention; a collection of operators
            (``torch.ops.aten.mm.default``), whose outputs are kept instead; or a function of
            ``(context, operator, *args, **kwargs)`` that returns a
            ``torch.utils.checkpoint.CheckpointPolicy``. ``False`` undoes it.
        blocks: names of classes, classes or modules, or a predicate of modules; by default the
            blocks that the model repeats.
        preserve_rng_state: draw the same random numbers again, such as those of dropout.
        offload: keep the inputs of the blocks in host memory until backward; those that are given
            by position, such as the activations.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: there are no such blocks, ``policy`` is invalid, or the model has the
            checkpointing of transformers on.

    Example:
        >>> import torch
        >>> from accel_callbacks import apply_activation_checkpointing
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())
        >>> model = torch.nn.ModuleList([block(), block()])
        >>> apply_activation_checkpointing(model)
        ['0', '1']
        >>> sorted(model.state_dict())
        ['0.0.bias', '0.0.weight', '1.0.bias', '1.0.weight']
    """
    every, context_fn = _read_policy(policy)
    chosen = list(_select_blocks(model, blocks))
    if every and not chosen:
        raise ValueError(
            f"{type(model).__name__} repeats no blocks that could be computed again: name them "
            "with blocks=, such as blocks=['Block']."
        )
    doubled = [name for name, module in model.named_modules() if _of_transformers_is_on(module)]
    if every and doubled:
        raise ValueError(
            f"{type(model).__name__} has gradient checkpointing of its own on (in "
            f"{doubled[0]!r}), and would be computed three times: call "
            "model.gradient_checkpointing_disable() first, or leave this one out."
        )
    picked = chosen[every - 1 :: every] if every else []
    refuse_scripted((block for _, block in picked), "activation checkpointing")
    for module in model.modules():
        _release(module)
    for _, block in picked:
        block.forward = CheckpointedForward(block.forward, context_fn, preserve_rng_state, offload)
    return [name for name, _ in picked]


def checkpoint_with(
    policy: CheckpointingPolicy | None, model: torch.nn.Module, *, offload: bool = False
) -> None:
    """Apply the policy of an option, where None and ``False`` change nothing.

    Args:
        policy: see :func:`apply_activation_checkpointing`.
        model: the model, which is changed in place.
        offload: keep the inputs of the blocks in host memory until backward.
    """
    if policy is not None and policy is not False:
        apply_activation_checkpointing(model, policy, offload=offload)


def _read_policy(policy: CheckpointingPolicy) -> tuple[int, Callable[[], Any]]:
    """Return the stride of checkpointed blocks, 0 for none, and their contexts."""
    if isinstance(policy, int):  # True and False are 1 and 0
        if policy < 0:
            raise ValueError(f"policy={policy} must be positive: every how many blocks.")
        return int(policy), noop_context_fn
    if isinstance(policy, str):
        if policy not in (_SELECTIVE, "full"):
            hint = nearest(policy, [_SELECTIVE, "full"])
            raise ValueError(
                f"policy={policy!r} is unknown; use True, a number, {_SELECTIVE!r}, operators "
                f"whose outputs are kept, or a policy function.{hint}"
            )
        saved: Any = _costly_operators()
        if policy == "full":
            return 1, noop_context_fn
    else:
        saved = policy if callable(policy) else list(policy)
        for operator in saved if isinstance(saved, list) else ():
            if not isinstance(operator, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
                raise ValueError(
                    f"policy: {operator!r} is no operator with an overload, such as "
                    "torch.ops.aten.mm.default."
                )
    # A partial, since that is what torch.compile can look into.
    return 1, functools.partial(create_selective_checkpoint_contexts, saved)


def _costly_operators() -> list[Any]:
    """Return the costly operators that this version of torch has."""
    operators = []
    for name in _COSTLY:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if operator is not None:
            operators.append(operator)
    return operators


def _select_blocks(
    model: torch.nn.Module, blocks: Blocks | None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the blocks with their names."""
    if blocks is None:
        blocks = list(regions(model))
    if callable(blocks):
        picks = blocks
    else:
        selection = [blocks] if isinstance(blocks, str) else list(blocks)
        names = {name for name in selection if isinstance(name, str)}
        classes = tuple(kind for kind in selection if isinstance(kind, type))
        modules = {id(module) for module in selection if isinstance(module, torch.nn.Module)}
        absent = names - {name for module in model.modules() for name in _class_names(module)}
        if absent:
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(
                f"blocks: {type(model).__name__} has no module of class {sorted(absent)[0]!r}."
                f"{nearest(sorted(absent)[0], known)}"
            )

        def picks(module: torch.nn.Module) -> bool:
            named = not names.isdisjoint(_class_names(module))
            return named or isinstance(module, classes) or id(module) in modules

    for name, module in model.named_modules():
        if picks(module):
            yield name, module


def _class_names(module: torch.nn.Module) -> set[str]:
    # fully_shard changes the class of a module to a subclass with another name.
    return {kind.__name__ for kind in type(module).__mro__}


def _of_transformers_is_on(module: torch.nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


def _release(module: torch.nn.Module) -> None:
    """Restore the forward of a module."""
    forward = vars(module).get("forward")
    if isinstance(forward, CheckpointedForward):
        del module.forward
        # It may have been set on the instance, not on the class.
        if module.forward != forward.original:
            module.forward = forward.original


class CheckpointedForward:
    """A forward that keeps its inputs, and is recomputed in backward.

    Args:
        original: the forward, a method of a block.
        context_fn: contexts of the two computations, see ``torch.utils.checkpoint.checkpoint``.
        preserve_rng_state: draw the same random numbers again.
        offload: keep the inputs in host memory until backward.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        context_fn: Callable[[], Any] = noop_context_fn,
        preserve_rng_state: bool = True,
        offload: bool = False,
    ) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.context_fn = context_fn
        self.preserve_rng_state = preserve_rng_state
        self.offload = offload
        # A partial, since torch.compile does not look for a context in an attribute.
        self._checkpoint = functools.partial(
            checkpoint, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
        if context_fn is not noop_context_fn:
            self._checkpoint = functools.partial(self._checkpoint, context_fn=context_fn)
        self._caches = _cache_places(original)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, checkpointed if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if self._caches:
            args, kwargs = self._without_caches(args, kwargs)
        call = self.original
        if not _RESERVED.isdisjoint(kwargs):
            call, kwargs = functools.partial(call, **kwargs), {}
        if not self.offload:
            return self._checkpoint(call, *args, **kwargs)
        # checkpoint saves the inputs for backward as an operator would, outside of its own hooks.
        with save_on_cpu(pin_memory=torch.accelerator.is_available()):
            return self._checkpoint(call, *args, **kwargs)

    def _without_caches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Drop the key-value caches of transformers, which the recomputation would extend.

        transformers does the same under its own checkpointing.
        """
        positional = tuple(None if at in self._caches else arg for at, arg in enumerate(args))
        named = {key: None if key in self._caches else arg for key, arg in kwargs.items()}
        if "use_cache" in named:
            named["use_cache"] = False
        return positional, named

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedForward:
        # Of a copied model, the forward is a method of the copy.
        original = copy.deepcopy(self.original, memo)
        return CheckpointedForward(original, self.context_fn, self.preserve_rng_state, self.offload)


def _cache_places(forward: Callable[..., Any]) -> frozenset[Any]:
    """Return position and name of the arguments of a transformers layer that are caches."""
    owner = getattr(forward, "__self__", None)
    if not hasattr(owner, "gradient_checkpointing") or getattr(
        owner, "_can_checkpoint_with_cache", False
    ):
        return frozenset()
    names = list(inspect.signature(forward).parameters)
    return frozenset(
        place for at, name in enumerate(names) if name in _CACHES for place in (at, name)
    )
