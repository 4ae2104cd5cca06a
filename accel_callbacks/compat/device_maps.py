"""Device maps as Accelerate makes them: devices are filled in order, and the main one keeps room.

Of this library's own plans, :func:`accel_callbacks.infer_auto_device_map` has more on accelerators.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.models.offload.budgets import Device, get_max_memory
from accel_callbacks.models.offload.device_map import clean_device_map
from accel_callbacks.models.offload.sizes import (
    AnyDtype,
    check_tied_parameters_in_config,
    class_names,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    direct_parts,
    find_tied_parameters,
    get_max_layer_size,
)
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = ["fallback_allocate", "get_module_size_with_ties", "infer_auto_device_map"]

_LOGGER = logging.getLogger("accelerate.utils.modeling")
_STORES = ("cpu", "disk")


def infer_auto_device_map(
    model: torch.nn.Module,
    max_memory: Mapping[Device, int | float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Return a device map that fills devices in order, as Accelerate does.

    The first accelerator and the host keep room for the largest layer that is not placed yet. What
    does not fit is split into its parts, or goes to the next device with all that follows.

    Args:
        model: also one on the meta device.
        max_memory: bytes, or text such as ``"8GB"``, by device; what is free here by default.
        no_split_module_classes: names of classes that are not split.
        dtype: the dtype that floating-point tensors are loaded as; their own by default.
        special_dtypes: dtypes of single tensors, by name.
        verbose: print where each part goes.
        clean_result: name a module in place of its parts if these are on one device.
        offload_buffers: buffers of offloaded layers are offloaded too, and need no accelerator.
        fallback_allocation: place a later part that fits on a device that would be left empty.

    Warns:
        UserWarning: no accelerator has room for the buffers of what is offloaded.
    """
    memory = get_max_memory(max_memory)
    filling = _Filling(
        model, memory, class_names(no_split_module_classes), dtype, special_dtypes, verbose
    )
    while filling.waiting:
        filling.place_next(fallback_allocation)
    if filling.needed:
        devices = listed(f"{device} ({size} bytes)" for device, size in filling.needed.items())
        _LOGGER.info(
            f"devices have insufficient memory, and nothing of the model: {devices}. Raise their "
            "max_memory to these sizes, or split larger classes."
        )
    if not offload_buffers:
        _check_buffers(filling, memory)
    return clean_device_map(filling.placed) if clean_result else filling.placed


def _check_buffers(filling: _Filling, memory: Mapping[Device, int]) -> None:
    """Warn if no accelerator has room for the buffers of what is offloaded."""
    nbytes = sum(filling.buffers.get(device, 0) for device in _STORES)
    free = [
        nbytes_of - filling.used[device]
        for device, nbytes_of in memory.items()
        if device not in _STORES
    ]
    if nbytes and free and max(free) < nbytes:
        warn(
            f"the buffers of offloaded layers are {nbytes} bytes, for which no accelerator has "
            "room: pass offload_buffers=True, or raise max_memory."
        )


