"""torch.compile in place: a model keeps its identity, its parameters and their names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accel_callbacks.plugins.compile import TorchDynamoPlugin

__all__ = [
    "adopt",
    "await_collectives",
    "compile_model",
    "hook_calls",
    "is_compiled",
    "original",
    "refuse_scripted",
    "regions",
    "release",
    "uncompile",
]

_MARK = "_compiled_by_prepare"


def original(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` has wrapped, else the model itself."""
    # Its class, without an import of dynamo: any module may have a child of that name.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    is_wrapper = isinstance(model, getattr(dynamo, "OptimizedModule", ()))
    return model.get_submodule("_orig_mod") if is_wrapper else model


def adopt(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of ``torch.compile(model)``, compiled in place with its options."""
    inner = original(model)
    if inner is not model:
        context: Any = model.dynamo_ctx
        _set_compiled(inner, context(_entry(inner, {})))
    return inner


def compile_model(model: torch.nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the model, or each of its repeated blocks, in place."""
    release(model)
    if not plugin.compiles or _call_of(model) is not None:  # already compiled by the user
        return
    refuse_scripted([model], "torch.compile")
    blocks = list(regions(model)) if plugin.use_regional_compilation else []
    blocks = [block for block in blocks if not isinstance(block, torch.jit.ScriptModule)]
    codes: dict[type, CodeType] = {}
    for module in blocks or [model]:
        call = torch.compile(_entry(module, codes), **plugin.compile_kwargs())
        setattr(call, _MARK, True)
        _set_compiled(module, call)


def refuse_scripted(modules: Iterable[torch.nn.Module], task: str) -> None:
    """Raise for a TorchScript module, whose layers Python neither calls nor changes."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{task}: {type(module).__name__} is a TorchScript module, whose layers "
                "Python does not call: pass the module as it was before torch.jit.script or "
                "torch.jit.trace."
            )


def regions(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the blocks that a model repeats: items of one class in ModuleLists and Sequentials."""
    children = list(model.children())
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)) and _are_alike(children):
        yield from children
        return
    for child in children:
        yield from regions(child)


def _are_alike(children: list[torch.nn.Module]) -> bool:
    # A single torch layer is no region: there is nothing to fuse in it.
    single = [not any(c.children()) and type(c).__module__.startswith("torch.nn") for c in children]
    return len(children) > 1 and len({type(c) for c in children}) == 1 and not single[0]


def release(model: torch.nn.Module) -> None:
    """Undo :func:`compile_model`, except for modules that the user has compiled."""
    for module in model.modules():
        if getattr(_call_of(module), _MARK, False):
            _set_compiled(module, None)


def uncompile(model: torch.nn.Module) -> torch.nn.Module:
    """Undo ``torch.compile`` for a model and its modules, those compiled by the user too."""
    for module in model.modules():
        if _call_of(module) is not None:
            _set_compiled(module, None)
    return model


def _entry(module: torch.nn.Module, codes: dict[type, CodeType]) -> Callable[..., Any]:
    """Return a callable of a module whose frame torch.compile does not skip.

    Dynamo skips ``Module.__call__`` and the forward of torch's own classes, so these need a frame
    of ours. Compiled code is cached with the code object of the frame, up to a few versions. So
    each class in a model gets a code object of its own, which models of a process do not share.
    """
    hook = vars(module).get("_offload_hook")
    call: Callable[..., Any] = module._call_impl if hook is None else hook.inside()
    of_torch = type(module).forward.__module__.startswith("torch.nn.modules")
    if not of_torch and "forward" not in vars(module):
        return call

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    code = codes.setdefault(type(module), forward.__code__.replace())
    return FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)


def await_collectives(model: torch.nn.Module) -> None:
    """Make compiled modules wait for the collectives of their inputs.

    torch 2.13 computes no gradient of an ``AsyncCollectiveTensor`` that goes through a hook of
    FSDP2 into compiled code, and says nothing: a cut embedding got zeros. Nor does it compile one
    that FSDP2 shards, so embeddings are left out.
    """
    if not is_compiled(model):
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            _set_compiled(module, torch.compiler.disable(_await_outputs_of(module._call_impl)))  # type: ignore[no-untyped-call]
        elif (call := _call_of(module)) is not None:
            _set_compiled(module, _await_outputs_of(call))


def _await_outputs_of(call: Callable[..., Any]) -> Callable[..., Any]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    def waited(value: Any) -> Any:
        # A product, as wait() would leave the graph of autograd.
        return value * 1 if isinstance(value, AsyncCollectiveTensor) else value

    @wraps(call)  # with the mark of prepare
    def awaited(*args: Any, **kwargs: Any) -> Any:
        named = {name: waited(value) for name, value in kwargs.items()}
        return waited(call(*map(waited, args), **named))

    return awaited


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether the model or one of its modules is compiled in place."""
    return any(_call_of(module) is not None for module in model.modules())


def hook_calls(
    models: Iterable[torch.nn.Module], hook: Callable[..., None]
) -> list[RemovableHandle]:
    """Call a function before each forward of the models, but for those compiled in place.

    Args:
        models: the models.
        hook: would be compiled into a model that was compiled in place.
    """
    # Of Module, as the method of a TorchScript module raises.
    return [
        torch.nn.Module.register_forward_pre_hook(model, hook)
        for model in models
        if getattr(model, "_compiled_call_impl", None) is None
    ]


def _call_of(module: torch.nn.Module) -> Any:
    return module._compiled_call_impl


def _set_compiled(module: torch.nn.Module, call: Any) -> None:
    # As Module.compile does, which finds nothing to compile in a class of torch's own.
    hook = vars(module).get("_offload_hook")  # fetches weights outside of the compiled region
    module._compiled_call_impl = call if hook is None else hook.around(call)
