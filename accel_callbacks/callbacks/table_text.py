"""Numbers and columns as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["as_table", "count_text", "size_text"]


def as_table(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of left-aligned columns under their titles; none without rows.

    Example:
        >>> from accel_callbacks.callbacks.table_text import as_table
        >>> as_table({"name": ["a", "bcd"], "size": ["1", "2"]})
        ['name  size', 'a     1', 'bcd   2']
    """
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    if len(rows) == 1:
        return []
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def count_text(count: float) -> str:
    """A number with at most four digits and a letter for its thousands.

    Example:
        >>> from accel_callbacks.callbacks.table_text import count_text
        >>> count_text(999), count_text(124_439_808), count_text(1.5e12)
        ('999', '124.4 M', '1.5 T')
    """
    return _scaled(count, 1000, ("", " K", " M", " G", " T", " P"))


def size_text(size: float) -> str:
    """Bytes in units of 1024.

    Example:
        >>> from accel_callbacks.callbacks.table_text import size_text
        >>> size_text(12), size_text(3 << 29)
        ('12 B', '1.5 GiB')
    """
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while round(value, 1) >= base and power < len(units) - 1:
        value /= base
        power += 1
    number = f"{value:.1f}".removesuffix(".0")
    return number + units[power]
