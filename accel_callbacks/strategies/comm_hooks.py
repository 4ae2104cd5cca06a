"""How DDP sends gradients: torch's communication hooks, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks.plugins.ddp import DDPCommunicationHookType as Hook
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs

__all__ = ["register_hook"]

_Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def register_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    """Send the gradients of this model as the options say.

    Example:
        >>> from accel_callbacks import DistributedDataParallelKwargs
        >>> from accel_callbacks.strategies.comm_hooks import register_hook
        >>> register_hook(None, DistributedDataParallelKwargs())  # the default needs no hook
    """
    if options.comm_hook is Hook.NO:
        return
    # Here and not above: a run without hooks does not import them.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[Hook, _Hook] = {
        Hook.FP16: default_hooks.fp16_compress_hook,
        Hook.BF16: default_hooks.bf16_compress_hook,
        Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
        Hook.BATCHED_POWER_SGD: _squared(powerSGD_hook.powerSGD_hook),
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
        state, _named(wrappers[options.comm_wrapper](hooks[options.comm_hook]))
    )


def _squared(hook: _Hook) -> _Hook:
    """PowerSGD of a whole bucket as one matrix; torch's own fails at its first such step."""

    def send(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        future = hook(state, _Square(bucket))
        return future.then(lambda done: done.value().flatten()[: len(flat)])

    return send


class _Square:
    """A bucket of gradients that looks like one with a single square gradient."""

    def __init__(self, bucket: Any) -> None:
        flat: torch.Tensor = bucket.buffer()
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


def _named(hook: _Hook) -> _Hook:
    """The hook under another name: torch refuses bf16 ones by name, where gloo sends them well."""

    def send(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    send.__annotations__ = {}  # strings in this file, and DDP wants classes or nothing
    send.__qualname__ = getattr(hook, "__qualname__", send.__qualname__)  # for DDP's own log
    return send
