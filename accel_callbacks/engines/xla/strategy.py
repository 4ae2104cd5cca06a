"""XLA devices, such as TPUs: one process computes on all of them, by annotated tensors (SPMD)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from accel_callbacks.collectives.nested import map_tensors
from accel_callbacks.data.device import Feed, Pairs, send_to_device
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.checks import refuse_distributed, refuse_spread
from accel_callbacks.logging import notice
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.engine_request import EngineRequest
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.base import SetUp, Strategy
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.engines.xla.states import XLAStates

__all__ = ["XLA"]

_REPLICATE, _SHARD = "dp_replicate", "dp_shard"
# Options of FSDP that a compiler decides about, or that name a format.
_IDLE = {
    *("fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch"),
    *("auto_wrap_policy", "state_dict_type", "state_dict_config", "optim_state_dict_config"),
    *("limit_all_gathers", "use_orig_params", "sync_module_states", "forward_prefetch"),
    *("cpu_ram_efficient_loading", "transformer_cls_names_to_wrap", "min_num_params", "no_sync"),
}


class XLA(Strategy):
    """A strategy that lets XLA compile steps, and cut them over the devices of this process.

    Each batch is cut along its first dimension. Parameters are whole on each device, or, with the
    options of FSDP, cut along a dimension.

    Args:
        topology: the rank and device of this process.
        handlers: the options.
        parallelism: how the *devices* are arranged, by ``dp_replicate_size`` and
            ``dp_shard_size``.
        fsdp: cut the parameters; on all devices if ``parallelism`` says nothing else.

    Raises:
        ValueError: the sizes do not arrange the devices, or an option has no counterpart.

    Example:
        >>> from accel_callbacks.engines import XLA
        >>> XLA.has_gradient_sync
        False
    """

    name = "xla"

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
        fsdp: FullyShardedDataParallelPlugin | None = None,
    ) -> None:
        self._xla = importlib.import_module("torch_xla")
        runtime = importlib.import_module("torch_xla.runtime")
        devices = int(runtime.global_runtime_device_count())
        arranged = (parallelism or ParallelismConfig()).fitted(devices, sharded=fsdp is not None)
        for axis, size in arranged.sizes.items():
            if size > 1 and axis not in (_REPLICATE, _SHARD):
                raise ValueError(
                    f"{axis}_size={size} does not go with XLA, which cuts batches and parameters "
                    "only: use dp_replicate_size and dp_shard_size."
                )
        # Without the arrangement, which is of devices: this process is the only rank.
        super().__init__(topology, handlers)
        self.engine_plugins = () if fsdp is None else (fsdp,)
        self._shards = arranged.sizes[_SHARD]
        self._refuse_options(fsdp)
        self._spmd: Any = None
        self._mesh: Any = None
        if devices > 1:
            self._spmd = importlib.import_module("torch_xla.distributed.spmd")
            shape = arranged.sizes[_REPLICATE], self._shards
            self._mesh = self._spmd.Mesh(list(range(devices)), shape, (_REPLICATE, _SHARD))
            notice(
                f"XLA: one process computes on {devices} devices; each batch of a loader is cut "
                "over them, so batch_size is that of all devices together"
            )
        self._stepping: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._warned_shapes = False

    @classmethod
    def for_run(cls, run: EngineRequest) -> XLA:
        """Return the strategy of a run; the axes arrange devices, not ranks."""
        return cls(run.topology, run.handlers, run.parallelism, run.fsdp)

    def _refuse_options(self, fsdp: FullyShardedDataParallelPlugin | None) -> None:
        for field in fields(fsdp) if fsdp is not None else ():
            value = getattr(fsdp, field.name)
            if value and field.name not in _IDLE:
                raise ValueError(
                    f"FullyShardedDataParallelPlugin({field.name}=...) does not go with XLA, where "
                    "the compiler places parameters: leave it out."
                )

    @cached_property
    def states(self) -> XLAStates:
        """The states, copied to the host."""
        from accel_callbacks.engines.xla.states import XLAStates

        return XLAStates(self.unwrap, self._xla.sync, self._annotate)

    def casts_to(self, precision: str) -> bool:
        """Return False, as autocast does it.

        Raises:
            ValueError: the precision is ``"fp16"``.
        """
        if precision == "fp16":
            raise ValueError(
                "mixed_precision='fp16' does not go with XLA, whose loss scaling would wait for "
                "the device in each step: use 'bf16', which needs none."
            )
        if precision != "no":
            _autocast_attention()
        return super().casts_to(precision)

    def check(self, model: torch.nn.Module, num_steps: int = 1) -> None:
        """Refuse models that are already distributed over devices or processes."""
        super().check(model, num_steps)
        refuse_spread(model)
        refuse_distributed(model)
        for module in model.modules():
            if type(module).__module__.startswith("torch_xla.distributed.fsdp"):
                raise ValueError(
                    f"{type(module).__name__} cuts parameters over processes, and one process has "
                    "all devices here: pass the model without it, and let "
                    "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) cut them."
                )

    def place(self, model: torch.nn.Module, *, trained: bool = True) -> torch.nn.Module:
        """Move parameters and buffers, which stay the objects that they are.

        ``model.to`` would make new ones, of which optimizers know nothing, and untie weights.

        Raises:
            RuntimeError: something else holds on to a parameter, such as the graph of a forward.
        """
        _warn_of_untied(model)
        # Each once, so that tied weights stay tied.
        for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
            if tensor.device.type != self.topology.device.type:
                _replace(tensor, self.topology.device)
        return model

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cut the parameters, if they are to be cut, and return the model itself."""
        for parameter in model.parameters():
            self._annotate(parameter)
        return model

    def setup(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
    ) -> SetUp:
        """Run what is queued on the device after each step of an optimizer."""
        for optimizer in optimizers:
            if optimizer not in self._stepping:
                optimizer.register_step_post_hook(lambda *_: self._xla.sync())
                self._stepping.add(optimizer)
        return super().setup(models, optimizers, schedulers)

    def feed(self, non_blocking: bool) -> Feed | None:
        """Return what moves batches, cuts them, and runs what is queued between two of them."""
        return self._deliver

    def _deliver(self, pairs: Pairs) -> Pairs:
        shapes: list[list[tuple[int, ...]]] = []
        for batch, delivery in pairs:
            # What the loop did with the batch before becomes one graph, however it was written.
            self._xla.sync()
            moved = send_to_device(batch, self.topology.device)
            batch_shapes: list[tuple[int, ...]] = []
            map_tensors(moved, partial(self._cut, batch_shapes))
            if batch_shapes not in shapes:
                self._warn_of_shapes(shapes, batch_shapes)
                shapes.append(batch_shapes)
            yield moved, delivery
        self._xla.sync()

    def _cut(self, shapes: list[tuple[int, ...]], tensor: torch.Tensor) -> torch.Tensor:
        """Cut a tensor of a batch over the devices along its first dimension."""
        shapes.append(tuple(tensor.shape))
        if self._mesh is not None and tensor.dim() and len(tensor) > 1:
            spec = ((_REPLICATE, _SHARD), *[None] * (tensor.dim() - 1))
            self._spmd.mark_sharding(tensor, self._mesh, spec)
        return tensor

    def _warn_of_shapes(self, shapes: Sequence[Any], batch_shapes: Sequence[Any]) -> None:
        if not shapes or self._warned_shapes:
            return
        self._warned_shapes = True
        warn(
            f"a batch has tensors of the shapes {batch_shapes}, one before had {shapes[-1]}: XLA "
            "compiles the step again for each shape, which takes long. Use drop_last=True in the "
            "DataLoader, and pad samples to one length."
        )

    def _annotate(self, tensor: torch.Tensor, like: torch.Tensor | None = None) -> None:
        """Cut a parameter, or a tensor like it, over the devices that share parameters."""
        # Along the first dimension that the devices divide; without one it stays whole.
        shape = tuple((tensor if like is None else like).shape)
        place = next((i for i, size in enumerate(shape) if size % self._shards == 0), None)
        alike = tensor.device.type == self.topology.device.type and tuple(tensor.shape) == shape
        if self._mesh is None or self._shards == 1 or place is None or not alike:
            return
        spec = [_SHARD if i == place else None for i in range(len(shape))]
        self._spmd.clear_sharding(tensor)
        self._spmd.mark_sharding(tensor, self._mesh, tuple(spec))


