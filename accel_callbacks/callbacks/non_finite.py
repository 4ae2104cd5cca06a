"""NonFinite: raise, skip the step or roll back on losses and gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import ResumableState, require_at_least
from accel_callbacks.callbacks.freeze import Freeze
from accel_callbacks.callbacks.observer import first_answer
from accel_callbacks.callbacks.weight_averaging import Averaging
from accel_callbacks.checkpoint.open import open_folder, open_one, together, unwrapped_failure
from accel_callbacks.checkpoint.part import LoadOptions
from accel_callbacks.checkpoint.restore import restore_from, restore_newest
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import nearest
from accel_callbacks.gradients import local_part
from accel_callbacks.host_copy import HostCopy
from accel_callbacks.logging import notice
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointReader

__all__ = [
    "FiniteCheck",
    "GradientNorms",
    "NonFinite",
    "Rollback",
    "StepCheck",
    "device_of",
    "keep_options",
    "measure_gradients",
    "roll_back",
    "save_is_due",
]

_WHERE = "a rollback"
_MAX_NAMES = 3  # parameters named in a message
_CHECKS = ("loss", "gradients")
_ACTIONS = ("raise", "skip", "rollback", "warn")
_ADVICE = (
    'Inspect the batch, lower the learning rate, or clip; NonFinite(action="skip") skips such '
    'steps, and action="rollback" goes back to the last checkpoint.'
)


class NonFinite(ResumableState):
    """Detect losses and gradients that are infinite or NaN.

    All ranks decide the same, even if only one of them is affected. On the CPU they decide before
    the step is taken. On other devices the result is read one step later, so that nothing waits
    for it; only ``"skip"`` waits before the step.

    With fp16, gradients that are not finite while the loss scale is above 1 are an ordinary
    overflow: the scaler skips the step and lowers the scale. At a scale of 1 they count, and a loss
    always does.

    Args:
        check: ``("loss", "gradients")`` or one of them.
        action: ``"raise"`` a ``FloatingPointError`` (the default); ``"skip"`` this optimizer step;
            ``"rollback"``: skip it, and continue from the weights of the newest checkpoint with the
            next batches, so that the batches that led there are not repeated; or ``"warn"``.
        patience: with ``"skip"`` and ``"warn"``, raise after more bad steps in a row than this;
            10 by default, never if ``None``. A good step of another optimizer ends the row.
        every_n_steps: check every so many optimizer steps, 1 by default.
        max_rollbacks: raise instead of one more; 3 by default.

    Attributes:
        bad_steps: number of bad steps.
        in_a_row: number of them since the last good step.
        rollbacks: number of rollbacks.

    Raises:
        ValueError: an unknown check or action, or a number that is too small. When the run starts:
            ``"rollback"`` without a callback that saves.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import NonFinite
        >>> accel = Accelerator(cpu=True, callbacks=[NonFinite()])
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accel.backward(model(torch.full((1, 1), torch.nan)).sum())
        >>> optimizer.step()
        Traceback (most recent call last):
        FloatingPointError: step 1: the loss is nan, and the gradients of 'weight' are not \
