"""What a plain loop cannot give to a callback of Lightning, said by name."""

from __future__ import annotations

from typing import Any

__all__ = ["Missing", "NotInAPlainLoop", "Part"]


class NotInAPlainLoop(AttributeError):
    """A callback asks for something that only the Trainer of its own world has.

    It is an ``AttributeError`` too, so that ``hasattr`` and ``getattr`` with a default work.

    Example:
        >>> from accel_callbacks.callbacks.adapters import NotInAPlainLoop
        >>> issubclass(NotInAPlainLoop, AttributeError)
        True
    """


class Missing:
    """Says who asks for what: the callback's name, and how the error ends.

    Example:
        >>> from accel_callbacks.callbacks.adapters.missing import Missing
        >>> str(Missing("Mine")("trainer.fit_loop.x"))
        'Mine needs trainer.fit_loop.x, which only pl.Trainer has'
    """

    def __init__(self, who: str, owner: str = "pl.Trainer") -> None:
        self.who = who
        self.owner = owner

    def __call__(self, what: str) -> NotInAPlainLoop:
        """The error to raise."""
        return NotInAPlainLoop(f"{self.who} needs {what}, which only {self.owner} has")


class Part:
    """A stand-in for a part of the Trainer: what it does not have is an error that names it.

    Example:
        >>> from accel_callbacks.callbacks.adapters.missing import Missing, Part
        >>> part = Part("trainer.fit_loop", Missing("Mine"), max_epochs=3)
        >>> part.max_epochs, hasattr(part, "restarting")
        (3, False)
    """

    def __init__(self, path: str, missing: Missing, **values: Any) -> None:
        vars(self).update(values, _path=path, _missing=missing)

    def __getattr__(self, name: str) -> Any:
        known = vars(self)
        if name.startswith("__") or "_path" not in known:
            raise AttributeError(name)
        raise known["_missing"](f"{known['_path']}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        settable = getattr(type(self), name, None)
        if not (isinstance(settable, property) and settable.fset is not None):
            raise self._missing(f"to set {self._path}.{name}")
        object.__setattr__(self, name, value)
