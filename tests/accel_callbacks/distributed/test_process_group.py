"""Processes that are started again agree on a name, whatever earlier attempts left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from accel_callbacks.distributed.process_group import agree_on_attempt, store_outlives
from tests.support.bound import BOUND

SHORT = timedelta(seconds=0.3)


def meet(store: dist.Store, world: int, ranks: list[int], timeout: timedelta = BOUND) -> list[str]:
    """What each rank takes the attempt's name to be, or its error, in the order they come."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        joins = [threads.submit(agree_on_attempt, store, r, world, timeout) for r in ranks]
        return [str(join.exception() or join.result()) for join in joins]


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_all_agree_whoever_comes_first(ranks: list[int]) -> None:
    assert len(set(meet(dist.HashStore(), 3, ranks))) == 1


@pytest.mark.parametrize("worlds", [[2, 2, 2], [3, 2, 3], [2, 3]])
def test_each_attempt_has_a_name_of_its_own(worlds: list[int]) -> None:
    store, names = dist.HashStore(), []
    for world in worlds:
        # The last comes first: it finds what the attempt before has left.
        agreed = set(meet(store, world, list(reversed(range(world)))))
        assert len(agreed) == 1
        names += agreed
    assert len(set(names)) == len(worlds)


def test_an_attempt_that_broke_off_misleads_nobody() -> None:
    store = dist.HashStore()
    assert "ranks [1, 2] of 3" in meet(store, 3, [0], SHORT)[0]
    assert "rank 0 did not confirm" in meet(store, 3, [1], SHORT)[0]
    assert len(set(meet(store, 3, [2, 1, 0]))) == 1


def test_who_did_not_come_is_named() -> None:
    (error,) = meet(dist.HashStore(), 4, [0], SHORT)
    assert error.startswith("ranks [1, 2, 3] of 4 did not come within 0:00:00.3")


@pytest.mark.parametrize(
    ("meet_at", "env", "expected"),
    [
        ("env://", {}, False),
        ("env://", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, True),
        ("tcp://host:1", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, True),
        ("env://", {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": "a"}, False),
        ("file:///a", {"TORCHELASTIC_RUN_ID": "a"}, True),
        ("file:///a", {}, False),
    ],
)
def test_which_stores_outlive_an_attempt(meet_at: str, env: dict[str, str], expected: bool) -> None:
    assert store_outlives(meet_at, env) is expected
