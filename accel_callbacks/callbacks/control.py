"""Control: steer a run that goes on, from a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
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
    from accel_callbacks.addons.steering.commands import CommandFile
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Control"]

_LOOK_EVERY = 0.5  # seconds between two looks at the file of commands
_REASON = "accel ctl"
_KIND = "control"  # of the request that the ranks vote on
_PLACE = ("epoch", "batch", "between_epochs")
Setting = str | int | float | bool


class Control(ResumableState):
    """Steer a run that goes on, by ``accel ctl RUN save``, ``evaluate``, ``stop`` or ``set``.

    About twice a second, rank 0 reads a file of the run to which only its user may write. Each
    command is put to the vote at the end of a step, and carried out on all ranks between the same
    two steps. The log says what was done, the journal gets a mark, and ``accel replay`` does the
    same again. It needs ``accel.run`` with a journal in a ``project_dir`` on a disk.

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
        self._file: CommandFile | None = None  # on rank 0
        self._waiting: list[str] = []  # commands that were read, the next one first
        self._voted_on: str | None = None
        self._save_step: int | None = None  # of the newest ``save``
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
            self._assign(run, name, value)

    def _note_number(self, run: TrainingRun) -> None:
        """Mark how many commands the state holds: those after them are undone by the load."""
        run.note("commands", number=self.number)

    # --- the life of a run --------------------------------------------------------------------

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Create the file of commands on rank 0; in a replay, read what was commanded then."""
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
        """Create the file of commands; say why the run cannot be steered where that fails."""
        from accel_callbacks.addons.steering.commands import CommandFile
        from accel_callbacks.checkpoint.project import path_in

        folder = local_path(path_in(run.default_root_dir, "journal", run.run_id))
        if run.noted is None or folder is None:
            notice(
                "`accel ctl` cannot steer this run: Control needs `with accel.run(...)` and a "
                "journal: pass a project_dir= on a disk"
            )
            return
        try:
            self._file = CommandFile(folder)
        except OSError as error:
            notice(f"`accel ctl` cannot steer this run: {error}")
            return
        if self._file.stale:
            stale = ", ".join(self._file.stale)
            notice(f"`accel ctl`: commands to an earlier start of the run are ignored: {stale}")

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Say which commands are not carried out, and remove the file."""
        run.votes.owners.pop(_KIND, None)
        self._run = None
        if self._file is None:
            return
        left = [] if self._voted_on is None else [self._voted_on]
        try:
            left += [*self._waiting, *self._file.read()]
            self._file.remove()
        except OSError as error:
            notice(f"`accel ctl`: {error}")
        if left:
            step = run._global_step
            notice(f"`accel ctl`: the run ended at step {step}, before it did: {', '.join(left)}")
        self._file, self._waiting, self._voted_on, self._save_step = None, [], None, None

    # --- commands -----------------------------------------------------------------------------

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look for commands; in a replay, do what was done here."""
        if self._file is not None:
            self._look(run)
        elif self._past:
            self._repeat(run, in_epoch=True)

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Do in a replay what was done between the epochs."""
        if self._past:
            self._repeat(run, in_epoch=False)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Look for commands that came during a validation."""
        if self._file is not None:
            self._look(run)

    def on_checkpoint_saved(self, run: TrainingRun, model: Any, path: str) -> None:
        """Log that the checkpoint of a ``save`` is durable."""
        if self._save_step is not None and base_name(path).endswith(f"{self._save_step:08}"):
            notice(f"`accel ctl`: saved {path}")

    def _look(self, run: TrainingRun) -> None:
        """Put the next command to the vote, if there is one."""
        now = time.monotonic()
        if self._voted_on is not None or now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY
        assert self._file is not None
        try:
            self._waiting += self._file.read()
        except OSError as error:  # the file is gone, or not this user's any more
            notice(f"`accel ctl` cannot steer this run any more: {error}")
            self._file = None
        while self._waiting:
            command = self._waiting.pop(0)
            try:
                facts = self._read_command(run, command)
            except ValueError as error:
                notice(f"`accel ctl`: refused {command!r}: {error}")
                continue
            self._voted_on = command
            run.votes.ask(_KIND, json.dumps(facts))
            return

    def _read_command(self, run: TrainingRun, command: str) -> dict[str, Any]:
        """Return what the ranks are to do about a command.

        Raises:
            ValueError: it cannot be done; the text says what can.
        """
        action, _, setting = command.partition(" ")
        name, value = "", None
        if action not in ("save", "evaluate", "stop", "set"):
            raise ValueError("a command is save, evaluate, stop, or set NAME=VALUE")
        if action == "evaluate" and self.evaluate is None:
            raise ValueError("the script gave no function to evaluate with: Control(evaluate=...)")
        if action == "save" and not any(hasattr(c, "save_now") for c in run.checkpoint_callbacks):
            raise ValueError("no callback saves: give the Accelerator a Checkpoint")
        if action == "set":
            name, _, text = setting.partition("=")
            value = self._read_value(run, name, text)
        return {"action": action, "setting": name, "value": value}

    def _read_value(self, run: TrainingRun, name: str, text: str) -> Setting:
        """Return the value of a setting in the type of the present one."""
        if name == "lr":
            first_rate(run.optimizers)
            rate = _convert(text, 1.0)
            if not isinstance(rate, float) or rate <= 0:
                raise ValueError(f"lr={text} is no number above 0")
            return rate
        present = self._present(run, name)
        if present is None:
            declared = (getattr(callback, "settable", {}) for callback in run.callbacks)
            names = sorted({"lr", *self.settings, *(name for names in declared for name in names)})
            raise ValueError(
                f"{name!r} cannot be set.{nearest(name, names)} This run can set: "
                f"{', '.join(names)}"
            )
        value = _convert(text, present)
        if value is None:
            raise ValueError(f"{name}={text} is not like the present {present!r}: give its type")
        if name not in self.settings and type(value) is int and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
        return value

    def _present(self, run: TrainingRun, name: str) -> Setting | None:
        """Return the value of a setting, None if there is none of that name."""
        values = [getattr(owner, attribute) for owner, attribute in _holders(run, name)]
        return self.settings.get(name, values[0] if values else None)

    def _assign(self, run: TrainingRun, name: str, value: Setting) -> None:
        """Set a value where it is: in the settings of the loop, and in callbacks."""
        if name in self.settings:
            self.settings[name] = value
        for owner, attribute in _holders(run, name):
            setattr(owner, attribute, value)

    # --- what all ranks do --------------------------------------------------------------------

    def _carry_out(self, run: TrainingRun, facts: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
        """Do on all ranks what one has asked for; return the requests that follow from it."""
        action, name, value = facts["action"], facts["setting"], facts["value"]
        step = run.global_step
        text = f"set {name}={value}" if action == "set" else action
        answer = text
        if action == "set":
            try:
                answer = f"{text}, which was {self._set(run, name, value)}"
            except ValueError as error:  # a schedule has come to 0 since
                self._voted_on = None
                notice(f"`accel ctl`: refused {text!r}: {error}")
                return {}
        self.number += 1
        places = (run.current_epoch, run.batch_idx, not run.epoch_open)
        place = {"step": step, **dict(zip(_PLACE, places, strict=True))}
        run.note("control", number=self.number, command=text, **facts, **place)
        if action == "evaluate":
            self._evaluate(run)
        if action == "save":
            self._save_step = step
        notice(f"`accel ctl`: {answer} (after step {step})")
        self._voted_on = None
        self._next_look = 0.0  # the next one need not wait
        return {action: (_REASON, 0)} if action in ("save", "stop") else {}

    def _set(self, run: TrainingRun, name: str, value: Setting) -> Any:
        """Set a value, and return the one before."""
        if name == "lr":
            return set_learning_rate(run.optimizers, run.schedulers, float(value))
        self._changed[name] = value
        before = self._present(run, name)
        self._assign(run, name, value)
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


def _holders(run: TrainingRun, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the callbacks that declare a setting, and the attribute that holds it."""
    for callback in run.callbacks:
        attribute = getattr(callback, "settable", {}).get(name)
        if attribute is not None:
            yield callback, attribute


def _convert(text: str, present: Setting) -> Setting | None:
    """Return a text as a value of the type of the present one, None if it is none."""
    if isinstance(present, bool):
        return {"true": True, "false": False}.get(text)
    try:
        value = type(present)(text)
    except ValueError:
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value
