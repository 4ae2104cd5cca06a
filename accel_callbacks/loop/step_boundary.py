"""The boundary between two steps: saves that have ended, and what the processes voted for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from accel_callbacks import collectives

if TYPE_CHECKING:
    from accel_callbacks.loop.loop import Loop

__all__ = ["poll", "poll_outside", "vote", "vote_within"]


def poll(loop: Loop) -> None:
    """At a step boundary: learn whether the save that is under way has ended."""
    window = loop.window
    # In a block of join_uneven_inputs the processes do not come here equally often.
    if loop.saves.pending and not window.is_open and not window.normalizer.closed:
        loop.saves.poll()


def poll_outside(loop: Loop) -> None:
    """The same where no prepared loader tells where a step ends: before the next one's backward."""
    window = loop.window
    if not loop.active and window.position <= 1 and not window.normalizer.closed:
        loop.saves.poll()


def vote_within(loop: Loop) -> None:
    """The vote at a step boundary within an epoch, where a callback may vote."""
    window = loop.window
    if window.is_open or window.normalizer.closed:
        return
    # A request of one process among several waits for a place to which all come.
    alone = collectives.world_size() == 1 and loop.run.votes.asked
    if loop.dispatch.can_vote or alone:
        vote(loop)


def vote(loop: Loop) -> None:
    """Collective: do what any process asked for: save, give way to another job, stop."""
    run = loop.run
    agreed = run.votes.agree()
    if not agreed:
        return
    loop.begin_fit()  # a request may come before the first batch
    if "save" in agreed:
        _save(loop, agreed["save"][0])
    if "preempt" in agreed:
        reason, rank = agreed["preempt"]
        run.preempted = True
        loop.fire("on_preempt", reason)
        run._stopped(reason, rank)
    if "stop" in agreed:
        run._stopped(*agreed["stop"])


def _save(loop: Loop, reason: str) -> None:
    """Every callback that saves does so now."""
    savers = [saver for saver in loop.dispatch.savers if hasattr(saver, "save_now")]
    if not savers and not loop.told_no_saver:
        loop.told_no_saver = True
        warnings.warn(
            f"run.save_now({reason!r}): no callback saves; give the Accelerator a Checkpoint.",
            stacklevel=2,
        )
    for saver in savers:
        saver.save_now(loop.run, reason)
