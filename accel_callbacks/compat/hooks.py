"""Hooks around a module's forward, under Accelerate's names: weights fetched for it and released.

A hook replaces ``module.forward``, with its signature; ``module._hf_hook`` is the hook, and
``module._old_forward`` the forward before. Hooks can be pickled and copied with their module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from accel_callbacks.collectives.nested import find_device
from accel_callbacks.compat.finder import is_installed
from accel_callbacks.compat.folder import PrefixedDataset
from accel_callbacks.compat.tensors import (
    TiedParams,
    move,
    new_like,
    set_module_tensor_to_device,
    stand_in,
)
from accel_callbacks.data.device import is_on, send_to_device
from accel_callbacks.distributed.topology import own_accelerator
from accel_callbacks.memory import clear_device_cache
from accel_callbacks.models.offload.align import MOVERS
from accel_callbacks.models.offload.assignment import Place, device_of
from accel_callbacks.models.offload.placeholder import (
    AbsentWeight,
    LostGradient,
    is_absent,
    on_meta,
)
from accel_callbacks.models.offload.sizes import get_non_persistent_buffers, named_module_tensors
from accel_callbacks.models.offload.slots import Lent, Slot

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "cpu_offload_with_hook",
    "outside_graphs",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Keep a function out of compiled graphs, without the import of ``torch._dynamo``."""

    disabled: list[Callable[..., Any]] = []  # no functools.cache: compiling would warn of it

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]


