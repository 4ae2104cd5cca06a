"""Members of Accelerate's objects that those of this library have under other names, or elsewhere.

What ``prepare`` returns gets them by a class of its own, and an Accelerator by its base.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import DataLoader

from accel_callbacks.compat.constants import FP8BackendType
from accel_callbacks.compat.helpers import (
    get_sampler,
    is_torchdata_stateful_dataloader_available,
)
from accel_callbacks.compat.names import NotProvided
from accel_callbacks.data.loader import SkipDataLoader
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.plugins.precision import AORecipeKwargs, AutocastKwargs, GradScalerKwargs
from accel_callbacks.plugins.process_group import InitProcessGroupKwargs
from accel_callbacks.plugins.profiler import ProfileKwargs

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = [
    "AcceleratorMembers",
    "LoaderMembers",
    "OptimizerMembers",
    "SchedulerMembers",
    "give_members",
    "make_stateful",
]

_classes: dict[tuple[type[Any], type[Any]], type[Any]] = {}


class member:
    """A value that is computed when it is read, unless the object has one of its own.

    Args:
        function: computes it.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        return self if instance is None else self.function(instance)


class _Lent:
    """Members of an object that an Accelerator has prepared; a copy of it is without them."""

    _plain: type[Any]

    @property
    def _owner(self) -> Any:
        """The Accelerator, None once it is gone."""
        found = vars(self).get("_lent_by")
        return None if found is None else found()

    def __reduce_ex__(self, protocol: Any) -> Any:
        lent, owner = type(self), vars(self).pop("_lent_by", None)
        object.__setattr__(self, "__class__", self._plain)
        try:
            make, arguments, *state = self.__reduce_ex__(protocol)
        finally:
            object.__setattr__(self, "__class__", lent)
            vars(self)["_lent_by"] = owner
        # Its own check would find that the class is not that of the object.
        return (_blank if make is copyreg.__newobj__ else make, arguments, *state)  # type: ignore[attr-defined]


def _blank(kind: type[Any], *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def give_members(prepared: Any, members: type[_Lent], owner: Accelerator | None) -> None:
    """Give an object the members of Accelerate's, what it has already excepted.

    Args:
        prepared: the object.
        members: the class that has them.
        owner: the Accelerator that has prepared it.
    """
    if isinstance(prepared, SkipDataLoader):
        give_members(prepared.loader, members, owner)
    elif not isinstance(prepared, _Lent):
        object.__setattr__(prepared, "__class__", _with_members(type(prepared), members))
        if owner is not None:
            vars(prepared)["_lent_by"] = weakref.ref(owner)


def _with_members(kind: type[Any], members: type[_Lent]) -> type[Any]:
    """Return a class with the members behind those of another class."""
    if (kind, members) not in _classes:
        described = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain": kind}
        # In front of the class, whose bases have a way to copy of their own.
        copies = {"__reduce_ex__": members.__reduce_ex__}
        _classes[kind, members] = type(kind.__name__, (kind, members), {**described, **copies})
    return _classes[kind, members]


def make_stateful(loader: Any) -> None:
    """Make a prepared loader, or a view of one, a StatefulDataLoader of torchdata's too.

    It reads as before. Without torchdata it only knows that it was asked for.

    Args:
        loader: the loader.
    """
    lent: Any = type(loader)
    if not issubclass(lent, _Lent):
        lent = _with_members(lent, _Lent)
    object.__setattr__(loader, "__class__", _with_state(lent))
    vars(loader)["use_stateful_dataloader"] = True


@functools.cache
def _with_state(kind: type[Any]) -> type[Any]:
    if not is_torchdata_stateful_dataloader_available():
        return kind
    # By its name, because a check of types has not seen what most environments lack.
    torchdata: Any = importlib.import_module("torchdata.stateful_dataloader")
    stateful: type[Any] = torchdata.StatefulDataLoader
    if issubclass(kind, stateful):
        return kind
    own = kind.__mro__[: kind.__mro__.index(DataLoader)]
    # Its way of reading is behind those of the class and of torch's loader.
    plain = {
        name: value
        for name, value in vars(DataLoader).items()
        if name in vars(stateful) and not any(name in vars(base) for base in own)
    }
    plain |= {"_base_class": stateful}
    if issubclass(kind, SkipDataLoader):
        plain |= {name: _delegate(name) for name in ("state_dict", "load_state_dict")}
    return type(kind.__name__, (kind, stateful), {**plain, "__doc__": kind.__doc__})


def _delegate(name: str) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self.loader, name)(*arguments, **options)

    return call


