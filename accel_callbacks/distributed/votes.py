"""Votes: what one process asks for, all processes do, at the same step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_callbacks import collectives

__all__ = ["KINDS", "Votes"]

#: What can be asked for, in the order in which it is done.
KINDS = ("save", "preempt", "stop")


class Votes:
    """The requests of this process, and how all of them learn of each other's.

    Example:
        >>> from accel_callbacks.distributed.votes import Votes
        >>> votes = Votes()
        >>> votes.ask("save", "once an hour")
        >>> votes.agree()
        {'save': ('once an hour', 0)}
        >>> votes.agree()
        {}
    """

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}

    def ask(self, kind: str, reason: str) -> None:
        """Ask for it at the next step boundary; the first reason is kept."""
        self.asked.setdefault(kind, reason)

    def withdraw(self, kind: str) -> None:
        """Take back what this process has asked for."""
        self.asked.pop(kind, None)

    def agree(self) -> dict[str, tuple[str, int]]:
        """Collective: what any process asked for, with the first reason and whose it is.

        One small all-reduce; the reasons are exchanged only where something was asked for.
        """
        asked, self.asked = self.asked, {}
        if collectives.world_size() == 1:
            wishes = [asked]
        elif not _anybody(asked):
            return {}
        else:
            wishes = collectives.all_objects(asked, operation="votes")
        return {
            kind: next((wish[kind], rank) for rank, wish in enumerate(wishes) if kind in wish)
            for kind in KINDS
            if any(kind in wish for wish in wishes)
        }


def _anybody(asked: dict[str, str]) -> bool:
    """Whether any process asked for anything."""
    collectives.begin("votes")
    ballot = torch.tensor([int(kind in asked) for kind in KINDS], dtype=torch.int32)
    ballot = collectives.on_backend(ballot)
    dist.all_reduce(ballot, dist.ReduceOp.MAX)
    return any(ballot.tolist())
