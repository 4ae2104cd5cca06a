"""Functions as callbacks, removable handles."""

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

_Getter = Callable[[tuple[Any, ...]], Any]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class CallbackHandle:
    """Takes a callback out again, by hand or at the end of a ``with`` block.

    Made by ``accel.add_callback``.

    Args:
        callback: the callback as it is registered.
        take_out: takes it out.

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
        self._take_out = take_out
        self._removed = False

    @property
    def removed(self) -> bool:
        """True after :meth:`remove`."""
        return self._removed

    def remove(self) -> None:
        """Take the callback out; a second time does nothing."""
        if not self._removed:
            self._removed = True
            self._take_out(self.callback)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class FunctionHandle(CallbackHandle):
    """The handle of a function that ``accel.on`` registered; calling it calls the function.

    Args:
        callback: the callback around the function.
        take_out: takes it out.
        function: what the user wrote.

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
        """The function itself, as if it were not registered."""
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Filters:
    """On which calls of a hook a function is called; they are counted from 1.

    Args:
        every: on each call whose number is a multiple of this.
        once: on the first of these calls and then no more.
        after: not on the first so many calls.
        main_process_only: on the main process only; the others count too.

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
        """Whether the call of this number is one of those."""
        return call > self.after and call % self.every == 0

    @property
    def count(self) -> bool:
        """Whether calls have to be counted."""
        return self.every > 1 or self.after > 0 or self.once


class FunctionCallback(Callback):
    """A callback with one hook, which calls a function with the arguments that it names.

    Args:
        function: called with keywords.
        hook: one of the hooks.
        filters: on which calls.
        state_key: under which its counter is saved.
        retire: takes this callback out once it has done its work.

    Raises:
        TypeError: the function wants what the hook has not.

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
        self._wanted = _wanted(function, hook)
        self._calls = 0
        self._done = False
        if hook != "setup":
            setattr(self, hook, self._come)
        if hook == "setup" or filters.count:
            setattr(self, "setup", self._set_up)  # noqa: B010 - a hook only where it is needed

    @property
    def state_key(self) -> str:
        """The function's name and the hook's."""
        return self._state_key

    def _set_up(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Count anew, unless ``load_state`` has told where the run stands."""
        if run.begins_anew:
            self._calls = 0
        if self._hook == "setup":
            self._come(run, model, stage)

    def _come(self, *args: Any) -> None:
        """The hook is called."""
        self._calls += 1
        filters = self._filters
        if self._done or not filters.take(self._calls):
            return
        if filters.once:  # first, so that an error in it does not bring it again
            self._done = True
            self._retire(self)
        if not filters.main_process_only or args[0].is_global_zero:
            self._function(**{name: get(args) for name, get in self._wanted})

    def state_dict(self) -> dict[str, Any]:
        """How many calls there were, if that matters."""
        return {"calls": self._calls, "done": self._done} if self._filters.count else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._calls = state_dict["calls"]
        if self._filters.once and state_dict["done"] and not self._done:
            self._done = True
            self._retire(self)


def checked_hook(hook: str) -> str:
    """The hook's full name; ``"train_batch_end"`` means ``"on_train_batch_end"``.

    Raises:
        ValueError: there is no such hook.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.functions import checked_hook
        >>> checked_hook("log"), checked_hook("on_log"), checked_hook("setup")
        ('on_log', 'on_log', 'setup')
    """
    for name in (hook, f"on_{hook}"):
        if name in HOOKS:
            return name
    short = [name.removeprefix("on_") for name in HOOKS]
    raise ValueError(f"{hook!r} is no hook.{nearest(str(hook).removeprefix('on_'), short)}")


def name_of(function: Any) -> str:
    """What a function is called; the class of an object that is called like one."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _wanted(function: Callable[..., Any], hook: str) -> list[tuple[str, _Getter]]:
    """The arguments that the function names, and where each is found."""
    name = name_of(function)
    if not callable(function):
        raise TypeError(f"{function!r} cannot be called: give a function to accel.on.")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"{name} is a coroutine or a generator: calling it would run nothing.")
    known = _arguments(hook)
    wanted = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return list(known.items())
        optional = parameter.default is not parameter.empty
        if parameter.name in known and parameter.kind in _NAMED:
            wanted.append((parameter.name, known[parameter.name]))
        elif not optional or parameter.name in known:
            raise TypeError(
                f"{name}({parameter}) cannot be given by {hook}, which passes by name: "
                f"{', '.join(known)}.{nearest(parameter.name, known)}"
            )
    return wanted


def _arguments(hook: str) -> Mapping[str, _Getter]:
    """What a function can ask for: the arguments of the hook, and some that are found in them."""
    names = list(inspect.signature(getattr(Callback, hook)).parameters.values())[1:]
    known = {one.name: _at(place, one.default) for place, one in enumerate(names)}
    more: dict[str, _Getter] = {
        "step": lambda args: args[0].global_step,
        "epoch": lambda args: args[0].current_epoch,
        "accelerator": lambda args: args[0].accelerator,
    }
    if "outputs" in known:
        more["loss"] = lambda args: args[2]["loss"] if args[2] else None
    return {**more, **known}


def _at(place: int, default: Any) -> _Getter:
    return lambda args: args[place] if place < len(args) else default