class OptimizerMembers(_Lent):
    """Members of Accelerate's ``AcceleratedOptimizer``."""

    device_placement = True

    @member
    def scaler(self: Any) -> Any:
        """The loss scaler of fp16, None with another precision."""
        return None if self._owner is None else self._owner.scaler

    @property
    def _is_overflow(self: Any) -> bool:
        """Whether the last step was skipped, which a script may say of one of its own."""
        return bool(self.step_was_skipped)

    @_is_overflow.setter
    def _is_overflow(self, value: bool) -> None:
        self.outcome = not value

    @member
    def accelerator_state(self: Any) -> Any:
        """The state of the Accelerator."""
        return self._owner.state

    @member
    def gradient_state(self: Any) -> Any:
        """The gradient window of the Accelerator."""
        return self._owner.gradient_state


class SchedulerMembers(_Lent):
    """Members of Accelerate's ``AcceleratedScheduler``."""

    @member
    def optimizers(self: Any) -> list[Any]:
        """The optimizers whose steps it waits for."""
        return list(self._optimizers)

    @member
    def step_with_optimizer(self: Any) -> bool:
        """Whether it steps only where they have."""
        return bool(self._step_with_optimizer)

    @member
    def split_batches(self: Any) -> bool:
        """Whether a batch is that of all processes, so that there is one step for it."""
        return bool(self._owner.split_batches)

    @member
    def gradient_state(self: Any) -> Any:
        """The gradient window of the Accelerator."""
        return self._owner.gradient_state

    def print_lr(self, is_verbose: bool, group: Any, lr: float, epoch: int | None = None) -> None:
        """Print a learning rate, as schedulers of older torch do.

        Args:
            is_verbose: print at all.
            group: index of the group.
            lr: its learning rate.
            epoch: the epoch to name.
        """
        if is_verbose:
            head = "" if epoch is None else f"Epoch {epoch:5d}: "
            action = "Adjusting" if epoch is None else "adjusting"
            print(f"{head}{action} learning rate of group {group} to {lr:.4e}.")


class LoaderMembers(_Lent):
    """Members of Accelerate's prepared loaders."""

    skip_batches = 0
    _base_class: type[Any] = DataLoader
    submesh_tp = submesh_dp = submesh_fsdp = None

    @member
    def gradient_state(self: Any) -> Any:
        """The gradient window of the Accelerator."""
        return None if self._owner is None else self._owner.gradient_state

    @member
    def state(self: Any) -> Any:
        """The state of the Accelerator."""
        return None if self._owner is None else self._owner.state

    @member
    def device(self: Any) -> torch.device | None:
        """Where batches are moved to, None if they stay."""
        placed = self._owner is not None and self._owner.device_placement
        return self._owner.device if placed else None

    @member
    def iteration(self: Any) -> int:
        """The pass that goes on, or the next one."""
        if self._next_epoch is not None:
            return int(self._next_epoch)
        return int(self.epoch + (self.epoch < 0 or self.finished))

    @member
    def base_dataloader(self: Any) -> Any:
        """The loader that was prepared, itself where only it keeps its state."""
        is_given = self.origin is not None and isinstance(self.origin, self._base_class)
        return self.origin if is_given else self

    @member
    def use_stateful_dataloader(self: Any) -> bool:
        """Whether a stream was asked to resume from its own state."""
        return bool(self._option("continues"))

    @member
    def split_batches(self: Any) -> bool:
        """Whether a batch is that of all processes."""
        return bool(self._option("split_batches"))

    @member
    def dl_state_dict(self: Any) -> Any:
        """The state of the loader, at the batch that was given out last."""
        return self.state_dict()

    @member
    def synchronized_generator(self: Any) -> Any:
        """The generator of the sampler, None without one."""
        return getattr(get_sampler(self), "generator", None)

    @member
    def slice_fn(self: Any) -> Any:
        """The function that slices the part of one process from a batch, None without one."""
        return getattr(self, "_slice_fn", None)

    @member
    def torch_device_mesh(self: Any) -> Any:
        """The mesh of the processes, None without one."""
        return getattr(self._owner, "torch_device_mesh", None)

    def begin(self: Any) -> None:
        """Count as the loader that is read, for a loop that iterates another object."""
        if self._owner is not None and self not in self._owner.loop.position.active:
            self._owner.loop.position.active.append(self)

    def end(self: Any) -> None:
        """Count as read."""
        if self._owner is not None and self in self._owner.loop.position.active:
            self._owner.loop.position.active.remove(self)

    def reset(self) -> None:
        """Have no effect: what a pass has counted is forgotten when the next one begins."""

    def adjust_state_dict_for_prefetch(self) -> None:
        """Have no effect: the state is at the batch that was given out, and not read ahead."""

    def _option(self: Any, name: str) -> Any:
        return self._owner is not None and getattr(self._owner.dataloader_config, name, False)


