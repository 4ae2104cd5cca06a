"""Views of a dispatched module as ``module._hf_hook``, which other libraries read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from accel_callbacks.compat.folder import PrefixedDataset, names_in
from accel_callbacks.compat.hooks import AlignDevicesHook
from accel_callbacks.models.offload.align import AlignHook
from accel_callbacks.models.offload.origins import note_origin, same_bits
from accel_callbacks.models.offload.placeholder import AbsentWeight
from accel_callbacks.models.offload.residence import Offload, offload_hooks
from accel_callbacks.models.offload.slots import Slot
from accel_callbacks.models.offload.units import FetchUnit

__all__ = ["DispatchHook", "OffloadWeights", "put_views", "remove_views"]


class OffloadWeights(Mapping[str, torch.Tensor]):
    """The offloaded weights of a model by name, those on disk first.

    Args:
        offload: where they are.
    """

    def __init__(self, offload: Offload) -> None:
        self.offload = offload

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.offload.tensor(name)

    def __iter__(self) -> Iterator[str]:
        held = self.offload.held
        yield from (name for name in self.offload.stored.tensors if name not in held)
        yield from held

    def __len__(self) -> int:
        return len({*self.offload.stored.tensors, *self.offload.held})

    @property
    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The weights in host memory."""
        return self.offload.held

    @property
    def index(self) -> dict[str, dict[str, Any]]:
        """The places of the weights on disk, as an index of Accelerate's."""
        stored = self.offload.stored
        index: dict[str, dict[str, Any]] = {}
        keys: dict[str, Mapping[int, str]] = {}
        for name, tensor in stored.tensors.items():
            if name in self.offload.held:
                continue
            entry: dict[str, Any] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
            }
            if stored.identities[tensor.path].head:  # of a safetensors file
                if tensor.path not in keys:
                    keys[tensor.path] = names_in(tensor.path)
                entry["safetensors_file"] = tensor.path
                entry["weight_name"] = keys[tensor.path].get(tensor.begin, name)
            index[name] = entry
        return index


