"""HostedCallback: one of our callbacks in another library's trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.addons.hosts.host import ForeignHost, ForeignRun
from accel_callbacks.callbacks.dispatch.dispatcher import Entry
from accel_callbacks.callbacks.dispatch.ledger import Ledger
from accel_callbacks.callbacks.foreign import adapt
from checkpoint_io.warning import warn

__all__ = ["HostedCallback"]

_OWN_SAVES = (
    "it saves and restores checkpoints of this library, which hold what the Accelerator prepared"
)
_NO_SAVE = "it needs a save that all ranks agree on, which that trainer does not have"


class HostedCallback:
    """Calls the hooks of one callback with a run over the trainer.

    Args:
        callback: a callback of ours, or what ``configured`` returned.
        host: the trainer.
        never: hooks that the trainer never fires; a user's callback with one of them is warned
            about.

    Attributes:
        callback: the callback.
        run: its run.
        on_own_log: called with the values that the callback itself logs.

    Raises:
        TypeError: it is no callback, or one that cannot run there.
    """

    def __init__(self, callback: Any, host: ForeignHost, *, never: Collection[str]) -> None:
        self._entry = Entry(callback, (adapt,))
        self.callback = self._entry.callback
        self._entry.wrap(Ledger(), self._entry.name)
        self._check_supported(host)
        lost = sorted(hook for hook in never if hook in self._entry.calls)
        # Our own callbacks are written to work without these hooks.
        ours = type(self.callback).__module__.startswith("accel_callbacks.")
        if lost and not ours:
            warn(
                f"{self.name}.{lost[0]} is never called in {host.title}, which has no such hook",
            )
        self.host = host
        self.run = ForeignRun(host, self.name, self._log)
        self.on_own_log: Callable[[dict[str, Any]], None] = lambda values: None

    def _check_supported(self, host: ForeignHost) -> None:
        """Raise TypeError with the reason if the callback cannot run in the trainer."""
        name = type(self.callback).__name__
        reason = None
        if "Preemption" in {base.__name__ for base in type(self.callback).__mro__}:
            reason = None if host.can_save else _NO_SAVE
        if "Control" in {base.__name__ for base in type(self.callback).__mro__}:
            reason = "it steers the loop of `accel.run`"
        if self._entry.saves:
            reason = _OWN_SAVES
        if getattr(self.callback, "lightning_callback", None) is not None:
            reason = "it is a callback of Lightning, which runs only there or in a plain loop"
        if reason is not None:
            raise TypeError(f"{name} cannot run in {host.title}: {reason}.")

    @property
    def name(self) -> str:
        """The callback's state key, or the name of its class."""
        return self._entry.name

    def has(self, hook: str) -> bool:
        """Return whether the callback has this hook."""
        return hook in self._entry.calls

    def fire(self, hook: str, *args: Any) -> None:
        """Call a hook."""
        call = self._entry.calls.get(hook)
        if call is not None:
            call(self.run, self.run.model, *args)

    def _log(self, values: dict[str, Any], step: int) -> None:
        """Fire ``on_log`` with values that the callback has logged."""
        self.on_own_log(values)
        self.fire("on_log", values, step)

    def agree(self, *, within_epoch: bool = True) -> None:
        """Collective: do on all ranks what the callback asked for on one.

        Within an epoch only if the callback declares ``can_vote``, as in our own loop.
        """
        if collectives.world_size() == 1:
            if self.run.votes.asked:
                self.run.agree()
        elif self._entry.votes or not within_epoch:
            self.run.agree()

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state."""
        return self.callback.state_dict() or {} if self._entry.has_state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the callback's state."""
        if state and self._entry.has_state:
            self.callback.load_state_dict(state)

    # --- hooks that come in pairs --------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Fire ``on_train_epoch_start``."""
        self.run.epoch_open, self.run.batch_idx = True, -1
        self.fire("on_train_epoch_start")

    def end_epoch(self) -> None:
        """Fire ``on_train_epoch_end``."""
        self.run.epoch_open = False
        self.fire("on_train_epoch_end")
        self.agree(within_epoch=False)

    def begin_evaluation(self, stage: str = "validation") -> None:
        """Fire the two hooks at the start of an evaluation."""
        self.run.loop.evaluating += 1
        self.fire(f"on_{stage}_start")
        self.fire(f"on_{stage}_epoch_start")

    def end_evaluation(self, stage: str = "validation") -> None:
        """Fire the two hooks at the end of an evaluation."""
        self.run.loop.evaluating = max(self.run.loop.evaluating - 1, 0)
        self.fire(f"on_{stage}_epoch_end")
        self.fire(f"on_{stage}_end")

    def stepped(self, step: int, optimizer: Any) -> None:
        """Fire ``on_after_optimizer_step`` for a step that the trainer has not counted yet."""
        self.run.uncounted_step = step
        try:
            self.fire("on_after_optimizer_step", optimizer)
        finally:
            self.run.uncounted_step = None
