"""Move single tensors of a module, align and tie them, collect them in a state dict."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from accel_callbacks.memory import clear_device_cache
from accel_callbacks.models.offload.assignment import Place, device_of
from accel_callbacks.models.offload.placeholder import (
    AbsentWeight,
    AbsentWeightError,
    is_absent,
    on_meta,
    placeholder,
)
from accel_callbacks.models.offload.residence import offload_hook
from accel_callbacks.models.offload.sizes import as_dtype
from accel_callbacks.models.offload.slots import Lent, Slot

__all__ = [
    "align_module_device",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "is_quantizer",
    "move",
    "new_like",
    "recursive_getattr",
    "retie_parameters",
    "set_module_tensor_to_device",
    "stand_in",
]

#: Data pointer of a tied weight to its copies by device, filled in as they are made.
TiedParams = MutableMapping[int, MutableMapping[Any, torch.Tensor]]

_KIND = "_stands_for"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its path, such as ``"layers.0.weight"``.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import recursive_getattr
        >>> recursive_getattr(torch.nn.Sequential(torch.nn.Linear(2, 1)), "0.out_features")
        1
    """
    for part in attr.split("."):
        obj = getattr(obj, part)
    return obj


def stand_in(
    tensor: torch.Tensor, name: str, place: str, device: torch.device | None = None
) -> AbsentWeight:
    """Return the placeholder of a tensor, which records the class of its parameter.

    Tensors that are one object get one placeholder, so that tied parameters stay tied.

    Args:
        tensor: a parameter or buffer, or a placeholder, which is returned as it is.
        name: its name in the model, for messages.
        place: where its values are, for messages.
        device: where its module runs; where the tensor is, if ``None``.
    """
    if isinstance(tensor, AbsentWeight):
        return tensor
    attributes = vars(tensor)
    if attributes.get("_stand_in") is None:
        substitute = placeholder(tensor, name, place, tensor.device if device is None else device)
        setattr(
            substitute,
            _KIND,
            (type(tensor), {k: v for k, v in attributes.items() if k != "_stand_in"}),
        )
        attributes["_stand_in"] = substitute
    absent: AbsentWeight = attributes["_stand_in"]
    return absent