class _DispatchHooks:
    """A dispatched model and the hooks that serve it.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks = list(offload_hooks(model))

    def end_unused(self) -> None:
        """Remove the hooks without weights to fetch, and the guards after the last one."""
        unused = [hook for hook in self._hooks if not any(unit.slots for _, unit in hook.units)]
        for hook in unused:
            hook.detach()
        self._hooks = [hook for hook in self._hooks if hook not in unused]
        if unused and not self._hooks:
            for module in self._model.modules():
                if (guard := vars(module).get("_offload_guard")) is not None:
                    guard.off()


class _OffloadedWeight(NamedTuple):
    """An offloaded weight of a module."""

    offload: Offload
    unit: FetchUnit
    name: str

    @property
    def slots(self) -> list[Slot]:
        """The slot in the model."""
        return self.unit.slots[self.name]


class DispatchHook(AlignDevicesHook):
    """A view of the hooks of a dispatched module, which do the work.

    Its methods do what those of Accelerate's hook do: bring the module's own weights, take them
    back, and end their offloading. A weight that was changed meanwhile is held in host memory from
    then on.

    Args:
        module: the module.
        served: its own offloaded weights, by their key in it.
        device: where it runs.
        dispatched: the model.
        offload_buffers: buffers are offloaded too.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        served: Mapping[str, _OffloadedWeight],
        device: torch.device,
        dispatched: _DispatchHooks,
        offload_buffers: bool = False,
    ) -> None:
        super().__init__(device, bool(served), offload_buffers=offload_buffers)
        self._module = module
        self._dispatched = dispatched
        self._served = dict(served)
        self._own_map: PrefixedDataset | None = None
        for key, (offload, _, name) in self._served.items():
            if self._own_map is None:
                prefix = name[: len(name) - len(key)]
                self._own_map = PrefixedDataset(OffloadWeights(offload), prefix)
            self.original_devices[key] = torch.device("cpu" if name in offload.held else "meta")
        self.weights_map = self._own_map

    def _align(self) -> AlignHook | None:
        module: torch.nn.Module | None = self.__dict__.get("_module")
        return None if module is None else vars(module).get("_align_hook")

    @property
    def io_same_device(self) -> bool:
        """True if the output is sent to the device of the input."""
        align = self._align()
        return align is not None and align.returns

    @io_same_device.setter
    def io_same_device(self, value: bool) -> None:
        align = self._align()
        if align is not None:
            align.returns = value
        elif value:
            device = torch.device(self.execution_device or "cpu")
            AlignHook(device, True).attach(self._module)

    @property
    def skip_keys(self) -> Any:
        """Keys of the arguments that are not moved."""
        align = self._align()
        return sorted(align.skip_keys) if align is not None and align.skip_keys else None

    @skip_keys.setter
    def skip_keys(self, value: Any) -> None:
        align = self._align()
        if align is not None:
            align.skip_keys = frozenset([value] if isinstance(value, str) else value or ())

    def init_hook(self, module: Any) -> Any:
        """Return the module, whose hooks are attached already."""
        return module

    def _fetch(self, module: Any) -> None:
        if module is self._module:
            super()._fetch(module)

    def _lend(self, module: Any) -> None:
        """Lend copies of the module's own weights to all that have them."""
        device = torch.device(self.execution_device or "cpu")
        with torch.no_grad():
            for key, served in self._served.items():
                stands = _slot(module, key).get()
                if isinstance(stands, AbsentWeight):
                    value = served.offload.tensor(served.name).to(device, copy=True)
                    self._lent.put(key, served.slots, stands.filled(value), stands)

    def _drop(self, module: Any, of_all: bool = False) -> None:
        """Take the copies back; hold changed ones, and leave tensors that others have put there."""
        if module is not self._module or not self._lent.end(of_all):
            return
        for loan in self._lent:
            served, tensor = self._served[loan.name], _slot(module, loan.name).get()
            if tensor is not loan.tensor:
                # A script has assigned another parameter, as peft does: that one stays.
                self._lent.give(loan.name)
                self._keep(loan.name, loan.tensor if tensor is None else tensor, loan.tensor)
            elif not same_bits(tensor, served.offload.tensor(served.name)):
                served.offload.hold(served.name, tensor, loan.instead_of)
        self._lent.take()
        self.weights_map = self._own_map

    def _keep(self, key: str, tensor: torch.Tensor, instead_of: torch.Tensor) -> None:
        """Make a weight resident."""
        served = self._served.pop(key)
        for slot in served.slots:
            slot.replace(instead_of, tensor)
        self.original_devices[key] = tensor.device
        served.unit.slots.pop(served.name, None)
        served.unit.placeholders.pop(served.name, None)
        self.offload = bool(self._served)

    def detach_hook(self, module: Any) -> Any:
        """Give the module its own weights: those in host memory, and views of mapped files."""
        if module is not self._module:
            return module
        self._drop(module, of_all=True)
        for key, (offload, _, name) in list(self._served.items()):
            stands = _slot(module, key).get()
            if isinstance(stands, AbsentWeight):
                # `writable` takes it away from copies of the model, which share what is held.
                is_held = name in offload.held
                value = offload.writable(name) if is_held else offload.tensor(name)
                weight = stands.filled(value)
                if not is_held:
                    note_origin(weight, offload.stored, name)
                self._keep(key, weight, stands)
        if (align := self._align()) is not None:
            align.detach(module)
        self._dispatched.end_unused()
        return module


def _slot(module: torch.nn.Module, key: str) -> Slot:
    return Slot(module, key, key in module._parameters)


def put_views(model: torch.nn.Module, device: torch.device, offload_buffers: bool = False) -> None:
    """Set ``_hf_hook`` on a dispatched model and its parts, in place of an earlier dispatch's.

    Args:
        model: the model.
        device: where modules with offloaded weights run.
        offload_buffers: buffers are offloaded too.
    """
    remove_views(model)
    served: dict[int, dict[str, _OffloadedWeight]] = {}
    dispatched = _DispatchHooks(model)
    for hook in offload_hooks(model):
        for _, unit in hook.units:
            for name, slots in unit.slots.items():
                for slot in slots:
                    weights = served.setdefault(id(slot.module), {})
                    weights[slot.key] = _OffloadedWeight(hook.offload, unit, name)
    for module in model.modules():
        weights, align = served.get(id(module), {}), vars(module).get("_align_hook")
        if weights or align is not None or module is model:
            place = align.device if align is not None and not weights else device
            view = DispatchHook(module, weights, place, dispatched, offload_buffers)
            vars(module)["_hf_hook"] = view


def remove_views(model: torch.nn.Module) -> None:
    """Remove the views of :func:`put_views`, and nothing else."""
    for module in model.modules():
        if isinstance(vars(module).get("_hf_hook"), DispatchHook):
            del vars(module)["_hf_hook"]