finite. Inspect the batch, lower the learning rate, or clip; NonFinite(action="skip") skips such \
steps, and action="rollback" goes back to the last checkpoint.
    """

    collective = True
    after = (Freeze,)  # which drops the gradients of frozen parameters
    before = (Averaging,)  # which may put the average into the models for an evaluation
    needs_checkpoints = True  # to roll back
    _rollback_option = '(action="rollback")'
    _rollback_cause: str | None = None  # its name in the journal, where that says more

    def __init__(
        self,
        check: str | Sequence[str] = _CHECKS,
        action: str = "raise",
        patience: int | None = 10,
        every_n_steps: int = 1,
        max_rollbacks: int = 3,
    ) -> None:
        checks = (check,) if isinstance(check, str) else tuple(check)
        if not checks or not set(checks) <= set(_CHECKS):
            raise ValueError(f"check={check!r}: use 'loss', 'gradients' or both.")
        if action not in _ACTIONS:
            hint = nearest(str(action), _ACTIONS)
            raise ValueError(f"action={action!r} is unknown; use one of {_ACTIONS}.{hint}")
        require_at_least(0, patience=patience)
        require_at_least(1, every_n_steps=every_n_steps, max_rollbacks=max_rollbacks)
        self.check = checks
        self.action = action
        self.patience = patience
        self.every_n_steps = every_n_steps
        self.max_rollbacks = max_rollbacks
        self._run: TrainingRun | None = None
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self.bad_steps = self.in_a_row = self.rollbacks = 0
        self._good_step = 0  # up to which the weights were finite
        self._avoided: list[str] = []  # ids of checkpoints whose weights may not be finite
        self._discard_all()

    def _discard_step(self) -> None:
        """Discard the values of the current step."""
        self._loss: torch.Tensor | None = None
        self._loss_read = False  # by one optimizer of the step; the others read it too
        self._norms: dict[int, GradientNorms] = {}  # by id of the optimizer
        self._overflow: torch.Tensor | None = None

    def _discard_all(self) -> None:
        """Discard the values of the current step, the unread check and a planned rollback."""
        self._discard_step()
        self._unread: StepCheck | None = None  # of the step before, on its way to the host
        self._rollback_reason: str | None = None

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the counts, unless ``load_state`` restored them, and discard pending checks."""
        needs_checkpoints = self.action == "rollback" and self.needs_checkpoints
        if needs_checkpoints and not run.checkpoint_callbacks:
            name = type(self).__name__
            raise ValueError(
                f"{name}{self._rollback_option} needs checkpoints to go back to: give the "
                "Accelerator a Checkpoint callback too."
            )
        super().setup(run, model, stage)
        self._discard_all()
        self._run = run

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Trust the weights with which the run starts."""
        self._good_step = run.global_step

    # --- measuring ----------------------------------------------------------------------------

    def _is_due(self, run: TrainingRun, *optimizers: torch.optim.Optimizer) -> bool:
        return any(
            run.next_step(optimizer) % self.every_n_steps == 0
            for optimizer in optimizers or run.optimizers
        )

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Add up the losses of a step: the sum is not finite if one of them is not."""
        if "loss" in self.check and self._is_due(run):
            value = loss.detach().float()
            value = value.sum() if value.dim() else value
            before = None if self._loss_read else self._loss
            self._loss = value if before is None else before + value
            self._loss_read = False

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Measure the gradients before clipping, which would spread one NaN to all of them."""
        # Over a foreign trainer this is unknown; the gradients are measured before the step then.
        if run.gradients_complete and "gradients" in self.check and self._is_due(run):
            scale = run.loss_scale()  # of fp16: an overflow is its own while it can be lowered
            self._overflow = None if scale is None else scale > 1
            for optimizer in run.optimizers:
                self._norms[id(optimizer)] = measure_gradients(optimizer)

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Act on this step, or on the one before if this one's result is not on the host yet."""
        if self._rollback_reason is not None:  # the gradients come from bad weights
            run.skip_step(self._rollback_reason)
        if self._rollback_reason is not None or not self._is_due(run, optimizer):
            self._discard_step()
            return
        norms = self._norms.pop(id(optimizer), None)
        if norms is None and "gradients" in self.check:
            norms = measure_gradients(optimizer)
        self._loss_read = True
        check: StepCheck | None = self._make_check(run, optimizer, norms)
        if check is not None and check.waits and self.action != "skip":
            check, self._unread = self._unread, check
        if check is not None:
            self._act(run, check, before_step=True)

    def _make_check(
        self, run: TrainingRun, optimizer: torch.optim.Optimizer, norms: GradientNorms | None
    ) -> StepCheck:
        return FiniteCheck(
            run.next_step(optimizer),
            self._loss,
            norms,
            overflow=self._overflow,
            collective=run.in_lockstep,
        )

    # --- acting -------------------------------------------------------------------------------

    def _note_good(self, check: StepCheck) -> None:
        self.in_a_row = 0
        self._good_step = check.step

    def _act(self, run: TrainingRun, check: StepCheck, *, before_step: bool) -> None:
        if not check.is_bad():
            self._note_good(check)
            return
        self.bad_steps += 1
        self.in_a_row += 1
        text = check.describe(_parameter_names(run))
        # In join_uneven_inputs the other ranks do not know of it, so no rank can skip or roll back.
        alone = collectives.world_size() > 1 and not run.in_lockstep
        if self.action == "raise" or (alone and self.action != "warn"):
            raise FloatingPointError(f"{text}. {_ADVICE}")
        if self.action == "rollback":
            self._plan_rollback(run, text, before_step)
            return
        if self.patience is not None and self.in_a_row > self.patience:
            raise FloatingPointError(f"{text}. {self.in_a_row} steps in a row were bad. {_ADVICE}")
        if self.action == "skip":
            run.skip_step(text)
        elif run.is_global_zero:
            warn(text)

    def _plan_rollback(self, run: TrainingRun, text: str, before_step: bool) -> None:
        """Skip this step; the rollback follows at the end of it."""
        self._count_try(text)
        self._discard_all()
        self._rollback_reason = text
        if before_step:
            run.skip_step(text)

    def _count_try(self, text: str) -> None:
        """Raise if there were too many rollbacks for one more."""
        if self.rollbacks >= self.max_rollbacks:
            raise FloatingPointError(f"{text}, after {self.rollbacks} rollbacks. {_ADVICE}")

    def _go_back(self, run: TrainingRun, reason: str) -> Rollback:
        training = run.accelerator.training_state
        return roll_back(training, newest_step=self._good_step, avoid=self._avoided)

    def _act_on_unread(self, run: TrainingRun) -> None:
        """Read the check of the last step now, and act on it."""
        check, self._unread = self._unread, None
        if check is not None:
            self._act(run, check, before_step=False)

    def _roll_back_if_planned(self, run: TrainingRun) -> None:
        """Roll back, if planned. Collective; only between two steps."""
        if self._rollback_reason is None or run.in_window:
            return
        text = self._rollback_reason
        self._discard_all()
        result = self._go_back(run, text)
        if result.path is None:
            raise FloatingPointError(
                f"{text}, and there is no earlier checkpoint to go back to: save more often, with "
                "Checkpoint(every_n_steps=...)."
            )
        self.rollbacks += 1
        run.note("rollback", path=result.path, reason=text, cause=self._rollback_cause)
        self._avoided = result.avoided
        self._good_step = run.global_step
        count = f"rollback {self.rollbacks} of at most {self.max_rollbacks}"
        notice(f"{text}: went back to the weights of {result.path} ({count})")

    # --- the end of a step --------------------------------------------------------------------

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the check of this step before a save, and roll back if planned."""
        if self._unread is not None and save_is_due(run):
            self._act_on_unread(run)
        self._roll_back_if_planned(run)

    def on_before_zero_grad(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Discard the step; roll back here if no prepared loader fires ``on_train_batch_end``."""
        self._discard_step()
        if self._rollback_reason is not None and not run.iterating:
            self._roll_back_if_planned(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Read the check of the last step, and roll back if planned."""
        self._act_on_unread(run)
        self._roll_back_if_planned(run)

    on_validation_start = on_test_start = on_train_end = on_train_epoch_end

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """Read the check of the last step, and roll back if planned."""
        self.on_train_epoch_end(run, model)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Discard pending checks, and release the run."""
        self._discard_all()
        self._run = None

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, after the check of the last step, so that no bad state is saved."""
        if self._run is not None:
            self._act_on_unread(self._run)
        return {
            "bad_steps": self.bad_steps,
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "avoided": list(self._avoided),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place."""
        self.bad_steps = state_dict["bad_steps"]
        self.in_a_row = state_dict["in_a_row"]
        self.rollbacks = state_dict["rollbacks"]
        self._avoided = list(state_dict["avoided"])


@dataclass
class GradientNorms:
    """A norm of each gradient, on the device; it is finite if the gradient is.

    Args:
        parameters: whose gradients they are, grouped by device and dtype.
        norms: a tensor for each group, with one number for each parameter.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.non_finite import measure_gradients
        >>> weight = torch.ones(2, requires_grad=True)
        >>> (weight * torch.tensor([1.0, torch.inf])).sum().backward()
        >>> measure_gradients(torch.optim.SGD([weight])).bad_names({id(weight): "weight"})
        ['weight']
    """

    parameters: list[list[torch.Tensor]] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)

    def is_bad(self, device: torch.device) -> torch.Tensor:
        """Return whether any gradient is not finite, as a tensor on a device."""
        if not self.norms:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([(~norms.isfinite()).any().to(device) for norms in self.norms]).any()

    def bad_names(self, known: Mapping[int, str]) -> list[str]:
        """Return the names of gradients that are not finite; waits for the device.

        Args:
            known: names by ``id`` of the parameter; the result has their order.
        """
        bad = {
            id(parameter)
            for parameters, norms in zip(self.parameters, self.norms, strict=True)
            for parameter, finite in zip(parameters, norms.isfinite().tolist(), strict=True)
            if not finite
        }
        named = [name for key, name in known.items() if key in bad]
        return named + ["a parameter of no prepared model"] * (len(bad) - len(named))


