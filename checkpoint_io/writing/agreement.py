"""The ranks agree on who writes what; a state like one before costs them a digest."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.sharding.local_tensors import Holdings
from checkpoint_io.sharding.planner import Assignment, plan_writes

_REMEMBERED = 8


class Share(NamedTuple):
    """One rank's share of an assignment."""

    boxes: list[tuple[str, tuple[int, ...]]]
    tied: dict[str, str]


class PlanMemory:
    """The last few assignments, by what this rank and all ranks held."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, Share]] = OrderedDict()
        self._lock = threading.Lock()

    def recall(self, own: str) -> tuple[str, Share] | None:
        """Return what all ranks held when this one held `own`, and its share then."""
        with self._lock:
            if own in self._known:
                self._known.move_to_end(own)
            return self._known.get(own)

    def keep(self, own: str, everyone: str, share: Share) -> None:
        """Remember a share."""
        with self._lock:
            self._known[own] = (everyone, share)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)


# A memo of a pure function: what is in it changes how long a save takes, never what it does.
_MEMORY = PlanMemory()


class Proposal:
    """What one rank holds, and what it remembers of having held it before."""

    def __init__(self, holdings: Holdings, rank: int, world_size: int) -> None:
        self._plain = holdings.to_plain()
        self._rank = rank
        text = json.dumps([rank, world_size, self._plain], separators=(",", ":"))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._recalled = _MEMORY.recall(self.digest)

    def to_plain(self) -> dict[str, Any]:
        """Return the digest for the other ranks."""
        return {"digest": self.digest, "known": self._recalled and self._recalled[0]}

    def settle(self, group: ProcessGroupLike, proposals: Sequence[dict[str, Any]]) -> Share:
        """Return this rank's share; collective, unless all remember the same."""
        everyone = hashlib.sha256("".join(p["digest"] for p in proposals).encode()).hexdigest()
        if self._recalled and all(p["known"] == everyone for p in proposals):
            return self._recalled[1]
        held = group.all_gather_object(self._plain)
        assignment: Assignment = plan_writes(held)
        share = Share(assignment.ranks[self._rank], assignment.tied)
        _MEMORY.keep(self.digest, everyone, share)
        return share
