"""The base class of option handlers, and the check of ``kwargs_handlers``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeVar, overload

from accel_callbacks.errors import nearest
from accel_callbacks.plugins.option import Block

__all__ = ["EnginePlugin", "Handlers", "KwargsHandler", "Launch", "OptionEnum", "sort_handlers"]

_ACCEPTED = (
    "AORecipeKwargs",
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
)

_Handler = TypeVar("_Handler", bound="KwargsHandler")


class Launch(Protocol):
    """What a launch asks for, as the options of an Accelerator hold it."""

    @property
    def distributed_type(self) -> str | None:
        """The kind of run."""

    @property
    def mixed_precision(self) -> str:
        """The precision."""

    @property
    def launched(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of plugins, by their group."""

    @property
    def origins(self) -> Mapping[str, str]:
        """The origin of each option, by group and name."""


class EnginePlugin:
    """What the options of an engine do to those of the run, and to each other."""

    @classmethod
    def check_launch(cls, block: Mapping[str, Any], processes: int) -> None:
        """Check options of a launch against its processes, before any of them starts.

        Args:
            block: the options, by their keys in a config file.
            processes: on all machines.

        Raises:
            SettingsError: they do not arrange all processes.
        """

    def configure(self, config: Any, beside: Mapping[str, Any]) -> Any:
        """Return the options of the run with those that this plugin sets.

        Args:
            config: the options of the run.
            beside: the plugins of the run by group, this one included.

        Raises:
            ValueError: they contradict each other.
        """
        return config

    def arrange(self, world_size: int) -> Mapping[str, Any]:
        """Return the plugins that this one stands for, by group; none for those of an engine.

        Args:
            world_size: number of ranks.
        """
        return {}


@dataclass(frozen=True)
class KwargsHandler(EnginePlugin):
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
    #: The block of a config file, and the variables of a launch, that have the options.
    block: ClassVar[Block] = Block("")

    def __new__(cls: type[_Handler], *args: Any, **options: Any) -> _Handler:
        """Raise for an unknown option, with a suggestion that ``__init__`` would not make."""
        known = [option.name for option in fields(cls) if option.init]
        for name in options:
            if name not in known:
                raise TypeError(f"{cls.__name__}() has no option {name!r}.{nearest(name, known)}")
        return object.__new__(cls)

    @classmethod
    def from_arguments(cls, **given: Any) -> Any:
        """Return the plugin that arguments of an Accelerator ask for, None without one.

        Raises:
            TypeError: it is of another class.
        """
        for name, value in given.items():
            if value is not None:
                _check_class(name, value, cls)
        return next(iter(given.values()))

    @classmethod
    def from_launch(cls, given: Any, launch: Launch) -> Any:
        """Return the script's plugin with what the launch adds; None if neither asks for one.

        Args:
            given: the script's; None without one.
            launch: what the launch asks for.

        Raises:
            ValueError: an option of the launch is invalid.
        """
        if not cls.is_asked_by(launch):
            return given
        options = launch.launched.get(cls.block.group, {})
        try:
            return cls(**options) if given is None else given.with_launch(options)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{cls.block.title} as the launch asks for it ({cls.block.variables}*): {error}"
            ) from None

    @classmethod
    def is_asked_by(cls, launch: Launch) -> bool:
        """Return whether a launch asks for these options, as its kind of run."""
        return launch.distributed_type == cls.block.group.upper()

    def with_launch(self: _Handler, options: Mapping[str, Any]) -> _Handler:
        """Return the plugin with options of the launch where the script left None."""
        left = {name: value for name, value in options.items() if getattr(self, name) is None}
        return replace(self, **left) if left else self

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


def _check_class(name: str, value: Any, kind: type[KwargsHandler]) -> None:
    """Raise TypeError for an argument of another class."""
    if isinstance(value, kind):
        return
    origin = ""
    if type(value).__name__ == kind.__name__:  # imported from another library by the same name
        origin = f" of {type(value).__module__}, another library"
        value = kind.__name__
    raise TypeError(
        f"{name}={value}{origin} must be a {kind.__name__}: "
        f"`from accel_callbacks import {kind.__name__}`."
    )


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

    def including(self, handler: KwargsHandler) -> Handlers:
        """Return the handlers with this one, in place of that of its class."""
        return Handlers({**self.by_class, type(handler): handler})


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
