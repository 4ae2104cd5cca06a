"""Control: steer a run that goes on, from a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import ResumableState
from accel_callbacks.callbacks.checkpoint import Checkpoint
from accel_callbacks.callbacks.group_rates import first_rate, set_learning_rate
from accel_callbacks.callbacks.observer import first_answer
from accel_callbacks.distributed.rng import capture_rng, devices_of, restore_rng
from accel_callbacks.errors import nearest
from accel_callbacks.logging import notice
from checkpoint_io.local_files import base_name, local_path

if TYPE_CHECKING:
    from accel_callbacks.addons.steering.mailbox import Command, Mailbox
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import Lease

__all__ = ["Control"]

_LOOK_EVERY = 0.5  # seconds between two looks into the mailbox
_REASON = "accel ctl"
_KIND = "control"  # of the request that the ranks vote on
_PLACE = ("epoch", "batch", "between_epochs")
Setting = str | int | float | bool


class Control(ResumableState):
    """Steer a run that goes on, by ``accel ctl RUN save``, ``evaluate``, ``stop`` or ``set``.

    About twice a second, rank 0 looks into a folder of the run that only its user may enter. What
    it finds there is put to the vote at the end of a step, and carried out on all ranks between
    the same two steps, one command after another. The journal gets a mark, and ``accel replay``
    does the same again. It needs ``accel.run`` with a journal in a ``project_dir`` on a disk.

    ``set lr=1e-4`` sets the rate of the first parameter group, and scales those of all others, and
    the schedules of prepared schedulers, by the same factor. ``set log_every=10`` sets the interval
    of the callbacks that log every so many steps. Other names are those of ``settings``, and of the
    ``settable`` of a callback. A checkpoint holds what was set.

    Args:
        evaluate: called with the run on all ranks for ``evaluate``; random numbers are as before
            when it is done. Without it there is nothing to call, and the command is refused.
        settings: names and values of the loop's own, which it reads from :attr:`settings`; a value
            keeps its type.

    Attributes:
        settings: the values by name, as they are now.
        number: commands that the run has carried out.

    Raises:
        TypeError: ``evaluate`` is no function.
        ValueError: a setting is named ``lr``, or is no text, number or truth value.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Control
        >>> control = Control(settings={"temperature": 1.0})
        >>> accel = Accelerator(cpu=True, callbacks=[control])
        >>> control.settings["temperature"]
        1.0
    """

    can_vote = True
    collective = True  # an evaluation is
    runs_last = True  # a replay acts where the vote came: after the other callbacks
    after = (Checkpoint,)

    def __init__(
        self,
        evaluate: Callable[[TrainingRun], Any] | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        if evaluate is not None and not callable(evaluate):
            raise TypeError(f"evaluate={evaluate!r} is no function: give one that takes the run.")
        initial = dict(settings or {})
        for name, value in initial.items():
            if name == "lr" or not isinstance(value, (str, int, float, bool)):
                raise ValueError(
                    f"settings: {name}={value!r} cannot be set; give text, numbers or truth "
                    "values under names other than lr."
                )
        self.evaluate = evaluate
        self.settings: dict[str, Setting] = initial
        self._initial = dict(initial)
        self._mailbox: Mailbox | None = None
        self._lease: Lease | None = None
        self._command: Command | None = None  # that the ranks vote on
        self._saving: Command | None = None  # whose checkpoint is not durable yet
        self._saved: str | None = None  # path of the newest checkpoint since
        self._save_step = 0
        self._next_look = 0.0
        self._past: list[Mapping[str, Any]] = []  # commands that a replay is to carry out
        self._run: TrainingRun | None = None
        self.reset_state()

    # --- state --------------------------------------------------------------------------------

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self.number = 0
        self._changed: dict[str, Setting] = {}
        self.settings.update(self._initial)

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and what was set; rates are in the states of their optimizers."""
        return {"number": self.number, "changed": dict(self._changed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        self.number = state_dict["number"]
        self._changed = dict(state_dict["changed"])
        self.settings.update(self._initial)
        if self._run is not None:
            self._apply_changed(self._run)
            self._note_number(self._run)

    def _apply_changed(self, run: TrainingRun) -> None:
        for name, value in self._changed.items():
            for owner, attribute in self._holders(run, name):
                _assign(owner, attribute, value)

    def _note_number(self, run: TrainingRun) -> None:
        """Mark how many commands the state holds: those after them are undone by the load."""
        run.note("commands", number=self.number)

    # --- the life of a run --------------------------------------------------------------------

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Open the mailbox on rank 0; in a replay, read what was commanded then."""
        self._apply_changed(run)
        run.votes.owners[_KIND] = lambda text: self._carry_out(run, json.loads(text))
        commands = first_answer(run.accelerator.loop.observers, "past_commands")
        if commands is not None:
            self._past = [command for command in commands if command["number"] > self.number]
            self._repeat(run, in_epoch=False)
            return
        self._run = run
        self._note_number(run)
        if run.is_global_zero:
            self._open(run)

    def _open(self, run: TrainingRun) -> None:
        """Open the mailbox; say why the run cannot be steered where that fails."""
        from accel_callbacks.addons.steering.mailbox import CONTROL, Mailbox
        from accel_callbacks.checkpoint.project import path_in
        from checkpoint_io import Lease, LeaseError

        folder = local_path(path_in(run.default_root_dir, "journal", run.run_id))
        problem = "Control needs `with accel.run(...)` and a journal: pass project_dir=..."
        if run.noted is not None and folder is None:
            problem = "Control needs a folder on a disk, and project_dir is a URL"
        elif run.noted is not None and folder is not None:
            lease = Lease(folder)
            try:
                # The lease that the journal holds in this process.
                lease.attempt("take_over")
                assert lease.holder is not None
                self._mailbox = Mailbox(path_in(folder, CONTROL), lease.holder.number)
            except (OSError, LeaseError) as error:
                lease.release()
                problem = str(error)
            else:
                self._lease = lease
                return
        notice(f"`accel ctl` cannot steer this run: {problem}")

    def on_fit_end(self, run: TrainingRun, model: Any) -> None:
        """Answer a save that came last: all are durable by now."""
        if self._saving is not None:
            self._answer_save()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Answer what is left, and close the mailbox."""
        run.votes.owners.pop(_KIND, None)
        self._run = None
        if self._mailbox is None:
            return
        text = f"the run ended at step {run._global_step}, before it could do that"
        left = [command for command in (self._command, self._saving) if command is not None]
        try:
            for command in left:
                self._mailbox.answer(command.name, accepted=False, text=text)
            self._mailbox.close(text)
        except OSError as error:
            notice(f"`accel ctl`: {error}")
        self._close()

    def _close(self) -> None:
        self._mailbox = self._command = self._saving = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    # --- commands -----------------------------------------------------------------------------

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look into the mailbox; in a replay, do what was done here."""
        if self._mailbox is not None:
            self._look(run)
        elif self._past:
            self._repeat(run, in_epoch=True)

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Do in a replay what was done between the epochs."""
        if self._past:
            self._repeat(run, in_epoch=False)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Look into the mailbox, for what came during a validation."""
        if self._mailbox is not None:
            self._look(run)

    def on_checkpoint_saved(self, run: TrainingRun, model: Any, path: str) -> None:
        """Note the path, for the answer; other checkpoints may come before and after it."""
        if self._saved is None or base_name(path).endswith(f"{self._save_step:08}"):
            self._saved = path

    def _look(self, run: TrainingRun) -> None:
        """Put the next command to the vote, if there is one."""
        if self._saving is not None:
            if run.accelerator.loop.saves.pending:
                return
            self._answer_save()
        now = time.monotonic()
        if self._command is not None or now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY
        assert self._mailbox is not None
        try:
            while (command := self._mailbox.take()) is not None:
                try:
                    facts = self._checked(run, command)
                except ValueError as error:
                    self._mailbox.answer(command.name, accepted=False, text=str(error))
                    continue
                self._command = command
                run.votes.ask(_KIND, json.dumps(facts))
                return
        except OSError as error:  # the folder is gone, full, or not this user's any more
            notice(f"`accel ctl` cannot steer this run any more: {error}")
            self._close()

    def _checked(self, run: TrainingRun, command: Command) -> dict[str, Any]:
        """Return what the ranks are to do about a command.

        Raises:
            ValueError: it cannot be done; the text says what can.
        """
        if command.action == "evaluate" and self.evaluate is None:
            raise ValueError("the script gave no function to evaluate with: Control(evaluate=...)")
        savers = [saver for saver in run.checkpoint_callbacks if hasattr(saver, "save_now")]
        if command.action == "save" and not savers:
            raise ValueError("no callback saves: give the Accelerator a Checkpoint")
        value = command.value
        if command.action == "set":
            value = self._checked_value(run, command.setting, command.value)
        return {"action": command.action, "setting": command.setting, "value": value}

    def _checked_value(self, run: TrainingRun, name: str, value: Any) -> Setting:
        if name == "lr":
            first_rate(run.optimizers)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"lr={value} is no number above 0")
            return float(value)
        holders = self._holders(run, name)
        if not holders:
            declared = (getattr(callback, "settable", {}) for callback in run.callbacks)
            names = sorted({"lr", *self.settings, *(name for names in declared for name in names)})
            raise ValueError(
                f"{name!r} cannot be set.{nearest(name, names)} This run can set: "
                f"{', '.join(names)}"
            )
        for owner, attribute in holders:
            value = _converted(name, value, _current(owner, attribute), owner is self.settings)
        return value  # type: ignore[no-any-return]

    def _holders(self, run: TrainingRun, name: str) -> list[tuple[Any, str]]:
        """Return what holds a setting: this callback's dict, and callbacks with an attribute."""
        holders: list[tuple[Any, str]] = [(self.settings, name)] if name in self.settings else []
        for callback in run.callbacks:
            attribute = getattr(callback, "settable", {}).get(name)
            if attribute is not None:
                holders.append((callback, attribute))
        return holders

    # --- what all ranks do --------------------------------------------------------------------

    def _carry_out(self, run: TrainingRun, facts: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
        """Do on all ranks what one has asked for; return the requests that follow from it."""
        action, name, value = facts["action"], facts["setting"], facts["value"]
        command, step = self._command, run.global_step
        text = f"{action} {name}={value}" if action == "set" else action
        answer = "stopping" if action == "stop" else text
        if action == "set":
            try:
                answer = f"{text}, which was {self._set(run, name, value)}"
            except ValueError as error:  # a schedule has come to 0 since
                self._answer(str(error), None)
                return {}
        self.number += 1
        places = (run.current_epoch, run.batch_idx, not run.epoch_open)
        place = {"step": step, **dict(zip(_PLACE, places, strict=True))}
        run.note("control", number=self.number, command=text, **facts, **place)
        if action == "evaluate":
            self._evaluate(run)
            answer = "evaluated"
        if action == "save":
            self._saved, self._saving, self._save_step = None, command, step
            self._command = None
        else:
            self._answer(answer, step)
        self._next_look = 0.0  # the next one need not wait
        return {action: (_REASON, 0)} if action in ("save", "stop") else {}

    def _set(self, run: TrainingRun, name: str, value: Setting) -> Any:
        """Set a value, and return the one before."""
        if name == "lr":
            return set_learning_rate(run.optimizers, run.schedulers, float(value))
        self._changed[name] = value
        before = None
        for owner, attribute in self._holders(run, name):
            before = _current(owner, attribute)
            _assign(owner, attribute, value)
        return before

    def _evaluate(self, run: TrainingRun) -> None:
        """Call the user's function; the training after it draws as if it had not been called."""
        assert self.evaluate is not None
        devices = devices_of(run.models)
        state = capture_rng(run.accelerator.device, devices)
        try:
            self.evaluate(run)
        finally:
            restore_rng(state, run.accelerator.device, devices)

    def _answer(self, text: str, step: int | None) -> None:
        """Answer the command that was voted on; without a step it was refused."""
        command, self._command = self._command, None
        if command is not None and self._mailbox is not None:
            try:
                accepted = step is not None
                self._mailbox.answer(command.name, accepted=accepted, text=text, step=step)
            except OSError as error:
                notice(f"`accel ctl` gets no answer: {error}")

    def _answer_save(self) -> None:
        """Answer that the checkpoint is durable."""
        self._command, self._saving = self._saving, None
        text = "this step was saved already" if self._saved is None else f"saved {self._saved}"
        self._answer(text, self._save_step)

    # --- a replay -----------------------------------------------------------------------------

    def _repeat(self, run: TrainingRun, *, in_epoch: bool) -> None:
        """Carry out the commands of the run that came at this place.

        Args:
            run: the replay.
            in_epoch: at the end of a batch; else at the start, where the checkpoint was saved
                before what came at its step, or between two epochs.
        """
        step, place = run.global_step, [run.current_epoch, run.batch_idx, False]
        while self._past:
            past = self._past[0]
            is_here = not in_epoch or [past[name] for name in _PLACE] == place
            if past["step"] > step or (past["step"] == step and not is_here):
                return
            self._past.pop(0)
            self._carry_out(run, {name: past[name] for name in ("action", "setting", "value")})


def _current(owner: Any, attribute: str) -> Any:
    return owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)


def _assign(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[attribute] = value
    else:
        setattr(owner, attribute, value)


def _converted(name: str, value: Any, current: Any, own: bool) -> Any:
    """Return a value in the type of the current one.

    Raises:
        ValueError: it is of another type, or a callback's number below 1.
    """
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(current) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name}={value} is not like the present value {current!r}: give its type")
    if not own and type(value) is int and value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    return value
