"""Format tables, sizes, ages and JSON as text for a terminal; imports no torch."""

from __future__ import annotations

import json
import math
import os
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, TextIO

_TERMINAL_WIDTH = 80  # of terminals that do not report theirs
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align cells in columns under a header; unprintable characters of cells become escapes.

    Example:
        >>> from accel_callbacks.terminal_text import table
        >>> print(table(("NAME", "SIZE"), [("a", "1"), ("bcd", "2")]))
        NAME  SIZE
        a     1
        bcd   2
    """
    lines = [tuple(head), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """Escape unprintable characters, which could otherwise control the terminal; not spaces."""
    return "".join(c if _is_harmless(c) else c.encode("unicode_escape").decode() for c in text)


def _is_harmless(character: str) -> bool:
    """Return whether a character is printable or a space, such as that of Japanese names."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def terminal_width(file: TextIO) -> int:
    """Return a terminal's columns but for the last, in which some begin a new line."""
    try:
        columns = os.get_terminal_size(file.fileno()).columns  # 0 in some containers
    except (AttributeError, OSError, ValueError):  # not a file of the operating system
        columns = 0
    return (columns or columns_variable() or _TERMINAL_WIDTH) - 1


def columns_variable() -> int:
    """Return ``COLUMNS`` of the environment, 0 if it is no number."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


def wrapped(text: str, file: TextIO | None) -> str:
    """Break long lines at words for a terminal; what goes elsewhere keeps its lines.

    Example:
        >>> import io
        >>> from accel_callbacks.terminal_text import wrapped
        >>> wrapped("a file is not a terminal", io.StringIO())
        'a file is not a terminal'
    """
    if file is None or not file.isatty():  # a process without a console has no standard error
        return text
    width = max(20, terminal_width(file))  # a word a line helps nobody
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,  # paths and names are to be copied
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


def listed(names: Iterable[str], most: int = 5, between: str = ", ") -> str:
    """Join the first names, and tell how many there are besides.

    Example:
        >>> from accel_callbacks.terminal_text import listed
        >>> listed("abc", most=2)
        'a, b and 1 more'
    """
    names = list(names)
    rest = len(names) - most
    return between.join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def size_of(nbytes: int) -> str:
    """Format a number of bytes in decimal units, as ``max_shard_size`` reads them."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = f"{value:.0f}" if unit == 0 or value >= 99.5 else f"{value:.3g}"
    return f"{digits} {_UNITS[unit]}"


def age_of(created: str) -> str:
    """Format the time since a manifest was created; ``?`` if ``created`` is not a timestamp."""
    try:
        then = datetime.fromisoformat(created.replace("Z", "+00:00"))
        seconds = (datetime.now(timezone.utc) - then).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return "?"
    for span, unit in _SPANS:
        if seconds >= span:
            return f"{int(seconds // span)} {unit}"
    return "now"


def shape_of(shape: Sequence[int]) -> str:
    """Format a shape as torch does."""
    return f"[{', '.join(map(str, shape))}]"


def to_json(value: Any) -> str:
    """Serialize to JSON; values that JSON does not have (NaN, sets, bytes) become text."""
    return json.dumps(_plain(value), indent=2)


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON has."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    known = value is None or isinstance(value, (str, int))
    finite = isinstance(value, float) and math.isfinite(value)
    return value if known or finite else repr(value)
