"""Killing jobs that save for ever, each in the middle of a save."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faultkit.forking import ForkServer, Victim

Job = Callable[..., None]


class Kills:
    """Starts a job on some ranks, learns how long a save takes, kills it at a moment of the next.

    Steps go on from one life of the job to the next one.
    """

    def __init__(
        self,
        victims: ForkServer,
        scratch: Path,
        job: Job,
        ranks: int = 1,
        options: dict[str, Any] | None = None,
        numel: int = 300_000,
    ) -> None:
        self._victims = victims
        self._scratch = scratch
        self._job = job
        self._ranks = ranks
        self._more = (options, numel)
        self._random = random.Random(7)
        self._duration = 0.0
        self._attempt = 0
        self.next_step = 1

    def once(self, url: str, fraction: float, doomed: tuple[int, ...] = (0,)) -> tuple[int, int]:
        """Kill ranks at a fraction of a save; return the last step reported and the last begun."""
        self._attempt += 1
        meeting = str(self._scratch / f"rendezvous-{self._attempt}")
        group = self._victims.ranks(
            self._ranks, self._job, self._ranks, meeting, url, self.next_step, *self._more
        )
        # one whole save first: the next has something to replace, and tells how long it takes
        group[0].wait_for("begin")
        begin = time.monotonic()
        group[0].wait_for("saved")
        took = time.monotonic() - begin
        self._duration = took if not self._duration else 0.5 * (self._duration + took)
        group[0].wait_for("begin")
        time.sleep(self._duration * fraction)
        for rank in doomed:
            group[rank].kill()
        return self._ends(group, doomed)

    def _ends(self, group: list[Victim], doomed: tuple[int, ...]) -> tuple[int, int]:
        """Wait for all; those that were not killed must end by themselves, with an error."""
        messages: list[Any] = []
        for rank, victim in enumerate(group):
            messages += victim.drain()
            if rank not in doomed:
                kinds = [message[0] for message in victim.messages]
                assert kinds[-1] == "raised", f"rank {rank} went on alone: {kinds[-3:]}"
        saved = max(m[1] for m in messages if m[0] == "saved")
        begun = max(m[1] for m in messages if m[0] == "begin")
        self.next_step = begun + 1
        return saved, begun

    def fractions(self, count: int) -> list[float]:
        """Spread moments over a save and a little beyond, in random order."""
        moments = [1.2 * (n + self._random.random()) / count for n in range(count)]
        self._random.shuffle(moments)
        return moments
