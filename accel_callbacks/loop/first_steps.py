"""The first steps of each optimizer: checks for mistakes that training would hide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from accel_callbacks import collectives
from accel_callbacks.gradients import first_elements, parameters_of
from accel_callbacks.loop.added_parameters import AddedParameters
from accel_callbacks.loop.bare_steps import BareSteps, UnseenSteps
from accel_callbacks.loop.gradient_watch import GradientWatch
from accel_callbacks.loop.loop import Loop
from accel_callbacks.precision import Precision
from accel_callbacks.strategy import Gradients, Strategy
from accel_callbacks.strategy.optimizer_state import find_unsaved, parameter_names
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.input_checksums import InputChecksums

__all__ = ["FirstSteps", "OptimizerWatch"]

_STEPS = 3
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = (
    "the weights of {} differ between the processes (such as {!r}), and will differ in all steps: "
    "something changed them on some processes after prepare(), such as load_state_dict() under "
    "`if accel.is_main_process`. Do it on all processes, or before prepare(), which gives all "
    "processes the weights of the main one."
)
_INPUTS = (
    "all {} processes call {} with the same inputs, and compute the same: prepare the DataLoader "
    "(`loader = accel.prepare(loader)`), so that each process reads its own share; inputs that are "
    "drawn, such as noise, differ after set_seed(seed, device_specific=True)."
)


class FirstSteps:
    """Watches the first steps of each prepared optimizer, and warns once of each mistake.

    Afterwards the hooks on parameters and models are removed, and nothing is left to be paid.

    Args:
        loop: has the gradient window and the prepared models.
        strategy: its gradients run backward and clip.
        precision: may scale losses.

    Attributes:
        run_backward: the backward of the strategy's gradients, noted as the Accelerator's own while
            it matters; None where it is ``loss.backward()``.
        clipping: the gradients, which clip, checked likewise.
        trains: a prepared optimizer has had gradients.
        bare_steps: watches optimizers that are not prepared.
        added_parameters: compares prepared models with what they were.

    Example:
        >>> import torch, warnings
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> accel.backward(model(torch.ones(1, 1)).sum())
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     optimizer.step()
        >>> "`with accel.accumulate(model):`" in str(caught[0].message)
        True
    """

    def __init__(self, loop: Loop, strategy: Strategy, precision: Precision) -> None:
        self.loop = loop
        self.strategy = strategy
        self.gradients = strategy.gradients
        self.precision = precision
        self.in_backward = False
        self.bare_steps = BareSteps(loop, strategy, precision, self.warn, self._end_checks)
        self.added_parameters = AddedParameters(loop, strategy, self.warn)
        loop.unprepared_steps.count_unseen = self._count_unseen
        self._watches: list[OptimizerWatch] = []
        self._calls: list[_Calls] = []
        self._warned: set[str] = set()
        self.trains = False
        self._begin_checks()

    def watch(self, optimizer: torch.optim.Optimizer) -> OptimizerWatch:
        """Return the watch of a new optimizer."""
        watch = OptimizerWatch(self, optimizer)
        self._watches.append(watch)
        self.loop.unprepared_steps.watch()
        self._begin_checks()
        for model in self.loop.models:
            self.watch_model(model)
        return watch

    def watch_model(self, model: torch.nn.Module) -> None:
        """Note the parameters of a model, and its calls if its gradients are averaged."""
        self.added_parameters.note(model)
        known = any(calls.model is model for calls in self._calls)
        if self._watches and not known and self.gradients.averages(model):
            # Imported here, because one process has nothing to compare.
            from accel_callbacks.loop.input_checksums import InputChecksums

            name = type(self.strategy.unwrap(model)).__name__
            self._calls.append(_Calls(model, InputChecksums(name, self.strategy.data.rank)))

    def finish(self, watch: OptimizerWatch) -> None:
        """Remove a watch, and with the last one all that it needed."""
        watch.remove()
        if watch in self._watches:
            self._watches.remove(watch)
        if not self._watches:
            self.bare_steps.finish()
            self.loop.unprepared_steps.stop()
            for calls in self._calls:
                calls.handle.remove()
            self._calls.clear()

    def forget(self) -> None:
        """Remove all watches."""
        for watch in list(self._watches):
            self.finish(watch)
        self.bare_steps.finish()
        self._begin_checks()

    def warn(self, kind: str, text: str) -> None:
        """Warn of a mistake the first time that it is found."""
        if kind not in self._warned:
            warn(text)
        self._warned.add(kind)

    def _count_unseen(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count a step of which the library is not asked; return whether it counts."""
        unseen = UnseenSteps(self.loop, self.strategy)
        if counts := unseen.count(optimizer):
            self.loop.unprepared_steps.count_unseen = unseen.count
        return counts

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.strategy.sequences.check_backward()
        self.gradients.backward(loss, **kwargs)

    def _note_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        for watch in self._watches:
            watch.gradients.before_backward()
        self.bare_steps.before_backward()
        self.in_backward = True
        try:
            self._backward(loss, **kwargs)
        finally:
            self.in_backward = False
        for watch in self._watches:
            watch.gradients.after_backward()
        self.bare_steps.note_backward()

    def _begin_checks(self) -> None:
        self.bare_steps.renew()
        self.run_backward: Callable[..., None] | None = self._note_backward
        self.clipping: Gradients | _CheckedClipping = _CheckedClipping(
            self.gradients, self.bare_steps, self.warn
        )

    def _end_checks(self) -> None:
        if not self._watches:
            gradients = self.gradients
            plain = type(gradients).backward is Gradients.backward
            unshared = None if plain else gradients.backward
            self.run_backward = self._backward if self.strategy.sequences.shared else unshared
            self.clipping = gradients

    @property
    def in_sync(self) -> bool:
        """True unless a backward now would leave gradients on their rank, as in ``no_sync``."""
        return all(self.gradients.averages(calls.model) for calls in self._calls)

    def share_calls(self) -> None:
        """Tell all watches which models were called since this was last done."""
        for calls in self._calls:
            if calls.called:
                calls.called = False
                for watch in self._watches:
                    watch.called.add(id(calls.model))

    def compare_weights(self) -> None:
        """Warn of an averaged model whose weights differ between the ranks before their steps."""
        for calls in self._calls:
            name, weights = type(self.strategy.unwrap(calls.model)).__name__, calls.weights
            if weights is None:
                # Posted, not gathered: a rank may step alone here, and would wait for the others.
                sums = ",".join(str(value) for value in _checksums(calls.model).values())
                calls.weights = collectives.Posted(f"weights of {name}", sums)
            elif collectives.rank() == 0 and (values := weights.values()) is not None:
                columns = zip(*(value.split(",") for value in values), strict=False)
                names = zip(_checksums(calls.model), columns, strict=False)
                differing = [parameter for parameter, sums in names if len(set(sums)) > 1]
                if differing:
                    self.warn("weights", _WEIGHTS.format(name, differing[0]))

    def compare_inputs(self) -> None:
        """Warn of an averaged model that all ranks call with the same inputs.

        Where they call another one with their own share, as a critic with pictures, the same inputs
        of this one, such as latents, are meant.
        """
        alike = [calls for calls in self._calls if calls.inputs.end_step()]
        if alike and not any(calls.inputs.differ for calls in self._calls):
            name = type(self.strategy.unwrap(alike[0].model)).__name__
            self.warn("inputs", _INPUTS.format(self.strategy.data.world, name))

    def averaged(self) -> Iterator[torch.nn.Module]:
        """Yield the watched models."""
        return (calls.model for calls in self._calls)


