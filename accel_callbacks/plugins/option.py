"""Declare options as fields of dataclasses, with all that a launch and its files know of them.

An option is declared once: as a field of the plugin, of the Accelerator's options, or of the
launch's settings. Its flag, key, variable, help and question are metadata of that field.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from accel_callbacks.errors import nearest

__all__ = [
    "Block",
    "Option",
    "SettingsError",
    "launched",
    "option",
    "options_of",
    "scripted",
    "shown",
]

BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

_LARGEST = 2**63 - 1


class SettingsError(ValueError):
    """Raised for a setting that is invalid or does not fit others; one line with a remedy."""


def shown(value: Any) -> str:
    """Format a value for an error message: short, on one line, and without secrets."""
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "an integer of more than 64 bits"
    if isinstance(value, str):
        from loggers.redaction import redacted  # imports all of loggers, and errors are rare

        value = redacted(value)
    text = ascii(value[:80] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= 60 else f"{text[:56]}..."


@dataclass(frozen=True)
class Block:
    """The block of a config file whose keys are the options of a class.

    Args:
        name: key of the block.
        title: what the options are for, in messages.
        prefix: what its keys have in front of the names of the fields.
        flags: what flags have in front of the keys.
        variables: what variables have in front of the names of the fields.
        valued: the flags of booleans take ``true`` or ``false``.
    """

    name: str
    title: str = ""
    prefix: str = ""
    flags: str = ""
    variables: str = ""
    valued: bool = False

    @property
    def group(self) -> str:
        """Name of the options in an Accelerator, such as ``"fsdp"`` of ``ACCEL_FSDP_``."""
        return self.variables.removeprefix("ACCEL_").removesuffix("_").lower()


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: key in the file.
        kind: ``"bool"``, ``"int"``, ``"float"``, ``"str"``, ``"list"`` or ``"block"``.
        default: value where nothing else is given.
        help: one line.
        attribute: name of the field.
        group: name of the class that declares the option.
        question: what ``accel config`` asks.
        least: smallest number.
        most: largest number.
        choices: allowed strings.
        renamed: older names of choices, and the current ones.
        numbers: a positive integer is a choice too.
        flags: aliases of the flag.
        shorthands: flags that stand for one value each, such as the one that turns a switch off.
        flag: the flag; empty for none.
        valued: the flag of a boolean takes ``true`` or ``false``.
        unset: values in a file that mean "not set".
        variable: environment variable that sets the option, and that the launched processes get.
        convert: reads the variable in these processes, where the plugin checks the value.
        foreign: variable of Accelerate's that asks for the same, which is not read.
        torchrun: torchrun has an option of the same name.
        lenient: a file may give numbers and booleans as strings.
        idle: why the option never has an effect; empty if it can have one.
        refused: why a launch with another value than the default is refused, and what to do.
        block: for an option of a block, the name of the block.
        owners: for a block, the classes of its options.
    """

    name: str
    kind: str
    default: Any
    help: str
    attribute: str = ""
    group: str = ""
    question: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    numbers: bool = False
    flags: tuple[str, ...] = ()
    shorthands: Mapping[str, Any] = field(default_factory=dict)
    flag: str = ""
    valued: bool = False
    unset: tuple[Any, ...] = ()
    variable: str = ""
    convert: Callable[[str], Any] = str
    foreign: str = ""
    torchrun: bool = False
    lenient: bool = False
    idle: str = ""
    refused: str = ""
    block: str = ""
    owners: tuple[type[Any], ...] = ()

    @property
    def path(self) -> str:
        """Name with the block, such as ``fsdp_config.fsdp_version``."""
        return f"{self.block}.{self.name}" if self.block else self.name

    @property
    def dest(self) -> str:
        """Attribute in the parsed command line; empty without a flag."""
        return self.flag.removeprefix("--")

    def is_unset(self, value: Any) -> bool:
        """Return whether a value of a file means "not set"."""
        if isinstance(value, bool):
            return False
        return value is None or value in self.unset or self.is_blank(value)

    def is_blank(self, value: Any) -> bool:
        """Return whether a value is empty text where text means nothing, as for a number."""
        takes_text = self.kind not in ("int", "float") and self.default is not None
        return isinstance(value, str) and not value.strip() and not takes_text

    def read(self, value: Any) -> Any:
        """Validate a value of a file; raise ValueError with the requirement."""
        if self.is_unset(value):
            return self.default
        if value is False and "no" in (self.default, *map(str.lower, self.choices)):
            value = "no"  # YAML reads a bare `no` as false
        if self.lenient and self.kind == "str" and isinstance(value, (bool, int, float)):
            value = str(value).lower() if abs(value) <= _LARGEST else value
        if self.choices:
            return self._choice(value)
        if self.lenient and isinstance(value, str) and self.kind in ("bool", "int", "float"):
            return self.parse(value)
        return _READERS[self.kind](self, value)

    def parse(self, text: str) -> Any:
        """Parse the text of a flag or an environment variable."""
        if self.choices:
            return self._choice(text)
        if self.kind == "list":
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if self.kind == "bool":
            if text.lower() not in BOOLEANS:
                raise ValueError(f"must be true or false, not {shown(text)}")
            return BOOLEANS[text.lower()]
        if self.kind in ("int", "float"):
            try:
                number = int(text) if self.kind == "int" else float(text)
            except ValueError:
                raise ValueError(self._requirement(text)) from None
            return _READERS[self.kind](self, number)
        return _READERS[self.kind](self, text)

    def _choice(self, value: Any) -> str:
        known = {choice.lower(): choice for choice in self.choices}
        known |= {old.lower(): new for old, new in self.renamed.items()}
        if self.numbers and isinstance(value, str) and value.isdecimal() and int(value) > 0:
            return str(int(value))
        if not isinstance(value, str) or value.lower() not in known:
            hint = nearest(value.lower()[:100], known) if isinstance(value, str) else ""
            known_ones = ", ".join((*self.choices, "a number") if self.numbers else self.choices)
            raise ValueError(f"must be one of {known_ones}, not {shown(value)}.{hint}")
        return known[value.lower()]

    def _requirement(self, value: Any) -> str:
        name = "an integer" if self.kind == "int" else "a number"
        low = "" if self.least is None else f" of at least {_plain(self.least)}"
        high = "" if self.most is None else f" and at most {_plain(self.most)}"
        return f"must be {name}{low}{high}, not {shown(value)}"

    def argument(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Return flags and keywords for ``add_argument``; the default is None, for "not given"."""
        flags = (self.flag, *self.flags)
        keywords: dict[str, Any] = {"dest": self.dest, "default": None, "help": self.help}
        if self.kind == "bool" and not self.valued:
            return flags, {**keywords, "action": "store_true"}
        keywords["type"] = self._argument_type
        if self.choices and len(self.choices) < 6:
            keywords["metavar"] = "{" + ",".join(self.choices) + "}"
        else:
            words = {"bool": "true|false", "int": "N", "float": "X", "list": "A,B"}
            keywords["metavar"] = words.get(self.kind, "TEXT")
        return flags, keywords

    def _argument_type(self, text: str) -> Any:
        try:
            return self.parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _read_bool(option: Option, value: Any) -> bool:
    if not isinstance(value, bool):
        hint = ", without quotes" if isinstance(value, str) and value.lower() in BOOLEANS else ""
        raise ValueError(f"must be true or false{hint}, not {shown(value)}")
    return value


def _read_number(option: Option, value: Any) -> Any:
    valid = isinstance(value, int) or (isinstance(value, float) and option.kind == "float")
    if not valid or isinstance(value, bool):
        raise ValueError(option._requirement(value))
    low = -_LARGEST if option.least is None else option.least
    high = _LARGEST if option.most is None else option.most
    if not (low <= value <= high and (isinstance(value, int) or math.isfinite(value))):
        raise ValueError(option._requirement(value))
    return float(value) if option.kind == "float" else value


def _read_str(option: Option, value: Any) -> str:
    # YAML reads `gpu_ids: 0` and `rdzv_id: 7` as numbers.
    number = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST
    text = str(value) if number else value
    if not isinstance(text, str):
        raise ValueError(f"must be text, not {shown(value)}")
    if not text.isprintable():
        raise ValueError(f"must be printable text on one line, not {shown(value)}")
    return text


def _read_list(option: Option, value: Any) -> tuple[str, ...]:
    values = value.strip("()[] ").split(",") if isinstance(value, str) else value
    if isinstance(values, list):  # Accelerate writes lists of switches, as in `[false, false]`
        values = [str(item).lower() if isinstance(item, bool) else item for item in values]
    if not isinstance(values, list):
        raise ValueError(f"must be a list of texts, not {shown(value)}")
    return tuple(text for text in (_read_str(option, item).strip() for item in values) if text)


_READERS: Mapping[str, Callable[[Option, Any], Any]] = {
    "bool": _read_bool,
    "int": _read_number,
    "float": _read_number,
    "str": _read_str,
    "list": _read_list,
}


def option(default: Any, help: str, /, **facts: Any) -> Any:
    """Declare an option as a dataclass field; ``facts`` are arguments of :class:`Option`.

    Without ``kind`` it is that of the annotation; ``key`` is a ``name`` other than the field's;
    other facts are read by the plugin itself.

    Example:
        >>> from dataclasses import dataclass
        >>> from accel_callbacks.plugins.option import option, options_of
        >>> @dataclass(frozen=True)
        ... class Mine:
        ...     steps: int = option(1, "how many", least=1)
        >>> [(option.name, option.kind, option.flag) for option in options_of(Mine)]
        [('steps', 'int', '--steps')]
    """
    return field(default=default, metadata={"default": default, "help": help, **facts})


def launched(default: Any, help: str, /, *, passed: bool = True, **facts: Any) -> Any:
    """Declare an option of a block, which is None in a script that leaves it to the launch.

    Args:
        default: of the launch.
        help: one line.
        passed: the launched processes get its variable.
        facts: as for :func:`option`.
    """
    return option(None, help, default=default, passed=passed, **facts)


def scripted(default: Any, /, **facts: Any) -> Any:
    """Declare an option that only scripts give, with facts for the plugin itself."""
    return field(default=default, metadata=facts)


def options_of(owner: type[Any]) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in order."""
    groups = {
        name: kind.__name__
        for kind in owner.__mro__
        for name in vars(kind).get("__annotations__", {})
    }
    block = getattr(owner, "block", Block(""))
    return tuple(
        _option_of(declared, block, groups[declared.name])
        for declared in fields(owner)
        if "help" in declared.metadata
    )


def _option_of(declared: Field[Any], block: Block, group: str) -> Option:
    facts = dict(declared.metadata)
    annotated = str(declared.type).removesuffix(" | None")
    kind = facts.pop("kind", "list" if annotated == "tuple[str, ...]" else annotated)
    key = facts.pop("key", declared.name)
    if facts.pop("passed", False):
        facts.setdefault("variable", f"{block.variables}{key}".upper())
    name = block.prefix + key
    facts.setdefault("flag", "" if kind == "block" else f"--{block.flags}{name}")
    valued = facts.pop("valued", block.valued and kind == "bool")
    if kind == "bool" and not valued:
        off = f"--no_{facts['flag'].removeprefix('--')}"
        facts["shorthands"] = {**facts.get("shorthands", {}), off: False}
    return Option(
        name=name,
        kind=kind,
        attribute=declared.name,
        group=group,
        block=block.name,
        lenient=facts.pop("lenient", bool(block.name)),
        convert=facts.pop("convert", _CONVERTERS.get(kind, str)),
        valued=valued,
        **{name: fact for name, fact in facts.items() if name in Option.__dataclass_fields__},
    )


def _boolean(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ValueError(f"{text!r} is neither true nor false")
    return BOOLEANS[text.lower()]


def switch_or_count(text: str) -> bool | int | str:
    """Convert to a boolean or a number where it is one."""
    value = BOOLEANS.get(text.lower(), text)
    return int(text) if isinstance(value, str) and text.isdecimal() else value


_CONVERTERS: Mapping[str, Callable[[str], Any]] = {"bool": _boolean, "int": int, "float": float}
