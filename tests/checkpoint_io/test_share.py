"""Which rank verifies which part of a checkpoint, as a pure function of what all ranks claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_io import CorruptCheckpointError, open_checkpoint, save
from checkpoint_io.loader.share import Claim, check_share, claim_of, deal

NOTHING: list[tuple[int, int]] = []


def claim(needed: list[tuple[int, int]], reads: list[tuple[int, int]]) -> Claim:
    def packed(ranges: list[tuple[int, int]]) -> bytes:
        return np.array(sorted(ranges), dtype="<i8").tobytes()

    return {"digest": "", "needed": packed(needed), "reads": packed(reads)}


def dealt(sizes: list[int], claims: list[Claim | None]) -> list[int]:
    lengths = np.array(sizes, dtype=np.int64)
    owners: list[int] = deal(np.cumsum(lengths) - lengths, lengths, claims).tolist()
    return owners


def test_a_rank_verifies_what_it_alone_reads_and_shares_the_rest() -> None:
    every = [(0, 80)]
    first, second = claim(every, [(0, 20), (60, 80)]), claim(every, [(20, 40), (60, 80)])
    # parts of 10 bytes: two of the first rank, two of the second, two of none, two of both
    assert dealt([10] * 8, [first, second]) == [0, 0, 1, 1, 0, 1, 0, 1]
    # a rank that reads little takes more of the rest
    lazy = claim(every, NOTHING)
    assert dealt([10] * 8, [claim(every, [(0, 40)]), lazy]) == [0] * 4 + [1] * 4
    assert dealt([10] * 8, [None, lazy]) == [1] * 8
    idle = claim(NOTHING, NOTHING)
    assert dealt([10] * 8, [claim([(10, 30)], every), idle]) == [-1, 0, 0, -1, -1, -1, -1, -1]
    assert dealt([10] * 8, [claim(NOTHING, every)] * 2) == [-1] * 8


RANGES = st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.lists(st.none() | st.tuples(RANGES, RANGES), min_size=1, max_size=6),
)
def test_each_part_that_is_needed_has_one_owner(sizes: list[int], drawn: list[Any]) -> None:
    begins = [sum(sizes[:number]) for number in range(len(sizes) + 1)]

    def parts(ranges: list[tuple[int, int]]) -> set[int]:
        return {n for a, b in ranges for n in range(min(a, b), max(a, b)) if n < len(sizes)}

    def bytes_of(numbers: set[int]) -> list[tuple[int, int]]:
        return [(begins[n], begins[n + 1]) for n in numbers]

    sets = [None if one is None else (parts(one[0]), parts(one[1])) for one in drawn]
    claims = [None if one is None else claim(bytes_of(one[0]), bytes_of(one[1])) for one in sets]
    owners = dealt(sizes, claims)
    takers = [rank for rank, one in enumerate(sets) if one is not None]
    needed = {n for one in sets if one is not None for n in one[0]}
    for number, owner in enumerate(owners):
        readers = [rank for rank in takers if number in sets[rank][1]]  # type: ignore[index]
        if number in needed:
            assert owner in (readers or takers)
        else:
            assert owner == -1
    if all(one is None or not one[1] for one in sets) and takers:
        load = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in takers]
        assert max(load) - min(load) <= 2 * max(sizes)


def test_ranks_that_opened_different_checkpoints_verify_nothing(tmp_path: Any) -> None:
    save(tmp_path, {"w": torch.ones(3)})
    old = open_checkpoint(tmp_path)
    save(tmp_path, {"w": torch.ones(3)})
    new = open_checkpoint(tmp_path)
    claims = [claim_of(reader.source, [0]) for reader in (old, new)]
    with pytest.raises(CorruptCheckpointError, match="was replaced while the ranks opened it"):
        check_share(new.source, claims, 1)
