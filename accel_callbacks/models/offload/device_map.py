"""Device maps, from names of modules and tensors to devices: infer, check and shorten them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from accel_callbacks.errors import nearest
from accel_callbacks.models.offload.budgets import STORES, Device, get_max_memory
from accel_callbacks.models.offload.planner import Plan, PlanError, plan
from accel_callbacks.models.offload.sizes import (
    AnyDtype,
    class_names,
    compute_module_sizes,
    get_module_leaves,
    get_non_persistent_buffers,
)
from accel_callbacks.models.offload.units import place_of
from accel_callbacks.models.offload.weights import Weights
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = [
    "check_device_map",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "get_balanced_memory",
    "infer_auto_device_map",
    "planned_device_map",
]

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
_Memory = Mapping[Device, "int | float | str"]


def infer_auto_device_map(
    model: torch.nn.Module,
    max_memory: _Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Return a device map that fills accelerators, then the host, then the disk, in order.

    A view of ``accel_callbacks.offload.plan`` under Accelerate's name. If something is offloaded,
    the first accelerator keeps room for the largest such layer, and the host for the largest that
    comes from disk; otherwise all of the budgets is used.

    Args:
        model: also one on the meta device.
        max_memory: bytes, or text such as ``"8GB"``, by device; what is free here by default.
        no_split_module_classes: names of classes that are on one device. Others are split down to
            the modules without children.
        dtype: the dtype that floating-point tensors are loaded as; their own by default.
        special_dtypes: dtypes of single tensors, by name.
        verbose: print the plan, with a line for each unit.
        clean_result: name a module in place of its parts if these are on one device.
        offload_buffers: buffers of offloaded layers are offloaded too; they are on the device that
            computes otherwise, and are counted there.
        fallback_allocation: accepted for Accelerate; gaps are always filled.

    Warns:
        UserWarning: no placement keeps the budgets; the map leaves no room for what it offloads. Or
            no accelerator has room for any of the model while it runs.

    Example:
        >>> import torch
        >>> from accel_callbacks import infer_auto_device_map
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(size, 1) for size in (7, 2, 1)))
        >>> infer_auto_device_map(model, max_memory={0: 44, "cpu": 100})
        {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    weights = Weights.of_model(model, class_names(no_split_module_classes), dtype, special_dtypes)
    fitted = _plan_map(weights, get_max_memory(max_memory), offload_buffers)
    if verbose:
        print(fitted.table(every_unit=True))
    device_map = dict(fitted.device_map)
    return clean_device_map(device_map) if clean_result else device_map


def planned_device_map(
    model: torch.nn.Module,
    policy: str,
    max_memory: _Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    offload_buffers: bool = False,
) -> dict[str, Device]:
    """Return the device map of a model by a policy, as arguments ``device_map=`` name it.

    Args:
        model: also one on the meta device.
        policy: ``"auto"`` or ``"balanced"``, ``"balanced_low_0"`` or ``"sequential"``.
        max_memory: see :func:`infer_auto_device_map`, as the others.
        no_split_module_classes: the same.
        dtype: the same.
        offload_buffers: the same.

    Raises:
        ValueError: it is no policy.
    """
    if policy not in _POLICIES:
        raise ValueError(
            f"device_map={policy!r} is no policy: use {', '.join(map(repr, _POLICIES))}, or "
            'a mapping such as {"": "cpu"}.'
        )
    classes = no_split_module_classes
    if policy != "sequential":
        low_zero = policy == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, classes, dtype, low_zero=low_zero)
    return infer_auto_device_map(model, max_memory, classes, dtype, offload_buffers=offload_buffers)


def _plan_map(weights: Weights, memory: Mapping[Device, int], offload_buffers: bool) -> Plan:
    """Return the plan of a map; warn if it does not fit, or uses no accelerator."""
    try:
        fitted = plan(weights, memory, prefetch=0, offload_buffers=offload_buffers)
    except PlanError as error:
        warn(f"{error} The map leaves no room to run what it offloads.")
        return error.plan
    fast = [device for device, nbytes in memory.items() if device not in STORES and nbytes > 0]
    if fast and weights.nbytes and fitted.execution_device == "cpu":
        way = "" if offload_buffers else "pass offload_buffers=True, "
        warn(
            f"all of the model runs on the CPU, since {fast[0]} has no room for the largest layer "
            f"and the buffers that are to stay there: raise its max_memory, {way}or split larger "
            "classes."
        )
    return fitted


def get_balanced_memory(
    model: torch.nn.Module,
    max_memory: _Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Return budgets with which :func:`infer_auto_device_map` shares a model evenly.

    Each accelerator but the last gets its share and a little more: 1.25 times the largest block, or
    the mean layer if that is larger. The budgets stay as they are where something would be
    offloaded otherwise that they hold.

    Args:
        model: also one on the meta device.
        max_memory: bytes, or text such as ``"8GB"``, by device; by default what is free here, of
            which a single accelerator gives 90 %.
        no_split_module_classes: names of classes that are on one device.
        dtype: the dtype that floating-point tensors are loaded as; their own by default.
        special_dtypes: dtypes of single tensors, by name.
        low_zero: the first accelerator gets only what the others do not hold.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_balanced_memory
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(3, 2) for _ in range(8)])
        >>> get_balanced_memory(model, {"cpu": 500})
        {'cpu': 500}
    """
    memory = get_max_memory(max_memory)
    fast = [device for device, nbytes in memory.items() if device not in STORES and nbytes > 0]
    if not fast:
        return memory
    if len(fast) == 1:
        if max_memory is None:
            memory[fast[0]] = memory[fast[0]] * 9 // 10
        return memory
    classes = class_names(no_split_module_classes)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(fast) - low_zero) + _margin(model, sizes, classes)
    weights = Weights.of_model(model, classes, dtype, special_dtypes)
    shares = dict(memory)
    for device in fast[1 if low_zero else 0 : -1]:
        shares[device] = min(share, memory[device])
    if low_zero:
        others = sum(shares[device] for device in fast[1:])
        shares[fast[0]] = min(max(0, sizes[""] - others), memory[fast[0]])
    # An even share is worth nothing that is offloaded for it.
    worse = _bytes_elsewhere(weights, shares) > _bytes_elsewhere(weights, memory)
    return memory if worse else shares


