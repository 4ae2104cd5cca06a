"""Freeze: keep parameters from being trained, until a step or an epoch or for the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.group_rates import (
    SCHEDULER_RATES,
    scale_group,
    scale_schedulers,
    schedulers_of,
)
from accel_callbacks.callbacks.interval import Interval
from accel_callbacks.collectives.sharded import class_of
from accel_callbacks.errors import nearest

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["Freeze", "split_param_groups"]

Target = str | torch.nn.Module  # a pattern of parameter names, or a module

# Attributes of a scheduler with one entry for each parameter group, beside its rates.
_OTHER_SCHEDULER_LISTS = ("lr_lambdas", "base_momentums", "max_momentums")


class Freeze(Callback):
    """Freeze parts of the models until a step or an epoch, or for the whole run.

    No optimizer changes frozen parameters, not even by weight decay or momentum. Prepare the models
    unfrozen: parameters with ``requires_grad=False`` stay frozen for ever. The schedule depends
    only on the step and the epoch, so a resumed run continues exactly. After the run everything is
    undone but the groups of ``lr_factor``.

    Where no gradients are averaged over the ranks, ``requires_grad`` is switched off, which saves
    work in backward. DDP averages the gradients of all parameters that were trainable when the
    model was prepared: there backward computes them, and they are dropped before clipping. With
    ``DistributedDataParallelKwargs(find_unused_parameters=True)``, ``requires_grad`` is switched
    off too.

    Args:
        schedule: maps what to freeze to until when. The key is a pattern of parameter names
            (``"backbone.*"``; of the second prepared model only, ``"1/backbone.*"``) or a module;
            of several that match, the last one counts. The value is a number of optimizer steps,
            ``"500 steps"``, ``"2 epochs"``, or ``None`` for the whole run.
        lr_factor: multiplies the learning rate of parameters that are unfrozen later: when the run
            starts, they are moved into separate parameter groups, which schedulers follow.
            ``None`` does not change the groups.
        norm_eval: keep BatchNorm layers in eval mode while they are frozen, so that their
            statistics do not change; off by default.

    Raises:
        ValueError: the schedule is empty, a time is neither in steps nor in epochs, or
            ``lr_factor`` is not above 0. When the run starts: nothing matches, or all that matches
            is frozen already.
        TypeError: the schedule is not a mapping.

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
        schedule: Mapping[Target, int | str | None],
        *,
        lr_factor: float | None = None,
        norm_eval: bool = False,
    ) -> None:
        if not isinstance(schedule, Mapping):
            raise TypeError(
                f"schedule={schedule!r} must be a dict, as {{'backbone.*': '2 epochs'}}."
            )
        if not schedule:
            raise ValueError("schedule is empty: give what to freeze, {'backbone.*': '2 epochs'}.")
        if lr_factor is not None and not lr_factor > 0:
            raise ValueError(f"lr_factor={lr_factor} must be above 0.")
        self.schedule = dict(schedule)
        self.lr_factor = lr_factor
        self.norm_eval = norm_eval
        self._phases = [_Phase(target, _parse_until(until)) for target, until in schedule.items()]
        self._trainable: dict[int, torch.nn.Parameter] = {}  # by id; those that Freeze may change
        self._grouped: set[int] = set()
        self._drops_gradients = True  # instead of switching requires_grad off
        self._is_set_up = False

    @property
    def state_key(self) -> str:
        """``Freeze:<targets>``, with the class for a module."""
        return f"Freeze:{','.join(phase.name for phase in self._phases)}"

    # --- hooks --------------------------------------------------------------------------------

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Match the schedule with parameters, and split groups before a checkpoint is restored."""
        self._is_set_up = True
        strategy = getattr(run.accelerator, "strategy", None)
        if strategy is not None and strategy.gradients.keeps_gradients_apart:
            raise RuntimeError(
                "Freeze does not work with an engine that keeps gradients, as ZeRO does: set "
                "requires_grad=False before prepare(), or train with DDP or FSDP."
            )
        self._drops_gradients = not _can_change_requires_grad(strategy)
        self._match(run)
        later = [p for phase in self._phases if phase.until is not None for p in phase.parameters]
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in run.optimizers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        owned = {id(parameter) for group in groups for parameter in group["params"]}
        new = [
            p
            for p in later
            if id(p) not in self._grouped and (self.lr_factor is not None or id(p) not in owned)
        ]
        schedulers = [getattr(scheduler, "scheduler", scheduler) for scheduler in run.schedulers]
        split_param_groups(optimizers, schedulers, new, self.lr_factor or 1.0)
        self._grouped.update(map(id, new))

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Freeze for the position of the run, which may have been resumed."""
        self._update(run)

    on_train_epoch_start = on_fit_start

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Unfreeze what is due."""
        self._update(run)

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set frozen BatchNorm layers to eval mode again, after a ``model.train()``."""
        for phase in self._phases:
            for norm in phase.norms if phase.frozen else ():
                norm.eval()

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Drop the gradients of frozen parameters, before any clipping or measuring."""
        self._drop_gradients(run)

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Drop them after a backward that was not called through the Accelerator."""
        self._drop_gradients(run)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Unfreeze everything."""
        for phase in self._phases:
            phase.frozen = False
            for parameter in phase.parameters:
                parameter.requires_grad_(True)
        self._is_set_up = False

    # --- matching -----------------------------------------------------------------------------

    def _match(self, run: TrainingRun) -> None:
        """Find the parameters and layers of each phase; the last phase that matches counts."""
        for phase in self._phases:
            phase.parameters, phase.norms, phase.frozen = [], [], False
        matched: set[int] = set()
        for number, model in enumerate(run.models):
            for name, parameter in model.named_parameters():
                owner = self._phase_of(name, number, parameter)
                if owner is not None:
                    matched.add(id(owner))
                    if parameter.requires_grad or id(parameter) in self._trainable:
                        self._trainable[id(parameter)] = parameter
                        owner.parameters.append(parameter)
            self._match_norms(number, model)
        for phase in self._phases:
            self._require_parameters(phase, id(phase) in matched, run)

    def _match_norms(self, number: int, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if not self.norm_eval or not isinstance(module, _BatchNorm):
                continue
            prefix = f"{name}." if name else ""
            members = [*module.named_parameters(prefix[:-1]), *module.named_buffers(prefix[:-1])]
            phases = [self._phase_of(full_name, number, member) for full_name, member in members]
            if phases and phases[0] is not None:
                phases[0].norms.append(module)

    def _phase_of(self, name: str, number: int, member: object) -> _Phase | None:
        matching = (
            phase for phase in reversed(self._phases) if phase.matches(name, number, member)
        )
        return next(matching, None)

    def _require_parameters(self, phase: _Phase, matched: bool, run: TrainingRun) -> None:
        if phase.parameters:
            return
        if matched:
            raise ValueError(
                f"Freeze: all parameters of {phase.name!r} have requires_grad=False already: "
                "prepare the model unfrozen, and leave that to Freeze."
            )
        names = [name for model in run.models for name, _ in model.named_parameters()]
        hint = nearest(phase.name, names)
        raise ValueError(
            f"Freeze: no parameter of a prepared model matches {phase.name!r}, or a later pattern "
            f"matches them all.{hint}"
        )

    # --- freezing -----------------------------------------------------------------------------

    def _update(self, run: TrainingRun) -> None:
        """Freeze and unfreeze for the current step and epoch."""
        for phase in self._phases:
            frozen = not phase.is_over(run)
            if frozen == phase.frozen:
                continue
            phase.frozen = frozen
            for parameter in phase.parameters:
                parameter.requires_grad_(self._drops_gradients or not frozen)
                parameter.grad = None
            for norm in phase.norms:
                norm.train(not frozen)

    def _drop_gradients(self, run: TrainingRun) -> None:
        if not self._is_set_up:  # a step outside of a run, where setup is not fired
            self.setup(run, None, "fit")
            self._update(run)
        if self._drops_gradients:
            for phase in self._phases:
                if phase.frozen:
                    for parameter in phase.parameters:
                        parameter.grad = None


@dataclass
class _Phase:
    """Hold an entry of the schedule, and what it freezes.

    Args:
        target: a pattern of names, or a module.
        until: the step or epoch at which it is unfrozen; never if ``None``.
        parameters: its parameters in the prepared models.
        norms: its BatchNorm layers.
        frozen: whether it is frozen now.
    """

    target: Target
    until: Interval | None
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    norms: list[torch.nn.Module] = field(default_factory=list)
    frozen: bool = False

    @property
    def name(self) -> str:
        """The pattern, or the class of the module."""
        return self.target if isinstance(self.target, str) else class_of(self.target).__name__

    def is_over(self, run: TrainingRun) -> bool:
        if self.until is None:
            return False
        position = run.current_epoch if self.until.unit == "epochs" else run.global_step
        return position >= self.until.amount

    def matches(self, name: str, number: int, member: object) -> bool:
        """Return whether a parameter or buffer of the model with this number belongs to it."""
        target = self.target
        if isinstance(target, torch.nn.Module):
            return any(member is tensor for tensor in (*target.parameters(), *target.buffers()))
        return fnmatchcase(name, target) or fnmatchcase(f"{number}/{name}", target)


def _parse_until(until: int | str | None) -> Interval | None:
    if until is None:
        return None
    if isinstance(until, int) and not isinstance(until, bool):
        return Interval(until, "steps")
    interval = Interval.parse(until)
    if interval.unit not in ("steps", "epochs"):
        raise ValueError(f"frozen until {until!r}: give a number of steps, or '2 epochs'.")
    return interval


def _can_change_requires_grad(strategy: Any) -> bool:
    """Return whether ``requires_grad`` may change after the model was prepared."""
    # Without a strategy it is a foreign trainer, which may wrap the model in DDP itself.
    return strategy is not None and bool(strategy.gradients.allows_unfreezing)


def split_param_groups(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    parameters: Sequence[torch.nn.Parameter],
    factor: float,
) -> None:
    """Move parameters into separate groups, with the options of their group and a scaled rate.

    A group without other parameters is kept, and its rate is scaled. Parameters that no optimizer
    has are added to the first one, with the options of its first group.

    Args:
        optimizers: those that may have the parameters.
        schedulers: of these optimizers; their lists are extended for each new group.
        parameters: those to move.
        factor: multiplies the learning rate.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.freeze import split_param_groups
        >>> weight, bias = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight, bias], lr=1.0)
        >>> split_param_groups([optimizer], [], [bias], 0.5)
        >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [(1, 1.0), (1, 0.5)]
    """
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        followers = schedulers_of(optimizer, schedulers)
        for index, group in enumerate(list(optimizer.param_groups)):
            moved = [p for p in group["params"] if id(p) in wanted]
            wanted -= {id(p) for p in moved}
            if moved and len(moved) == len(group["params"]):
                scale_group(group, factor)
                scale_schedulers(followers, index, factor)
            elif moved:
                group["params"] = [p for p in group["params"] if all(p is not m for m in moved)]
                _add_group(optimizer, followers, index, moved, factor)
    left = [parameter for parameter in parameters if id(parameter) in wanted]
    if left and optimizers:
        _add_group(optimizers[0], schedulers_of(optimizers[0], schedulers), 0, left, factor)


def _add_group(
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    like: int,
    parameters: list[torch.nn.Parameter],
    factor: float,
) -> None:
    """Add a group with the options of the one at index ``like``, to its schedulers too."""
    group = {**optimizer.param_groups[like], "params": parameters}
    scale_group(group, factor)
    optimizer.add_param_group(group)
    for scheduler in schedulers:
        for name in (*SCHEDULER_RATES, *_OTHER_SCHEDULER_LISTS):
            values = getattr(scheduler, name, None)
            if isinstance(values, list) and len(values) > like:
                values.append(values[like])
    scale_schedulers(schedulers, len(optimizer.param_groups) - 1, factor)
