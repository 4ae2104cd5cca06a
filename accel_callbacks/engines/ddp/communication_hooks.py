"""torch's communication hooks, as the options of DDP choose them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks.plugins.ddp import DDPCommunicationHookType as Hook
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs

__all__ = ["register_hook"]

_Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def register_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    """Register the communication hook of the options, inside of its wrapper."""
    hooks: dict[Hook, _Hook] = {
        Hook.FP16: default_hooks.fp16_compress_hook,
        Hook.BF16: default_hooks.bf16_compress_hook,
        Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
        Hook.BATCHED_POWER_SGD: _compress_whole(powerSGD_hook.powerSGD_hook),
    }
    wrappers: dict[Hook, Callable[[_Hook], _Hook]] = {
        Hook.NO: lambda hook: hook,
        Hook.FP16: default_hooks.fp16_compress_wrapper,
        Hook.BF16: default_hooks.bf16_compress_wrapper,
    }
    state: Any = None
    if options.comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD):
        state = powerSGD_hook.PowerSGDState(None, **options.comm_state_option)
    model.register_comm_hook(
        state, _hide_name(wrappers[options.comm_wrapper](hooks[options.comm_hook]))
    )


def _compress_whole(hook: _Hook) -> _Hook:
    """Return a PowerSGD hook that compresses a whole bucket as one matrix.

    It replaces torch's ``batched_powerSGD_hook``, which fails at its first compressed step.
    """

    def send(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        future = hook(state, _SquareBucket(bucket))
        return future.then(lambda reduced: reduced.value().flatten()[: len(flat)])

    return send


class _SquareBucket:
    """A gradient bucket with the interface of one that holds a single square gradient."""

    def __init__(self, bucket: Any) -> None:
        flat: torch.Tensor = bucket.buffer()
        # The smallest square that holds all elements; what is left of it are zeros.
        side = math.isqrt(max(len(flat) - 1, 0)) + 1
        self._flat = flat.new_zeros(side * side)
        self._flat[: len(flat)] = flat
        self._side = side
        self.index = bucket.index
        self.is_last = bucket.is_last

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return [self._flat.view(self._side, self._side)]


def _hide_name(hook: _Hook) -> _Hook:
    """Hide the name of a hook: DDP refuses bf16 ones by name without NCCL, but gloo sends them."""

    def send(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    # DDP checks annotations, and expects classes; they are strings in this file.
    send.__annotations__ = {}
    send.__qualname__ = getattr(hook, "__qualname__", send.__qualname__)  # for DDP's own log
    return send
