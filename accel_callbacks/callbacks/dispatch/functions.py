"""FunctionCallback and handles: register functions as callbacks, and remove callbacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import HOOKS, Callback
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "CallbackHandle",
    "Filters",
    "FunctionCallback",
    "FunctionHandle",
    "checked_hook",
    "name_of",
]

_Getter = Callable[[tuple[Any, ...]], Any]  # reads an argument from those of a hook
_PASSED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class CallbackHandle:
    """Remove a callback, with :meth:`remove` or at the end of a ``with`` block.

    Returned by ``accel.add_callback``.

    Args:
        callback: the callback as it is registered.
        take_out: removes it.

    Attributes:
        callback: the callback; for one of Lightning's the adapter around it.

    Example:
        >>> from accel_callbacks import Accelerator, Callback
        >>> accel = Accelerator(cpu=True)
        >>> with accel.add_callback(Callback()) as handle:
        ...     accel.callbacks == [handle.callback]
        True
        >>> accel.callbacks
        []
    """

    def __init__(self, callback: Any, take_out: Callable[[Any], None]) -> None:
        self.callback = callback
        self._remove = take_out
        self._removed = False

    @property
    def removed(self) -> bool:
        """True after :meth:`remove`."""
        return self._removed

    def remove(self) -> None:
        """Remove the callback; a second call does nothing."""
        if not self._removed:
            self._removed = True
            self._remove(self.callback)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class FunctionHandle(CallbackHandle):
    """The handle of a function that ``accel.on`` registered; calling it calls the function.

    Args:
        callback: the callback around the function.
        take_out: removes it.
        function: the user's function.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> @accel.on("log")
        ... def double(metrics):
        ...     return {name: 2 * value for name, value in metrics.items()}
        >>> double({"loss": 1.5})
        {'loss': 3.0}
        >>> double.remove()
    """

    def __init__(
        self, callback: Any, take_out: Callable[[Any], None], function: Callable[..., Any]
    ) -> None:
        super().__init__(callback, take_out)
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly, without the filters."""
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Filters:
    """The calls of a hook on which a function is called; they are counted from 1.

    Args:
        every: each call whose number is a multiple of this.
        once: only the first of these calls.
        after: number of calls to skip first.
        main_process_only: only calls on the main process; the other ranks count too.

    Raises:
        ValueError: ``every`` is below 1, or ``after`` below 0.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.functions import Filters
        >>> [n for n in range(1, 10) if Filters(every=2, after=5).take(n)]
        [6, 8]
    """

    every: int = 1
    once: bool = False
    after: int = 0
    main_process_only: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("every", self.every, 1), ("after", self.after, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {least}.")

    def take(self, call: int) -> bool:
        """Return whether the function is called on the call with this number."""
        return call > self.after and call % self.every == 0

    @property
    def count(self) -> bool:
        """True if calls must be counted."""
        return self.every > 1 or self.after > 0 or self.once


class FunctionCallback(Callback):
    """A callback with one hook, which calls a function with the arguments in its signature.

    Args:
        function: called with keyword arguments.
        hook: name of the hook.
        filters: the calls on which the function is called.
        state_key: key of its saved counter.
        retire: removes this callback after its last call.

    Raises:
        TypeError: the function has an argument that the hook does not provide.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.functions import Filters, FunctionCallback
        >>> def show(step, metrics):
        ...     print(step, metrics)
        >>> callback = FunctionCallback(show, "on_log", Filters(every=2), "show", print)
        >>> for step in range(4):
        ...     callback.on_log(None, None, {"loss": 0.5}, step)
        1 {'loss': 0.5}
        3 {'loss': 0.5}
    """

    def __init__(
        self,
        function: Callable[..., Any],
        hook: str,
        filters: Filters,
        state_key: str,
        retire: Callable[[Any], None],
    ) -> None:
        self._function = function
        self._hook = hook
        self._filters = filters
        self._state_key = state_key
        self._retire = retire
        self._arguments = _arguments_of(function, hook)
        self._calls = 0
        self._done = False
        # Hooks are set on the instance, so that those that are not needed cost nothing.
        if hook != "setup":
            setattr(self, hook, self._call)
        if hook == "setup" or filters.count:
            setattr(self, "setup", self._set_up)  # noqa: B010

    @property
    def state_key(self) -> str:
        """``<function>:<hook>``."""
        return self._state_key

    def _set_up(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the counter, unless ``load_state`` restored it."""
        if run.starts_fresh:
            self._calls = 0
        if self._hook == "setup":
            self._call(run, model, stage)

    def _call(self, *args: Any) -> None:
        """Count a call of the hook, and call the function if the filters match."""
        self._calls += 1
        filters = self._filters
        if self._done or not filters.take(self._calls):
            return
        if filters.once:  # before the call, so that a function that raises is not called again
            self._done = True
            self._retire(self)
        if not filters.main_process_only or args[0].is_global_zero:
            self._function(**{name: get(args) for name, get in self._arguments})

    def state_dict(self) -> dict[str, Any]:
        """Return the number of calls, if the filters need it."""
        return {"calls": self._calls, "done": self._done} if self._filters.count else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of calls, and retire if the function was called once already."""
        self._calls = state_dict["calls"]
        if self._filters.once and state_dict["done"] and not self._done:
            self._done = True
            self._retire(self)


def checked_hook(hook: str) -> str:
    """Return the hook's full name; ``"train_batch_end"`` means ``"on_train_batch_end"``.

    Raises:
        ValueError: there is no such hook.
    """
    for name in (hook, f"on_{hook}"):
        if name in HOOKS:
            return name
    short = [name.removeprefix("on_") for name in HOOKS]
    raise ValueError(f"{hook!r} is no hook.{nearest(str(hook).removeprefix('on_'), short)}")


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _arguments_of(function: Callable[..., Any], hook: str) -> list[tuple[str, _Getter]]:
    """Return the arguments in the function's signature, and how to get each."""
    name = name_of(function)
    if not callable(function):
        raise TypeError(f"{function!r} is not callable: give a function to accel.on.")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"{name} is a coroutine or a generator: calling it would run nothing.")
    known = _available_arguments(hook)
    requested = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return list(known.items())
        optional = parameter.default is not parameter.empty
        if parameter.name in known and parameter.kind in _PASSED_BY_NAME:
            requested.append((parameter.name, known[parameter.name]))
        elif not optional or parameter.name in known:
            raise TypeError(
                f"{name}({parameter}) cannot be given by {hook}, which passes by name: "
                f"{', '.join(known)}.{nearest(parameter.name, known)}"
            )
    return requested


def _available_arguments(hook: str) -> Mapping[str, _Getter]:
    """Return the arguments of the hook, and some that are read from these."""
    names = list(inspect.signature(getattr(Callback, hook)).parameters.values())[1:]
    known = {argument.name: _at(index, argument.default) for index, argument in enumerate(names)}
    more: dict[str, _Getter] = {
        "step": lambda args: args[0].global_step,
        "epoch": lambda args: args[0].current_epoch,
        "accelerator": lambda args: args[0].accelerator,
    }
    if "outputs" in known:
        more["loss"] = lambda args: args[2]["loss"] if args[2] else None
    return {**more, **known}


def _at(index: int, default: Any) -> _Getter:
    return lambda args: args[index] if index < len(args) else default