class _Filling:
    """The state of devices while a model is placed on them, one after the other.

    Args:
        model: the model.
        memory: bytes by device, in the order in which they are filled.
        whole: names of classes that are not split.
        dtype: see :func:`infer_auto_device_map`.
        special_dtypes: the same.
        verbose: the same.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        memory: Mapping[Device, int],
        whole: frozenset[str],
        dtype: AnyDtype | None,
        special_dtypes: Mapping[str, AnyDtype] | None,
        verbose: bool,
    ) -> None:
        self.waiting: list[tuple[str, Any]] = direct_parts(model)
        self.placed: dict[str, Device] = {}
        self.used: dict[Device, int] = dict.fromkeys((*memory, "disk"), 0)
        #: Bytes of the first part that did not fit, by device that is left empty.
        self.needed: dict[Device, int] = {}
        self.buffers: dict[Device, int] = {}
        self._memory = memory
        self._whole = whole
        self._dtypes: Any = (dtype, special_dtypes)
        self._verbose = verbose
        self._devices: list[Device] = list(self.used)
        self._found: set[str] = set()  # what has been the next part once, and is not found again
        fast = [device for device in self._devices if device not in _STORES]
        self._keeping = {"mps"} if "mps" in fast else {*fast[:1], "cpu"}
        self._sizes = compute_module_sizes(model, *self._dtypes)
        self._ties = find_tied_parameters(model)
        if not self._ties and check_tied_parameters_in_config(model):
            _LOGGER.warning("weights that the config ties are not tied: call model.tie_weights().")
        self._largest, self._largest_names = self._find_largest(self.waiting)

    def place_next(self, fall_back: bool) -> None:
        """Place the next part, split it, or go on to the next device.

        Args:
            fall_back: look for another part if nothing is on the device yet.
        """
        name, part = self.waiting.pop(0)
        self._largest_names = [other for other in self._largest_names if not _is_in(other, name)]
        if not self._largest_names:
            self._update_largest()
        size = self._sizes[name]
        tied = self._ties_outside(name)
        total, owner_names, owners = get_module_size_with_ties(
            tied, size, self._sizes, self.waiting
        )
        device = self._devices[0]
        reserve = self._largest if device in self._keeping else 0
        room = float("inf") if device == "disk" else self._memory[device] - reserve
        room -= self.used[device]
        if total <= room:
            self._put(name, part, total, owner_names)
        elif size <= room and self._split_first(owner_names, owners):
            self.waiting.insert(0, (name, part))
        elif size >= room and _parts(name, part, self._whole):
            self._split(name, part, 0)
        elif not (fall_back and not self.used[device] and self._search(name, part, total)):
            self._go_on(name, part, total, reserve)

    def _go_on(self, name: str, part: Any, size: int, reserve: int) -> None:
        """Let a part wait for the next device."""
        device = self._devices.pop(0)
        self._say(f"{name} ({size} bytes) does not fit on {device}")
        if not self.used[device]:
            self.needed[device] = size + reserve
        self.used[device] += reserve
        self.waiting.insert(0, (name, part))

    def _put(self, name: str, part: Any, size: int, owners: list[str]) -> None:
        """Place a part and those that own what is tied to it."""
        device = self._devices[0]
        self._say(f"{name} ({size} bytes) is on {device}")
        self.used[device] += size
        self.placed.update(dict.fromkeys((name, *owners), device))
        self.waiting = [(other, value) for other, value in self.waiting if other not in owners]
        if isinstance(part, torch.nn.Module):
            nbytes = compute_module_total_buffer_size(part, *self._dtypes)
            self.buffers[device] = self.buffers.get(device, 0) + nbytes

    def _split_first(self, names: list[str], parts: list[Any]) -> bool:
        """Split the first of some waiting parts that can be; return whether one was."""
        waiting = [name for name, _ in self.waiting]
        for name, part in zip(names, parts, strict=True):
            if _parts(name, part, self._whole):
                at = waiting.index(name)
                del self.waiting[at]
                self._split(name, part, at)
                return True
        return False

    def _split(self, name: str, part: Any, at: int) -> None:
        """Let the parts of a module wait in its place."""
        self._say(f"{name} is split")
        self.waiting[at:at] = _parts(name, part, self._whole)
        self._update_largest()

    def _search(self, name: str, part: Any, size: int) -> bool:
        """Let a part that fits be the next one; return whether there is one."""
        device = self._devices[0]
        if device == "disk":
            return False
        room = self._memory[device] - max(self._largest, size)
        found, fitting, rest = fallback_allocate(
            self.waiting, self._sizes, room, self._whole, self._ties
        )
        if found is None or found in self._found:
            return False
        self._found.add(found)
        self.waiting = [(found, fitting), (name, part), *rest]
        return True

    def _ties_outside(self, name: str) -> list[str]:
        """Return the parameters outside of a part that are tied to one in it."""
        inside = [group for group in self._ties if any(_is_in(tied, name) for tied in group)]
        return [tied for group in inside for tied in group if not _is_in(tied, name)]

    def _update_largest(self) -> None:
        modules = [pair for pair in self.waiting if isinstance(pair[1], torch.nn.Module)]
        self._largest, self._largest_names = self._find_largest(modules)

    def _find_largest(self, parts: list[tuple[str, Any]]) -> tuple[int, list[str]]:
        return get_max_layer_size(parts, self._sizes, self._whole)

    def _say(self, text: str) -> None:
        if self._verbose:
            print(text)


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Any]],
) -> tuple[int, list[str], list[Any]]:
    """Return the bytes of a module and of those that hold its tied parameters, and the latter.

    Args:
        tied_params: names, outside of the module, of its parameters.
        module_size: bytes of the module.
        module_sizes: bytes by name.
        modules_to_treat: names with modules that are not placed yet; of others nothing is counted.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_module_size_with_ties
        >>> head = torch.nn.Linear(3, 2)
        >>> sizes = {"head": 32, "head.weight": 24}
        >>> get_module_size_with_ties(["head.weight"], 24, sizes, [("head", head)])[:2]
        (32, ['head'])
    """
    holders: dict[str, Any] = {}
    for tied in tied_params:
        for name, module in modules_to_treat:
            if tied == name or tied.startswith(f"{name}."):
                module_size -= module_sizes.get(tied, 0)
                if name not in holders:
                    holders[name] = module
                    module_size += module_sizes.get(name, 0)
                break
    return module_size, list(holders), list(holders.values())


def fallback_allocate(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Collection[str] | str | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[tuple[str, Any]]]:
    """Return the first module that fits, its name, and the modules without it.

    Modules that do not fit are split into their parameters, children and buffers.

    Args:
        modules: names with modules, or tensors.
        module_sizes: bytes by name.
        size_limit: bytes, or text such as ``"8GB"``.
        no_split_module_classes: names of classes that are not split.
        tied_parameters: groups of names; what is tied to a module counts with it.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import compute_module_sizes, fallback_allocate
        >>> model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(2, 1))
        >>> children = list(model.named_children())
        >>> fallback_allocate(children, compute_module_sizes(model), 20)[0]
        '1'
    """
    rest = list(modules)
    try:
        limit = convert_file_size_to_int(size_limit)
    except ValueError:
        return None, None, rest
    whole = class_names(no_split_module_classes)

    def size(name: str, others: Sequence[tuple[str, Any]]) -> int:
        tied = [
            parameter
            for group in tied_parameters or ()
            if any(_is_in(parameter, name) for parameter in group)
            for parameter in group
            if not _is_in(parameter, name)
        ]
        return get_module_size_with_ties(tied, module_sizes[name], module_sizes, others)[0]

    def search(
        inside: list[tuple[str, Any]], before: list[tuple[str, Any]], after: list[tuple[str, Any]]
    ) -> tuple[str, Any, list[tuple[str, Any]]] | None:
        for at, (name, module) in enumerate(inside):
            others = [*inside[at + 1 :], *after]
            if size(name, others) <= limit:
                return name, module, [*before, *inside[:at], *others]
            parts = _parts(name, module, whole)
            if parts and (fitting := search(parts, [*before, *inside[:at]], others)):
                return fitting
        return None

    return search(rest, [], []) or (None, None, rest)


def _parts(name: str, module: Any, whole: frozenset[str]) -> list[tuple[str, Any]]:
    """Return the parts of a module that may be split, none for another one and for a tensor."""
    if not isinstance(module, torch.nn.Module) or type(module).__name__ in whole:
        return []
    if not any(True for _ in module.children()):
        return []
    return [(f"{name}.{key}", part) for key, part in direct_parts(module)]


def _is_in(tensor: str, name: str) -> bool:
    return f"{tensor}.".startswith(f"{name}.")
