"""The interface of a precision, which is full fp32 as it stands; and that of an engine's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.host_copy import HostCopy
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.precision import AutocastKwargs

if TYPE_CHECKING:
    from accel_callbacks.strategy import Strategy

__all__ = ["EnginePrecision", "Precision", "PreparedForward", "PreparedMethod", "StepFinding"]


class Precision:
    """The precision of the forward pass, the loss and the optimizer step; fp32 in this class.

    Args:
        device: the device that the model computes on.
        handlers: its options; the defaults if ``None``.

    Attributes:
        scaler: the loss scaler, for fp16.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import Precision
        >>> with Precision(torch.device("cpu")).autocast():
        ...     (torch.ones(2) * 2).dtype
        torch.float32
    """

    name = "no"
    scales_loss = False

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        self.device = device
        self.handlers = handlers or Handlers()
        self.scaler: torch.amp.GradScaler | None = None

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context for operations in this precision, or without it by ``options``."""
        if options is not None and not options.enabled:
            return torch.autocast(self.device.type, enabled=False)
        return nullcontext()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Run the model's own forward in this precision; parameters stay in fp32."""
        return self.unwrap(model)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Restore the model's own methods, whichever precision wrapped them."""
        for name, prepared in list(model.__dict__.items()):
            if not isinstance(prepared, PreparedForward):
                continue
            del model.__dict__[name]
            # It may have been set on the instance, not on the class.
            if getattr(model, name, None) != prepared.original:
                model.__dict__[name] = prepared.original
            if name == "forward":
                prepared.precision.release(model)
        return model

    def wrap_methods(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Run other methods of a wrapped model in this precision, as its forward.

        Args:
            model: a model after :meth:`wrap`.
            names: its methods. Where they or the forward call each other, the outermost counts.
        """

    def after_setup(self, model: torch.nn.Module, strategy: Strategy) -> None:
        """Adapt to the parameters that a strategy has put into a wrapped model.

        Args:
            model: the model inside of what the strategy returned.
            strategy: has set it up.
        """

    def check_compiled(self, compiled: bool) -> None:
        """Warn if a model that was prepared should have been compiled for this precision."""

    def release(self, model: torch.nn.Module) -> None:
        """Undo what :meth:`wrap` changed besides the forward."""

    def call(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward of a wrapped model in this precision."""
        return forward(*args, **kwargs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on."""
        return loss

    def is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether new gradients of this optimizer are scaled and not unscaled yet."""
        return False

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of this optimizer, at most once a step."""

    def step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool | StepFinding, Any]:
        """Step the optimizer; return (True if it stepped, what the optimizer returned).

        The first is a :class:`StepFinding` if only the device knows whether the optimizer stepped.

        Args:
            optimizer: the optimizer as the user made it.
            args: of its ``step``.
            kwargs: of its ``step``.
        """
        return True, optimizer.step(*args, **kwargs)

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip a step of this optimizer; an overflow in its gradients still counts."""

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the state of this optimizer's gradients, which have been cleared."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class EnginePrecision(Precision):
    """A precision that leaves casting and scaling to the engine, and asks it whether it stepped.

    Args:
        name: ``"no"``, ``"bf16"`` or ``"fp16"``.
        device: the device that the model computes on.
        handlers: options of others.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import EnginePrecision
        >>> EnginePrecision("fp16", torch.device("cpu")).scales_loss
        False
    """

    def __init__(self, name: str, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        self.name = name

    def step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Step the engine; return (True if it stepped, None)."""
        result = optimizer.step(*args, **kwargs)
        return bool(getattr(optimizer, "stepped", True)), result


class StepFinding:
    """Result of an optimizer step, known on the device and read later.

    Args:
        overflow: on the device, above 0 if a gradient was infinite or nan and the step skipped.
    """

    def __init__(self, overflow: torch.Tensor) -> None:
        self._overflow = HostCopy(overflow)
        self._stepped: bool | None = None

    @property
    def is_ready(self) -> bool:
        """True if :attr:`stepped` does not wait for the device."""
        return self._stepped is not None or self._overflow.is_ready

    @property
    def stepped(self) -> bool:
        """True if the optimizer stepped; waits for the gradients of the step."""
        if self._stepped is None:
            self._stepped = not float(self._overflow.read()) > 0
        return self._stepped


class PreparedForward:
    """A callable that runs a model's own forward in a precision, with the original signature.

    Args:
        original: the forward, a method of the model.
        precision: the precision to run it in.
    """

    def __init__(self, original: Callable[..., Any], precision: Precision) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.precision = precision

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in the precision."""
        return self.precision.call(self.original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedForward:
        # A copy of the model has its own forward, but shares the precision.
        return PreparedForward(copy.deepcopy(self.original, memo), self.precision)


class PreparedMethod(PreparedForward):
    """One of several methods of a model in a precision; calls between them run as they are.

    Args:
        original: the method.
        precision: the precision to run it in.
        entered: shared by the methods of a model; not empty while one of them runs.
    """

    def __init__(
        self, original: Callable[..., Any], precision: Precision, entered: list[bool]
    ) -> None:
        super().__init__(original, precision)
        self.entered = entered

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method in the precision, unless another one has brought it about."""
        if self.entered:
            return self.original(*args, **kwargs)
        self.entered.append(True)
        try:
            return self.precision.call(self.original, *args, **kwargs)
        finally:
            self.entered.pop()

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedMethod:
        original = copy.deepcopy(self.original, memo)
        return PreparedMethod(original, self.precision, copy.deepcopy(self.entered, memo))
