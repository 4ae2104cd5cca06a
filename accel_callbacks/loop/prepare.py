"""Models, and with them optimizers and schedulers, made ready for a strategy and a precision."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.optim.lr_scheduler import LRScheduler

from accel_callbacks.collectives.nested import is_tensor, map_leaves
from accel_callbacks.errors import nearest
from accel_callbacks.loop.first_steps import FirstSteps
from accel_callbacks.loop.loop import Loop
from accel_callbacks.models.compile import adopt, compile_model, is_compiled
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.plugins.compile import TorchDynamoPlugin
from accel_callbacks.precision import Precision
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.strategy import Strategy
from accel_callbacks.strategy.checks import is_dispatched, refuse_empty

__all__ = ["ModelRequest", "Preparer", "is_scheduler"]


class ModelRequest(NamedTuple):
    """A model to prepare.

    Args:
        model: the model, prepared or not.
        device_placement: move it to the device.
        evaluation_mode: it is not trained, so that its gradients are not averaged.
    """

    model: torch.nn.Module
    device_placement: bool = True
    evaluation_mode: bool = False


class Preparer:
    """Prepares the models, optimizers and schedulers of one ``prepare`` call together.

    Args:
        strategy: sets them up for training on several ranks.
        precision: wraps models for mixed precision.
        compile_plugin: how models are compiled.
        loop: counts the steps of optimizers.
        models: the prepared models; the new ones are added.
        optimizers: the prepared optimizers, likewise.
        schedulers: the prepared schedulers, likewise.
        first_steps: watches the first steps of new optimizers.
        scheduler_options: keywords of :class:`AcceleratedScheduler`.
    """

    def __init__(
        self,
        strategy: Strategy,
        precision: Precision,
        compile_plugin: TorchDynamoPlugin,
        loop: Loop,
        models: list[torch.nn.Module],
        optimizers: list[AcceleratedOptimizer],
        schedulers: list[AcceleratedScheduler],
        first_steps: FirstSteps,
        *,
        scheduler_options: dict[str, Any],
    ) -> None:
        self._strategy = strategy
        self._precision = precision
        self._compile_plugin = compile_plugin
        self._loop = loop
        self._models = models
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._first_steps = first_steps
        self._scheduler_options = scheduler_options
        self._casts = strategy.casts_to(precision.name)
        self._left_in_place: WeakSet[torch.optim.Optimizer] = WeakSet()

    def prepare(
        self,
        requests: Sequence[ModelRequest] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        forward_methods: Sequence[str] = (),
        *,
        left_in_place: Collection[int] = (),
    ) -> dict[int, Any]:
        """Prepare the objects of one call; prepared ones are returned as they are.

        Args:
            requests: the models.
            optimizers: the optimizers; their states move to where the parameters are.
            schedulers: the schedulers.
            forward_methods: methods of the models that are called besides the model itself.
            left_in_place: the ``id`` of each optimizer whose state is not moved.

        Returns:
            The prepared objects by the ``id`` of those that were given.

        Raises:
            ValueError: a model cannot be set up, or a scheduler's optimizer is not prepared, or no
                model has one of the ``forward_methods``.
        """
        ready: dict[int, Any] = {}
        bare = [self._strategy.unwrap(request.model) for request in requests]
        _check_methods(bare, forward_methods)
        prepared = {id(self._strategy.unwrap(model)): model for model in self._models}
        new: list[torch.nn.Module] = []
        for request, inner in zip(requests, bare, strict=True):
            if id(inner) in prepared or any(inner is model for model in new):
                continue
            wrapped = self._wrap_for_precision(request, inner)
            self._strategy.sequences.adopt(inner)
            if wrapped is not inner or request.evaluation_mode:
                prepared[id(inner)] = wrapped
            else:
                new.append(inner)
        set_up = self._strategy.setup(
            new,
            [_inside(optimizer, AcceleratedOptimizer, "optimizer") for optimizer in optimizers],
            [_inside(scheduler, AcceleratedScheduler, "scheduler") for scheduler in schedulers],
        )
        if not self._casts:
            for inner in new:
                self._precision.after_setup(inner, self._strategy)
        prepared.update(zip(map(id, new), set_up.models, strict=True))
        for request, inner in zip(requests, bare, strict=True):
            ready[id(request.model)] = self._add_model(prepared[id(inner)])
            methods = [name for name in forward_methods if _has_method(inner, name)]
            if methods:
                if not self._casts:
                    self._precision.wrap_methods(inner, methods)
                self._strategy.mark_forward_methods(prepared[id(inner)], methods)
        for argument, optimizer in zip(optimizers, set_up.optimizers, strict=True):
            ready[id(argument)] = self._optimizer(optimizer)
            if id(argument) in left_in_place:
                self._left_in_place.add(optimizer)
        # All of them: the model of one that was prepared before may only have moved now.
        for known in self._optimizers if requests or optimizers else ():
            if known.optimizer not in self._left_in_place:
                _move_state(known.optimizer)
        for argument, scheduler in zip(schedulers, set_up.schedulers, strict=True):
            # One that an engine has made in its place follows the window as torch's do.
            own = scheduler is _inside(argument, AcceleratedScheduler, "scheduler")
            ready[id(argument)] = self._scheduler(scheduler, as_called=own)
        # An optimizer may be prepared after its model: a teacher without one is no hook's model.
        trained = self._loop.trained_models()
        self._loop.model = self._strategy.unwrap(trained[0]) if trained else None
        return ready

    def _wrap_for_precision(self, request: ModelRequest, inner: torch.nn.Module) -> torch.nn.Module:
        """Move a new model to the device, wrap it for the precision and compile it.

        Return the model inside, or the strategy's wrapper that is around it already.
        """
        trained, window = not request.evaluation_mode, self._loop.window
        averages_last = trained and not window.plugin.sync_each_batch
        self._strategy.check(inner, window.num_steps if averages_last else 1)
        model = adopt(request.model)
        if not trained:
            refuse_empty(inner)  # no strategy gives it weights
        if request.device_placement and not is_dispatched(inner):
            model = self._strategy.place(model, trained=trained)
        if trained:
            self._strategy.checkpoint_activations(inner)
        if not self._casts or not trained:
            # It changes the forward of the inner model, so the wrapper stays valid.
            inner = self._precision.wrap(inner)
        else:
            self._precision.unwrap(inner)
        compile_model(inner, self._compile_plugin)
        if trained:
            self._precision.check_compiled(is_compiled(inner))
        return model

    def _add_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if not any(model is known for known in self._models):
            self._models.append(model)
            self._first_steps.watch_model(model)
        return model

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        for known in self._optimizers:
            if known.optimizer is optimizer:
                return known
        watch = self._first_steps.watch(optimizer)
        prepared = AcceleratedOptimizer(
            optimizer, self._loop, self._precision, watch, self._strategy.gradients
        )
        self._optimizers.append(prepared)
        return prepared

    def _scheduler(self, scheduler: Any, *, as_called: bool) -> AcceleratedScheduler:
        for known in self._schedulers:
            if known.scheduler is scheduler:
                return known
        owner = getattr(scheduler, "optimizer", None)
        inner = _inside(owner, AcceleratedOptimizer, "optimizer")
        optimizers = [optimizer for optimizer in self._optimizers if inner is optimizer.optimizer]
        if not optimizers and owner is not None:
            raise ValueError(
                f"the optimizer of {type(scheduler).__name__} is not prepared: pass it to "
                "prepare() before the scheduler, or together with it."
            )
        # Others, such as those of timm, are told the epoch or the number of updates: each call
        # is meant as it is, and once.
        as_called = as_called and not isinstance(scheduler, LRScheduler)
        options = {"step_with_optimizer": False} if as_called else self._scheduler_options
        prepared = AcceleratedScheduler(scheduler, optimizers, self._loop, **options)
        self._schedulers.append(prepared)
        return prepared


# The second is of NAdam.
_HOST_SCALARS = {"step", "mu_product"}


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of each parameter to the parameter's device, by the rules of torch.

    ``load_state_dict(state_dict())`` would do it too, but it also casts the state to the dtype of
    the parameter, replaces the groups, and calls hooks and overrides that expect a checkpoint.
    """
    for group in optimizer.param_groups:
        # Else the host reads these scalars at each step, and the optimizer makes them there.
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if isinstance(state, MutableMapping):
                for key, value in state.items():
                    if counts_on_device or key not in _HOST_SCALARS:
                        moved = _on_device(value, parameter.device)
                        if moved is not value:
                            state[key] = moved