@torch.no_grad()
def measure_gradients(optimizer: torch.optim.Optimizer) -> GradientNorms:
    """Measure the gradients of an optimizer; of sharded ones, this rank's part."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is None:
            continue
        dense = parameter.grad
        part = dense.coalesce().values() if dense.is_sparse else local_part(dense)
        if part.numel():
            members, parts = groups.setdefault((part.device, part.dtype), ([], []))
            members.append(parameter)
            parts.append(part)
    measured = GradientNorms()
    for members, parts in groups.values():
        measured.parameters.append(members)
        measured.norms.append(_norms(parts))
    return measured


def _norms(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return one number for each tensor, finite if all of its elements are."""
    if parts[0].device.type == "cpu":
        # The 2-norm is ten times faster on the CPU; it overflows for huge finite elements, so a
        # result that is not finite is checked again with the infinity norm.
        norms = torch.stack(torch._foreach_norm(parts, 2.0))
        if bool(norms.isfinite().all()):
            return norms
    return torch.stack(torch._foreach_norm(parts, torch.inf))


class StepCheck:
    """What a step is judged by, reduced over the ranks and on its way to the host.

    Args:
        step: the step about to be taken, from 1.
        numbers: on the device.
        operation: how they are reduced, ``"max"`` or ``"sum"``.
        collective: reduce over the ranks, all of which must make the check.
    """

    def __init__(
        self, step: int, numbers: torch.Tensor, operation: str, *, collective: bool
    ) -> None:
        self.step = step
        self._device = numbers.device
        self._ranks = collectives.world_size() if collective else 1
        if self._ranks > 1:
            numbers = collectives.reduce(numbers, operation)
        self._numbers = HostCopy(numbers)

    @property
    def waits(self) -> bool:
        """True if reading the result now would block on the device."""
        return self._device.type != "cpu"

    def is_bad(self) -> bool:
        """Return whether the step is bad on any rank; waits for the device."""
        raise NotImplementedError

    def describe(self, known: Mapping[int, str]) -> str:
        """Describe what is bad.

        Args:
            known: names of parameters by their ``id``.
        """
        raise NotImplementedError


