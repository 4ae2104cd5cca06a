"""Who still answers after a collective broke: torch's errors do not say whose process is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

_PATIENCE = 3.0  # seconds: the others notice a broken connection within about one
_PAUSE = 0.05


def name_the_silent(store: Any, call: str, rank: int, ranks: Sequence[int]) -> str:
    """Say which ranks do not answer; "" if all of them do.

    Args:
        store: the key-value store of the process group.
        call: names the collective that broke, the same on all ranks.
        rank: this rank, as the ranks are counted below.
        ranks: all of them.
    """
    try:
        store.set(f"{call}/{rank}", b"here")
        silent = _wait(store, call, ranks)
    except Exception:  # it lives in rank 0, or in a launcher that ended with it
        return "rank 0 does not answer (the store of the process group is gone)"
    if not silent:
        return ""
    names = ", ".join(map(str, silent))
    return f"rank{'s' if len(silent) > 1 else ''} {names} did not answer within {_PATIENCE:.0f} s"


def _wait(store: Any, call: str, ranks: Sequence[int]) -> list[int]:
    """Wait a little for the others to answer; return those who did not."""
    silent = list(ranks)
    until = time.monotonic() + _PATIENCE
    while silent and time.monotonic() < until:
        silent = [one for one in silent if not store.check([f"{call}/{one}"])]
        if silent:
            time.sleep(_PAUSE)
    return silent
