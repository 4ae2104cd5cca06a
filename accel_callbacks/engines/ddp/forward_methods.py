"""DistributedDataParallel for models with several forward methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from accel_callbacks.collectives import tensors_in
from accel_callbacks.engines.ddp.reduction import explain_unfinished

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchDDP):
    """torch's wrapper, with the attributes and methods of the model inside.

    Methods that are marked run through the wrapper's forward, so that gradients are averaged.
    Others run as they are; those that would train parameters behind the wrapper's back are refused.

    Gradients are laid out once, in the reverse order of their parameters. torch lays them out for
    the first backward, and anew for all others. Three or more ranks add up a gradient in an order
    that follows from its place, so the first step after a resume would have other bits.

    Args:
        *args: those of torch's wrapper.
        **options: likewise.

    Attributes:
        reduced_names: the parameters that torch's errors number, those that were trained then.
    """

    _forward_methods: frozenset[str] = frozenset()
    lays_out_once = False

    def __init__(self, *args: Any, **options: Any) -> None:
        # With unused parameters, torch lays them out once too.
        again = options.get("static_graph") or not options.get("find_unused_parameters")
        self.lays_out_once = bool(again) and dist.get_world_size() > 2
        super().__init__(*args, **options)
        if self.lays_out_once:
            self.reducer._push_all_rebuilt_params()
            self._has_rebuilt_buckets = self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """Return the parameters in the order in which their gradients are to be laid out."""
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.lays_out_once:
            parameters, sparse = parameters[::-1], sparse[::-1]
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.reduced_names = [names[id(parameter)] for parameter in parameters]
        return parameters, sparse

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the forward of the model inside, after its last gradients were reduced."""
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            explain_unfinished(self, error)
            raise

    def mark_forward_methods(self, names: Iterable[str]) -> None:
        """Run these methods of the model inside through the wrapper's forward.

        Raises:
            ValueError: the wrapper has a method of this name itself.
        """
        names = frozenset(names)
        for name in sorted(names):
            if hasattr(TorchDDP, name):
                raise ValueError(
                    f"forward_methods: {name!r} is a method of DistributedDataParallel too, which "
                    "hides that of the model on several processes: give it another name."
                )
        self._forward_methods = self._forward_methods | names

    def __getattr__(self, name: str) -> Any:
        modules = vars(self).get("_modules", {})
        # First, because each forward asks for it.
        if name == "module" and name in modules:
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Protocols such as copying ask for dunder names, and mean the wrapper.
            if name.startswith("__") or "module" not in modules:
                raise
        inner = modules["module"]
        value = getattr(inner, name)
        if name in self._forward_methods:
            return functools.partial(self._call_method, name)
        if isinstance(value, torch.ScriptMethod) or (
            inspect.ismethod(value) and value.__self__ is inner
        ):
            return self._guard_method(name, value)
        return value

    def _call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapper with a method of the model inside in place of its forward."""
        inner = self.module
        attributes = vars(inner)  # a traced module would set the attribute of another one
        before = inner._compiled_call_impl

        # In place of the compiled call, which torch asks for before hooks and the forward.
        def redirected(*args: Any, **kwargs: Any) -> Any:
            attributes["_compiled_call_impl"] = before
            return getattr(inner, name)(*args, **kwargs)

        attributes["_compiled_call_impl"] = redirected
        try:
            return self(*args, **kwargs)
        finally:
            attributes["_compiled_call_impl"] = before

    def _guard_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that raises where it runs trained layers past the wrapper."""
        scripted = isinstance(method, torch.ScriptMethod)  # its layers run no hooks

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() and self.require_backward_grad_sync):
                return method(*args, **kwargs)
            trained = {id(module) for module in self.module.modules() if _is_trained(module)}

            def refuse(module: torch.nn.Module, inputs: Any) -> None:
                if id(module) in trained and torch.is_grad_enabled():
                    raise RuntimeError(_describe_unmarked(type(self.module).__name__, name))

            handle = register_module_forward_pre_hook(refuse)
            try:
                result = method(*args, **kwargs)
            finally:
                handle.remove()
            if scripted and _is_differentiable(result) and not _is_differentiable((args, kwargs)):
                raise RuntimeError(_describe_unmarked(type(self.module).__name__, name))
            return result

        return call


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _is_differentiable(data: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(data))


def _describe_unmarked(model: str, name: str) -> str:
    return (
        f"{model}.{name}() runs layers of the model past DistributedDataParallel, and their "
        "gradients would not be averaged over the processes: mark it with "
        f"accel.prepare(model, forward_methods=[{name!r}]), or call it under torch.no_grad() if "
        "nothing is trained by it."
    )
