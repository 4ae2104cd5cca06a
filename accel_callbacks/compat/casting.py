"""Layerwise casting: weights stored in a small dtype, and computed with in a larger one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from accel_callbacks.compat.hooks import ModelHook, add_hook_to_module, outside_graphs
from accel_callbacks.models.offload.slots import Lent, Slot

__all__ = ["LayerwiseCastingHook", "attach_layerwise_casting_hooks"]

_LAYERS = (
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
    torch.nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Store the floating-point tensors of a module in one dtype, and compute with them in another.

    They are rounded once, when the hook is attached. Each forward gets copies in the dtype of the
    computation; the stored tensors stay the module's parameters, so that optimizers keep them, and
    gradients reach them. Buffers that a forward writes are rounded again;
    what it writes into parameters is not kept.

    Args:
        storage_dtype: such as ``torch.float8_e4m3fn``.
        compute_dtype: such as ``torch.bfloat16``.
        non_blocking: do not wait for copies; has an effect for pinned memory only.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import LayerwiseCastingHook, add_hook_to_module
        >>> layer = torch.nn.Linear(2, 1)
        >>> hook = LayerwiseCastingHook(torch.float8_e4m3fn, torch.float32, non_blocking=False)
        >>> layer = add_hook_to_module(layer, hook)
        >>> layer.weight.dtype, layer(torch.ones(1, 2)).dtype
        (torch.float8_e4m3fn, torch.float32)
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False
    ) -> None:
        for dtype in (storage_dtype, compute_dtype):
            if not dtype.is_floating_point:
                raise ValueError(f"{dtype} is no floating-point dtype, such as torch.bfloat16.")
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._lent = Lent()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lent": Lent()}

    def init_hook(self, module: Any) -> Any:
        """Round to the dtype of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Put copies in the dtype of the computation in the place of the stored tensors."""
        self._cast(module)
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        """Put the stored tensors back."""
        self._restore()
        return output

    def forward_failed(self, module: Any) -> None:
        """Put the stored tensors back."""
        self._restore()

    def detach_hook(self, module: Any) -> Any:
        """Convert the tensors to the dtype of the computation for good."""
        self._restore(of_all=True)
        return module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)

    @outside_graphs
    def _cast(self, module: torch.nn.Module) -> None:
        if not self._lent.begin():
            return
        for path, owner in module.named_modules():
            for is_parameter, tensors in ((True, owner._parameters), (False, owner._buffers)):
                for key, tensor in tensors.items():
                    if tensor is None or not tensor.is_floating_point():
                        continue
                    copy = tensor.to(self.compute_dtype, non_blocking=self.non_blocking)
                    if copy is not tensor:
                        slot = Slot(owner, key, is_parameter)
                        self._lent.put(f"{path}.{key}", [slot], copy, tensor)

    @outside_graphs
    def _restore(self, of_all: bool = False) -> None:
        if not self._lent.end(of_all):
            return
        for loan in self._lent.take():
            if not loan.slots[0].is_parameter:
                loan.instead_of.copy_(loan.tensor)


def attach_layerwise_casting_hooks(
    module: torch.nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: type | tuple[type, ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear layers and convolutions in a small dtype.

    A layer whose parameters are tied to another kind of module, such as an embedding, is left as it
    is, and so is one that has such a hook.

    Args:
        module: the model, or one of these layers.
        storage_dtype: such as ``torch.float8_e4m3fn``.
        compute_dtype: such as ``torch.bfloat16``.
        skip_modules_pattern: a regular expression, or several: modules in whose names one is found
            are left as they are, with all in them.
        skip_modules_classes: classes of modules that are left as they are.
        non_blocking: do not wait for copies.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import attach_layerwise_casting_hooks
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
        >>> model[0].weight.dtype, model[1].weight.dtype
        (torch.float8_e4m3fn, torch.float32)
    """
    patterns = (
        [skip_modules_pattern]
        if isinstance(skip_modules_pattern, str)
        else list(skip_modules_pattern or ())
    )
    layers_found: dict[int, torch.nn.Module] = {}

    def visit(owner: torch.nn.Module, name: str) -> None:
        if skip_modules_classes is not None and isinstance(owner, skip_modules_classes):
            return
        if any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(owner, _LAYERS):
            layers_found[id(owner)] = owner
            return
        for key, child in owner.named_children():
            visit(child, f"{name}.{key}" if name else key)

    visit(module, "")
    layers = _leave_out_tied(module, list(layers_found.values()))
    for layer in layers:
        if not _casts(vars(layer).get("_hf_hook")):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(layer, hook, append=True)


def _leave_out_tied(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Return the layers whose parameters no other modules have."""
    everywhere = _owners(model.modules())
    ours = list(layers)
    while True:  # a layer that is left out may be tied to one that is not
        among = _owners(ours)
        untied = [
            layer
            for layer in ours
            if all(among[id(p)] == everywhere[id(p)] for p in layer.parameters())
        ]
        if len(untied) == len(ours):
            return untied
        ours = untied


def _owners(modules: Any) -> Counter[int]:
    return Counter(id(parameter) for owner in modules for parameter in owner._parameters.values())


def _casts(hook: Any) -> bool:
    return isinstance(hook, LayerwiseCastingHook) or any(map(_casts, getattr(hook, "hooks", ())))
