"""The states of models and optimizers on XLA devices, as copies on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel_callbacks.collectives.nested import map_tensors
from accel_callbacks.strategy.optimizer_state import named_optimizer_state
from accel_callbacks.strategy.state_access import StateAccess

__all__ = ["XLAStates"]


class XLAStates(StateAccess):
    """States that are copied to the host, and cut again when they are loaded.

    Args:
        unwrap: as of the base class.
        sync: runs what is queued on the device.
        annotate: cuts a parameter, or a tensor like it, over the devices.
    """

    def __init__(
        self,
        unwrap: Callable[[torch.nn.Module], torch.nn.Module],
        sync: Callable[[], None],
        annotate: Callable[..., None],
    ) -> None:
        super().__init__(unwrap)
        self._sync = sync
        self._annotate = annotate

    def local_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state of a model, copied to the host."""
        return self._on_host(self._unwrap(model).state_dict(keep_vars=True))

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return False: a state is a copy."""
        return False

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the gradients of an open window, copied to the host."""
        return self._on_host(super().open_gradients(model))

    def load_model_state_dict(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Load a state from the host, and cut the parameters as they were."""
        super().load_model_state_dict(model, state)
        for parameter in self._unwrap(model).parameters():
            self._annotate(parameter)
        self._sync()

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Return the state of an optimizer by parameter name, copied to the host."""
        return self._on_host(named_optimizer_state(optimizer, names))

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load a state, and cut what belongs to a parameter as that is cut."""
        super().load_optimizer_state_dict(optimizer, state)
        for parameter, entry in optimizer.state.items():
            for value in entry.values() if isinstance(entry, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    self._annotate(value, parameter)
        self._sync()

    def _on_host(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a tree with copies of its tensors on the host; tied ones stay tied."""
        # A sync draws the next seed of the generator: a run that saves would draw other numbers.
        seed = torch.xla.get_rng_state()  # type: ignore[attr-defined]
        self._sync()
        torch.xla.set_rng_state(seed)  # type: ignore[attr-defined]
        copies: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().cpu()
            return copies[id(tensor)]

        moved: dict[str, Any] = map_tensors(tree, copied)
        return moved
