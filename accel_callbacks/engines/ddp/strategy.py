"""DistributedDataParallel and its communication hooks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks import collectives
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.checks import ignored_weights, refuse_distributed, refuse_spread
from accel_callbacks.engines.ddp.forward_methods import (
    DistributedDataParallel as PreparedDDP,
)
from accel_callbacks.engines.ddp.gradients import AveragedGradients
from accel_callbacks.engines.shared_buffers import SharedBuffers
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.ddp import DDPCommunicationHookType as Hook
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.base import Strategy

if TYPE_CHECKING:
    from accel_callbacks.engines.ddp.states import ReplicaStates

__all__ = ["DDP", "register_hook"]

_Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def register_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    """Register the communication hook of the options, if there is one."""
    if options.comm_hook is Hook.NO:
        return
    # Imported here, because a run without hooks does not need them.
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
    """Return a PowerSGD hook that compresses a whole bucket as one matrix.

    It replaces torch's ``batched_powerSGD_hook``, which fails at its first compressed step.
    """

    def send(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        future = hook(state, _Square(bucket))
        return future.then(lambda reduced: reduced.value().flatten()[: len(flat)])

    return send


class _Square:
    """A gradient bucket with the interface of one that holds a single square gradient."""

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
    """Hide the name of a hook: DDP refuses bf16 ones by name without NCCL, but gloo sends them."""

    def send(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    # DDP checks annotations, and expects classes; they are strings in this file.
    send.__annotations__ = {}
    send.__qualname__ = getattr(hook, "__qualname__", send.__qualname__)  # for DDP's own log
    return send


class DDP(Strategy):
    """A strategy that wraps each model with trainable parameters in DistributedDataParallel.

    Args:
        topology: the rank and device of this process.
        handlers: for their :class:`accel_callbacks.DistributedDataParallelKwargs`.
        parallelism: how the ranks are arranged.

    Example:
        >>> from accel_callbacks.engines import DDP
        >>> DDP.has_gradient_sync
        True
    """

    name = "ddp"
    has_gradient_sync = True

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(topology, handlers, parallelism)
        default = DistributedDataParallelKwargs()
        self.options = self.handlers.get(DistributedDataParallelKwargs, default)

    @cached_property
    def gradients(self) -> AveragedGradients:
        """The gradients of replicas."""
        return AveragedGradients(self.options, self.topology.device)

    @cached_property
    def states(self) -> ReplicaStates:
        """The states of replicas."""
        from accel_callbacks.engines.ddp.states import ReplicaStates

        return ReplicaStates(self.unwrap, self.topology.rank, self.gradients.apart)

    def check(self, model: torch.nn.Module, num_steps: int = 1) -> None:
        """Refuse models that are distributed already, and windows with a static graph.

        torch learns the graph in a first backward that averages.
        """
        super().check(model, num_steps)
        if self.options.static_graph and num_steps > 1:
            raise ValueError(
                "DistributedDataParallelKwargs(static_graph=True) does not work with a gradient "
                f"window of {num_steps} micro-batches, of whose backward passes torch averages the "
                "last alone: leave static_graph out, or average after each one with "
                f"GradientAccumulationPlugin(num_steps={num_steps}, sync_each_batch=True)."
            )
        refuse_spread(model)
        refuse_distributed(model)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model unless all of it is frozen."""
        frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        if len(frozen) == sum(1 for _ in model.parameters()):
            return model
        self._refuse_other_ranks()
        ignored = set(ignored_weights(model, self.topology.device))
        if ignored:  # neither sent at the start nor averaged
            known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
            # As DDP's _set_params_and_buffers_to_ignore_for_model does.
            model._ddp_params_and_buffers_to_ignore = {*known, *ignored}  # type: ignore[assignment]
            frozen = [(name, parameter) for name, parameter in frozen if name not in ignored]
        index = self.topology.device.index
        options = self.options.to_kwargs()
        if self.sequences.shared:  # DDP would send rank 0's part of a buffer that is cut
            options["broadcast_buffers"] = False
        with warnings.catch_warnings():
            # The name that replaces it always shares buffers at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = PreparedDDP(model, device_ids=None if index is None else [index], **options)
        if self.sequences.shared and self.options.broadcast_buffers:
            SharedBuffers(self.sequences.is_cut).watch(wrapped)
        # Moved to the end of __dict__, so that it is freed after the reducer: a group whose last
        # reference is the reducer's can deadlock when it is freed.
        wrapped.process_group = wrapped.__dict__.pop("process_group")
        register_hook(wrapped, self.options)
        self.gradients.watch(wrapped)
        if frozen:
            wrapped.register_forward_pre_hook(_StillFrozen(frozen))
        return wrapped

    def _refuse_other_ranks(self) -> None:
        """Raise if the script has replaced the process group by one of other ranks, or by none."""
        rank, world_size = collectives.rank(), collectives.world_size()
        if (rank, world_size) != (self.topology.rank, self.topology.world_size):
            raise RuntimeError(
                f"this Accelerator was made on rank {self.topology.rank} of "
                f"{self.topology.world_size}, and the process is rank {rank} of {world_size} "
                "now: make a new Accelerator on all processes."
            )

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the replica inside the wrapper."""
        model = super().unwrap(model)
        if isinstance(model, DistributedDataParallel):
            return self.unwrap(model.module)
        return model

    def mark_forward_methods(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Run these methods of a model through the wrapper.

        Raises:
            ValueError: the wrapper is the user's own, or has a method of this name itself.
        """
        if isinstance(model, PreparedDDP):
            model.mark_forward_methods(names)
        elif isinstance(model, DistributedDataParallel):
            raise ValueError(
                "forward_methods: the model is wrapped in DistributedDataParallel already, which "
                "has no other methods: pass the model itself to prepare()."
            )


class _StillFrozen:
    """A forward hook that raises if a parameter is trained that was frozen at ``prepare``.

    DDP averages only the parameters that required gradients when it was constructed.
    """

    def __init__(self, frozen: list[tuple[str, torch.nn.Parameter]]) -> None:
        self.frozen = frozen

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the model was prepared, and is trained now: its "
                    "gradients would differ between processes. Prepare the model unfrozen, with "
                    "DistributedDataParallelKwargs(find_unused_parameters=True), and freeze it "
                    "afterwards."
                )
