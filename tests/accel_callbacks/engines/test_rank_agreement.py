"""Which ranks exchange messages about the order of their events."""

from __future__ import annotations

from typing import Any

import pytest

from accel_callbacks import collectives
from accel_callbacks.engines.rank_agreement import END, RankAgreement


class Counted(RankAgreement):
    """Counts its comparisons, as of which there is no other rank here."""

    def __init__(self, ranks: Any) -> None:
        super().__init__(ranks)
        self.compared: list[Any] = []

    def _agree(self, event: Any) -> None:
        self.compared.append(event)


@pytest.mark.parametrize(
    ("peers", "ranks", "compares"),
    [
        (True, None, True),
        (True, (0, 1), True),
        (True, (0,), False),  # it alone holds these parameters
        (False, None, False),
        (False, (0, 1), False),
    ],
)
def test_only_ranks_with_others_compare_and_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch, peers: bool, ranks: Any, compares: bool
) -> None:
    monkeypatch.setattr(collectives, "has_peers", lambda: peers)
    agreement = Counted(ranks)
    step = [("forward", 0), ("backward", 0), END]
    for event in [*step, *step]:  # the second comes after a backward, the first after none
        agreement.follow(event)
    expected = [*step, *step] if compares else []
    assert agreement.compared == expected
    for event in step:
        agreement.follow(event)
    assert agreement.compared == expected
    agreement.follow(("backward", 0))
    assert agreement.compared == ([*expected, ("backward", 0)] if compares else [])
