"""Freeze, and the parameter groups it makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Freeze", "give_own_groups"]

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # of a group
_RATE_LISTS = ("base_lrs", "_last_lr", "max_lrs", "min_lrs")  # of a scheduler, one for each group
_OTHER_LISTS = ("lr_lambdas", "base_momentums", "max_momentums")
What = str | torch.nn.Module


def give_own_groups(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    parameters: Sequence[torch.nn.Parameter],
    factor: float,
) -> None:
    """Put parameters into groups of their own, with their group's options and a part of its rate.

    A group that has no other parameters stays and gets the rate. What no optimizer has is added to
    the first one, with the options of its first group.

    Args:
        optimizers: those that may have the parameters.
        schedulers: of these optimizers; their lists get an entry for each new group.
        parameters: what to put there.
        factor: multiplies the learning rate.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.freeze import give_own_groups
        >>> weight, bias = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight, bias], lr=1.0)
        >>> give_own_groups([optimizer], [], [bias], 0.5)
        >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [(1, 1.0), (1, 0.5)]
    """
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        moving = [one for scheduler in schedulers for one in _of(scheduler, optimizer)]
        for index, group in enumerate(list(optimizer.param_groups)):
            taken = [p for p in group["params"] if id(p) in wanted]
            wanted -= {id(p) for p in taken}
            if taken and len(taken) == len(group["params"]):
                _scale(group, factor)
                _scale_lists(moving, index, factor)
            elif taken:
                group["params"] = [p for p in group["params"] if all(p is not t for t in taken)]
                _add(optimizer, moving, index, taken, factor)
    left = [parameter for parameter in parameters if id(parameter) in wanted]
    if left and optimizers:
        moving = [one for scheduler in schedulers for one in _of(scheduler, optimizers[0])]
        _add(optimizers[0], moving, 0, left, factor)


def _add(
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    like: int,
    parameters: list[torch.nn.Parameter],
    factor: float,
) -> None:
    """A new group, with the options of the one at ``like``."""
    group = {**optimizer.param_groups[like], "params": parameters}
    _scale(group, factor)
    optimizer.add_param_group(group)
    for scheduler in schedulers:
        for name in (*_RATE_LISTS, *_OTHER_LISTS):
            values = getattr(scheduler, name, None)
            if isinstance(values, list) and len(values) > like:
                values.append(values[like])
    _scale_lists(schedulers, len(optimizer.param_groups) - 1, factor)


def _scale(group: dict[str, Any], factor: float) -> None:
    for name in _RATES:
        if name in group:
            group[name] = group[name] * factor  # a new tensor, where it is one


def _scale_lists(schedulers: Sequence[Any], index: int, factor: float) -> None:
    for scheduler in schedulers:
        for name in _RATE_LISTS:
            values = getattr(scheduler, name, None)
            if isinstance(values, list) and len(values) > index:
                values[index] = values[index] * factor


def _of(scheduler: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """A scheduler and those inside of it, if they move this optimizer."""
    own = getattr(scheduler, "optimizer", None)
    if own is optimizer or getattr(own, "optimizer", None) is optimizer:
        yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _of(inner, optimizer)


@dataclass
class _Phase:
    """What is frozen until one moment.

    Args:
        what: a pattern of names, or a module.
        until: the step or epoch with which it is trained; never if ``None``.
        parameters: what that is in the prepared models.
        norms: its BatchNorm layers.
        frozen: whether it is frozen now.
    """

    what: What
    until: Interval | None
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    norms: list[torch.nn.Module] = field(default_factory=list)
    frozen: bool = False

    def is_over(self, run: TrainingRun) -> bool:
        if self.until is None:
            return False
        here = run.current_epoch if self.until.unit == "epochs" else run.global_step
        return here >= self.until.amount

    def takes(self, name: str, number: int, member: object) -> bool:
        """Whether a parameter or buffer of the model with this number belongs to it."""
        if isinstance(self.what, torch.nn.Module):
            return any(member is one for one in (*self.what.parameters(), *self.what.buffers()))
        return fnmatchcase(name, self.what) or fnmatchcase(f"{number}/{name}", self.what)


class Freeze(Callback):
    """Keeps parts of the models from being trained, until a step or an epoch, or for the whole run.

    What is frozen is not changed by any optimizer, its weight decay or its momentum. Prepare the
    models unfrozen: what had ``requires_grad=False`` before stays so for ever. Where it stands
    follows from the step and the epoch, so a resumed run goes on exactly. After the
    run nothing of it is left but the groups of ``lr_factor``.

    Where nothing averages gradients between processes, ``requires_grad`` is switched off and
    backward saves the work. Under DDP, which averages what could be trained when the model was
    prepared, backward goes on and the gradients are dropped before they are clipped; unless the
    model was prepared with ``DistributedDataParallelKwargs(find_unused_parameters=True)``, where it
    is switched off too.

    Args:
        schedule: what is frozen, to until when. What is a pattern of parameter names
            (``"backbone.*"``; of the second prepared model only, ``"1/backbone.*"``) or a module;
            of several that match, the last one counts. Until when is a number of optimizer steps,
            ``"500 steps"``, ``"2 epochs"``, or ``None`` for ever.
        lr_factor: what is unfrozen later is trained with this part of its learning rate: when the
            run begins, it is moved into parameter groups of its own, which schedulers follow.
            ``None`` leaves the groups as they are.
        norm_eval: keep BatchNorm layers in evaluation mode while they are frozen, so that their
            statistics do not move; off by default.

    Raises:
        ValueError: an empty schedule, a time that is neither steps nor epochs, or ``lr_factor`` is
            not above 0. When the run begins: nothing matches, or it is frozen already.
        TypeError: a schedule that is none.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Freeze
        >>> accel = Accelerator(cpu=True, callbacks=[Freeze({"0.*": 1})])
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with accel.run("demo"):
        ...     for _ in range(2):
        ...         print(model[0].weight.requires_grad)
        ...         accel.backward(model(torch.ones(1, 1)).sum())
        ...         optimizer.step()
        False
        True
    """

    def __init__(
        self,
        schedule: Mapping[What, int | str | None],
        *,
        lr_factor: float | None = None,
        norm_eval: bool = False,
    ) -> None:
        if not isinstance(schedule, Mapping):
            raise TypeError(
                f"schedule={schedule!r} must be a dict, as {{'backbone.*': '2 epochs'}}."
            )
        if not schedule:
            raise ValueError("schedule is empty: say what to freeze, {'backbone.*': '2 epochs'}.")
        if lr_factor is not None and not lr_factor > 0:
            raise ValueError(f"lr_factor={lr_factor} must be above 0.")
        self.schedule = dict(schedule)
        self.lr_factor = lr_factor
        self.norm_eval = norm_eval
        self._phases = [_Phase(what, _moment(until)) for what, until in schedule.items()]
        self._ours: dict[int, torch.nn.Parameter] = {}  # which requires gradients but for us
        self._grouped: set[int] = set()
        self._drops = True
        self._begun = False

    @property
    def state_key(self) -> str:
        """``Freeze`` with what is frozen."""
        parts = (one if isinstance(one, str) else type(one).__name__ for one in self.schedule)
        return f"Freeze:{','.join(parts)}"

    # --- when ---------------------------------------------------------------------------------

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Find what is meant, and give it groups of its own, before a checkpoint is restored."""
        self._begun = True
        self._drops = not _switches_off(run)
        self._find(run)
        later = [p for phase in self._phases if phase.until is not None for p in phase.parameters]
        optimizers = [getattr(one, "optimizer", one) for one in run.optimizers]
        held = {id(p) for one in optimizers for g in one.param_groups for p in g["params"]}
        new = [
            p
            for p in later
            if id(p) not in self._grouped and (self.lr_factor is not None or id(p) not in held)
        ]
        schedulers = [getattr(one, "scheduler", one) for one in run.schedulers]
        give_own_groups(optimizers, schedulers, new, self.lr_factor or 1.0)
        self._grouped.update(map(id, new))

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Stand where the run stands, which may have been resumed."""
        self._follow(run)

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Unfreeze what is over."""
        self._follow(run)

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Unfreeze what is over."""
        self._follow(run)

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Put frozen BatchNorm layers back to evaluation mode, after a ``model.train()``."""
        for norm in self._frozen_norms():
            norm.eval()

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Drop gradients of what is frozen, before anything is clipped or measured."""
        self._drop(run)

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """The same for a backward that was not called through the Accelerator."""
        self._drop(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """What was frozen for this run is free again."""
        for phase in self._phases:
            phase.frozen = False
            for parameter in phase.parameters:
                parameter.requires_grad_(True)
        self._begun = False

    # --- what ---------------------------------------------------------------------------------

    def _find(self, run: TrainingRun) -> None:
        """The parameters and layers of each phase; the last one that matches counts."""
        for phase in self._phases:
            phase.parameters, phase.norms, phase.frozen = [], [], False
        matched: set[int] = set()
        for number, model in enumerate(run.models):
            for name, parameter in model.named_parameters():
                meant = self._phase_of(name, number, parameter)
                if meant is not None:
                    matched.add(id(meant))
                    if parameter.requires_grad or id(parameter) in self._ours:
                        self._ours[id(parameter)] = parameter
                        meant.parameters.append(parameter)
            self._find_norms(number, model)
        for phase in self._phases:
            self._check(phase, id(phase) in matched, run)

    def _find_norms(self, number: int, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if not self.norm_eval or not isinstance(module, _BatchNorm):
                continue
            prefix = f"{name}." if name else ""
            members = [*module.named_parameters(prefix[:-1]), *module.named_buffers(prefix[:-1])]
            phases = [self._phase_of(one, number, member) for one, member in members]
            if phases and phases[0] is not None:
                phases[0].norms.append(module)

    def _phase_of(self, name: str, number: int, member: object) -> _Phase | None:
        matching = (one for one in reversed(self._phases) if one.takes(name, number, member))
        return next(matching, None)

    def _check(self, phase: _Phase, matched: bool, run: TrainingRun) -> None:
        if phase.parameters:
            return
        shown = phase.what if isinstance(phase.what, str) else type(phase.what).__name__
        if matched:
            raise ValueError(
                f"Freeze: all that {shown!r} means has requires_grad=False already: prepare the "
                "model unfrozen, and leave that to Freeze."
            )
        names = [name for model in run.models for name, _ in model.named_parameters()]
        hint = nearest(str(shown), names)
        raise ValueError(f"Freeze: no parameter of a prepared model is {shown!r} alone.{hint}")

    def _follow(self, run: TrainingRun) -> None:
        """Freeze and unfreeze, as the run stands."""
        for phase in self._phases:
            frozen = not phase.is_over(run)
            if frozen == phase.frozen:
                continue
            phase.frozen = frozen
            for parameter in phase.parameters:
                parameter.requires_grad_(self._drops or not frozen)
                parameter.grad = None
            for norm in phase.norms:
                norm.train(not frozen)

    def _drop(self, run: TrainingRun) -> None:
        if not self._begun:  # a step that no run is around
            self.setup(run, None, "fit")
            self._follow(run)
        if self._drops:
            for phase in self._phases:
                if phase.frozen:
                    for parameter in phase.parameters:
                        parameter.grad = None

    def _frozen_norms(self) -> Iterable[torch.nn.Module]:
        return (norm for phase in self._phases if phase.frozen for norm in phase.norms)


def _moment(until: int | str | None) -> Interval | None:
    if until is None:
        return None
    if isinstance(until, int) and not isinstance(until, bool):
        return Interval(until, "steps")
    interval = Interval.parse(until)
    if interval.unit not in ("steps", "epochs"):
        raise ValueError(f"frozen until {until!r}: say a number of steps, or '2 epochs'.")
    return interval


def _switches_off(run: TrainingRun) -> bool:
    """Whether a parameter may stop requiring gradients after the model was prepared."""
    strategy = getattr(run.accelerator, "strategy", None)
    if strategy is None:  # another trainer's stand-in
        return False
    options = getattr(strategy, "options", None)
    return not strategy.has_gradient_sync or bool(getattr(options, "find_unused_parameters", False))