class FiniteCheck(StepCheck):
    """A check that one step's loss and gradients are finite.

    Args:
        step: the step about to be taken, from 1.
        loss: the sum of the losses of the step, or ``None``.
        gradients: their norms, or ``None``.
        overflow: on the device, whether the loss scaler handles gradients that are not finite;
            ``None`` without a scaler.
        collective: reduce over the ranks, all of which must make the check.
    """

    def __init__(
        self,
        step: int,
        loss: torch.Tensor | None,
        gradients: GradientNorms | None,
        *,
        overflow: torch.Tensor | None = None,
        collective: bool = True,
    ) -> None:
        self._loss, self._gradients = loss, gradients
        device = device_of(loss, gradients)
        no = torch.zeros((), dtype=torch.bool, device=device)
        loss_flag = no if loss is None else ~loss.isfinite()
        gradient_flag = no if gradients is None else gradients.is_bad(device)
        if overflow is not None:
            gradient_flag = gradient_flag & ~overflow.to(device)
        flags = torch.stack([loss_flag, gradient_flag]).int()
        super().__init__(step, flags, "max", collective=collective)

    def is_bad(self) -> bool:
        """Return whether loss or gradients are not finite on any rank; waits for the device."""
        return bool(self._numbers.read().any())

    def describe(self, known: Mapping[int, str]) -> str:
        """Describe the values that are not finite.

        Args:
            known: names of parameters by their ``id``; the first few are in the text.
        """
        loss_bad, gradients_bad = self._numbers.read().tolist()
        parts = []
        if loss_bad:
            value = float("nan") if self._loss is None else float(self._loss)
            own_is_bad = self._loss is not None and not math.isfinite(value)
            parts.append(
                f"the loss is {value}" if own_is_bad else "the loss of another rank is bad"
            )
        if gradients_bad:
            names = [] if self._gradients is None else self._gradients.bad_names(known)
            parts.append(_gradients_text(names))
        return f"step {self.step}: {', and '.join(parts)}"


