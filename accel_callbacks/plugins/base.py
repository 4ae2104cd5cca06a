"""The base class of option handlers, and the check of ``kwargs_handlers``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar, overload

from accel_callbacks.errors import nearest

__all__ = ["Handlers", "KwargsHandler", "OptionEnum", "sort_handlers"]

_ACCEPTED = (
    "AORecipeKwargs",
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
)

_Handler = TypeVar("_Handler", bound="KwargsHandler")


@dataclass(frozen=True)
class KwargsHandler:
    """Options of one part of the Accelerator, as a frozen dataclass.

    ``Accelerator(kwargs_handlers=[...])`` accepts subclasses that set ``role`` to the part that
    their options are for.

    Example:
        >>> from accel_callbacks import GradScalerKwargs
        >>> GradScalerKwargs(growth_interval=10).to_kwargs()
        {'growth_interval': 10}
    """

    #: The part that the options are for; empty for plugins that have an argument of their own.
    role: ClassVar[str] = ""

    def __new__(cls: type[_Handler], *args: Any, **options: Any) -> _Handler:
        """Raise for an unknown option, with a suggestion that ``__init__`` would not make."""
        known = [option.name for option in fields(cls) if option.init]
        for name in options:
            if name not in known:
                raise TypeError(f"{cls.__name__}() has no option {name!r}.{nearest(name, known)}")
        return object.__new__(cls)

    @property
    def activation_checkpointing(self) -> Any:
        """Policy by which blocks are computed again in backward, False for none."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return {option.name: deepcopy(getattr(self, option.name)) for option in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose value is not the default."""
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.init and not _is_default(option, getattr(self, option.name))
        }


def _is_default(option: Any, value: Any) -> bool:
    default = option.default if option.default_factory is MISSING else option.default_factory()
    return default is not MISSING and (value is default or bool(value == default))


@dataclass(frozen=True)
class Handlers:
    """The handlers of one Accelerator, at most one per class.

    Args:
        by_class: the handlers by class.

    Example:
        >>> from accel_callbacks import AutocastKwargs, GradScalerKwargs
        >>> from accel_callbacks.plugins import sort_handlers
        >>> handlers = sort_handlers([AutocastKwargs(enabled=False)])
        >>> handlers.get(AutocastKwargs).enabled, handlers.get(GradScalerKwargs)
        (False, None)
        >>> handlers.get(GradScalerKwargs, GradScalerKwargs()).growth_interval
        2000
    """

    by_class: Mapping[type[KwargsHandler], KwargsHandler] = field(default_factory=dict)

    @overload
    def get(self, kind: type[_Handler]) -> _Handler | None: ...
    @overload
    def get(self, kind: type[_Handler], default: _Handler) -> _Handler: ...

    def get(self, kind: type[_Handler], default: _Handler | None = None) -> _Handler | None:
        """Return the handler of this class or of a subclass, else ``default``."""
        for handler in self.by_class.values():
            if isinstance(handler, kind):
                return handler
        return default


def sort_handlers(kwargs_handlers: Iterable[Any] | None) -> Handlers:
    """Check a list of handlers, and return them by class.

    Raises:
        TypeError: an item is no handler.
        ValueError: two handlers have the same class.

    Example:
        >>> from accel_callbacks import AutocastKwargs
        >>> from accel_callbacks.plugins import sort_handlers
        >>> sort_handlers([AutocastKwargs(), AutocastKwargs()])
        Traceback (most recent call last):
        ValueError: kwargs_handlers has two AutocastKwargs: keep one.
    """
    by_class: dict[type[KwargsHandler], KwargsHandler] = {}
    if kwargs_handlers is not None and not isinstance(kwargs_handlers, Iterable):
        raise TypeError(f"kwargs_handlers must be a list of handlers, not {kwargs_handlers!r}.")
    for handler in kwargs_handlers or ():
        kind = type(handler)
        if not isinstance(handler, KwargsHandler) or not kind.role:
            raise TypeError(_not_accepted(handler))
        for other in by_class:
            if issubclass(kind, other) or issubclass(other, kind):
                raise ValueError(f"kwargs_handlers has two {other.__name__}: keep one.")
        by_class[kind] = handler
    return Handlers(by_class)


def _not_accepted(handler: Any) -> str:
    kind = type(handler)
    if kind.__name__ in _ACCEPTED:  # imported from another library by the same name
        return (
            f"kwargs_handlers holds a {kind.__name__} of {kind.__module__}, another library: "
            f"`from accel_callbacks import {kind.__name__}`."
        )
    name = getattr(handler, "__name__", kind.__name__)
    return (
        f"kwargs_handlers holds {handler!r}, which is none of {', '.join(_ACCEPTED)}: "
        f"pass instances of these.{nearest(name, _ACCEPTED)}"
    )


_Option = TypeVar("_Option", bound="OptionEnum")


class OptionEnum(str, Enum):
    """Values of an option, given in any case, as a string or as a member.

    Example:
        >>> from accel_callbacks import DDPCommunicationHookType
        >>> DDPCommunicationHookType.read("FP16", "comm_hook")
        <DDPCommunicationHookType.FP16: 'fp16'>
    """

    @classmethod
    def list(cls) -> Any:
        """Return the values."""
        return [member.value for member in cls]

    @classmethod
    def read(cls: type[_Option], value: Any, option: str) -> _Option:
        """Return the member of this name.

        Raises:
            ValueError: there is none; the message names ``option`` and the known values.
        """
        known = [member.value for member in cls]
        text = value.value if isinstance(value, cls) else str(value)
        for member in cls:
            if member.value.lower() == text.lower():
                return member
        hint = nearest(text.lower(), known)
        raise ValueError(f"{option}={value!r} is unknown; use one of {known}.{hint}")