def _handler(kind: type[Any]) -> Any:
    def get(self: Any) -> Any:
        return self.handlers.get(kind)

    return member(get)


class AcceleratorMembers:
    """Members of Accelerate's ``Accelerator``."""

    step_scheduler_with_optimizer = True
    #: Kernels of fp8 that this library does not use.
    fp8_recipe_handler = te_recipe_handler = msamp_recipe_handler = None
    delayed_fp8_autocast = False

    ddp_handler = _handler(DistributedDataParallelKwargs)
    scaler_handler = _handler(GradScalerKwargs)
    init_handler = _handler(InitProcessGroupKwargs)
    autocast_handler = _handler(AutocastKwargs)
    profile_handler = _handler(ProfileKwargs)
    ao_recipe_handler = _handler(AORecipeKwargs)

    @member
    def step(self: Any) -> int:
        """Micro-batches of the gradient window that is open: 0 at a step that is taken early."""
        window = self.window
        return 0 if window.sync and window.position < window.num_steps else int(window.position)

    @member
    def fp8_enabled(self: Any) -> bool:
        """Whether models compute in fp8."""
        return bool(self.mixed_precision == "fp8")

    @member
    def has_fp8_handler(self: Any) -> bool:
        """Whether fp8 has options, which it has where it is used."""
        return self.fp8_enabled or self.ao_recipe_handler is not None

    @member
    def fp8_backend(self: Any) -> FP8BackendType:
        """The package that computes in fp8."""
        return FP8BackendType.AO if self.has_fp8_handler else FP8BackendType.NO

    @member
    def native_amp(self: Any) -> bool:
        """Whether torch's autocast is used."""
        if self.mixed_precision == "fp16":
            return self.device.type not in ("cpu", "mps")
        return bool(self.mixed_precision != "no")

    @member
    def flag_tensor(self: Any) -> torch.Tensor | None:
        """The flag of ``set_trigger``, None where it is not set."""
        raised = self._trigger.is_set
        return torch.tensor(1, device=self.device) if raised else None

    @member
    def has_lomo_optimizer(self: Any) -> bool:
        """Whether an optimizer of lomo_optim was prepared."""
        return any(_is_lomo(optimizer.optimizer) for optimizer in self.optimizers)

    @member
    def deepspeed_engine_wrapped(self: Any) -> Any:
        """The DeepSpeed engine as ``.engine``, None without one."""
        engines = [model for model in self.models if type(model).__name__ == "DeepSpeedEngine"]
        return SimpleNamespace(engine=engines[0]) if engines else None

    def lomo_backward(self: Any, loss: torch.Tensor, learning_rate: float | None) -> None:
        """Compute gradients and update with optimizers of lomo_optim, which do both at once.

        Args:
            loss: the loss.
            learning_rate: the step.

        Raises:
            ValueError: there is no learning rate, or no such optimizer was prepared.
        """
        if learning_rate is None:
            raise ValueError("lomo_backward needs learning_rate=, by which it updates.")
        found = [each.optimizer for each in self.optimizers if _is_lomo(each.optimizer)]
        if not found:
            raise ValueError(
                "lomo_backward updates with Lomo or AdaLomo of lomo_optim: pass one to prepare()."
            )
        for optimizer in found:
            optimizer.fused_backward(loss, learning_rate)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether parts of a model are on several devices, by their ``hf_device_map``."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> NoReturn:
        """Raise NotProvided: prepared loaders and models share sequences already."""
        raise NotProvided(
            "Accelerator.deepspeed_ulysses_dl_adapter: prepare() shares the tokens of a batch "
            "where parallelism_config says so."
        )


def _is_lomo(optimizer: Any) -> bool:
    return any(
        kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__
    )
