"""torch.compile in place: names, parameters and the identity of a model stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from accel_callbacks.plugins.compile import TorchDynamoPlugin

__all__ = ["adopt", "compile_model", "original", "regions", "release", "uncompile"]

_MARK = "_compiled_by_prepare"


def original(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of what ``torch.compile(model)`` returned; any other is itself.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.compile import original
        >>> layer = torch.nn.Linear(1, 1)
        >>> original(torch.compile(layer, backend="eager")) is layer
        True
    """
    inner = model._modules.get("_orig_mod")  # known by its one child, without importing dynamo
    return model if inner is None else inner


def adopt(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of ``torch.compile(model)``, compiled in place with the same options.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.compile import adopt
        >>> layer = torch.nn.Linear(1, 1)
        >>> adopt(torch.compile(layer, backend="eager")) is layer
        True
    """
    inner = original(model)
    if inner is not model:
        context: Any = model.dynamo_ctx
        _set_compiled(inner, context(_entry(inner, {})))
    return inner


def compile_model(model: torch.nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the model, or each of its repeated blocks, in place.

    Example:
        >>> import torch
        >>> from accel_callbacks import TorchDynamoPlugin
        >>> from accel_callbacks.modeling.compile import compile_model, uncompile
        >>> layer = torch.nn.Linear(1, 1)
        >>> compile_model(layer, TorchDynamoPlugin(backend="eager"))
        >>> sorted(layer.state_dict())
        ['bias', 'weight']
    """
    release(model)
    if not plugin.compiles or _compiled(model) is not None:  # the user's own choice stays
        return
    found = list(regions(model)) if plugin.use_regional_compilation else []
    codes: dict[type, CodeType] = {}
    for module in found or [model]:
        call = torch.compile(_entry(module, codes), **plugin.compile_kwargs())
        setattr(call, _MARK, True)
        _set_compiled(module, call)


def regions(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The blocks that a model repeats: what ModuleLists and Sequentials hold of one class.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.compile import regions
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> model = torch.nn.Sequential(torch.nn.ModuleList([block(), block()]), block())
        >>> len(list(regions(model)))
        2
    """
    children = list(model.children())
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)) and _repeated(children):
        yield from children
        return
    for child in children:
        yield from regions(child)


def _repeated(children: list[torch.nn.Module]) -> bool:
    # A single layer of torch is no region: there is nothing in it to fuse.
    single = [not any(c.children()) and type(c).__module__.startswith("torch.nn") for c in children]
    return len(children) > 1 and len({type(c) for c in children}) == 1 and not single[0]


def release(model: torch.nn.Module) -> None:
    """Take back what :func:`compile_model` did, and leave what the user compiled.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.compile import release
        >>> release(torch.nn.Linear(1, 1))
    """
    for module in model.modules():
        if getattr(_compiled(module), _MARK, False):
            _set_compiled(module, None)


def uncompile(model: torch.nn.Module) -> torch.nn.Module:
    """Take ``torch.compile`` off a model and its modules, whoever put it there.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.compile import uncompile
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.compile(backend="eager")
        >>> uncompile(layer) is layer
        True
    """
    for module in model.modules():
        if _compiled(module) is not None:
            _set_compiled(module, None)
    return model


def _entry(module: torch.nn.Module, codes: dict[type, CodeType]) -> Callable[..., Any]:
    """What to compile of a module: a frame that torch.compile does not pass over.

    It enters neither the call of a module nor the forward of a class of torch's, so these need a
    frame of our own. Compiled code is kept with the code of the frame, and only a few versions of
    it; so there is one for each class of a model, and none that all models of a process share.
    """
    call: Callable[..., Any] = module._call_impl
    of_torch = type(module).forward.__module__.startswith("torch.nn.modules")
    if not of_torch and "forward" not in vars(module):
        return call

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    code = codes.setdefault(type(module), forward.__code__.replace())
    return FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)


def _compiled(module: torch.nn.Module) -> Any:
    return module._compiled_call_impl


def _set_compiled(module: torch.nn.Module, call: Any) -> None:
    # What Module.compile sets, which finds nothing to compile in a class of torch's.
    module._compiled_call_impl = call
