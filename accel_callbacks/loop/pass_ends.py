"""The ends of passes: a rank that ran out of batches says so before it leaves the others alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakMethod, ref

import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import abort_run
from accel_callbacks.distributed.heartbeat import current_heartbeat, remote_failure, report_progress

__all__ = ["PassEnds"]

_Position = tuple[int, int, int]

_KEY = "pass_end"  # "{_KEY}/{rank}" in the store: number of the last check that a rank has reached
_POLLING = 0.01, 0.1  # seconds between two looks at the store: at first, and at most
_PATIENCE = 10.0  # seconds at most that a rank waits for others which neither come nor go on


class PassEnds:
    """Compares how far the ranks are, before the first collective after a pass over data.

    A rank that ran out of batches goes on to a collective of its own, such as a gather or a vote,
    while the others reduce gradients: gloo ends the process where these do not fit together, and
    else all wait until their timeout. So that rank waits in the store until all are there, or the
    heartbeat of one shows that it goes on.

    The batches of a loop over data of the script's own have no end that can be seen. There each
    kind of collective is taken for the end of a pass the first time that it comes.

    Args:
        position: returns the epoch, the batches of it that were begun, and the steps of the run.
        trains_together: returns whether no rank can take a step without the others now.

    Attributes:
        in_pass: a prepared loader is being iterated, and its end will be noted.
    """

    def __init__(
        self, position: Callable[[], _Position], trains_together: Callable[[], bool]
    ) -> None:
        self._position, self._trains_together = position, trains_together
        self._restarts, self._origin = 0, position()
        self.in_pass = self._ended = self._given_up = False
        self._seen: set[str] = set()
        self._checks, self._compared = 0, self._progress()
        self._thread = threading.get_ident()
        self._group: Callable[[], object] = _reference(dist.group.WORLD)
        collectives.before_collectives("passes", WeakMethod(self.check))
        here = ref(self)
        report_progress(lambda: () if (ends := here()) is None else ends._report())

    def begin(self) -> None:
        """Note that a pass over a prepared loader begins, and training goes on."""
        self.in_pass, self._ended = True, False

    def end(self) -> None:
        """Note that a pass has ended, or may have."""
        self.in_pass, self._ended = False, True

    def count_from_here(self) -> None:
        """Count from here: what was before is over, or had unequal numbers as it was meant to."""
        self._restarts, self._origin = self._restarts + 1, self._position()
        self.in_pass = self._ended = False
        self._compared = self._progress()

    def _progress(self) -> tuple[int, ...]:
        """Return what tells how far this rank is: restarts of the count, epoch, batches, steps.

        Batches and steps are those since the count was restarted.
        """
        epoch, batches, steps = self._position()
        first, batches_before, steps_before = self._origin
        since = batches - batches_before if epoch == first else batches
        return self._restarts, epoch, since, steps - steps_before

    def _report(self) -> tuple[int, ...]:
        """Return the progress for the others; none where ranks need not be equally far."""
        return self._progress() if self._trains_together() else ()

    def check(self, operation: str) -> None:
        """Wait until all ranks have ended their pass, where this one has and did not wait yet.

        Args:
            operation: the collective that is about to begin.

        Raises:
            RuntimeError: another rank goes on with a batch that this one does not have.
        """
        if self._thread != threading.get_ident():
            return
        if self._group() is not dist.group.WORLD:
            self._begin_in_group()
        if self._given_up or (not self._ended and (self.in_pass or operation in self._seen)):
            return
        self._seen.add(operation)
        self._ended, mine = False, self._progress()
        if mine != self._compared and self._trains_together():
            self._compared = mine
            with suppress(dist.DistError):  # of a store that is gone: the collective says with whom
                self._meet(operation, mine)

    def _begin_in_group(self) -> None:
        """Count from here: the ranks have joined another group, each from another place.

        That is so after an attempt of :func:`find_executable_batch_size` that failed on one.
        """
        self._group = _reference(dist.group.WORLD)
        self._checks, self._given_up = 0, False
        self._seen.clear()
        self.count_from_here()

    def _meet(self, operation: str, mine: tuple[int, ...]) -> None:
        watch = current_heartbeat()
        if watch is None:
            return
        # In the store, and not by a collective: the others may be in one, which this rank would
        # answer with another. Each rank writes its own key, so that no two writes race.
        self._checks += 1
        ranks = range(collectives.world_size())
        keys = [f"{_KEY}/{rank}" for rank in ranks]
        collectives.store().set(keys[collectives.rank()], str(self._checks))
        heard: dict[int, list[int]] = {}  # the numbers of the heartbeats of each rank
        # The others may be in a collective already, which must not time out meanwhile.
        patience = min(_PATIENCE, collectives.group_timeout().total_seconds() / 2)
        deadline, (pause, longest) = time.monotonic() + patience, _POLLING
        while True:
            reached = collectives.store().read(keys)
            absent = [rank for rank in ranks if int(reached[rank] or 0) < self._checks]
            if not absent or watch.find_gone(absent):  # whose loss the collective reports
                return
            remote_failure.raise_in(operation)
            for rank, (count, progress) in watch.progress_of(absent).items():
                counts = heard.setdefault(rank, [])
                counts += [count] if count not in counts else []
                # The first is of before, and so may be the second, which was on its way.
                if len(counts) > 2 and _goes_on(progress, mine):
                    problem = _ran_out(mine[2], rank, progress[2])
                    cause = abort_run(problem, operation)
                    raise cause from (None if cause is problem else problem)
            if time.monotonic() > deadline:
                # They make other calls than this rank, as after a break on some; so no rank may
                # wait for those that do not come here.
                self._given_up = True
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _reference(group: object) -> Callable[[], object]:
    """Return what returns a group, which it does not keep alive; None without one."""
    return (lambda: None) if group is None else ref(group)


def _goes_on(progress: Sequence[int], mine: Sequence[int]) -> bool:
    """Return whether a rank has begun a batch that this one has not, and steps as often."""
    if list(progress[:2]) != list(mine[:2]):
        return False
    return progress[2] > mine[2] and progress[3] >= mine[3]


def _ran_out(batches: int, rank: int, reached: int) -> RuntimeError:
    count = "1 batch" if batches == 1 else f"{batches} batches"
    return RuntimeError(
        f"rank {collectives.rank()} ran out of data after {count}, and rank {rank} goes on with "
        f"batch {reached}, in which no gradients can be averaged without rank "
        f"{collectives.rank()}: give all ranks as many batches (prepare the DataLoader, with "
        "even_batches or drop_last=True; a dataset that reads a part for each rank must read "
        "equally many), or train inside of `with accel.join_uneven_inputs([model]):`, which "
        "DistributedDataParallel has."
    )
