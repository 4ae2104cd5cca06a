"""Votes and triggers: all ranks do what one rank asks for, at the same place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from accel_callbacks import collectives

__all__ = ["KINDS", "Trigger", "Votes"]

#: The kinds of requests that a loop carries out, in their order, after those of other owners.
KINDS = ("save", "preempt", "stop", "end_epoch")
_WHERE = "the vote at the end of the step"
Agreed = dict[str, tuple[str, int]]  # kind of request: its reason, and the rank that asked


class Votes:
    """Requests of this rank that take effect on all ranks at the same step boundary.

    Without a vote, a rank that receives a signal or whose timer expires would save or stop one
    step before the others, and they would wait for it in their next collective.

    A vote that is begun at one boundary and read at the next travels during the step in between, so
    that no rank waits for the slowest one at each boundary.

    Attributes:
        asked: requests of this rank, not voted on yet: their reasons by kind.
        owners: carry out kinds of their own on all ranks, given the reason, and return the requests
            that follow from it.

    Example:
        >>> from accel_callbacks.distributed.votes import Votes
        >>> votes = Votes()
        >>> votes.ask("save", "once an hour")
        >>> votes.agree()
        {'save': ('once an hour', 0)}
        >>> votes.agree()
        {}
    """

    __slots__ = ("_ballot", "_sent", "asked", "owners")

    def __init__(self) -> None:
        self.owners: dict[str, Callable[[str], Agreed]] = {}
        self.asked: dict[str, str] = {}
        self._sent: dict[str, str] = {}  # what this rank asked for in the vote that was begun
        self._ballot: _Ballot | None = None

    @property
    def pending(self) -> bool:
        """True while a vote is begun and not read; on all ranks alike."""
        return self._ballot is not None

    def ask(self, kind: str, reason: str) -> None:
        """Request an action for the next step boundary; the first reason is kept."""
        self.asked.setdefault(kind, reason)

    def withdraw(self, kind: str) -> None:
        """Withdraw this rank's request."""
        self.asked.pop(kind, None)
        self._sent.pop(kind, None)

    def begin(self) -> None:
        """Collective: begin a vote, for :meth:`read` at the next step boundary."""
        self._sent, self.asked = self.asked, {}
        self._ballot = _Ballot(self._sent)

    def wait(self) -> None:
        """Collective: wait until a vote that was begun is over; it is still to be read."""
        if self._ballot is not None:
            self._ballot.is_any()

    def read(self) -> Agreed:
        """Collective: the requests of the vote that was begun, none without one.

        Requests that were made since are granted with them.
        """
        ballot, self._ballot = self._ballot, None
        if ballot is None or not ballot.is_any():
            return {}
        # All ranks read the same flag, so all of them gather here, or none does. The reason that
        # was voted on comes before one that was given since.
        asked, self.asked, self._sent = {**self.asked, **self._sent}, {}, {}
        return _first_requests(collectives.all_objects(asked, operation="votes"))

    def agree(self) -> Agreed:
        """Collective: the requests of all ranks, each with its first reason and that rank.

        It costs one small all-reduce; the reasons are gathered only if there is a request.
        """
        if collectives.world_size() == 1:
            if not self.asked:
                return {}
            asked, self.asked = self.asked, {}
            return _first_requests([asked])
        if agreed := self.read():
            return agreed
        self.begin()
        return self.read()


def _first_requests(requests: Sequence[Mapping[str, str]]) -> Agreed:
    """Return each kind of request with the reason of the lowest rank, and that rank."""
    kinds = {kind for asked in requests for kind in asked}
    # Sorted: a set of text has another order on each rank.
    in_order = [*sorted(kinds.difference(KINDS)), *(kind for kind in KINDS if kind in kinds)]
    return {
        kind: next((asked[kind], rank) for rank, asked in enumerate(requests) if kind in asked)
        for kind in in_order
    }


class _Ballot:
    """An all-reduce of whether a rank asks for something."""

    @collectives.explained(_WHERE)
    def __init__(self, asked: Collection[str]) -> None:
        collectives.begin("votes")
        flag = torch.tensor([len(asked)], dtype=torch.int32, device="cpu")
        # One all-reduce of one number a step; what was asked for is gathered only if it is not
        # zero, which all ranks see alike.
        self._flag = collectives.on_backend(flag)
        group = collectives.group_for(self._flag)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=group, async_op=True)

    @collectives.explained(_WHERE)
    def is_any(self) -> bool:
        """Wait, and return whether any rank has a request."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._flag.item())


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

    @property
    def is_set(self) -> bool:
        """True once this rank has raised it, until the next check."""
        return self._raised

    def check(self) -> bool:
        """Collective: return whether any rank has raised it, and lower it on all ranks."""
        raised = collectives.any_process(self._raised)
        self._raised = False
        return raised
