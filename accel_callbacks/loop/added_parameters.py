"""Parameters added to a model after it was prepared, which nothing trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch

from accel_callbacks.gradients import first_elements, local_part, parameters_of
from accel_callbacks.loop.loop import Loop
from accel_callbacks.strategy import Strategy
from accel_callbacks.terminal_text import listed

__all__ = ["AddedParameters"]

_SHOWN = 3


class AddedParameters:
    """Warns of added parameters that get gradients, and are not trained or not averaged.

    Args:
        loop: has the prepared models and optimizers.
        strategy: averages gradients.
        warn: warns once of a kind of mistake.

    Example:
        >>> import torch, warnings
        >>> from accel_callbacks import Accelerator
        >>> accel, model = Accelerator(cpu=True), torch.nn.Sequential(torch.nn.Linear(1, 1))
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> _ = model.append(torch.nn.Linear(1, 1))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     for _ in range(3):
        ...         accel.backward(model(torch.ones(1, 1)).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> "1.weight, 1.bias" in str(caught[0].message)
        True
    """

    def __init__(self, loop: Loop, strategy: Strategy, warn: Callable[[str, str], None]) -> None:
        self._loop = loop
        self._strategy = strategy
        self._warn = warn
        self._prepared: WeakKeyDictionary[torch.nn.Module, set[int]] = WeakKeyDictionary()
        self._samples: dict[int, torch.Tensor] = {}
        self._step = 0

    def note(self, model: torch.nn.Module) -> None:
        """Note the parameters of a model that was prepared now."""
        self._prepared.setdefault(model, {id(parameter) for parameter in model.parameters()})

    def check(self) -> None:
        """Compare added parameters with what they were at the check before."""
        held = {id(parameter) for parameter in parameters_of(self._loop.optimizers)}
        stepped = self._loop.run._global_step > self._step
        before, self._samples = self._samples, {}
        for model in self._loop.models:
            idle, apart = [], []
            for name, parameter in self._new_parameters(model):
                gradient = parameter.grad
                reached = gradient is not None and bool(local_part(gradient).any())
                sample = self._samples[id(parameter)] = first_elements(parameter)
                if not reached:
                    continue
                if id(parameter) in held:
                    if self._strategy.gradients.averages(model):
                        apart.append(name)
                # An optimizer of the script's own may train it.
                elif stepped and torch.equal(before.get(id(parameter), sample[:0]), sample):
                    idle.append(name)
            inner = type(self._strategy.unwrap(model)).__name__
            if idle:
                self._warn(
                    "added",
                    f"{listed(idle, _SHOWN)} of {inner} came after prepare() and is in no "
                    "optimizer, so that it is not trained: change the model before the optimizer "
                    "is made and both are prepared.",
                )
            elif apart:
                self._warn(
                    "added",
                    f"{listed(apart, _SHOWN)} of {inner} came after prepare(), so that the "
                    "processes do not average its gradients: change the model before it is "
                    "prepared.",
                )
        self._step = self._loop.run._global_step

    def _new_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        known = self._prepared.get(model, set())
        for name, parameter in self._strategy.unwrap(model).named_parameters():
            if id(parameter) not in known and parameter.requires_grad and not parameter.is_meta:
                yield name, parameter