def _replace(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor to a device of another kind, in place."""
    new: torch.Tensor = tensor.detach().to(device)
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, tensor.requires_grad)
    if tensor.grad is not None:
        new.grad = tensor.grad.detach().to(device)
    vars(new).update(vars(tensor))  # attributes that a model or a script has set
    try:
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            f"a parameter cannot move to {device} ({error}): call prepare() before the first "
            "forward of the model, or move the model there before its optimizer is built."
        ) from error


def _warn_of_untied(model: torch.nn.Module) -> None:
    """Warn of input and output embeddings that should be one parameter, and are two."""
    config = getattr(model, "config", None)
    tie = getattr(model, "tie_weights", None)
    if not getattr(config, "tie_word_embeddings", False) or not callable(tie):
        return
    outer: Any = model
    ends = outer.get_input_embeddings(), outer.get_output_embeddings()
    weights = [getattr(end, "weight", None) for end in ends]
    if None not in weights and weights[0] is not weights[1]:
        warn(
            f"{type(model).__name__} ties its input and output embeddings, but they are two "
            "parameters now: model.to() unties weights on XLA. Leave the move to prepare(), or "
            "call model.tie_weights() after it and before the optimizer is built."
        )


@functools.cache
def _autocast_attention() -> Any:
    """Let autocast on XLA cast the inputs of attention, as on every other device.

    torch's list of what it casts there has products, but not attention: rotary positions give
    queries and keys in float32, and values are in bfloat16.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        dtype = torch.get_autocast_dtype("xla")
        with torch.autocast("xla", enabled=False):
            cast = [tensor.to(dtype) for tensor in (query, key, value)]
            return torch.ops.aten.scaled_dot_product_attention(*cast, *args, **kwargs)

    kinds: Any = torch.library
    library = kinds.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutocastXLA")
    return library
