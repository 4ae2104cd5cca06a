"""Base class of strategies that replace the parameters of a model by shards of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_callbacks import collectives
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.sharded_gradients import ShardedGradients
from accel_callbacks.models.activation_checkpointing import checkpoint_with
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.base import SetUp, Strategy
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.strategy.state_access import StateAccess

__all__ = ["Sharding"]

_Reasons = Mapping[str, str]
#: Why optimizers step with other numbers than one process would, or not at all.
_OF_ALL_PARAMETERS: _Reasons = {"LBFGS": "it looks at all parameters as one vector"}
_OF_WHOLE_PARAMETERS: _Reasons = {
    "Adafactor": "it averages over rows and columns of whole matrices",
    "Muon": "it makes whole matrices orthogonal",
    "Rprop": "torch has its step for whole parameters alone",
}


class Sharding(Strategy):
    """A strategy whose models have shards in place of the parameters that the user built.

    Optimizers step with the shards, in whatever order they and their models are prepared.
    """

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(topology, handlers, parallelism)
        self._sharded = WeakIdKeyDictionary()  # the parameters in place of those of the user
        # In order, which must be that of all ranks, as those of a set are not.
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        #: Whether each model had a plain state before its parameters were replaced.
        self._plain: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()

    #: What to do to train without shards.
    _plainer = "train with DistributedDataParallel (leave the fsdp_plugin out)"

    @property
    def _models(self) -> list[torch.nn.Module]:
        """The sharded models, in the same order on all ranks."""
        raise NotImplementedError

    @cached_property
    def gradients(self) -> ShardedGradients:
        """The gradients of shards."""
        return ShardedGradients(lambda: self._models, self._shard_of, self.data, self._plainer)

    @cached_property
    def states(self) -> StateAccess:
        """The states of shards."""
        from accel_callbacks.engines.sharded_states import ShardedStates

        return ShardedStates(self.unwrap, self.topology.rank, self._plain)

    def _refuse_shared(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter in self._sharded:
                raise ValueError(
                    f"{name!r} of {type(model).__name__} is also a parameter of a model that is "
                    "sharded already: put both models into one module, and prepare that."
                )

    def _refuse_optimizer(self, optimizer: torch.optim.Optimizer, reasons: _Reasons) -> None:
        """Refuse an optimizer whose step is one of these; a step of the user's own is theirs."""
        step = inspect.unwrap(type(optimizer).step)
        name = step.__qualname__.partition(".")[0]
        if name in reasons and step.__module__.partition(".")[0] in ("torch", "transformers"):
            raise ValueError(
                f"{name} does not work with sharded models: {reasons[name]}, and each rank has "
                f"only a part. Choose another optimizer, or {self._plainer}."
            )

    def _replace(self, before: dict[str, torch.nn.Parameter], model: torch.nn.Module) -> None:
        """Note the shard of each parameter of the user, whose memory was freed."""
        for name, shard in model.named_parameters(remove_duplicate=False):
            whole = before[name]
            if shard is not whole and whole not in self._sharded:
                self._sharded[whole] = shard
                whole.grad = None  # an optimizer or a list of the user may keep it

    def checkpoint_activations(self, model: torch.nn.Module) -> None:
        """Apply ``activation_checkpointing`` of the ``fsdp_plugin`` too."""
        super().checkpoint_activations(model)
        options = self.plugin(FullyShardedDataParallelPlugin)
        if options is None:
            return
        policy = options.activation_checkpointing
        offload = bool(options.activation_checkpointing_offload)
        if offload and not policy:
            raise ValueError(
                "activation_checkpointing_offload=True keeps in host memory what blocks are "
                "computed from again: set activation_checkpointing=True as well "
                "(--fsdp_activation_checkpointing true), or leave it out."
            )
        checkpoint_with(policy, model, offload=offload)

    def setup(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
    ) -> SetUp:
        """Shard the models, and let all optimizers step with the shards."""
        # Before any model is changed.
        if self.topology.world_size > 1:
            for optimizer in optimizers:
                self._refuse_optimizer(optimizer, _OF_ALL_PARAMETERS)
        replaced = super().setup(models, optimizers, schedulers)
        self._optimizers.update(dict.fromkeys(optimizers))
        # Those of earlier calls too: their model may have come only now.
        for optimizer in list(self._optimizers) if models else optimizers:
            self._bind(optimizer)
        return replaced

    def _bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace parameters by their shards, in place, wherever an optimizer has them."""
        shard = self._shard_of
        for group in optimizer.param_groups:
            # The same list, which a scheduler or the script may hold.
            group["params"][:] = map(shard, group["params"])
            if any(map(collectives.is_sharded, group["params"])):
                self._refuse_optimizer(optimizer, _OF_WHOLE_PARAMETERS)
            _fit_kernels(optimizer, group)
        if not len(self._sharded):
            return
        state = optimizer.state
        for known in [parameter for parameter in state if shard(parameter) is not parameter]:
            state[shard(known)] = _shard_state(state.pop(known), known, shard(known))
        # Some keep parameters in lists of their own, beside the groups.
        for name, value in vars(optimizer).items():
            if name not in ("param_groups", "state"):
                _replace_in(value, shard)

    def _shard_of(self, parameter: Any) -> Any:
        """Return the shard of a parameter of the user; other objects as they are."""
        if isinstance(parameter, torch.Tensor):
            return self._sharded.get(parameter, parameter)  # type: ignore[no-untyped-call]
        return parameter


# Whose fused kernels DTensors have.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def _fit_kernels(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Step with one parameter after the other where torch's kernels do not take all of a group.

    They take no list with shards and others, which tensor parallelism leaves.
    """
    kinds = set(map(collectives.is_sharded, group["params"]))
    mixed = len(kinds) == 2
    if group.get("fused") and (mixed or (True in kinds and not isinstance(optimizer, _FUSED))):
        name = type(optimizer).__name__
        subject = "sharded parameters beside whole ones" if mixed else "sharded parameters"
        warn(f"{name}(fused=True): torch has no such kernel for {subject}; it steps one by one.")
        group["fused"], group["foreach"] = False, False
        # By this GradScaler would leave the scale to the kernel.
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = False
    elif mixed and "foreach" in group:
        if group["foreach"]:
            warn(
                f"{type(optimizer).__name__}(foreach=True): torch has no such kernel for sharded "
                "parameters beside whole ones; it steps one by one."
            )
        group["foreach"] = False


def _shard_state(state: Any, whole: torch.Tensor, shard: Any) -> Any:
    """Collective: shard the tensors of a state that are as large as the parameter was."""
    if not isinstance(state, dict):
        return state
    return {
        name: collectives.shard_like(collectives.broadcast(value.to(shard.device)), shard)
        if isinstance(value, torch.Tensor) and value.shape == shard.shape and value.dim()
        else value
        for name, value in state.items()
    }


def _replace_in(value: Any, shard: Callable[[Any], Any]) -> None:
    """Replace parameters in an attribute of an optimizer, in nested lists and dicts."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            value[index] = shard(entry)
            _replace_in(entry, shard)
    elif isinstance(value, dict):
        for key in list(value):
            entry = value[key]
            if shard(key) is not key or shard(entry) is not entry:
                del value[key]
                value[shard(key)] = shard(entry)
            _replace_in(entry, shard)