class _Calls:
    """A forward hook that notes that the model was called as ``prepare`` returned it."""

    def __init__(self, model: torch.nn.Module, inputs: InputChecksums) -> None:
        self.model = model
        self.inputs = inputs
        self.called = False
        self.weights: collectives.Posted | None = None
        self.handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled():
            self.called = True
            self.inputs.note((args, kwargs))


class OptimizerWatch:
    """The backward passes into the parameters of one optimizer, checked at its steps.

    Args:
        first_steps: makes it, and warns.
        optimizer: the optimizer as the user made it.

    Attributes:
        called: the ids of averaged models that were called since the last step.
        gradients: what became of the gradients since then.
    """

    def __init__(self, first_steps: FirstSteps, optimizer: torch.optim.Optimizer) -> None:
        self._first = first_steps
        self._optimizer = optimizer
        self._left = _STEPS
        self._idle: list[torch.Tensor] | None = None
        self._windows_checked = False
        self.called: set[int] = set()
        self.gradients = GradientWatch(optimizer, first_steps.precision, first_steps.warn)
        self._reset()
        # Weak, so that a parameter does not keep its optimizer alive.
        note = _note(ref(self))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            for parameter in _trainable(optimizer)
            if parameter.is_leaf
        ]
        self.check_state()
        if not first_steps.strategy.owns_step:
            handle = optimizer.register_step_post_hook(_check_state_of(ref(self)))
            self._handles.append(handle)

    def _reset(self) -> None:
        self._passes: Counter[int] = Counter()
        self._plain = self._apart = False
        self._rates: list[list[Any]] = []  # the learning rates at each backward
        self.called.clear()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def note(self, parameter: torch.Tensor) -> None:
        """Note a backward pass that reached a parameter."""
        self._passes[id(parameter)] += 1
        self._plain = self._plain or not self._first.in_backward
        # Of the last pass: those before it in a window stay on their rank.
        self._apart = not self._first.in_sync
        if self._passes[id(parameter)] > len(self._rates):
            self._rates.append(_rates_and_versions(self._optimizer))

    def check_state(self) -> None:
        """Warn of what no checkpoint can hold of the optimizer's state."""
        first = self._first
        if not first.strategy.owns_step:
            names = parameter_names([first.strategy.unwrap(model) for model in first.loop.models])
            if unsaved := find_unsaved(self._optimizer, names):
                first.warn("state", f"no checkpoint of this run can be saved: {unsaved}")

    def check(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> bool:
        """Check a step that is about to be taken; return whether to check the next one.

        Args:
            optimizer: the optimizer as the user made it.
            closure: the step computes gradients itself.
        """
        # Before the optimizer changes the weights, and the next batch the inputs.
        self._first.share_calls()
        self._first.compare_weights()
        self._first.compare_inputs()
        if not closure:
            self._first.gradients.check_step(optimizer)
        if self._passes:
            self._first.trains = True
            self._check_window()
            self._check_scheduler(optimizer)
            self._check_backward()
            self._check_averaged()
        self._check_changes(optimizer, closure)
        if self._left in (1, _STEPS):
            self._first.added_parameters.check()
        self.gradients.check(known=not (closure or self._plain))
        self._reset()
        self._left -= 1
        if self._left == 0:
            self._first.finish(self)
        return self._left > 0

    def _check_window(self) -> None:
        """Warn of a step that is not inside of ``accumulate``."""
        window, done = self._first.loop.window, self._windows_checked
        # Only at the first step: a loop that counts by itself has its full length there.
        self._windows_checked = True
        passes = max(self._passes.values())
        within = window.position > 0 or window.dirty  # left by a break
        if done or within or passes >= window.num_steps:
            return
        self._first.warn(
            "window",
            f"gradient_accumulation_steps={window.num_steps}, and the optimizer stepped after "
            f"{passes} backward, outside of accelerator.accumulate: put the body of the loop into "
            "`with accel.accumulate(model):`, or set gradient_accumulation_steps=1.",
        )

    def _check_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of learning rates that changed inside of a gradient window."""
        loop = self._first.loop
        window = loop.window
        changed = any(rates != self._rates[0] for rates in self._rates)
        if not changed or window.position == 0 or not window.plugin.adjust_scheduler:
            return
        wrappers = (form for form in loop.optimizers if getattr(form, "optimizer", 0) is optimizer)
        forms = [optimizer, *wrappers]
        followed = any(getattr(each, "optimizer", None) in forms for each in loop.schedulers)
        # Set by torch's schedulers, but not by a script that writes the rates itself.
        marked = any(hasattr(form.step, "_wrapped_by_lr_sched") for form in forms)
        if marked and not followed:
            self._first.warn(
                "scheduler",
                f"a scheduler of {type(optimizer).__name__} is not prepared, and steps after each "
                f"micro-batch, not once in {window.divisor}: write `scheduler = "
                "accel.prepare(scheduler)` before the loop, and step that one.",
            )

    def _check_backward(self) -> None:
        """Warn of a loss that was neither divided nor scaled."""
        window = self._first.loop.window
        divided = window.position > 0 and window.divisor > 1
        if not self._plain or not (divided or self._first.precision.scales_loss):
            return
        lost = f"divided by the {window.divisor} micro-batches of its step" if divided else ""
        if self._first.precision.scales_loss:
            lost += f"{' nor ' if lost else ''}scaled for {self._first.precision.name}"
        self._first.warn(
            "backward",
            f"the optimizer steps with gradients of a loss.backward(), whose loss was not {lost}: "
            "call accel.backward(loss) instead.",
        )

    def _check_averaged(self) -> None:
        """Warn of gradients that were not averaged over the ranks."""
        models = list(self._first.averaged())
        if self._apart or not models:
            return
        called = (model for model in models if id(model) in self.called)
        averaged = {id(parameter) for model in called for parameter in model.parameters()}
        for model in models:
            reached = {id(parameter) for parameter in model.parameters()} & self._passes.keys()
            if reached - averaged:
                name = type(self._first.strategy.unwrap(model)).__name__
                self._first.warn(
                    "averaged",
                    f"the gradients of {name} were not averaged over the processes, whose weights "
                    "drift apart: call the model that accel.prepare returned, not the one that it "
                    "was given, or that unwrap_model returned; for its other methods pass "
                    "prepare(model, forward_methods=[...]).",
                )

    def _check_changes(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Warn of two steps in a row that changed nothing."""
        held = list(_trainable(optimizer))
        loop = self._first.loop
        idle = held and not closure and not self._first.gradients.has_gradients(optimizer)
        # A callback may have dropped the gradients, as Freeze does under DDP.
        dropped = self._passes and loop.dispatch.hooks["on_after_backward"]
        if not idle or dropped or not loop.models:
            self._idle = None
            return
        before, self._idle = self._idle, [first_elements(parameter) for parameter in held]
        # Some optimizers step within backward, and their own step has nothing left to do.
        if before is None or not all(map(torch.equal, before, self._idle)):
            return
        known = {id(p) for model in loop.models for p in model.parameters()}
        if not any(id(parameter) in known for parameter in held):
            cause = (
                "it has no parameter of a prepared model: make it of model.parameters() of the "
                "same object that is passed to prepare()"
            )
        elif self._first.trains and not self._passes:
            return  # another one trains, and the loss of this one may begin later
        else:
            cause = (
                "none of its parameters had a gradient: call accel.backward(loss) before step(), "
                "and zero_grad() after it"
            )
        self._first.warn(
            "changes", f"two steps of {type(optimizer).__name__} changed no parameter, as {cause}."
        )


class _CheckedClipping:
    """Clips as the gradients of a strategy do, and warns of a used-up iterator of parameters.

    Args:
        gradients: clips.
        bare_steps: compares gradients, which clipping changes.
        warn: warns once of a kind of mistake.

    Example:
        >>> import torch, warnings
        >>> from accel_callbacks import Accelerator
        >>> parameters = torch.nn.Linear(1, 1).parameters()
        >>> optimizer = torch.optim.SGD(parameters)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     norm = Accelerator(cpu=True).clip_grad_norm_(parameters, 1.0)
        >>> "model.parameters() anew" in str(caught[0].message)
        True
    """

    def __init__(
        self, gradients: Gradients, bare_steps: BareSteps, warn: Callable[[str, str], None]
    ) -> None:
        self._gradients = gradients
        self._bare_steps = bare_steps
        self._warn = warn

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm and return it."""
        with self._bare_steps.clipping():
            return self._gradients.clip_grad_norm_(self._to_clip(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        with self._bare_steps.clipping():
            self._gradients.clip_grad_value_(self._to_clip(parameters), clip_value)

    def _to_clip(self, parameters: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Return the parameters, none if they come from an iterator at its end."""
        if not _is_used_up(parameters):
            return parameters
        self._warn(
            "used up",
            "the parameters to clip come from an iterator that was used before and yields nothing "
            "any more, so that no gradient is clipped: pass model.parameters() anew in each step, "
            "or keep a list, `parameters = list(model.parameters())`.",
        )
        return []  # torch would warn again of an empty generator, with less to go by


def _is_used_up(parameters: Any) -> bool:
    """Return whether an iterator has ended before; one that is empty from the start has not."""
    if isinstance(parameters, GeneratorType):
        return parameters.gi_frame is None
    if isinstance(parameters, (filter, map)):
        arguments: Any = parameters.__reduce__()[1]
        return any(map(_is_used_up, arguments[1:]))  # after the function
    return False


def _checksums(model: Any) -> dict[str, int]:
    """Return a checksum of the bits of each parameter that DDP holds whole on all ranks."""
    world = getattr(model, "process_group", None)
    if world is None or world.size() != collectives.world_size():
        return {}
    return {
        name: int(parameter.detach().view(_BITS[parameter.element_size()]).sum(dtype=torch.int64))
        for name, parameter in model.module.named_parameters()
        if name not in model.parameters_to_ignore
        and parameter.element_size() in _BITS
        and not (parameter.is_meta or collectives.is_sharded(parameter))
    }


def _check_state_of(watch: ref[OptimizerWatch]) -> Callable[..., None]:
    def check(*_: Any) -> None:
        alive = watch()
        if alive is not None:
            alive.check_state()

    return check


def _note(watch: ref[OptimizerWatch]) -> Callable[[torch.Tensor], None]:
    def note(parameter: torch.Tensor) -> None:
        alive = watch()
        if alive is not None:
            alive.note(parameter)

    return note


def _trainable(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for parameter in parameters_of([optimizer]) if parameter.requires_grad)


def _rates_and_versions(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the learning rates, and of those on a device their versions."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [rate._version if isinstance(rate, torch.Tensor) else rate for rate in rates]
