"""The boundary between two steps: saves that have ended, and what the ranks have voted for."""

from __future__ import annotations

from collections.abc import Collection

from accel_callbacks import collectives
from accel_callbacks.distributed.votes import Agreed
from accel_callbacks.loop.loop import Loop
from checkpoint_io.warning import warn

__all__ = ["StepBoundary"]


class StepBoundary:
    """Polls the save in the background and holds the vote, where all ranks do so together.

    Args:
        loop: the loop whose steps are separated.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.loop.step_boundary import StepBoundary
        >>> accel = Accelerator(cpu=True)
        >>> accel.current_run.stop("done")
        >>> _ = StepBoundary(accel.loop).vote()
        >>> accel.current_run.stop_reason
        'done'
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._warned = False  # that no callback saves

    def poll(self) -> None:
        """Check at a step boundary whether the save in the background has ended."""
        loop = self._loop
        # Polling is collective: inside a window, or in a block of join_uneven_inputs, the ranks do
        # not come here equally often, and a rank would wait for the others.
        if loop.saves.pending and not loop.in_window and loop.in_lockstep:
            loop.saves.poll()

    def vote_within_epoch(self, last: bool) -> bool:
        """Vote at a step boundary, if a callback may; return whether the epoch ends here.

        With several ranks the vote travels during the next step, and is read at its end.

        Args:
            last: no boundary of this pass follows, so the ranks decide at once.
        """
        loop = self._loop
        if loop.in_window or not loop.in_lockstep:
            return False
        alone = collectives.world_size() == 1
        # With several ranks, a request of one rank waits for a place that all ranks come to:
        # without a voting callback that is the end of the epoch.
        if not (loop.dispatch.can_vote or (alone and loop.run.votes.asked)):
            return False
        if alone or last or loop.dispatch.votes_at_once:
            return "end_epoch" in self.vote()
        # The vote that was begun a step ago: its all-reduce has traveled during this step, so that
        # no rank waits for the slowest one here. What it grants is a step late on all ranks alike.
        agreed = self.carry_out(loop.run.votes.read())
        if not loop.run.should_stop and "end_epoch" not in agreed:
            loop.run.votes.begin()
        return "end_epoch" in agreed

    def vote(self) -> Collection[str]:
        """Collective: save, preempt or stop, if any rank has asked for it; return what was asked.

        The end of an epoch is left to the caller, as only a pass can be cut short.
        """
        return self.carry_out(self._loop.run.votes.agree())

    def drain(self) -> None:
        """Collective: carry out a vote that was begun, where no step boundary follows."""
        if self._loop.run.votes.pending:
            self.carry_out(self._loop.run.votes.read())

    def carry_out(self, agreed: Agreed) -> Collection[str]:
        """Collective: do what the ranks have agreed on; return what that is."""
        loop, run = self._loop, self._loop.run
        if not agreed:
            return ()
        loop.begin_fit()  # a request may come before the first batch
        for kind in [kind for kind in agreed if kind in run.votes.owners]:
            agreed = {**agreed, **run.votes.owners[kind](agreed[kind][0])}
        if "save" in agreed:
            self._save(agreed["save"][0])
        if "preempt" in agreed:
            reason, rank = agreed["preempt"]
            run.preempted = True
            loop.fire("on_preempt", reason)
            run._set_stop(reason, rank)
        if "stop" in agreed:
            run._set_stop(*agreed["stop"])
        return agreed.keys()

    def _save(self, reason: str) -> None:
        """Let every callback save that can."""
        loop = self._loop
        savers = [saver for saver in loop.savers if hasattr(saver, "save_now")]
        if not savers and not self._warned:
            self._warned = True
            warn(
                f"run.save_now({reason!r}): no callback saves; give the Accelerator a Checkpoint.",
            )
        for saver in savers:
            saver.save_now(loop.run, reason)
