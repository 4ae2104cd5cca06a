"""Few cases of many: each value of a setting meets each value of every other one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

__all__ = ["pairwise"]


def pairwise(*settings: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of the product in which all pairs of two values are, each row the best next."""

    def pairs(row: tuple[int, ...]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(row), 2))

    rows = list(itertools.product(*(range(len(values)) for values in settings)))
    left, chosen = set().union(*map(pairs, rows)), []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & left)))
        left -= pairs(chosen[-1])
    return [tuple(v[at] for v, at in zip(settings, row, strict=True)) for row in chosen]
