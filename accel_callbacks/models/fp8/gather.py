"""Weights that FSDP gathers in float8: one byte an element in place of four."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch

from accel_callbacks.models.compile import is_compiled

__all__ = ["Float8Shard", "share_scales"]


class Float8Shard(torch.Tensor):
    """The part of a ``Float8Linear``'s weight on this rank, which FSDP gathers in float8.

    It is the part itself, in its own dtype and memory, with the two methods that FSDP looks for.
    torchao's tensor for this has no memory of its own, which optimizers, checkpoints and averages
    would have to know; it is made here for each gather. What is computed with a shard is a plain
    tensor.

    Args:
        part: the part, a plain tensor.
        writes: counts the writes to the whole weight.
        layer: the ``torchao.float8.float8_linear.Float8Linear``, for its config.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    _writes: Callable[[], int]
    _layer: Any
    _known: tuple[int, torch.Tensor] | None

    @staticmethod
    def __new__(cls, part: torch.Tensor, writes: Callable[[], int], layer: Any) -> Float8Shard:
        """Return a tensor in the memory of the part."""
        shard: Float8Shard = torch.Tensor._make_subclass(cls, part)
        return shard

    def __init__(self, part: torch.Tensor, writes: Callable[[], int], layer: Any) -> None:
        self._writes, self._layer, self._known = writes, layer, None

    def note_scale(self, scale: torch.Tensor | None) -> None:
        """Note the scale of the whole weight as it is now; None forgets it."""
        self._known = None if scale is None else (self._writes(), scale)

    @property
    def target_dtype(self) -> torch.dtype:
        """The dtype that is gathered."""
        dtype: torch.dtype = self._layer.config.cast_config_weight.target_dtype
        return dtype

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what is gathered, and the scale; collective if the scale is not known."""
        scale = None
        # Ranks write to a weight together, so that they agree on this.
        if self._known is not None and self._known[0] == self._writes():
            scale = self._known[1]
        gathered: tuple[tuple[torch.Tensor, ...], Any] = self._cast(scale).fsdp_pre_all_gather(mesh)
        return gathered

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Return the whole weight in float8, and the memory to free after it."""
        cast = self._cast()
        return cast.fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)

    def _cast(self, scale: torch.Tensor | None = None) -> Any:
        """Return this part as torchao's tensor."""
        kind = import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        return kind(self.detach(), self._layer.linear_mm_config, self.target_dtype, scale)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy that is gathered alike: so FSDP brings offloaded parts to the device."""
        return Float8Shard(self.detach().to(*args, **kwargs), self._writes, self._layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def share_scales(model: torch.nn.Module, weights: Sequence[torch.nn.Parameter]) -> None:
    """Compute the scales of all weights together, at the start of each forward of a model.

    One collective then, in place of one for each gather of a weight. torchao computes them after
    the optimizer's step, and they are wrong when the weights change after that, as averaged ones do
    that are lent for an evaluation.

    Args:
        model: a sharded model.
        weights: its DTensors whose parts are of `Float8Shard`.
    """

    def compute(module: torch.nn.Module, args: Any) -> None:
        # Offloaded parts are on the host, where the mesh may have no backend.
        shards = [
            (weight, shard)
            for weight, shard in _shards(weights)
            if weight.device.type == weight.device_mesh.device_type
        ]
        if not shards:
            return
        with torch.no_grad():
            largest: Any = torch.stack(torch._foreach_norm([w for w, _ in shards], math.inf))
            amax_to_scale = import_module("torchao.float8.float8_utils").amax_to_scale
            scales = amax_to_scale(largest.full_tensor(), shards[0][1].target_dtype)
        for (_, shard), scale in zip(shards, scales, strict=True):
            shard.note_scale(scale)

    def forget(module: torch.nn.Module, args: Any, output: Any) -> None:
        # Backward needs them. Without one, weights may be those of an evaluation.
        if not torch.is_grad_enabled():
            for _, shard in _shards(weights):
                shard.note_scale(None)

    if not weights:
        return
    hooks: list[Any] = [compute, forget]
    if is_compiled(model):  # compiled code leaves out what changes no tensor
        hooks = list(map(torch.compiler.disable, hooks))
    # Before that of FSDP, which gathers.
    model.register_forward_pre_hook(hooks[0], prepend=True)
    model.register_forward_hook(hooks[1], always_call=True)


def _shards(weights: Iterable[Any]) -> list[tuple[Any, Float8Shard]]:
    """Return the weights whose parts are still of `Float8Shard`, with these."""
    pairs = [(weight, weight._local_tensor) for weight in weights]
    return [(weight, part) for weight, part in pairs if isinstance(part, Float8Shard)]
