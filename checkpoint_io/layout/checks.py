"""Checks of single values out of JSON that may be damaged or hostile."""

from __future__ import annotations

import re
from typing import Any

LIMIT = 2**63 - 1
MAX_DIMS = 64
HEX16S = re.compile(r"[0-9a-f]+", re.ASCII).fullmatch
_HEX16 = re.compile(r"[0-9a-f]{16}", re.ASCII)


class Bad(Exception):
    """One thing wrong with a manifest."""


def typed(value: Any, kind: type, what: str) -> Any:
    """Return the value if it is of that JSON type."""
    if type(value) is not kind:
        raise Bad(f"{what} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def integer(value: Any, what: str, low: int = 0, high: int = LIMIT) -> int:
    """Return a whole number within its bounds; true and false are not numbers."""
    if type(value) is not int or not low <= value <= high:
        raise Bad(f"{what} must be a whole number from {low} to {high}, not {show(value)}")
    return value


def show(value: Any) -> str:
    """Write a value for an error: short, and never slow, whatever it is."""
    if type(value) in (str, int, float, bool, type(None)):
        # the text of an int of thousands of digits is refused by Python itself
        huge = type(value) is int and value.bit_length() > 256
        return "a huge number" if huge else f"{value!r:.80}"
    return f"a {type(value).__name__}"


def integers(value: Any, what: str) -> tuple[int, ...]:
    """Return a list of whole numbers with at most as many entries as a tensor has dimensions."""
    if type(value) not in (list, tuple) or len(value) > MAX_DIMS:
        raise Bad(f"{what} must be a list of at most {MAX_DIMS} dimensions")
    for item in value:
        if type(item) is not int or not 0 <= item <= LIMIT:
            integer(item, what)
    return tuple(value)


def strings(value: Any, what: str) -> dict[str, str]:
    """Return an object whose values are all strings."""
    return {k: typed(v, str, f"{what}[{k!r:.80}]") for k, v in typed(value, dict, what).items()}


def checksums(value: Any, size: int, part_size: int, what: str) -> tuple[str, ...]:
    """Return one checksum for each part of so many bytes."""
    if type(value) is not list or len(value) != -(-size // part_size):
        raise Bad(f"{what} does not have one checksum for each {part_size} of its {size} bytes")
    for item in value:
        if type(item) is not str or not _HEX16.fullmatch(item):
            raise Bad(f"{what} has a checksum that is not 16 hex digits")
    return tuple(value)


def joined_checksums(value: Any, size: int, part_size: int) -> tuple[str, ...]:
    """Return the checksums of so many bytes out of one string."""
    if type(value) is not str or len(value) != 16 * -(-size // part_size):
        raise Bad(f"there is not one checksum for each {part_size} of its {size} bytes")
    if value and not HEX16S(value):
        raise Bad("a checksum that is not 16 hex digits")
    if size <= part_size:
        return (value,) if size else ()
    return tuple([value[begin : begin + 16] for begin in range(0, len(value), 16)])
