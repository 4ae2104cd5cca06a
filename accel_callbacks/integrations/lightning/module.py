"""A LightningModule that is the user's model: the same parameters under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.integrations.lightning.packages import LightningPackage

if TYPE_CHECKING:
    from accel_callbacks.integrations.lightning.trainer import TrainerFacade

__all__ = ["module_facade"]

_OWN = ("_trainer", "_fabric")


class _Methods:
    """What the facade answers itself; everything else it has from the user's model."""

    accel_model: torch.nn.Module
    _trainer: TrainerFacade

    @property
    def training(self) -> bool:
        """The model's mode."""
        return self.accel_model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "accel_model" in vars(self):  # not while the facade is being made
            self.accel_model.training = mode

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        device: torch.device = self._trainer.accel_run.accelerator.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """That of the first parameter."""
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
        """The model's own; its hooks are the facade's too."""
        return self.accel_model.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set the model's mode."""
        self.accel_model.train(mode)
        return self

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Hand a value to ``accel.log``, as a value of the step or of the epoch."""
        self._trainer.log_from_module(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """The same for several."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The prepared optimizers, or the user's own; one, or a list."""
        prepared = list(self._trainer.accel_run.accelerator.optimizers)
        found: list[Any] = prepared if use_pl_optimizer else self._trainer.optimizers
        return found[0] if len(found) == 1 else found

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """``accel.backward``."""
        self._trainer.accel_run.accelerator.backward(loss, *args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The tensors of all processes, stacked."""
        return self._trainer.strategy.all_gather(data)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
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


def module_facade(
    package: LightningPackage, model: torch.nn.Module | None, trainer: TrainerFacade
) -> Any:
    """A LightningModule over a model, which shares its dicts of parameters, modules and hooks.

    A copy of it (averaged weights) leaves the trainer behind, as Lightning's modules do.
    """
    model = torch.nn.Module() if model is None else model
    base = package.get("core.module", "LightningModule")
    parent = type(model) if isinstance(model, base) else base
    of = type(model)
    kind: Any = type(of.__name__, (_Methods, parent), {"__module__": of.__module__})
    facade = kind.__new__(kind)
    base.__init__(facade)
    here, there = vars(facade), vars(model)
    here.update({key: there[key] for key in here if key in there and key not in _OWN})
    here.update(accel_model=model, _trainer=trainer)
    here.pop("training", None)
    return facade
