"""Sizes in bytes, as numbers or as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(size: int | str) -> int:
    """Return a size in bytes; "5GB" is 5e9, "5GiB" is 5 * 2**30."""
    text = str(size).strip().lower()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text)
    value = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if value < 1 or isinstance(size, bool):
        raise ValueError(f'a size is a positive number of bytes or text like "5GB", not {size!r}')
    return value