class ModelHook:
    """The base class of hooks: each method does nothing.

    Unlike torch's own hooks, these see and may change the keyword arguments, and a module has one,
    which a chain of hooks may be. Subclass it, and attach it with :func:`add_hook_to_module`.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import ModelHook, add_hook_to_module
        >>> class Doubled(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> layer = add_hook_to_module(torch.nn.Identity(), Doubled())
        >>> layer(torch.ones(1))
        tensor([2.])
    """

    #: The forward runs under ``torch.no_grad()``.
    no_grad: bool = False

    def init_hook(self, module: Any) -> Any:
        """Return the module, prepared; called when the hook is attached."""
        return module

    def pre_forward(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments and keyword arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        """Return the output of the forward."""
        return output

    def forward_failed(self, module: Any) -> None:
        """Clean up after a forward that raised, which skips ``post_forward``."""

    def detach_hook(self, module: Any) -> Any:
        """Return the module, restored; called when the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """A sequence of hooks; each method calls theirs in order.

    Args:
        hooks: the hooks.

    Example:
        >>> from accel_callbacks.utils import ModelHook, SequentialHook
        >>> len(SequentialHook(ModelHook(), ModelHook()).hooks)
        2
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        """True if one of them asks for ``torch.no_grad()``."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: Any) -> Any:
        """Initialize all hooks."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Pass the arguments through all hooks; if one raises, clean up those that have run."""
        done = 0
        try:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                done += 1
        except BaseException:
            for hook in self.hooks[:done]:
                hook.forward_failed(module)
            raise
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        """Pass the output through all hooks."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: Any) -> None:
        """Clean up after a forward that raised."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: Any) -> Any:
        """Detach all hooks."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _forward_with_hook(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:  # KeyboardInterrupt too: fetched weights would stay on the device
        if hasattr(hook, "forward_failed"):  # a class of Accelerate's has none
            hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


def add_hook_to_module(module: _Module, hook: Any, append: bool = False) -> _Module:
    """Attach a hook to a module, whose ``forward`` calls it and keeps its signature.

    Args:
        module: changed in place.
        hook: a :class:`ModelHook`.
        append: keep the hook that is there, and call both in order. If ``False``, that one is
            detached, so that weights that it has offloaded come back before this one is attached.

    Returns:
        The module.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import ModelHook, add_hook_to_module
        >>> layer = add_hook_to_module(torch.nn.Linear(2, 1), ModelHook())
        >>> type(layer._hf_hook).__name__
        'ModelHook'
    """
    attributes = vars(module)
    before = attributes.get("_hf_hook")
    if before is not None and append:
        hook.init_hook(module)
        attributes["_hf_hook"] = SequentialHook(before, hook)
        if "_old_forward" not in attributes:  # of a dispatched module, which is served without one
            attributes["_old_forward"] = module.forward
            _set_forward(module, _wrap_forward(module, attributes["_old_forward"]))
        return module
    if before is not None:
        # First of all: the new hook is to see weights, and not the placeholders of the old one.
        before.detach_hook(module)
        del attributes["_hf_hook"]
    if "_old_forward" not in attributes:
        attributes["_old_forward"] = module.forward
    module = hook.init_hook(module)
    vars(module)["_hf_hook"] = hook
    _set_forward(module, _wrap_forward(module, attributes["_old_forward"]))
    return module


def _wrap_forward(module: torch.nn.Module, forward: Any) -> Any:
    """Wrap a forward with the hook; keep its name, docstring and signature."""
    return functools.update_wrapper(functools.partial(_forward_with_hook, module), forward)


def _set_forward(module: torch.nn.Module, forward: Any) -> None:
    if isinstance(module, torch.fx.GraphModule):
        # Its `recompile` sets the forward of its class, which each has of its own.
        is_method = getattr(forward, "__self__", None) is module
        cls: Any = type(module)
        cls.forward = forward.__func__ if is_method else staticmethod(forward)
    else:
        vars(module)["forward"] = forward


def remove_hook_from_module(module: _Module, recurse: bool = False) -> _Module:
    """Remove the hook of a module, and restore its ``forward``; without one, do nothing.

    Args:
        module: changed in place.
        recurse: of all modules in it too.

    Returns:
        The module.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import ModelHook, add_hook_to_module
        >>> from accel_callbacks.utils import remove_hook_from_module
        >>> layer = add_hook_to_module(torch.nn.Linear(2, 1), ModelHook())
        >>> hasattr(remove_hook_from_module(layer), "_hf_hook")
        False
    """
    attributes = vars(module)
    if "_hf_hook" in attributes:
        attributes["_hf_hook"].detach_hook(module)
        del attributes["_hf_hook"]
    if "_old_forward" in attributes:
        forward = attributes.pop("_old_forward")
        if getattr(forward, "__self__", None) is module and not isinstance(
            module, torch.fx.GraphModule
        ):
            attributes.pop("forward", None)  # the method of the class
        else:
            _set_forward(module, forward)
    for name in MOVERS:
        attributes.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: torch.nn.Module) -> None:
    """Remove the hooks of a module and of all modules in it.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import ModelHook, add_hook_to_module
        >>> from accel_callbacks.utils import remove_hook_from_submodules
        >>> model = torch.nn.Sequential(add_hook_to_module(torch.nn.Linear(2, 1), ModelHook()))
        >>> remove_hook_from_submodules(model)
        >>> hasattr(model[0], "_hf_hook")
        False
    """
    remove_hook_from_module(module, recurse=True)


class AlignDevicesHook(ModelHook):
    """Move inputs and weights of a module to one device, and offload the weights after its forward.

    While they are offloaded, the module holds placeholders: a computation that uses one raises
    AbsentWeightError with its name. All are fetched together, and go after a forward that raises,
    too. What the forward writes into a fetched tensor in place is kept. ``state_dict()`` has the
    values.

    Args:
        execution_device: where the forward runs; inputs and weights stay where they are if
            ``None``.
        offload: keep the weights in ``weights_map`` outside of the forward.
        io_same_device: send the output to the device of the input.
        weights_map: tensors by name in the module; copies on the CPU are made if it is ``None``.
        offload_buffers: offload persistent buffers too.
        place_submodules: for the tensors of all modules in it, not only its own.
        skip_keys: keys of dicts in inputs and output whose values are not moved.
        tied_params_map: copies of tied weights by data pointer and device, which hooks that do not
            offload share while they are attached.

    Raises:
        ValueError: a weight to offload has other values in the folder of ``weights_map``; that
            belongs to another model.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import AlignDevicesHook, add_hook_to_module
        >>> layer = torch.nn.Linear(2, 1)
        >>> hook = AlignDevicesHook(execution_device="cpu", offload=True)
        >>> layer = add_hook_to_module(layer, hook)
        >>> type(layer.weight).__name__, layer(torch.ones(1, 2)).shape
        ('AbsentWeight', torch.Size([1, 1]))
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._away: dict[str, AbsentWeight] = {}  # placeholders by name
        self._refusals: dict[str, LostGradient] = {}
        self._lent = Lent()
        self._handle: Any = None

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    @property
    def _is_meta(self) -> bool:
        return self.execution_device is not None and str(self.execution_device) == "meta"

    def init_hook(self, module: Any) -> Any:
        """Move the tensors, or replace them by placeholders."""
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            self._place(module, self._tensors(module))
        # Its keys are addresses, which mean nothing in a copy or in another process.
        self.tied_params_map = None
        return module

    def _tensors(self, module: Any, buffers: bool = True) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name; of tied ones, all names."""
        deep = self.place_submodules
        tensors = dict(module.named_parameters(recurse=deep, remove_duplicate=False))
        if buffers:
            tensors.update(module.named_buffers(recurse=deep, remove_duplicate=False))
        return tensors

    def _place(self, module: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Move tensors to the execution device; on "meta", replace them by meta tensors."""
        assert self.execution_device is not None
        for name in tensors:
            if self._is_meta:
                Slot.of(module, name).put(on_meta(tensors[name]))
            else:
                set_module_tensor_to_device(
                    module, name, self.execution_device, tied_params_map=self.tied_params_map
                )

    def _offload(self, module: Any) -> None:
        everything = self._tensors(module)
        self.original_devices = {
            name: torch.device("meta") if is_absent(tensor) else tensor.device
            for name, tensor in everything.items()
        }
        away = self._tensors(module, self.offload_buffers)
        # They stay: no state dict has them, of which maps are made.
        for name in get_non_persistent_buffers(module, self.place_submodules, True):
            away.pop(name, None)
        if self.weights_map is None:
            self.weights_map = {name: _on_host(tensor) for name, tensor in away.items()}
        weights = self._weights()
        for name, tensor in away.items():
            if not is_absent(tensor):
                weights.check(name, tensor)
        device = None if self.execution_device is None else device_of(self.execution_device)
        if is_installed():
            device = torch.device("meta")  # what scripts of Accelerate ask for
        for name, tensor in away.items():
            full_name = f"{weights.prefix or type(module).__name__ + '.'}{name}"
            self._refusals[name] = LostGradient(full_name)
            self._away[name] = stand_in(tensor, full_name, "in the weights_map of a hook", device)
            Slot.of(module, name).put(self._away[name])
        if self.execution_device is not None:
            self._place(module, {k: tensor for k, tensor in everything.items() if k not in away})
        fill: Any = functools.partial(AlignDevicesHook.fill, self)  # which copies and pickles
        self._handle = module.register_state_dict_post_hook(fill)

    def _weights(self) -> PrefixedDataset:
        """Return the map of weights as one that can be written."""
        if isinstance(self.weights_map, PrefixedDataset):
            return self.weights_map
        return PrefixedDataset({} if self.weights_map is None else self.weights_map, "")

    def pre_forward(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Fetch the weights, and send the inputs to the execution device."""
        if self.io_same_device:
            self.input_device = _find_device(args, kwargs)
        if self.offload:
            self._fetch(module)
        if self.execution_device is None:
            return args, kwargs
        return (
            _to_device(args, self.execution_device),
            _to_device(kwargs, self.execution_device, self.skip_keys),
        )

    def post_forward(self, module: Any, output: Any) -> Any:
        """Release the fetched weights, and send the output to the device of the input."""
        if self.offload:
            self._drop(module)
        if self.io_same_device and self.input_device is not None:
            output = _to_device(output, self.input_device, self.skip_keys)
        return output

    def forward_failed(self, module: Any) -> None:
        """Release the fetched weights."""
        if self.offload:
            self._drop(module)

    @outside_graphs
    def _fetch(self, module: Any) -> None:
        if not self._lent.begin():  # an outer call has fetched them, and releases them
            return
        try:
            self._lend(module)
        except BaseException:
            self._drop(module)
            raise

    def _lend(self, module: Any) -> None:
        """Fill the slots that hold our placeholders; leave tensors that others have put there."""
        device = device_of("cpu" if self.execution_device is None else self.execution_device)
        weights = self._weights()
        for name, absent in self._away.items():
            slot = Slot.of(module, name)
            if slot.get() is absent:
                tensor = self._materialize(name, weights[name], device)
                self._lent.put(name, [slot], tensor, absent)

    def _materialize(self, name: str, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor for a slot: the stored one where device and dtype fit, else a copy."""
        absent = self._away[name]
        if device.type == "meta":
            return on_meta(absent)
        with torch._C.DisableTorchFunctionSubclass():  # the placeholder answers slowly
            shape, dtype = absent.shape, absent.dtype
        if value.shape != shape:
            raise ValueError(
                f"{self._refusals[name].name} has shape {tuple(shape)}, and what is stored has "
                f"{tuple(value.shape)}: these are weights of another model."
            )
        if value.dtype != dtype:
            value = value.to(dtype)
        same_kind = isinstance(value, torch.nn.Parameter) == absent.is_parameter
        is_alike = same_kind and value.requires_grad == absent.is_trained
        if is_alike and move(value, device) is value:
            return value  # a parameter of the script's, which gets its gradient
        tensor = new_like(absent, value, device)
        if tensor.requires_grad and torch.is_grad_enabled() and tensor.is_leaf:
            tensor.register_hook(self._refusals[name])  # type: ignore[no-untyped-call]
        return tensor

    @outside_graphs
    def _drop(self, module: Any, of_all: bool = False) -> None:
        """Restore the placeholders, and store tensors that were changed in place."""
        if not self._lent.end(of_all):
            return
        weights = self._weights()
        for loan in self._lent.take():
            weights.put(loan.name, loan.tensor.detach().to("cpu"))

    def fill(
        self, module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        """Replace placeholders in a state dict by values; a state dict hook of torch."""
        for name, absent in self._away.items():
            is_away = isinstance(state_dict.get(prefix + name), AbsentWeight)
            if is_away and Slot.of(module, name).get() is absent:
                state_dict[prefix + name] = self._weights()[name].detach()

    def detach_hook(self, module: Any) -> Any:
        """Restore the weights to their original devices; absent ones stay absent."""
        if not self.offload:
            return module
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._drop(module, of_all=True)
        for name, device in self.original_devices.items():
            if device.type == "meta":
                continue
            if name not in self._away:
                set_module_tensor_to_device(module, name, device)
            elif (slot := Slot.of(module, name)).get() is self._away[name]:
                slot.put(self._restore(name, self._away[name], device))
        self._away.clear()
        return module

    def _restore(self, name: str, absent: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor that replaces a placeholder; tied placeholders share one."""
        attributes = vars(absent)
        if attributes.get("_restored") is None:
            assert self.weights_map is not None
            value = self.weights_map[name].to(absent.dtype)
            is_same = isinstance(value, torch.nn.Parameter) and move(value, device) is value
            tensor = value if is_same else new_like(absent, value, device)
            vars(tensor).pop("_stand_in", None)
            attributes["_restored"] = tensor
        restored: torch.Tensor = attributes["_restored"]
        return restored


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, itself if it is on the CPU already."""
    if is_absent(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on the meta device has no values to offload: "
            "give weights_map, or load the weights first."
        )
    if tensor.device.type == "cpu":
        return tensor
    with torch.no_grad():  # a graph would keep the memory on the device
        return tensor.to("cpu")


def _find_device(args: Any, kwargs: Any) -> torch.device | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return _find_nested_device(args, kwargs)


@outside_graphs
def _find_nested_device(args: Any, kwargs: Any) -> torch.device | None:
    return find_device([args, kwargs])


def _to_device(data: Any, device: Place, skip_keys: Any = None) -> Any:
    """Return a structure on a device; break the graph only if a tensor has to move."""
    if is_on(data, device):
        return data
    return _send(data, device, skip_keys)


@outside_graphs
def _send(data: Any, device: Place, skip_keys: Any) -> Any:
    return send_to_device(data, device_of(device), skip_keys=skip_keys)


def attach_execution_device_hook(
    module: torch.nn.Module,
    execution_device: Place,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach a hook to each module with tensors that has none: its forward runs on a device.

    Args:
        module: the module, and all in it.
        execution_device: where their tensors and inputs go.
        skip_keys: keys of dicts in inputs and outputs whose values are not moved.
        preload_module_classes: names of classes in whose modules it stops.
        tied_params_map: see :class:`AlignDevicesHook`.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import attach_execution_device_hook
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU())
        >>> attach_execution_device_hook(model, "cpu")
        >>> [hasattr(child, "_hf_hook") for child in model]
        [True, False]
    """
    if not hasattr(module, "_hf_hook") and any(
        True for _ in named_module_tensors(module, recurse=True)
    ):
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: torch.nn.Module,
    execution_device: Place | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach an :class:`AlignDevicesHook` to each module that has tensors of its own.

    Args:
        module: the module, and all in it.
        execution_device: where the forwards run.
        offload: offload the weights after each forward.
        weights_map: tensors by their names in the model.
        offload_buffers: offload persistent buffers too.
        module_name: the name of ``module`` in the model.
        skip_keys: keys of dicts in inputs and outputs whose values are not moved.
        preload_module_classes: names of classes whose modules fetch the weights of all modules in
            them, because they use weights of children without calling these.
            ``torch.nn.MultiheadAttention`` is one without being named.
        tied_params_map: see :class:`AlignDevicesHook`.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import attach_align_device_hook
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> attach_align_device_hook(model, "cpu", offload=True)
        >>> type(model[0].weight).__name__, model(torch.ones(1, 2)).shape
        ('AbsentWeight', torch.Size([1, 1]))
    """
    preloads = isinstance(module, torch.nn.MultiheadAttention) or (
        type(module).__name__ in (preload_module_classes or ())
    )
    whole = offload and preloads
    if whole or any(True for _ in named_module_tensors(module)):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: torch.nn.Module,
    execution_device: Place | Mapping[str, Place] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach hooks to the blocks of a model, each with a device of its own.

    Args:
        module: the model, or a module of it.
        execution_device: a device for all, or devices by the names of blocks.
        offload: for all, or by the names of blocks.
        weights_map: tensors by their names in the model.
        offload_buffers: offload persistent buffers too.
        module_name: the name of ``module`` in the model.
        skip_keys: keys of dicts in inputs and outputs whose values are not moved.
        preload_module_classes: see :func:`attach_align_device_hook`.
        tied_params_map: see :class:`AlignDevicesHook`.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import attach_align_device_hook_on_blocks
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> attach_align_device_hook_on_blocks(
        ...     model, {"0": "cpu", "1": "cpu"}, {"0": False, "1": True}
        ... )
        >>> [type(layer.weight).__name__ for layer in model]
        ['Parameter', 'AbsentWeight']
    """
    options: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloading: dict[str, Any] = {
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "preload_module_classes": preload_module_classes,
        **options,
    }

    def add(device: Any, **further: Any) -> None:
        add_hook_to_module(module, AlignDevicesHook(device, **options, **further))

    def add_offload(device: Any) -> None:
        attach_align_device_hook(module, device, True, module_name=module_name, **offloading)

    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            add_offload(execution_device)
        else:
            add(execution_device, io_same_device=True, place_submodules=True)
        return
    devices: Any = execution_device
    leaving: Any = offload
    if not isinstance(devices, Mapping):
        devices = dict.fromkeys(leaving, devices)
    if not isinstance(leaving, Mapping):
        leaving = dict.fromkeys(devices, leaving)
    is_root = module_name == ""
    if module_name in devices and module_name in leaving:
        device, is_leaving = devices[module_name], leaving[module_name]
        if is_leaving:
            add_offload(device)
            if not hasattr(module, "_hf_hook"):
                add(device, io_same_device=is_root)
        else:
            placed = {"offload_buffers": offload_buffers, "place_submodules": True}
            add(device, io_same_device=is_root, **placed)
        whole = preload_module_classes if is_leaving else None
        attach_execution_device_hook(module, device, preload_module_classes=whole, **options)
    elif is_root:
        add(devices.get(""), io_same_device=True)
    for name, child in module.named_children():
        attach_align_device_hook_on_blocks(
            child,
            devices,
            leaving,
            module_name=name if is_root else f"{module_name}.{name}",
            **offloading,
        )


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward, and on the device after it.

    It goes back when ``init_hook`` is called again, as :class:`UserCpuOffloadHook` does.

    Args:
        execution_device: the accelerator of this machine, or else the CPU, if ``None``.
        prev_module_hook: of the model that runs before this one in a pipeline; that model goes to
            the CPU before this one comes to the device.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import CpuOffload, add_hook_to_module
        >>> layer = add_hook_to_module(torch.nn.Linear(2, 1), CpuOffload("cpu"))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        default = own_accelerator() or torch.device("cpu")
        self.execution_device = default if execution_device is None else device_of(execution_device)

    def init_hook(self, module: Any) -> Any:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move the model and its inputs to the device, and offload the model before it."""
        self._exchange(module)
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device),
        )

    @outside_graphs
    def _exchange(self, module: torch.nn.Module) -> None:
        before = self.prev_module_hook
        if isinstance(before, UserCpuOffloadHook) and not _is_on(before.model, torch.device("cpu")):
            before.offload()
            clear_device_cache()
        if not _is_on(module, self.execution_device):
            module.to(self.execution_device)


def _is_on(model: torch.nn.Module, device: torch.device) -> bool:
    """Return whether all tensors of a model are on a device."""
    return all(
        tensor.device.type == device.type and device.index in (None, tensor.device.index)
        for tensor in (*model.parameters(), *model.buffers())
    )


class UserCpuOffloadHook:
    """A model with its hook: moves it to the CPU, or removes the hook.

    Args:
        model: the model.
        hook: its hook.

    Example:
        >>> import torch
        >>> from accel_callbacks import cpu_offload_with_hook
        >>> model, hook = cpu_offload_with_hook(torch.nn.Linear(2, 1), "cpu")
        >>> hook.offload()
        >>> hook.remove()
    """

    def __init__(self, model: torch.nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU; its next forward brings it back."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: _Module,
    execution_device: Place | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[_Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until its forward, and on the device until it is offloaded.

    For pipelines that run several models, one of them in a loop: the one that runs is on the
    device, and the one before it leaves when the next begins.

    Args:
        model: changed in place, and moved to the CPU.
        execution_device: the accelerator of this machine, or else the CPU, if ``None``.
        prev_module_hook: what this function returned for the model that runs before.

    Returns:
        The model, and what moves it to the CPU.

    Example:
        >>> import torch
        >>> from accel_callbacks import cpu_offload_with_hook
        >>> encoder, first = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu")
        >>> decoder, second = cpu_offload_with_hook(torch.nn.Linear(2, 1), "cpu", first)
        >>> decoder(encoder(torch.ones(1, 2))).shape
        torch.Size([1, 1])
        >>> second.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
