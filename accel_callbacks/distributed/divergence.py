"""Ranks that wait for each other in different calls, none of which can end.

``if accel.is_main_process: accel.save_state(...)`` is one: rank 0 waits there for the others, which
wait for it in the next backward. Each rank notes with its heartbeat in which call its main thread
is, and for how long it has been at that very place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accel_callbacks.distributed.stack import Call, call_of_torch, entry_of, thread_is_asleep

__all__ = ["MainThread", "Wait", "find_divergence"]

_PATIENCE = 5.0  # seconds at one place, on all ranks


class Wait(NamedTuple):
    """Where the main thread of a rank is.

    Args:
        call: the function of this library or torch that the script has called; empty for none.
        collective: it waits in a collective, and does not compute.
        seconds: for how long it has been at this very place.
    """

    call: str = ""
    collective: bool = False
    seconds: float = 0.0


class MainThread:
    """Measures for how long a thread has been at one place.

    Args:
        thread: the one that trains.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._calls: Sequence[Call] = ()
        self._since = self._asleep_since = 0.0

    def observe(self, calls: Sequence[Call]) -> Wait:
        """Return where the thread is.

        Args:
            calls: its frames now, innermost first.
        """
        now, moved = time.monotonic(), calls != self._calls
        self._calls = calls
        self._since = now if moved else self._since
        # A thread that is only kept from the processor is none that waits.
        asleep = call_of_torch(calls) and thread_is_asleep(self._thread)
        self._asleep_since = self._asleep_since if asleep and not moved else now
        since = self._asleep_since if asleep else self._since
        return Wait(entry_of(calls), asleep, now - since)


def find_divergence(rank: int, beats: Mapping[int, Mapping[str, Any]]) -> tuple[int, str] | None:
    """Return a rank that will not come to the collective in which this one waits, and what it did.

    That is certain where no rank moves, and each other one has begun a batch which comes after the
    call of this rank, or waits in a collective of another call.

    Args:
        rank: of this process.
        beats: the heartbeats of all ranks.

    Example:
        >>> from accel_callbacks.distributed.divergence import find_divergence
        >>> beats = {
        ...     0: {"wait": ["save_state", True, 9.0], "progress": [0, 0, 2, 2]},
        ...     1: {"wait": ["backward", False, 9.0], "progress": [0, 0, 3, 2]},
        ... }
        >>> find_divergence(0, beats)[0]
        1
        >>> find_divergence(1, beats) is None
        True
    """
    waits = {peer: Wait(*beat["wait"]) for peer, beat in beats.items()}
    mine, progress = waits[rank], beats[rank]["progress"]
    # Of several that wait in collectives the first one tells.
    first = min((peer for peer, wait in waits.items() if wait.collective), default=None)
    still = all(wait.seconds >= _PATIENCE for wait in waits.values())
    if first != rank or not mine.call or not still:
        return None
    others = sorted(waits.keys() - {rank})
    for peer in others:
        elsewhere = waits[peer].collective and waits[peer].call != mine.call
        if not (elsewhere or _is_ahead(beats[peer]["progress"], progress)):
            return None
    return others[0], (
        f"went on without {mine.call}, in which rank {rank} waits for it: call {mine.call} on all "
        "processes, and not on one, as under `if accel.is_main_process:`"
    )


def _is_ahead(progress: Sequence[int], mine: Sequence[int]) -> bool:
    """Return whether a rank has begun a batch of this training that this one has not."""
    return len(progress) == len(mine) == 4 and (
        progress[0] == mine[0] and list(progress[1:3]) > list(mine[1:3])
    )