def new_like(old: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a value on a device as a parameter of the replaced one's class, or as a buffer.

    A value that is a parameter of a class of its own, such as a quantized one, moves by its own
    ``to``. What is there already is not copied.

    Args:
        old: the parameter, buffer or placeholder in whose place it comes.
        value: the values, of the dtype that they are to have.
        device: the target device.
    """
    if isinstance(old, AbsentWeight):  # whose own attributes save a detour over torch's functions
        is_parameter, requires_grad = old.is_parameter, old.is_trained
    else:
        is_parameter, requires_grad = isinstance(old, torch.nn.Parameter), old.requires_grad
    if not is_parameter or is_quantizer(value):
        return move(value, device)
    kind, attributes = _kind_of(old)
    if kind is torch.nn.Parameter or not issubclass(kind, torch.nn.Parameter):
        # A traceable subclass, such as torchao's, is a parameter by a mark: its data has the class.
        parameter = torch.nn.Parameter(move(value.detach(), device), requires_grad)
        if attributes:
            vars(parameter).update(
                {k: v for k, v in attributes.items() if k not in ("_stand_in", _KIND)}
            )
        return parameter
    options = {k: v for k, v in attributes.items() if k not in ("_stand_in", "_is_hf_initialized")}
    # bitsandbytes quantizes in `to`, its constructors take what their parameters have noted.
    return move(kind(value.detach(), requires_grad=requires_grad, **options), device)


def _kind_of(tensor: torch.Tensor) -> tuple[type, dict[str, Any]]:
    """Return the class and the attributes of a tensor, or of what a placeholder stands for."""
    if not isinstance(tensor, AbsentWeight):
        return type(tensor), vars(tensor)
    kind: tuple[type, dict[str, Any]] = vars(tensor).get(_KIND) or (torch.nn.Parameter, {})
    return kind


def is_quantizer(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter of a class of its own, whose ``to`` does more."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return issubclass(kind, torch.nn.Parameter)


def move(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, the same one if it is there."""
    is_there = value.device.type == device.type and device.index in (None, value.device.index)
    if is_there and not is_quantizer(value):
        return value
    # CUDA orders copies from pageable memory on its stream; MPS does not.
    return value.to(device, non_blocking=device.type == "cuda")


def set_module_tensor_to_device(
    module: torch.nn.Module,
    tensor_name: str,
    device: Place,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = False,
) -> None:
    """Move a parameter or buffer of a module to a device, with new values if given.

    On ``"meta"`` it becomes a placeholder: a computation with it raises AbsentWeightError.

    Args:
        module: the module, or one that contains it.
        tensor_name: the name of the tensor in it, with dots.
        device: a device, or the number of an accelerator.
        value: the values; required for a tensor that has none.
        dtype: the dtype that floating-point values get; that of the tensor before, if ``None``.
        fp16_statistics: the scales of an int8 weight of bitsandbytes.
        tied_params_map: copies of tied weights by data pointer and device: one that is there is
            used, one that is made is noted.
        non_blocking: do not wait for copies from pinned memory.
        clear_cache: give cached memory of the device back, which costs more than the rest of this.

    Raises:
        ValueError: there is no such tensor, it has no values, or ``value`` has another shape.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import set_module_tensor_to_device
        >>> layer = torch.nn.Linear(2, 1, device="meta")
        >>> set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(1, 2))
        >>> layer.weight
        Parameter containing:
        tensor([[1., 1.]], requires_grad=True)
    """
    slot = Slot.of(module, tensor_name)
    old = slot.get()
    assert old is not None
    target = device_of(device)
    known = _copies_by_device(tied_params_map, value if value is not None else old)
    if known is not None and device in known:
        slot.put(known[device])
        return
    if target.type == "meta":
        slot.put(_on_meta(old, tensor_name, dtype))
        return
    if value is None:
        if is_absent(old):
            raise ValueError(f"{tensor_name} has no values: give `value` to put it on {device}.")
        wanted = as_dtype(dtype) or old.dtype
        is_there = old.device.type == target.type and target.index in (None, old.device.index)
        if is_there and wanted == old.dtype:
            return  # the same parameter, so that optimizers and tied modules keep it
        source = old if is_quantizer(old) else _cast(old.detach(), wanted, non_blocking)
    else:
        source = _values_for(old, tensor_name, value, as_dtype(dtype), non_blocking)
    new = new_like(old, source, target)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(new.device)  # type: ignore[attr-defined]
    slot.put(new)
    if known is not None:
        known[device] = new
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()


def _copies_by_device(
    tied: TiedParams | None, tensor: torch.Tensor
) -> MutableMapping[Any, torch.Tensor] | None:
    """Return the copies of a tied weight by device, None if it is not tied."""
    if not tied or is_absent(tensor):
        return None
    return tied.get(tensor.data_ptr())


def _on_meta(old: torch.Tensor, name: str, dtype: str | torch.dtype | None) -> torch.Tensor:
    wanted = as_dtype(dtype)
    if isinstance(old, AbsentWeight) and wanted in (None, old.dtype):
        return old
    if wanted is not None and wanted != old.dtype and old.is_floating_point():
        old = on_meta(old, wanted)
    return stand_in(old, name, "on the meta device", torch.device("meta"))


def _cast(value: torch.Tensor, dtype: torch.dtype, non_blocking: bool = False) -> torch.Tensor:
    """Convert floating-point values; integers and booleans stay."""
    if value.dtype == dtype or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(dtype, non_blocking=non_blocking)


def _values_for(
    old: torch.Tensor,
    name: str,
    value: torch.Tensor,
    dtype: torch.dtype | None,
    non_blocking: bool,
) -> torch.Tensor:
    """Return the values for a tensor in its dtype; raise if they are not of its shape."""
    kind, _ = _kind_of(old)
    packed = "Params4bit" in (kind.__name__, type(value).__name__)
    if value.shape != old.shape and not packed:
        raise ValueError(
            f"{name} has shape {tuple(old.shape)}, and the value that it is to get has "
            f"{tuple(value.shape)}: these are weights of another model."
        )
    if is_quantizer(value):
        return value
    if dtype is not None:
        return _cast(value, dtype, non_blocking)
    return value.to(old.dtype, non_blocking=non_blocking)


def retie_parameters(model: torch.nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie the parameters of each group again, to the first of them that has values.

    Args:
        model: the model.
        tied_params: groups of names, from ``find_tied_parameters``.

    Raises:
        ValueError: parameters of a group have different shapes; nothing was changed.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import retie_parameters
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> retie_parameters(model, [["0.weight", "1.weight"]])
        >>> model[0].weight is model[1].weight
        True
    """
    changes: list[tuple[Slot, torch.Tensor]] = []
    for group in tied_params:
        slots = {name: Slot.of(model, name) for name in group}
        tensors = {
            name: tensor for name, slot in slots.items() if (tensor := slot.get()) is not None
        }
        if len({tensor.shape for tensor in tensors.values()}) > 1:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            raise ValueError(f"parameters of different shapes cannot be tied: {shapes}")
        for tensor in tensors.values():
            if not is_absent(tensor):
                changes += [(slot, tensor) for slot in slots.values()]
                break
    for slot, tensor in changes:
        slot.put(tensor)


def has_offloaded_params(module: torch.nn.Module) -> bool:
    """Return whether a hook of this module itself, not of its children, offloads its tensors.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import has_offloaded_params
        >>> has_offloaded_params(torch.nn.Linear(2, 1))
        False
    """
    return offload_hook(module) is not None


@contextmanager
def align_module_device(
    module: torch.nn.Module, execution_device: Place | None = None
) -> Iterator[None]:
    """Context manager: move a module's own parameters to a device.

    Offloaded ones are fetched, and written back if they were changed in place. Others move, and
    come back as the parameters that they were, with their changes.

    Args:
        module: the module; its children are left alone.
        execution_device: where; if ``None``, that of the hook, and a module without one is left
            alone.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import align_module_device
        >>> layer = torch.nn.Linear(2, 1)
        >>> with align_module_device(layer, "cpu"):
        ...     layer.weight.device
        device(type='cpu')
    """
    hook = offload_hook(module)
    if hook is not None:
        device = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            try:
                yield
            finally:
                hook.post_forward(module, None)
        finally:
            hook.execution_device = device
    elif execution_device is not None:
        with _lend_copies(module, device_of(execution_device)):
            yield
    else:
        yield


@contextmanager
def _lend_copies(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Replace parameters by copies on a device; copy changes back at the end."""
    lent = Lent()
    slots: dict[str, Any] = module._parameters
    try:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_absent(parameter) and device.type != "meta":
                raise AbsentWeightError(
                    f"{name} of {type(module).__name__} has no values: load them first, with "
                    "load_checkpoint_in_model(model, path)."
                )
            set_module_tensor_to_device(module, name, device)
            if slots[name] is not parameter:
                lent.put(name, [Slot(module, name, True)], slots[name], parameter)
        yield
    finally:
        for loan in lent:
            value = slots.get(loan.name)
            if value is None or is_absent(value):
                continue
            if value is not loan.tensor or loan.is_changed():
                with torch.no_grad():
                    loan.instead_of.copy_(value)
                slots[loan.name] = loan.instead_of
        lent.take()


def get_state_dict_offloaded_model(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state dict of an offloaded model, on the CPU.

    Tied parameters are one tensor in it.

    Raises:
        AbsentWeightError: a weight is on the meta device, and no hook knows its values.
        MemoryError: the model does not fit the CPU's memory.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_state_dict_offloaded_model
        >>> list(get_state_dict_offloaded_model(torch.nn.Linear(2, 1)))
        ['weight', 'bias']
    """
    groups: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first = {name: groups.setdefault(id(tensor), name) for name, tensor in named}
    with ExitStack() as stack:
        try:
            for module in model.modules():
                if has_offloaded_params(module):
                    stack.enter_context(align_module_device(module, "cpu"))
            state = model.state_dict()
            tensors = {name: _on_cpu(name, value) for name, value in state.items()}
        except MemoryError:
            raise MemoryError(
                "the model must fit the CPU's memory for a state dict of all of it"
            ) from None
    return {name: tensors.get(first.get(name, name), value) for name, value in tensors.items()}


def _on_cpu(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_absent(value):
        raise AbsentWeightError(
            f"{name} has no values: load them before the state dict is taken, with "
            "load_checkpoint_in_model(model, path)."
        )
    return value.to("cpu")


def get_state_dict_from_offload(
    module: torch.nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Place | None = "cpu",
) -> dict[str, Any]:
    """Fill the entries of a state dict that one module holds, in place.

    Args:
        module: the module; it may be offloaded.
        module_name: the name in the model of one of its tensors, such as ``"layers.0.weight"``.
        state_dict: entries by name; only those that are there are filled.
        device_to_put_offload: the device for what is offloaded.

    Returns:
        ``state_dict``.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import get_state_dict_from_offload
        >>> layer = torch.nn.Linear(2, 1)
        >>> filled = get_state_dict_from_offload(layer, "head.weight", {"head.bias": ""})
        >>> torch.equal(filled["head.bias"], layer.bias)
        True
    """
    root, dot, _ = module_name.rpartition(".")
    device = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for key, tensor in module.state_dict().items():
            if f"{root}{dot}{key}" in state_dict:
                state_dict[f"{root}{dot}{key}"] = tensor
    return state_dict


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return device, address and size of a tensor's storage, which identify it while it lives.

    All tensors on the meta device have address 0.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import id_tensor_storage
        >>> one = torch.ones(2)
        >>> id_tensor_storage(one) == id_tensor_storage(one[1:])
        True
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()
