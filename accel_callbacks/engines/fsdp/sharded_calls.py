"""Calls of a model under FSDP2 that torch does not expect: made to work, or told what to do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import class_of
from accel_callbacks.distributed.abort import explain_in_place
from accel_callbacks.engines.advice import Advice, advise
from accel_callbacks.models.compile import is_compiled

__all__ = [
    "begin_at_root",
    "explain_backward",
    "explain_forward",
    "explain_layers",
    "refuse_copies",
]

_SHARDED: Advice = {
    "mixed torch.Tensor and DTensor": (
        "{place} met sharded weights: FSDP gathers them in the forward of the model and of its "
        "units, and outside of it each rank has a part. Call the model that accel.prepare() "
        "returned, not a layer of it; name another method in prepare(model, forward_methods=[...])"
        "; or make the layer a unit (FullyShardedDataParallelPlugin(auto_wrap_policy=...)), or "
        "keep it whole (ignored_modules=[...])."
    ),
}
_FREED: Advice = {
    "out of bounds for storage of size 0": (
        "{place} needs weights that FSDP has freed after an earlier backward through the same "
        "graph: gradients of gradients (create_graph=True), such as a gradient penalty, do not "
        "work with sharded models. Train with DistributedDataParallel (leave the fsdp_plugin out), "
        "or take the penalty from differences of two forwards."
    ),
}
_OTHER_TYPES: Advice = {
    "same dtype|expected scalar type|type .* should be the same": (
        "{place} met tensors of two types: FSDP gathers its weights in {dtype} and computes in it, "
        "without autocast{buffers}. Cast in the forward, as in `x + self.table.to(x.dtype)`; or "
        "leave it to autocast: FullyShardedDataParallelPlugin(mixed_precision_policy='fp32')."
    ),
}
_SHOWN = 4


def explain_forward(model: torch.nn.Module, args: Any, output: Any) -> None:
    """Explain the error of a failed forward: a forward hook of a model, always called."""
    if output is not None:  # first, because this is compiled too
        return
    error, place = sys.exc_info()[1], f"the forward of {class_of(model).__name__}"
    if not isinstance(error, RuntimeError):
        return
    computes_in = model._get_fsdp_state()._mp_policy.param_dtype  # type: ignore[operator]
    advice = {**_SHARDED, **({} if computes_in is None else _OTHER_TYPES)}
    dtype, buffers = str(computes_in).removeprefix("torch."), _float32_buffers(model)
    if not advise(error, advice, place=place, dtype=dtype, buffers=buffers):
        explain_in_place(error, f"{place}, which gathers weights from all ranks")


def _float32_buffers(model: torch.nn.Module) -> str:
    names = [repr(name) for name, buffer in model.named_buffers() if buffer.dtype == torch.float32]
    more = ", ..." if len(names) > _SHOWN else ""
    return f"; {', '.join(names[:_SHOWN])}{more} of its buffers are float32" if names else ""


def explain_backward(error: RuntimeError) -> None:
    """Explain the error of a failed backward through sharded models, where torch does not."""
    advise(error, {**_SHARDED, **_FREED}, place="backward")


def explain_layers(model: torch.nn.Module) -> None:
    """Explain the error of a layer called by itself that has sharded weights and is no unit.

    By a forward of its own, which costs each call less than a hook does.
    """
    kind = class_of(model).__name__
    for name, layer in _layers(model, ""):
        sharded = any(map(collectives.is_sharded, layer._parameters.values()))
        plain = "forward" not in vars(layer) and not isinstance(layer, torch.jit.ScriptModule)
        if sharded and plain and not hasattr(layer, "_get_fsdp_state"):
            vars(layer)["forward"] = functools.partial(_forward, layer, f"{name!r} of {kind}")


def _layers(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules inside of one with their names, but those that are compiled."""
    for name, child in module.named_children():
        if not is_compiled(child):
            yield f"{prefix}{name}", child
            yield from _layers(child, f"{prefix}{name}.")


def _forward(layer: torch.nn.Module, place: str, /, *args: Any, **kwargs: Any) -> Any:
    try:
        # By its class, which an engine of low precision may change.
        return type(layer).forward(layer, *args, **kwargs)
    except RuntimeError as error:
        advise(error, _SHARDED, place=place)
        raise


def begin_at_root(model: Any) -> None:
    """Let a unit that is called before its model begin with the model, which stays the root.

    torch takes for the root what is called first, and refuses the model afterwards.
    """
    root = model._get_fsdp_state()
    modules = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    units = [state for module in modules if (state := module._get_fsdp_state()) is not root]

    def begin() -> None:
        for state in units:
            vars(state).pop("_lazy_init", None)
        root._lazy_init()

    for state in units:
        state._lazy_init = begin


def refuse_copies(model: torch.nn.Module) -> None:
    """Let ``copy.deepcopy`` of a sharded model, or of a unit, say what to do instead."""
    refuse = functools.partial(_refuse_copy, class_of(model).__name__)
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            vars(module)["__deepcopy__"] = refuse


def _refuse_copy(kind: str, memo: Any) -> NoReturn:
    raise ValueError(
        f"copy.deepcopy of a sharded {kind}, of whose weights each rank has a part, which its "
        "collectives know by name. Copy it before prepare(); or build it again, prepare it too, "
        "and load what accel.save_model(model, folder) wrote with "
        "load_checkpoint_in_model(copy, folder). The callbacks EMA and WeightAveraging keep an "
        "average of sharded weights."
    )