def _gradients_text(names: list[str]) -> str:
    if not names:
        return "gradients of another rank are not finite"
    return f"the gradients of {listed(map(repr, names), _MAX_NAMES)} are not finite"


def device_of(loss: torch.Tensor | None, gradients: GradientNorms | None) -> torch.device:
    """Return the device that a step is judged on; the CPU if there is nothing to judge."""
    if loss is not None:
        return loss.device
    norms = gradients.norms if gradients is not None else []
    return norms[0].device if norms else torch.device("cpu")


def _parameter_names(run: TrainingRun) -> dict[int, str]:
    """Return the names of parameters by ``id``, prefixed by the model's index if several."""
    models = list(run.models)
    return {
        id(parameter): f"{index}.{name}" if len(models) > 1 else name
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


class Rollback(NamedTuple):
    """The result of a rollback.

    Args:
        path: the restored checkpoint, ``None`` if there was none.
        avoided: ids of the checkpoints that were skipped.
    """

    path: str | None
    avoided: list[str]


def roll_back(
    training: TrainingState, *, newest_step: int, avoid: Collection[str] = ()
) -> Rollback:
    """Restore the weights from the newest checkpoint of a callback that saves.

    Collective; call it between two steps. Models, optimizer states, the loss scaler, registered
    objects, and callbacks whose ``rolls_back`` is True are restored. The run, its loaders and
    schedulers, and the options of the parameter groups (learning rates) are kept.

    Args:
        training: the state of the run, ``accel.training_state``.
        newest_step: skip checkpoints of later steps.
        avoid: ids of further checkpoints to skip.

    Raises:
        ResumeError: the checkpoint does not fit.
        checkpoint_io.CheckpointError: all checkpoints are damaged, or a save in progress failed.
        RemoteError: another rank failed.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> from accel_callbacks.callbacks.non_finite import roll_back
        >>> accel = Accelerator(cpu=True, callbacks=[Checkpoint("memory://doc-rollback")])
        >>> model = accel.prepare(torch.nn.Linear(1, 1))
        >>> _ = accel.save_state("memory://doc-rollback/step-00000000")
        >>> before = model.weight.item()
        >>> _ = torch.nn.init.constant_(model.weight, torch.nan)
        >>> roll_back(accel.training_state, newest_step=0).path, model.weight.item() == before
        ('memory://doc-rollback/step-00000000', True)
    """
    training.loop.saves.wait()
    avoided: list[str] = []
    target = first_answer(training.loop.observers, "rollback_target", training.loop.run.global_step)
    if target == "":
        return Rollback(None, avoided)
    if target is not None:
        saver = next(iter(training.loop.savers), None)
        storage_options = None if saver is None else saver.storage_options
        restore = partial(restore_from, training, target)
        return Rollback(_restore(training, restore, storage_options), avoided)
    for saver in training.loop.savers:
        root, storage_options = saver.resume_root(training.loop.run)
        candidates = _find_candidates(root, storage_options, newest_step, avoid)
        avoided += candidates.skipped_ids
        if candidates.usable:
            find = partial(restore_newest, training, root, skip=candidates.skipped_paths)
            path = _restore(training, find, storage_options)
            if path is not None:
                return Rollback(path, avoided)
    return Rollback(None, avoided)


def save_is_due(run: TrainingRun) -> bool:
    """Return whether a Checkpoint's schedule saves this step; ``run.save_now`` is not foreseen."""
    savers = getattr(run, "checkpoint_callbacks", ())  # a foreign trainer has none
    schedules = (getattr(saver, "schedule", None) for saver in savers)
    return any(
        schedule.step_is_due(run.global_step) for schedule in schedules if schedule is not None
    )


class _Candidates(NamedTuple):
    usable: int
    skipped_paths: list[str]
    skipped_ids: list[str]


def _find_candidates(
    root: str, storage_options: Mapping[str, Any] | None, newest_step: int, avoid: Collection[str]
) -> _Candidates:
    """Find the checkpoints that may be restored, on the main process. Collective."""
    candidates = _Candidates(0, [], [])
    with shared_failure(_WHERE):
        if collectives.rank() == 0:
            entries = open_folder(root, storage_options).survey()
            infos = [entry.info for entry in entries if entry.status == "valid"]
            skipped = [
                info
                for info in infos
                if info.manifest.id in avoid or info.manifest.metadata.get("step", 0) > newest_step
            ]
            paths, ids = [info.path for info in skipped], [info.manifest.id for info in skipped]
            candidates = _Candidates(len(infos) - len(skipped), paths, ids)
    return collectives.broadcast_object(candidates)


def _restore(
    training: TrainingState,
    restore: Callable[..., str | None],
    storage_options: Mapping[str, Any] | None,
) -> str | None:
    """Restore what follows from the weights, by a function that takes the options of a load."""
    sections = ["models", "precision"]
    sections += ["optimizers"] if training.optimizers else []
    sections += ["registered"] if training.registered.names else []
    options = LoadOptions(Selection(sections), storage_options=storage_options)
    with keep_options(training):
        path = restore(options=options)
    if path is not None:
        with unwrapped_failure():
            _restore_callbacks(training, open_one(path, storage_options))
    return path


@contextmanager
def keep_options(training: TrainingState) -> Iterator[None]:
    """Keep the options of the parameter groups, such as learning rates, over a restore."""

    def groups() -> list[dict[str, Any]]:
        return [group for optimizer in training.optimizers for group in optimizer.param_groups]

    options = [{**group} for group in groups()]
    yield
    # Loading replaces the dicts of the groups.
    for group, before in zip(groups(), options, strict=True):
        group.update({name: value for name, value in before.items() if name != "params"})


def _restore_callbacks(training: TrainingState, reader: CheckpointReader) -> None:
    """Restore the callbacks whose states are derived from weights."""
    saved = reader.state["callbacks"]
    chosen = {
        entry.key: entry.callback
        for entry in training.loop.dispatch.entries
        if getattr(entry.callback, "rolls_back", False) and entry.key in saved
    }
    read = partial(reader.load_tree, {key: saved[key] for key in chosen})
    states: dict[str, Any] = together(_WHERE, read)
    with shared_failure(_WHERE):
        for key, callback in chosen.items():
            callback.load_state_dict(states[key])
