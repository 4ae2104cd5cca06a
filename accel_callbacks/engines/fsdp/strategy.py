"""Fully sharded data parallelism: FSDP2, and HSDP over two axes of the mesh."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import class_of, needs_all_ranks, refuse_on_subset
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.checks import refuse_distributed, refuse_spread
from accel_callbacks.engines.fsdp.gradients import FSDPGradients
from accel_callbacks.engines.fsdp.groups import (
    gather_through,
    is_idle,
    parameter_groups,
    take_up_loaded,
)
from accel_callbacks.engines.fsdp.sharded_calls import (
    begin_at_root,
    explain_forward,
    explain_layers,
    refuse_copies,
)
from accel_callbacks.engines.fsdp.units import find_units, ignored_parameters
from accel_callbacks.engines.sharding import Sharding
from accel_callbacks.engines.shared_buffers import SharedBuffers
from accel_callbacks.engines.tensor.strategy import (
    is_cut,
    packed_dim,
    parallelize,
    required_plan,
    separate_dropout,
    share_cut,
    share_whole,
)
from accel_callbacks.logging import notice
from accel_callbacks.models.absent_weights import absent_weights
from accel_callbacks.models.compile import await_collectives, is_compiled, refuse_scripted
from accel_callbacks.models.empty_weights import init_empty_weights
from accel_callbacks.models.from_pretrained import weights_on_rank_0
from accel_callbacks.models.initial_weights import InitialWeights, whole_parameters_freed
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.plugins.distributed_type import DistributedType
from accel_callbacks.plugins.engine_request import EngineRequest
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.plugins.precision import AutocastKwargs
from accel_callbacks.strategy.base import GatherCast
from accel_callbacks.strategy.checks import is_dispatched, is_plain
from checkpoint_io.warning import warn

__all__ = ["FSDP"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)
#: "fp32" and "no" cast nothing.
_DTYPES: dict[Any, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": None,
    "no": None,
}


class FSDP(Sharding):
    """A strategy that shards parameters, gradients and optimizer states over the ranks.

    On one rank models stay as they are.

    Args:
        topology: the rank and device of this process.
        handlers: options of other parts.
        parallelism: how the ranks are arranged; one shard on each if ``None``.
        options: what is sharded, and how.

    Example:
        >>> from accel_callbacks.engines import FSDP
        >>> FSDP.has_gradient_sync
        True
    """

    name = "fsdp"
    has_gradient_sync = True

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
        options: FullyShardedDataParallelPlugin | None = None,
    ) -> None:
        self.options = options or FullyShardedDataParallelPlugin()
        if parallelism is None:
            parallelism = _default_parallelism(topology, self.options)
        super().__init__(topology, handlers, parallelism)
        self.engine_plugins = (self.options,)
        self._policy: Any = None
        # By sharded model, the units that stay gathered after a forward; they must not keep it.
        self._lingering: WeakKeyDictionary[torch.nn.Module, list[ref[Any]]] = WeakKeyDictionary()
        shared = self._common.broadcast_buffers
        self._buffers = SharedBuffers(self._is_cut_now) if shared else None
        for note in self.options.notes():
            warn(note)

    @classmethod
    def for_run(cls, run: EngineRequest) -> FSDP:
        """Return the strategy of a run."""
        return cls(run.topology, run.handlers, run.arranged, run.fsdp)

    @property
    def distributed_type(self) -> DistributedType:
        """``DistributedType.FSDP``."""
        return DistributedType.FSDP

    @property
    def _common(self) -> DistributedDataParallelKwargs:
        """The options of DDP that have a meaning here too."""
        return self.handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())

    @cached_property
    def gradients(self) -> FSDPGradients:
        """The gradients of shards, and those that FSDP holds back."""
        return FSDPGradients(
            lambda: self._models,
            self._shard_of,
            self.data,
            self._plainer,
            holds_whole=bool(self.options.no_sync),
            fills=self._common.find_unused_parameters,
        )

    @property
    def _models(self) -> list[torch.nn.Module]:
        """The sharded models, in the same order on all ranks."""
        return list(self._lingering)

    def casts_to(self, precision: str) -> bool:
        """Choose the policy for a precision; return False if autocast has to bring it about."""
        if self.topology.world_size == 1:
            return False
        autocast = self.handlers.get(AutocastKwargs, AutocastKwargs())
        self._policy = _policy(self.options.mixed_precision_policy, precision, autocast)
        return self._policy.param_dtype is not None and precision != "fp8"

    # --- sharding -----------------------------------------------------------------------------

    def check(self, model: torch.nn.Module, num_steps: int = 1) -> None:
        """Refuse models that are distributed in another way, or share a sharded parameter.

        A model on the meta device is filled after it is sharded.
        """
        if self.topology.world_size > 1:
            refuse_spread(model)
            if is_dispatched(model):
                raise ValueError(
                    f"{type(model).__name__} was dispatched, so that its offloaded weights are "
                    "fetched whole, and FSDP shards weights: build it in init_empty_weights() and "
                    "load it after prepare() with load_checkpoint_in_model, which reads each "
                    "rank's part alone."
                )
        if not _is_sharded(model):
            self._check_cut(model)
        self._refuse_shared(model)

    def _check_cut(self, model: torch.nn.Module) -> None:
        """Refuse DTensors but those of tensor parallelism over the axis of this run."""
        if self.parallelism is None or not self.parallelism.tp_enabled:
            refuse_distributed(model)
        elif not is_cut(model):
            required_plan(model, self.parallelism)
        else:
            axis = self.data.mesh["tp"]
            meshes = {getattr(parameter, "device_mesh", axis) for parameter in model.parameters()}
            if meshes != {axis}:
                raise ValueError(
                    f"{type(model).__name__} is cut over another mesh than that of this run: cut "
                    'it over accel.torch_device_mesh["tp"], or let prepare() cut it.'
                )

    def init_context(self, *, pretrained: bool = False) -> AbstractContextManager[None]:
        """Return ``init_empty_weights()``, or let rank 0 alone load weights, to send its shards."""
        if not pretrained:
            return init_empty_weights()
        if self.topology.world_size == 1 or self.options.cpu_ram_efficient_loading is False:
            return nullcontext()
        return weights_on_rank_0(self.topology.rank)

    def place(self, model: torch.nn.Module, *, trained: bool = True) -> torch.nn.Module:
        """Leave a trained model where it is, unless one rank holds all of it."""
        alone = self.topology.world_size == 1 and not _has_meta(model)
        return super().place(model, trained=trained) if alone or not trained else model

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model."""
        mesh = self.data.mesh
        if mesh is None:
            if _has_meta(model) and not is_dispatched(model):
                self._initial_weights(model).fill()
                return model.to(self.topology.device)
            return model
        assert self.parallelism is not None
        if not _is_sharded(model):
            self._refuse_shared(model)
            # Layers are cut first, so that FSDP shards each part over the ranks that have it.
            cut_already = is_cut(model)
            # Values of a model that is cut already differ between ranks as they should.
            # Collective, and before any parameter is replaced: rank 0 keeps the whole values that
            # it sends in fill(), of which each rank takes its shard.
            weights = self._initial_weights(model, sync=not cut_already)
            before = dict(model.named_parameters(remove_duplicate=False))
            # Asked now: the hooks that FSDP has on state dicts would count as the model's own.
            self._plain[model] = is_plain(model)
            names = self.parallelism.fsdp_dim_names
            shards = self.parallelism.get_submesh(names, mesh.device_type)
            if self.parallelism.tp_enabled:
                if cut_already:
                    share_whole(model)
                    if self.options.sync_module_states is not False:
                        share_cut(model, shards)
                else:
                    with whole_parameters_freed(model):
                        parallelize(model, required_plan(model, self.parallelism), mesh["tp"])
                separate_dropout(model, self.parallelism, mesh["tp"], self.topology.device)
                await_collectives(model)
            self._shard(model, shards)
            weights.fill()
            self._replace(before, model)
        else:  # by the user, or for another Accelerator
            take_up_loaded(model)
            self._plain[model] = True
            self._lingering[model] = [
                ref(module) for module in model.modules() if _is_sharded(module)
            ]
        self.gradients.watch(model)
        if self._buffers is not None and any(True for _ in model.buffers()):
            self._buffers.watch(model)
        needs_all_ranks(filter(_is_sharded, model.modules()))
        refuse_copies(model)
        if not is_compiled(model):  # whose code would leave the hook out, or break there
            model.register_forward_hook(explain_forward, always_call=True)
            explain_layers(model)
        if callable(getattr(model, "generate", None)):
            self.mark_forward_methods(model, ["generate"])
        return model

    def gather_through(
        self, model: torch.nn.Module, casts: Sequence[GatherCast]
    ) -> list[torch.nn.Parameter]:
        """Gather weights through casts, where FSDP can."""
        casts_by_id = {id(cast.parameter): cast.cast for cast in casts}
        return [
            parameter.sharded_param
            for group in parameter_groups(model)
            for parameter in group.fsdp_params
            if id(parameter.sharded_param) in casts_by_id
            and gather_through(parameter, casts_by_id[id(parameter.sharded_param)])
        ]

    def _is_cut_now(self, buffer: torch.Tensor) -> bool:
        return self.sequences.is_cut(buffer)

    def _initial_weights(self, model: torch.nn.Module, sync: bool = True) -> InitialWeights:
        shard_device = torch.device("cpu") if self.options.offloads else self.topology.device
        return InitialWeights(
            model,
            shard_device,
            sync=sync and self.options.sync_module_states is not False,
            param_init_fn=self.options.param_init_fn,
        )

    def _shard(self, model: torch.nn.Module, mesh: Any) -> None:
        """Shard the units of a model, and then what is left of it."""
        # Imported here, because other strategies do not need it.
        from torch.distributed.fsdp import fully_shard

        options = self.options
        whole = ignored_parameters(model, options)
        left = set(map(id, whole))
        sharded = (
            module
            for module in model.modules()
            if any(id(parameter) not in left for parameter in module.parameters(recurse=False))
        )
        refuse_scripted((model, *sharded), "FSDP")
        self._place_whole(model, whole)
        common = {"mesh": mesh, "offload_policy": self._offload_policy(), **_ignore_options(whole)}
        common |= _around_packed(model, mesh)
        policy = self._policy or _policy(options.mixed_precision_policy, "no", AutocastKwargs())
        lingering: list[Any] = [model]
        upcast, placed = 0, {id(parameter) for parameter in whole}
        # The output of a unit inside is the input of another one, and is not cast.
        inner = type(policy)(
            policy.param_dtype, policy.reduce_dtype, None, policy.cast_forward_inputs
        )
        # Inner ones first: a unit takes what no unit inside of it has taken.
        units = find_units(model, options, whole)
        for unit in units:
            upcast += self._take_weights(model, unit.modules, placed, policy)
            with whole_parameters_freed(*unit.modules):
                fully_shard(
                    list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],
                    mp_policy=inner,
                    # Backward begins with the last one, and would gather it again at once.
                    reshard_after_forward=False if unit.is_last else options.reshard,
                    **common,
                )
            if unit.is_last or options.reshard is not True:
                lingering.extend(unit.modules)
        upcast += self._take_weights(model, (model,), placed, policy)
        with whole_parameters_freed(model):
            fully_shard(model, mp_policy=policy, reshard_after_forward=False, **common)
        self._lingering[model] = list(map(ref, lingering))
        begin_at_root(model)
        if options.forward_prefetch:
            single: list[Any] = [unit.modules[0] for unit in units if len(unit.modules) == 1]
            for following, module in pairwise(single):  # units are in reverse order of the model
                module.set_modules_to_forward_prefetch([following])
        _note_precision(model, policy, upcast)

    def _place_whole(self, model: torch.nn.Module, whole: Sequence[torch.nn.Parameter]) -> None:
        """Move the parameters that are not sharded to the device."""
        for parameter in whole:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self.topology.device)
        self.gradients.average_whole(model, whole)

    def _take_weights(
        self,
        model: torch.nn.Module,
        modules: Sequence[torch.nn.Module],
        placed: set[int],
        policy: Any,
    ) -> int:
        """Bring the weights of a unit, which are about to be sharded, to the device.

        Return the number of elements that are float32 from now on: trained weights of fewer bits
        would lose small steps.
        """
        tensors = [
            tensor
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
            if id(tensor) not in placed and not _is_of_fsdp(tensor)
        ]
        placed.update(map(id, tensors))
        upcast = 0
        # By ``.data``, so that each stays the object that an optimizer of the user holds.
        for tensor in tensors:
            cut = collectives.is_sharded(tensor)  # and on the device already
            if not tensor.is_meta and not cut:
                tensor.data = tensor.data.to(self.topology.device)
            low = tensor.dtype in _LOW_PRECISION and tensor.requires_grad
            if policy.param_dtype is not None and low:
                upcast += tensor.numel()
                if not cut:
                    tensor.data = tensor.data.float()
                else:  # of which ``.data`` is the local part alone
                    master = torch.nn.Parameter(tensor.detach().float())
                    torch.utils.swap_tensors(tensor, master)  # type: ignore[no-untyped-call]
            if cut:
                continue
            if not tensor.is_contiguous():  # which FSDP refuses
                tensor.data = tensor.data.contiguous()
        _refuse_dtypes(model, tensors)
        return upcast

    def _offload_policy(self) -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        policy = self.options.cpu_offload
        if not self.options.offloads:
            return OffloadPolicy()
        pinned = getattr(policy, "pin_memory", True) and self.topology.device.type != "cpu"
        return CPUOffloadPolicy(pin_memory=pinned)

    # --- calls ----------------------------------------------------------------------------------

    def mark_forward_methods(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Gather the weights for these methods too, and check that there are some."""
        if _is_sharded(model):
            from torch.distributed.fsdp import register_fsdp_forward_method

            for name in names:
                if not getattr(vars(model).get(name), "_gathers", False):
                    register_fsdp_forward_method(model, name)
                    vars(model)[name] = _explain_waits(model, name, self._buffers)
        if (absent := absent_weights(model)) is not None:
            absent.guard(names)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as the user built it, with its shards as parameters."""
        model = super().unwrap(model)
        self._free_gathered(model)
        return model

    def _free_gathered(self, model: torch.nn.Module) -> None:
        """Free what torch has left whole after a forward without a backward.

        These parameters are other objects than those of the optimizer.
        """
        for unit in self._lingering.get(model, ()):
            module = unit()
            # Within a forward or backward, its layers still compute with what would be freed.
            if module is not None and is_idle(module):
                module.reshard()


def _default_parallelism(
    topology: Topology, options: FullyShardedDataParallelPlugin
) -> ParallelismConfig:
    """Return one shard on each rank, or of each machine, with replicas over machines."""
    machines = 1
    if options.is_hybrid:
        machines = max(topology.world_size // max(topology.local_world_size, 1), 1)
    return ParallelismConfig(
        dp_replicate_size=machines,
        dp_shard_size=topology.world_size // machines,
        tp_size=1,
        cp_size=1,
        sp_size=1,
    )


def _has_meta(model: torch.nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _is_of_fsdp(tensor: Any) -> bool:
    """Return whether a tensor is sharded by FSDP; those of tensor parallelism are not yet."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and tuple(mesh.mesh_dim_names or ()) != ("tp",)


def _is_sharded(model: torch.nn.Module) -> bool:
    return hasattr(model, "_get_fsdp_state")


# --- precision --------------------------------------------------------------------------------


def _policy(option: Any, precision: str, autocast: AutocastKwargs) -> Any:
    """Return the MixedPrecisionPolicy that was given, or that of a precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if option is None:
        # Autocast brings about fp16: it leaves norms and sums in float32, which fp16 needs.
        option = "bf16" if precision == "bf16" and autocast.enabled else "no"
    if isinstance(option, str):
        if option not in _DTYPES:
            raise ValueError(
                f"mixed_precision_policy={option!r} is unknown; use one of {list(_DTYPES)}."
            )
        dtype = _DTYPES[option]
        if dtype is None:
            return MixedPrecisionPolicy()
        output = torch.float32 if autocast.upcast_outputs else None
        return MixedPrecisionPolicy(dtype, torch.float32, output)
    if isinstance(option, MixedPrecisionPolicy):
        return option
    if isinstance(option, dict):
        dtypes: dict[str, Any] = {name: _DTYPES.get(dtype, dtype) for name, dtype in option.items()}
        return MixedPrecisionPolicy(**dtypes)
    if hasattr(option, "param_dtype") and hasattr(option, "reduce_dtype"):  # FSDP1's
        return MixedPrecisionPolicy(option.param_dtype, option.reduce_dtype)
    raise TypeError(
        f"mixed_precision_policy={option!r} must be a MixedPrecisionPolicy, a dict, or 'bf16'."
    )


def _note_precision(model: torch.nn.Module, policy: Any, upcast: int) -> None:
    if policy.param_dtype is None:
        return
    name = class_of(model).__name__
    reduced = policy.reduce_dtype or policy.param_dtype
    short = {policy.param_dtype: str(policy.param_dtype).removeprefix("torch.")}
    masters = f"; {upcast} trained weights were made float32" if upcast else ""
    notice(
        f"FSDP gathers {name} in {short[policy.param_dtype]} and computes in it, without autocast; "
        f"gradients are reduced in {str(reduced).removeprefix('torch.')}, and the optimizer steps "
        f"with shards as they are{masters}"
    )


# --- forwards -----------------------------------------------------------------------------------


def _explain_waits(
    model: torch.nn.Module, name: str, buffers: SharedBuffers | None
) -> Callable[..., Any]:
    """Return a method that gathers weights, and explains a wait for ranks that do not call it."""
    method = vars(model)[name]
    label = f"{class_of(model).__name__}.{name}"

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_on_subset(label)
        with collectives.explained(f"{label}, which gathers weights from all ranks"):
            if buffers is not None:
                buffers.share(model)
            return method(*args, **kwargs)

    call._gathers = True  # type: ignore[attr-defined]
    return call


# --- helpers of sharding ----------------------------------------------------------------------


def _refuse_dtypes(model: torch.nn.Module, unit: Sequence[torch.Tensor]) -> None:
    """Raise for trained parameters of a unit that differ in dtype: they are gathered together."""
    trained = {id(tensor): tensor.dtype for tensor in unit if tensor.requires_grad}
    if len({*trained.values()}) < 2:
        return
    names: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in trained:
            names.setdefault(parameter.dtype, name)
    (one, name), (other, another) = list(names.items())[:2]
    raise ValueError(
        f"{name!r} of {type(model).__name__} is {one} and {another!r} {other}, and FSDP gathers "
        "both at once, in one dtype: convert one of them before prepare(), freeze it, keep its "
        "module whole with FullyShardedDataParallelPlugin(ignored_modules=[...]), or shard it "
        "as a unit of its own with transformer_cls_names_to_wrap=[...]."
    )


def _ignore_options(whole: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
    if not whole:
        return {}
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise ValueError(
            f"ignored_modules and scalar parameters under FSDP need torch 2.7 or newer, and this "
            f"is {torch.__version__}."
        )
    return {"ignored_params": set(whole)}


def _around_packed(model: torch.nn.Module, mesh: Any) -> dict[str, Any]:
    """Return options by which weights that pack layers are sharded along their other dimension.

    torch cannot say where the rows of a rank are that are cut twice.
    """
    packed = {n: p for n, p in model.named_parameters() if packed_dim(p) == 0}
    if not packed:
        return {}
    from torch.distributed.tensor import Shard

    ranks = mesh.size(mesh.ndim - 1)
    for name, parameter in packed.items():
        if parameter.dim() < 2 or parameter.shape[1] % ranks:
            raise ValueError(
                f"{name!r}, of shape {tuple(parameter.shape)}, packs several layers for tensor "
                f"parallelism, and FSDP can shard its columns alone, over {ranks} ranks: choose a "
                "dp_shard_size that divides them, or split it into one layer each."
            )
    return {
        "shard_placement_fn": lambda parameter: Shard(1) if packed_dim(parameter) == 0 else None
    }
