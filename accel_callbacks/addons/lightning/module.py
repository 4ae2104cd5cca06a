"""module_facade: the user's model as a LightningModule with the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.addons.lightning.packages import LightningPackage

if TYPE_CHECKING:
    from accel_callbacks.addons.lightning.trainer import TrainerFacade

__all__ = ["module_facade"]

_OWN = ("_trainer", "_fabric")
_CONTAINER = ("__getitem__", "__len__", "__iter__", "__contains__")


def module_facade(
    package: LightningPackage, model: torch.nn.Module | None, trainer: TrainerFacade
) -> Any:
    """Return a LightningModule that shares a model's dicts of parameters, modules and hooks.

    A deep copy of it (averaged weights) has no trainer, as with Lightning's modules.
    """
    model = torch.nn.Module() if model is None else model
    base = package.get("core.module", "LightningModule")
    parent = type(model) if isinstance(model, base) else base
    of = type(model)
    methods = {"__module__": of.__module__, **_container_methods(of)}
    kind: Any = type(of.__name__, (_ModuleMethods, parent), methods)
    facade = kind.__new__(kind)
    base.__init__(facade)
    attributes, shared = vars(facade), vars(model)
    attributes.update({n: shared[n] for n in attributes if n in shared and n not in _OWN})
    attributes.update(accel_model=model, _trainer=trainer)
    attributes.pop("training", None)  # so that the property is used
    return facade


def _container_methods(of: type[torch.nn.Module]) -> dict[str, Any]:
    """Return the methods of a container, such as Sequential, that a model's class has.

    Python looks these up in the class, and a class that had them without need would be a container.
    """

    def forwarding(name: str) -> Callable[..., Any]:
        return lambda facade, *args: getattr(facade.accel_model, name)(*args)

    methods = {name: forwarding(name) for name in _CONTAINER if hasattr(of, name)}
    # Callbacks ask `if pl_module`, which is no question about its length.
    return {**methods, "__bool__": lambda facade: True}


class _ModuleMethods:
    """The facade's own attributes; all others are those of the user's model."""

    accel_model: torch.nn.Module
    _trainer: TrainerFacade

    @property
    def training(self) -> bool:
        """The model's mode."""
        return self.accel_model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "accel_model" in vars(self):  # not in the __init__ of LightningModule
            self.accel_model.training = mode

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self._trainer.accel_run.accelerator.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        first = next(self.accel_model.parameters(), None)
        return torch.get_default_dtype() if first is None else first.dtype

    @property
    def example_input_array(self) -> Any:
        """The model's attribute of this name, for summaries."""
        return getattr(self.accel_model, "example_input_array", None)

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return batch

    def _apply_batch_transfer_handler(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        from accel_callbacks.data.device import send_to_device

        return send_to_device(batch, self.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``forward``; the facade has the model's hooks already."""
        return self.accel_model.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set the model's mode."""
        self.accel_model.train(mode)
        return self

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value of the step or of the epoch through ``accel.log``."""
        self._trainer.log_from_module(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log several values."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the prepared optimizers, or the user's own; a list unless there is one."""
        prepared = list(self._trainer.accel_run.accelerator.optimizers)
        optimizers: list[Any] = prepared if use_pl_optimizer else self._trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Call ``accel.backward``."""
        self._trainer.accel_run.accelerator.backward(loss, *args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors of all ranks along a new first dimension."""
        return self._trainer.strategy.all_gather(data)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 of each node."""
        self._trainer.print(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            model = vars(self).get("accel_model")
            if model is None or name == "__deepcopy__":
                raise
            return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = vars(self).get("accel_model")
        if model is None or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
        else:
            delattr(self.accel_model, name)
