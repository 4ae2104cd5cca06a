"""Agreement of ranks on their next event, where it is not what followed the last time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import abort_run
from accel_callbacks.distributed.heartbeat import current_heartbeat, remote_failure

__all__ = ["END", "Event", "RankAgreement", "unused_advice"]

Event = tuple[Any, ...]  # what happens, then strings and numbers that say to what
END: Event = ("end",)  # of a backward

_POLLING = 0.001, 0.05  # seconds between two looks at the store: at first, and at most


def unused_advice(engine: str) -> str:
    """Return the end of an error about ranks with gradients of different parameters."""
    return (
        f": {engine} would add up gradients of different parameters. If ranks use different ones, "
        "pass kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)], with "
        "which a missing gradient counts as zero; else let the loss of each rank depend on the "
        "same ones."
    )


class RankAgreement:
    """Events that all ranks come to in the same order, as collectives are paired by it.

    Each rank compares what it is about to do with what all did last time at this place, and goes on
    if it is the same. Else it tells the others, and waits until they tell the same. So the first
    step costs some messages in the store, and a loop that repeats itself none afterwards.

    Args:
        ranks: those that agree, others of which then fail with them; all if None.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._ranks = ranks
        number = collectives.next_number("units")
        self._keys = f"units{number}" + ("" if ranks is None else f"/{ranks[0]}")
        self._rounds = 0
        self._last = self._phase = END
        # What followed on each event when the ranks last compared; the same on all of them. By what
        # the backward before it ended with too, as losses may take turns.
        self._next: dict[tuple[Event, Event], Event] = {}

    def _describe(self, event: Event) -> str:
        """Return an event as a noun of an error."""
        return str(event)

    def _conflict_error(self, sides: Sequence[tuple[int, Event]]) -> RuntimeError:
        """Return the error about two ranks, in order, that came to different events."""
        raise NotImplementedError

    def _timeout_error(self, event: Event) -> RuntimeError:
        """Return the error about this rank alone having come to an event."""
        raise NotImplementedError

    def follow(self, event: Event) -> None:
        """Come to an event, and wait for the other ranks if another one followed the last time."""
        place = self._phase, self._last
        if self._next.get(place) != event:
            if collectives.has_peers() and (self._ranks is None or len(self._ranks) > 1):
                self._agree(event)
            self._next[place] = event
        if event == END:
            self._phase = self._last
        self._last = event

    def _agree(self, event: Event) -> None:
        """Collective: wait until all ranks come to an event.

        Raises:
            RuntimeError: a rank comes to another event, or to none within the timeout.
        """
        keys = f"{self._keys}/{self._rounds}"
        self._rounds += 1
        rank = collectives.rank()
        count = collectives.world_size() if self._ranks is None else len(self._ranks)
        report = json.dumps([rank, event, [self._phase, self._last]])

        # The first to come notes what it comes to. Each one that comes to the same is counted, and
        # the last of them lets all go; one that comes to another event tells all who wait.
        def arrive(store: Any) -> Any:
            if store.add(f"{keys}/came", 1) == 1:  # a file has no compare_set
                store.set(f"{keys}/first", report)
            first = json.loads(store.get(f"{keys}/first"))
            if tuple(first[1]) != event:
                store.set(f"{keys}/go", json.dumps([rank, event]))
                return first[0], tuple(first[1])
            if first[2] != json.loads(report)[2]:
                store.add(f"{keys}/apart", 1)
            if store.add(f"{keys}/count", 1) == count:
                store.set(f"{keys}/go", json.dumps(store.add(f"{keys}/apart", 0)))
                if self._rounds > 1:  # which all ranks have left
                    for name in ("came", "first", "apart", "count", "go"):
                        store.delete_key(f"{self._keys}/{self._rounds - 2}/{name}")
            return None

        other = collectives.store().call(arrive)
        if other is not None:
            raise self._mismatch((rank, event), other)
        outcome = self._wait(f"{keys}/go", event)
        if isinstance(outcome, list):
            raise self._mismatch((rank, event), (outcome[0], tuple(outcome[1])))
        if outcome:  # ranks came from different events, as after an error, and know different ones
            self._next.clear()

    def _mismatch(self, *sides: tuple[int, Event]) -> BaseException:
        """Return the error to raise about two ranks that came to different events."""
        problem = self._conflict_error(sorted(sides))
        # All ranks raise it at once, but those that do not take part: they wait for these.
        return problem if self._ranks is None else abort_run(problem, self._describe(sides[0][1]))

    def _wait(self, key: str, event: Event) -> Any:
        """Return the value of a key that another rank sets."""
        # One rank alone in a forward fails as in the gather that would follow. In backward it knows
        # more than the others, whose collectives must not time out first.
        in_forward = event[0] == "forward"
        timeout = collectives.group_timeout().total_seconds()
        deadline = time.monotonic() + (1.0 if in_forward else 0.9) * timeout
        pause, longest = _POLLING
        operation = self._describe(event)
        ranks = range(collectives.world_size()) if self._ranks is None else self._ranks
        while True:
            value = collectives.store().read([key])[0]
            if value is not None:
                return json.loads(value)
            remote_failure.raise_in(operation)
            # No collective reports a loss here; one that has come already is missed in the next.
            watch = current_heartbeat()
            if watch is not None and (gone := watch.find_gone(ranks)):
                raise abort_run(watch.error_of(gone, operation), operation)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        problem = self._timeout_error(event)
        if in_forward:
            raise RuntimeError(f"Timed out in the process group: {problem}")
        cause = abort_run(problem, operation)
        raise cause from (None if cause is problem else problem)