def _on_device(value: Any, device: torch.device) -> Any:
    return map_leaves(
        value, lambda tensor: tensor if tensor.device == device else tensor.to(device), is_tensor
    )


def _check_methods(models: Sequence[torch.nn.Module], names: Sequence[str]) -> None:
    """Refuse names that are no method of any of the models, or one of every module."""
    for name in names:
        if hasattr(torch.nn.Module, name):
            raise ValueError(
                f"forward_methods: {name!r} is a method of torch.nn.Module itself; name those that "
                "you call besides the model itself, such as 'encode'."
            )
        if not any(_has_method(model, name) for model in models):
            hint = nearest(name, [known for model in models for known in dir(type(model))])
            shown = ", ".join(type(model).__name__ for model in models) or "no model"
            raise ValueError(f"forward_methods: {shown} has no method {name!r}.{hint}")


def _has_method(model: torch.nn.Module, name: str) -> bool:
    method = getattr(model, name, None)
    return callable(method) and not isinstance(method, torch.nn.Module)


def is_scheduler(item: Any) -> bool:
    """Return whether an object is a learning-rate scheduler, prepared or not."""
    if isinstance(item, AcceleratedScheduler):
        return True
    if not all(hasattr(item, name) for name in ("step", "state_dict")):
        return False
    # Others have their optimizer under another name; a scaler or an average has none.
    held = getattr(item, "__dict__", {}).values()
    return hasattr(item, "optimizer") or (
        hasattr(item, "load_state_dict")
        and any(isinstance(value, (torch.optim.Optimizer, LRScheduler)) for value in held)
    )


def _inside(instance: Any, kind: type, name: str) -> Any:
    """Return the object that a prepared one wraps: another Accelerator may have prepared it."""
    return getattr(instance, name) if isinstance(instance, kind) else instance