def _bytes_elsewhere(weights: Weights, memory: Mapping[Device, int]) -> int:
    """Return what a map of these budgets offloads; all bytes if there is none."""
    try:
        return plan(weights, memory, prefetch=0).offloaded
    except PlanError:
        return weights.nbytes


def _margin(model: torch.nn.Module, sizes: Mapping[str, int], classes: frozenset[str]) -> int:
    """Return what a share has besides: the boundaries between layers are nowhere exact."""
    blocks = [
        sizes.get(name, 0)
        for name, module in model.named_modules()
        if name and type(module).__name__ in classes
    ]
    tensors = set(get_module_leaves(sizes))
    modules = {name: nbytes for name, nbytes in sizes.items() if name not in tensors}
    layers = get_module_leaves(modules)
    mean = sum(modules[name] for name in layers) // max(1, len(layers))
    return max([*blocks, mean]) * 5 // 4


def clean_device_map(device_map: dict[str, Device], module_name: str = "") -> dict[str, Device]:
    """Name a module in place of its parts where all of these are on one device, in place.

    Args:
        device_map: the map, which is changed.
        module_name: only this module and its parts.

    Returns:
        The same map.

    Example:
        >>> from accel_callbacks.utils import clean_device_map
        >>> clean_device_map({"a.0": 0, "a.1": 0, "b": "cpu"})
        {'a': 0, 'b': 'cpu'}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    devices: dict[str, set[Device]] = {}
    counts: dict[str, int] = {}
    for name in inside:
        for parent in _parents(name, prefix, module_name):
            devices.setdefault(parent, set()).add(device_map[name])
            counts[parent] = counts.get(parent, 0) + 1
    cleaned: dict[str, Device] = {}
    for name, device in device_map.items():
        if name.startswith(prefix):
            outer = _parents(name, prefix, module_name)
            name = next((p for p in outer if len(devices[p]) == 1 and counts[p] > 1), name)
        cleaned[name] = device
    device_map.clear()
    device_map.update(cleaned)
    return device_map


def _parents(name: str, prefix: str, module_name: str) -> Iterator[str]:
    """Yield the modules that contain a name, outermost first, within a module."""
    yield module_name
    end = name.find(".", len(prefix))
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    if name != module_name:
        yield name


def check_device_map(model: torch.nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that a device map has a device for each tensor of a model's state dict.

    Args:
        model: the model.
        device_map: devices by the names of modules or tensors; ``""`` is the model.

    Raises:
        ValueError: a tensor has none; the message names it.

    Warns:
        UserWarning: a name is none of the model's.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import check_device_map
        >>> check_device_map(torch.nn.Linear(1, 1), {"weight": "cpu"})
        Traceback (most recent call last):
        ValueError: the device map has no device for 'bias': add it, or a module that it is in.
    """
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    skipped = get_non_persistent_buffers(model, recurse=True, fqns=True)
    tensors = [
        name
        for named in (model.named_parameters, model.named_buffers)
        for name, _ in named(remove_duplicate=False)
    ]
    known = modules.union(tensors)
    if unknown := [name for name in device_map if name not in known]:
        hint = nearest(unknown[0], known)
        warn(
            f"the device map has names that are no module and no tensor of the model: "
            f"{listed(map(repr, unknown))}.{hint}"
        )
    missing = [
        name for name in tensors if name not in skipped and place_of(name, device_map) is None
    ]
    if missing:
        raise ValueError(
            f"the device map has no device for {listed(map(repr, missing))}: add it, or a "
            "module that it is in."
        )


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Device]
) -> None:
    """Check that a device map has one device for tied parameters.

    Args:
        tied_params: groups of names, as ``find_tied_parameters`` returns them.
        device_map: devices by the names of modules or tensors.

    Raises:
        ValueError: a parameter has no device.

    Warns:
        UserWarning: tied parameters are on several devices.

    Example:
        >>> from accel_callbacks.utils import check_tied_parameters_on_same_device
        >>> check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"": 0})
    """
    for group in tied_params:
        devices = {name: place_of(name, device_map) for name in group}
        absent = [name for name, device in devices.items() if device is None]
        if absent:
            raise ValueError(
                f"the device map has no device for {listed(map(repr, absent))}: add it."
            )
        if len(set(map(str, devices.values()))) > 1:
            shown = ", ".join(f"{name} on {device}" for name, device in devices.items())
            warn(
                f"tied parameters are on several devices: {shown}. Give them one in the map, or "
                "make it with infer_auto_device_map."
            )
