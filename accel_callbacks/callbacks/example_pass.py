"""One forward pass with an example, watched module by module."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks.callbacks.flops import FlopCounter
from accel_callbacks.collectives import tensors_in
from accel_callbacks.modeling.undisturbed import looking_at

__all__ = ["ExamplePass", "run_example"]

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class ExamplePass:
    """What a module did in the pass.

    Attributes:
        inputs: shapes of the tensors that its first call was given.
        outputs: shapes of the tensors that its first call returned.
        flops: of all its calls.
    """

    inputs: Shapes = ()
    outputs: Shapes = ()
    flops: int = 0


def run_example(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], example: Any
) -> dict[str, ExamplePass]:
    """Call a model once, and tell what each of some of its modules did.

    Args:
        model: called in eval mode and without gradients, and as before afterwards.
        modules: those to watch, by name.
        example: an input, a tuple of inputs, or a mapping of keyword arguments.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.example_pass import run_example
        >>> model = torch.nn.Linear(2, 3)
        >>> run_example(model, {"": model}, torch.ones(1, 2))
        {'': ExamplePass(inputs=((1, 2),), outputs=((1, 3),), flops=12)}
    """
    args: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        args, kwargs = (), {str(name): value for name, value in example.items()}
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    counter, passes = FlopCounter(), {name: ExamplePass() for name in modules}
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # a model may be compiled: not anew for the hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(looking_at([model], device))
        for name, module in modules.items():
            _watch(stack, module, counter, passes[name])
        with counter:
            model(*args, **kwargs)
    return passes


def _watch(
    stack: ExitStack, module: torch.nn.Module, counter: FlopCounter, seen: ExamplePass
) -> None:
    """Put two hooks on a module, which the stack takes away again."""
    begun: list[int] = []

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(counter.total)
        seen.inputs = seen.inputs or _shapes((args, kwargs))

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        seen.flops += counter.total - begun.pop()
        seen.outputs = seen.outputs or _shapes(output)

    for handle in (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ):
        stack.callback(handle.remove)


def _shapes(data: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(data))
