"""Votes and triggers: all ranks do what one rank asks for, at the same place."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_callbacks import collectives

__all__ = ["KINDS", "Trigger", "Votes"]

#: The kinds of requests, in the order in which they are carried out.
KINDS = ("save", "preempt", "stop", "end_epoch")


class Votes:
    """Requests of this rank that take effect on all ranks at the same step boundary.

    Without a vote, a rank that receives a signal or whose timer expires would save or stop one
    step before the others, and they would wait for it in their next collective.

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
        """Request an action for the next step boundary; the first reason is kept."""
        self.asked.setdefault(kind, reason)

    def withdraw(self, kind: str) -> None:
        """Withdraw this rank's request."""
        self.asked.pop(kind, None)

    def agree(self) -> dict[str, tuple[str, int]]:
        """Collective: the requests of all ranks, each with its first reason and that rank.

        It costs one small all-reduce; the reasons are gathered only if there is a request.
        """
        asked, self.asked = self.asked, {}
        if collectives.world_size() == 1:
            requests = [asked]
        elif not _any_request(asked):
            return {}
        else:
            requests = collectives.all_objects(asked, operation="votes")
        return {
            kind: next((one[kind], rank) for rank, one in enumerate(requests) if kind in one)
            for kind in KINDS
            if any(kind in one for one in requests)
        }


@collectives.explained("the vote at the end of the step")
def _any_request(asked: dict[str, str]) -> bool:
    """Return whether any rank has a request."""
    collectives.begin("votes")
    ballot = torch.tensor([int(kind in asked) for kind in KINDS], dtype=torch.int32, device="cpu")
    ballot = collectives.on_backend(ballot)
    dist.all_reduce(ballot, dist.ReduceOp.MAX)
    return any(ballot.tolist())


class Trigger:
    """A flag that any rank may raise, and all ranks read together.

    Example:
        >>> from accel_callbacks.distributed.votes import Trigger
        >>> trigger = Trigger()
        >>> trigger.set()
        >>> trigger.check(), trigger.check()
        (True, False)
    """

    def __init__(self) -> None:
        self._raised = False

    def set(self) -> None:
        """Raise the flag of this rank."""
        self._raised = True

    def check(self) -> bool:
        """Collective: return whether any rank has raised it, and lower it on all ranks."""
        raised = collectives.any_process(self._raised)
        self._raised = False
        return raised
