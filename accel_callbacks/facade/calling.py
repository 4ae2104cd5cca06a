"""Callbacks that come and go, and what is known of them, as methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_callbacks.callbacks.dispatch.dispatcher import Entry, firing_plan
from accel_callbacks.callbacks.dispatch.functions import (
    CallbackHandle,
    Filters,
    FunctionCallback,
    FunctionHandle,
    checked_hook,
    name_of,
)
from accel_callbacks.callbacks.dispatch.ledger import CallbackReport
from accel_callbacks.callbacks.dispatch.registration import configured
from accel_callbacks.facade.parts import Parts

__all__ = ["CallingMethods"]


class CallingMethods(Parts):
    """Who is called when."""

    def add_callback(
        self, callback: Any, *, before: Any = (), after: Any = (), on_error: str | None = None
    ) -> CallbackHandle:
        """Register a callback, at any time.

        While a run is on, its ``setup`` is called at once, and it is given the state that a
        resumed checkpoint has for it; its other hooks come as the loop goes on. One that votes,
        saves or is collective must be added on all processes, at the same place.

        Args:
            callback: an object with hooks.
            before: callbacks, their classes or state keys, that it is called before.
            after: those that it is called after.
            on_error: ``"raise"``, ``"warn"`` or ``"disable"``; the callback's own where ``None``.

        Raises:
            TypeError: a method looks like a hook and is none.
            ValueError: the ``state_key`` of another, or constraints that cannot be met.

        Example:
            >>> from accel_callbacks import Accelerator, Callback
            >>> class Hello(Callback):
            ...     def on_log(self, run, model, metrics, step):
            ...         print("hello", metrics)
            >>> accel = Accelerator(cpu=True)
            >>> with accel.add_callback(Hello()):
            ...     accel.log({"loss": 1.0})
            hello {'loss': 1.0}
            >>> accel.log({"loss": 2.0})
        """
        wanted = configured(callback, before=before, after=after, on_error=on_error)
        entry = self._register(wanted)
        return CallbackHandle(entry.callback, self._take_out)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback out; it is not called again. While a run is on, it is torn down.

        Args:
            callback: the object that was registered.

        Raises:
            ValueError: it is not registered.

        Example:
            >>> from accel_callbacks import Accelerator, Callback
            >>> callback = Callback()
            >>> accel = Accelerator(cpu=True, callbacks=[callback])
            >>> accel.remove_callback(callback)
            >>> accel.callbacks
            []
        """
        loop = self.loop
        entry = loop.dispatch.remove(callback)
        if loop.fitting and "teardown" in entry.calls:
            entry.off = False  # this one call more
            try:
                entry.calls["teardown"](loop.run, loop.model, "fit")
            finally:
                entry.off = True

    def on(
        self,
        hook: str,
        *,
        every: int = 1,
        once: bool = False,
        after: int = 0,
        main_process_only: bool = False,
        on_error: str = "raise",
        can_vote: bool = False,
    ) -> Callable[[Callable[..., Any]], FunctionHandle]:
        """Decorator: call a function in a hook, with the arguments that it names.

        A function can ask for the arguments of the hook, and for ``step`` (optimizer steps so
        far), ``epoch`` and ``accelerator``; where there are ``outputs``, for ``loss`` too. Calls
        of the hook are counted from 1, and go on to be counted in a resumed run.

        Args:
            hook: with or without its ``on_``.
            every: call the function on each call of the hook whose number is a multiple of this.
            once: call it on the first of these, and take it out.
            after: not on the first so many calls.
            main_process_only: call it on the main process only.
            on_error: ``"raise"`` (default), ``"warn"`` or ``"disable"``.
            can_vote: the function may stop the run (or call ``save_now``, ``preempt``) in the
                middle of an epoch of several processes.

        Returns:
            The decorator; it gives a handle that is called like the function, can be removed, and
            is a context manager.

        Raises:
            ValueError: no such hook, or a number that makes no sense.
            TypeError: the function wants an argument that the hook has not.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> @accel.on("log", every=2)
            ... def show(step, metrics):
            ...     print(step, metrics)
            >>> for step in (1, 2, 3, 4):
            ...     accel.log({"loss": 1 / step}, step=step)
            2 {'loss': 0.5}
            4 {'loss': 0.25}
        """
        name = checked_hook(hook)
        filters = Filters(every, once, after, main_process_only)

        def register(function: Callable[..., Any]) -> FunctionHandle:
            dispatch = self.loop.dispatch
            key = dispatch.free_key(f"{name_of(function)}:{name}")
            callback = FunctionCallback(function, name, filters, key, dispatch.retire)
            callback.can_vote = can_vote
            self._register(configured(callback, on_error=on_error))
            return FunctionHandle(callback, self._take_out, function)

        return register

    def describe_callbacks(self) -> str:
        """The firing plan: the callbacks in the order of their calls, and who has which hook.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> @accel.on("log", can_vote=True)
            ... def watch(run, metrics):
            ...     if metrics["loss"] > 100:
            ...         run.stop("the loss has exploded")
            >>> print(accel.describe_callbacks())
            callbacks
              1  watch:on_log  votes
            hooks
              on_log  watch:on_log
        """
        return firing_plan(self.loop.dispatch)

    def callback_report(self) -> CallbackReport:
        """What each hook of each callback has cost on this process, the costliest first.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> @accel.on("log")
            ... def watch(metrics):
            ...     pass
            >>> accel.log({"loss": 1.0})
            >>> [(row.callback, row.hook, row.calls) for row in accel.callback_report().rows]
            [('watch:on_log', 'on_log', 1)]
        """
        return self.loop.dispatch.ledger.report()

    def _register(self, wanted: Any) -> Entry:
        """Add it, and let it catch up with the run."""
        loop = self.loop
        (entry,) = loop.dispatch.add(wanted)
        if entry.votes or entry.meets_others:
            loop.dispatch.check_alike()
        if loop.fitting and "setup" in entry.calls:
            entry.calls["setup"](loop.run, loop.model, "fit")
        if loop.run.resumed_from is not None:
            loop.dispatch.claim(entry)
        return entry

    def _take_out(self, callback: Any) -> None:
        """For handles: one that has gone by itself is gone."""
        if any(callback is one for one in self.loop.dispatch.callbacks):
            self.remove_callback(callback)
