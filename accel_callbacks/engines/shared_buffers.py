"""Buffers of models that no wrapper keeps alike: those of rank 0, as in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks import collectives

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """Broadcasts buffers from rank 0 before each forward of training, and the first one after it.

    Args:
        skips: returns whether a buffer has another value on each rank for now.
        group: of the ranks that share a model, whose first one counts; all of them if None.
    """

    def __init__(self, skips: Callable[[torch.Tensor], bool], group: Any = None) -> None:
        self._skips = skips
        self._group = group
        self._trained: WeakSet[torch.nn.Module] = WeakSet()  # since their last broadcast

    def watch(self, model: torch.nn.Module) -> None:
        """Share the buffers of a model at its forwards from now on."""

        # A function, which a copy of the model shares; FSDP's own hooks are not compiled either.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def share(module: torch.nn.Module, inputs: object) -> None:
            self.share(module)

        model.register_forward_pre_hook(share)

    def share(self, model: torch.nn.Module) -> None:
        """Collective: broadcast the buffers of a model that may differ from those of rank 0."""
        if torch.is_grad_enabled():
            self._trained.add(model)
        elif model in self._trained:
            self._trained.discard(model)
        else:
            return
        if isinstance(model, DistributedDataParallel):
            model = model.module
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for name, buffer in model.named_buffers():
            whole = not buffer.is_meta and not collectives.is_sharded(buffer)
            if whole and name not in ignored and not self._skips(buffer):
                by_device.setdefault(buffer.device, []).append(buffer)
        if collectives.has_peers():
            for buffers in by_device.values():
                _broadcast(buffers, self._group)


@torch.no_grad()
def _broadcast(buffers: Sequence[torch.Tensor], group: Any) -> None:
    """Collective: overwrite buffers by those of the first rank, all in one message of bytes."""
    sent = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
    flat = torch.cat(sent)
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast(flat, first, group=group or collectives.group_for(flat))
    if collectives.rank() == first:
        return
    # An earlier forward may have saved them for a backward that is still to come, as DDP has it.
    with _unsafe_preserve_version_counter(tuple(buffers)):
        for buffer, received in zip(buffers, torch.split(flat, list(map(len, sent))), strict=True):
            # A copy, because a buffer may begin at a byte that is no multiple of its size.
            buffer.copy_(received.clone().view(buffer.dtype).view(buffer.shape))
