"""Tensor parallelism: layers of one replica are cut over the ranks of an axis."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.engines.checks import is_of_transformers, refuse_spread
from accel_callbacks.engines.sharding import Sharding
from accel_callbacks.engines.tensor.cut_dropout import CutDropout, draws_random_numbers
from accel_callbacks.engines.tensor.plan import (
    check_heads,
    check_own,
    check_pairs,
    check_parameters,
    cut_dim,
    first_pattern,
    is_cut_after,
    matched_parameters,
    matched_styles,
    output_features,
    part_size,
    parts_of,
    plan_of,
    propose_plan,
)
from accel_callbacks.gradients import local_part
from accel_callbacks.models.compile import await_collectives, refuse_scripted
from accel_callbacks.models.empty_weights import init_empty_weights
from accel_callbacks.models.from_pretrained import weights_on_rank_0
from accel_callbacks.models.initial_weights import InitialWeights, whole_parameters_freed
from accel_callbacks.plugins.engine_request import EngineRequest
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.checks import is_plain
from checkpoint_io.warning import warn

__all__ = [
    "TensorParallel",
    "checked_plan",
    "is_cut",
    "packed_dim",
    "parallelize",
    "reduce_partial_gradients",
    "required_plan",
    "separate_dropout",
    "share_cut",
    "share_whole",
]


class TensorParallel(Sharding):
    """A strategy that cuts layers over the ranks of one replica, without data parallelism.

    Args:
        topology: the rank and device of this process.
        handlers: options of other parts.
        parallelism: how the ranks are arranged.

    Example:
        >>> from accel_callbacks.engines.tensor.strategy import TensorParallel
        >>> TensorParallel.has_gradient_sync
        False
    """

    name = "tensor_parallel"

    @classmethod
    def for_run(cls, run: EngineRequest) -> TensorParallel:
        """Return the strategy of a run, which has no replicas."""
        arranged = run.arranged
        if arranged is not None and arranged.dp_replicate_enabled:
            raise ValueError(
                f"tp_size={arranged.tp_size} does not go with dp_replicate_size="
                f"{arranged.dp_replicate_size} alone: shard over the data axis, with "
                f"dp_shard_size={arranged.dp_replicate_size}."
            )
        return cls(run.topology, run.handlers, arranged)

    @property
    def _models(self) -> list[torch.nn.Module]:
        return list(self._plain)

    def check(self, model: torch.nn.Module, num_steps: int = 1) -> None:
        """Refuse a model without a plan, before it is changed."""
        if not is_cut(model):
            refuse_scripted(model.modules(), "tensor parallelism")
            self._refuse_shared(model)
            refuse_spread(model)
            required_plan(model, self.parallelism)

    def init_context(self, *, pretrained: bool = False) -> AbstractContextManager[None]:
        """Return ``init_empty_weights()``, or let rank 0 alone load weights, to send its parts."""
        return weights_on_rank_0(self.topology.rank) if pretrained else init_empty_weights()

    def place(self, model: torch.nn.Module, *, trained: bool = True) -> torch.nn.Module:
        """Return a model that is trained unchanged: no device holds all of it."""
        return model if trained else super().place(model, trained=trained)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cut the layers of the model."""
        if model in self._plain:
            return model
        mesh = self.data.mesh["tp"]
        self._plain[model] = is_plain(model)
        if is_cut(model):
            model.to(self.topology.device)
            share_whole(model)
        else:
            # Collective, and before any parameter is replaced; fill() sends each rank its part.
            weights = InitialWeights(model, self.topology.device)
            before = dict(model.named_parameters(remove_duplicate=False))
            plan = required_plan(model, self.parallelism)
            with whole_parameters_freed(model):
                parallelize(model, plan, mesh)
            _place_whole(model, self.topology.device)
            weights.fill()
            self._replace(before, model)
        reduce_partial_gradients(model)
        separate_dropout(model, self.parallelism, mesh, self.topology.device)
        await_collectives(model)
        self.gradients.watch_inputs(model)
        return model


def required_plan(
    model: torch.nn.Module, parallelism: ParallelismConfig | None
) -> Mapping[str, Any]:
    """Return the plan that was given, or that the model brings along.

    Raises:
        ValueError: there is none; the message has a proposal if there is one.
    """
    handler = None if parallelism is None else parallelism.tp_handler
    if handler is not None and handler.enable_async_tp:
        warn(
            "enable_async_tp has no effect: torch overlaps the communication of cut layers only in "
            "what torch.compile has compiled, on GPUs with symmetric memory, by a setting of its "
            "own (torch._inductor.config._micro_pipeline_tp). Leave it out; a script that compiles "
            "its blocks may set that one."
        )
    if handler is not None and _keeps_sequence(handler.plan, model):
        warn(
            f"sequences stay whole between the blocks of {type(model).__name__}, which takes "
            "positions and masks from the length of its activations: layers alone are cut."
        )
    plan = _find_plan(model, parallelism)
    if plan:
        check_own(model, plan)
        return plan
    try:
        proposal = f"accel.propose_tp_plan(model) proposes {propose_plan(model)}; read it, and pass"
    except ValueError as error:
        proposal = f"{error} Pass"
    raise ValueError(
        f"{type(model).__name__} has no plan of tensor parallelism. {proposal} it as "
        "ParallelismConfig(tp_size=..., tp_handler=TorchTensorParallelConfig(plan=...))."
    )


def _find_plan(model: torch.nn.Module, parallelism: ParallelismConfig | None) -> Mapping[str, Any]:
    """Return the plan that was given or proposed as asked for, or that of the model, else empty."""
    handler = None if parallelism is None else parallelism.tp_handler
    plan = None if handler is None else handler.plan
    if not isinstance(plan, str):
        return plan or plan_of(model)
    model_plan = plan_of(model)
    if _keeps_sequence(plan, model):
        plan = "proposed"
    cuts_sequence = plan == "proposed_sequence"
    has_sequence = any("sequence" in str(style) for style in model_plan.values())
    if model_plan and (has_sequence or not cuts_sequence):
        return model_plan
    try:
        return propose_plan(model, sequence_parallel=cuts_sequence)
    except ValueError as error:
        raise ValueError(f"{error} Set the plan as an attribute of the model: tp_plan.") from None


def _keeps_sequence(plan: Any, model: torch.nn.Module) -> bool:
    """Return whether sequences are to be cut that a model takes positions and masks from."""
    of_transformers = any(map(is_of_transformers, model.modules()))
    cut = any("sequence" in str(style) for style in plan_of(model).values())
    return bool(plan == "proposed_sequence" and of_transformers and not cut)


def is_cut(model: torch.nn.Module) -> bool:
    """Return whether a model has DTensors, as one of transformers with a ``tp_plan``."""
    return any(map(collectives.is_sharded, model.parameters()))


def packed_dim(parameter: torch.Tensor) -> int | None:
    """Return the dimension along which a weight that packs layers is cut, None for others."""
    for placement in getattr(parameter, "placements", ()):
        if type(placement).__name__ == "_StridedShard":
            return int(placement.dim)
    return None


@torch.no_grad()
def share_whole(model: torch.nn.Module) -> None:
    """Collective: give the whole parameters and buffers of a cut model the values of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not collectives.is_sharded(tensor) and not tensor.is_meta:
            tensor.data.copy_(collectives.broadcast(tensor.detach()))


@torch.no_grad()
def share_cut(model: torch.nn.Module, mesh: Any) -> None:
    """Collective: give the parts of a cut model the values that the first rank of a mesh has.

    Args:
        model: cut over another dimension.
        mesh: the dimensions whose ranks have the same parts.
    """
    import torch.distributed as dist

    for parameter in dict.fromkeys(model.parameters()):
        if collectives.is_sharded(parameter) and not parameter.is_meta:
            part = local_part(parameter)
            for dimension in range(mesh.ndim):
                group = mesh.get_group(dimension)
                sent = part.contiguous()
                dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
                if sent is not part:
                    part.copy_(sent)


def _place_whole(model: torch.nn.Module, device: torch.device) -> None:
    """Move what the plan has left whole to the device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not collectives.is_sharded(tensor) and not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def reduce_partial_gradients(model: torch.nn.Module) -> None:
    """Let backward sum the gradients of replicated parameters over the ranks that each add a part.

    As norms do, of which each rank sees a part of the sequence. torch would leave the sum to
    whoever reads the gradient, and a clipped or saved one would be the part of one rank.
    """
    for parameter in model.parameters():
        if not collectives.is_sharded(parameter):
            continue
        target: Any = parameter
        if all(placement.is_replicate() for placement in target.placements):
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # a hook that it has once it is unfrozen
            parameter.register_hook(_sum_partial)  # type: ignore[no-untyped-call]
            if frozen:
                parameter.requires_grad_(False)


def _sum_partial(gradient: Any) -> Any:
    placements = getattr(gradient, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return gradient
    from torch.distributed.tensor import Replicate

    return gradient.redistribute(placements=[Replicate() for _ in placements])


def separate_dropout(
    model: torch.nn.Module, parallelism: ParallelismConfig | None, mesh: Any, device: torch.device
) -> None:
    """Let dropout of cut activations draw other numbers on each rank of tensor parallelism."""
    if not draws_random_numbers(model):
        return
    plan = _find_plan(model, parallelism)
    cut = {pattern: is_cut_after(style) for pattern, style in plan.items()}
    styled = [(module, bool(cut[pattern])) for module, pattern in _by_pattern(model, cut).items()]
    if styled:
        CutDropout(model, styled, mesh.get_local_rank(), device)


def _by_pattern(
    model: torch.nn.Module, cut: Mapping[str, bool | None]
) -> dict[torch.nn.Module, str]:
    patterns = {}
    for name, module in model.named_modules():
        pattern = first_pattern(name, cut)
        if pattern is not None and cut[pattern] is not None:
            patterns[module] = pattern
    return patterns


def parallelize(model: torch.nn.Module, plan: Mapping[str, Any], mesh: Any) -> None:
    """Collective: cut the layers of a model that a plan names; tied weights stay tied.

    Args:
        model: the model, whole on each rank of the mesh; values are those of its first rank.
        plan: see :func:`accel_callbacks.engines.tensor.plan.matched_styles`.
        mesh: of one dimension.

    Raises:
        ValueError: the plan does not fit the model, or the sizes of a layer cannot be divided.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    # All ranks have the same values, or get them afterwards.
    known = inspect.signature(parallelize_module).parameters
    options: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in known else {}
    # Before layers are cut, each place of a tied weight by itself.
    ties = _ties(model)
    chosen, parameters = checked_plan(model, plan, mesh.size())
    # Likewise: it compares stored numbers with the sizes of whole layers.
    _divide_counts(model, chosen, mesh.size())
    _cut_parameters(parameters, mesh)
    for name, module, style in chosen:
        if style == "replicated_with_grad_allreduce":
            _replicate(module, mesh)
        elif style != "replicated":
            if style in _SEQUENCE_BEGINS:
                module.register_forward_hook(_SequenceLength(name, mesh.size()))
            parallelize_module(module, mesh, _style(style, module, model, name), **options)
            if style == "rowwise" and _SHARED_EXPERTS.intersection(name.split(".")):
                # Routed experts are added to it in place, which autograd refuses for torch's view.
                module.register_forward_hook(lambda module, inputs, output: output.clone())
    _tie_again(model, ties)


_SHARED_EXPERTS = {"shared_expert", "shared_experts"}
_Chosen = list[tuple[str, torch.nn.Module, Any]]
_Parameters = list[tuple[str, torch.nn.Module, str, str]]


def checked_plan(
    model: torch.nn.Module, plan: Mapping[str, Any], ranks: int
) -> tuple[_Chosen, _Parameters]:
    """Return the modules and the parameters that a plan names, with their styles.

    Args:
        model: the model, which is not changed.
        plan: see :func:`accel_callbacks.engines.tensor.plan.matched_styles`.
        ranks: number of ranks that share each layer.

    Raises:
        ValueError: the plan does not fit the model, or the sizes of a layer cannot be divided.
    """
    chosen, parameters = list(matched_styles(model, plan)), list(matched_parameters(model, plan))
    for name, module, style in chosen:
        _check_layer(name, module, style, ranks)
    check_pairs(chosen)
    check_parameters(parameters, chosen, ranks)
    check_heads(model, chosen, ranks)
    return chosen, parameters


def _divide_counts(model: torch.nn.Module, chosen: _Chosen, ranks: int) -> None:
    """Let attention of transformers, which computes with stored numbers, use those of a rank."""
    for name, layer, style in chosen:
        attention: Any = model.get_submodule(name.rpartition(".")[0])
        size = part_size(attention)
        is_packed = isinstance(style, str) and style.startswith("packed_colwise")
        # A script may have divided it already.
        if is_packed and size is not None and size * parts_of(style) == output_features(layer):
            attention.split_size = size // ranks
        # The heads of T5, beside biases of positions that are cut by head.
        is_query = style == "colwise" and name.endswith("Attention.q")
        if is_query and getattr(attention, "inner_dim", None) == output_features(layer):
            attention.inner_dim = attention.inner_dim // ranks
            attention.n_heads = attention.n_heads // ranks


def _cut_parameters(parameters: _Parameters, mesh: Any) -> None:
    """Replace parameters that a plan names by themselves by this rank's parts."""
    for _, module, key, style in parameters:
        parameter = module._parameters[key]
        assert parameter is not None
        dimension = cut_dim(parameter, style)
        if dimension is not None:
            from accel_callbacks.engines.tensor.styles import cut_parameter

            cut_parameter(module, key, mesh, dimension, parts_of(style))


# Styles after which each rank has a part of the sequence, which was whole before.
_SEQUENCE_BEGINS = ("embedding_rowwise_sequence", "sequence_split", "rowwise_sequence")


def _style(style: Any, module: torch.nn.Module, model: torch.nn.Module, name: str) -> Any:
    """Return torch's style for a name, or ours for layers and modules that torch does not cut."""
    if not isinstance(style, str):
        return style
    if style in _OF_MODULES:
        from accel_callbacks.engines.tensor.styles import (
            DividedInput,
            LocalModule,
            RotaryGradient,
        )

        if style == "mla_kv_a_proj":
            return RotaryGradient(_rotary_width(model, name))
        if style == "moe_identity_expert":
            return DividedInput()
        return LocalModule(sums=style != "local_params")
    if style.startswith("packed") or _is_conv1d(module):
        # Imported here, because it needs torch's tensors of several ranks.
        from accel_callbacks.engines.tensor.styles import LocalColwise, LocalRowwise

        in_sequence = "_sequence" in style
        if "rowwise" in style:
            return LocalRowwise(parts_of(style), sequence=in_sequence)
        return LocalColwise(parts_of(style), sequence=in_sequence)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole, sequence, last = Replicate(), Shard(1), Shard(-1)
    if style == "sequence_parallel":
        return SequenceParallel(use_local_output=True)
    if style == "sequence_split":
        return PrepareModuleOutput(output_layouts=whole, desired_output_layouts=sequence)
    if style.startswith("colwise"):
        input_layout = sequence if "_sequence" in style else whole
        if style.endswith("loss_parallel"):
            return ColwiseParallel(
                input_layouts=input_layout, output_layouts=last, use_local_output=False
            )
        output_layout = whole if style.endswith("gather_output") else last
        return ColwiseParallel(input_layouts=input_layout, output_layouts=output_layout)
    takes_whole = style.startswith("embedding") or style == "rowwise_split_input"
    input_layout = whole if takes_whole else last
    output_layout = sequence if style.endswith("_sequence") else whole
    return RowwiseParallel(input_layouts=input_layout, output_layouts=output_layout)


def _rotary_width(model: torch.nn.Module, name: str) -> int:
    """Return how many of the last features of a layer are rotary keys, in latent attention."""
    attention = model.get_submodule(name.rpartition(".")[0])
    for holder in (attention, getattr(attention, "config", None), getattr(model, "config", None)):
        width = getattr(holder, "qk_rope_head_dim", None)
        if type(width) is int and width > 0:
            return width
    raise ValueError(
        f"{name!r} has the style 'mla_kv_a_proj', and nothing says how many of its last features "
        f"are rotary keys: set qk_rope_head_dim on its {type(attention).__name__}, or leave the "
        "layers of the attention out of the plan."
    )


class _SequenceLength:
    """A forward hook that refuses sequences that the ranks cannot share.

    torch would take the parts for equal ones, and exchange the wrong elements.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self._name, self._ranks = name, ranks

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if output.dim() < 2 or output.shape[1] % self._ranks:
            length = tuple(output.shape)[1:2] or tuple(output.shape)
            raise ValueError(
                f"{self._name} returned a sequence of {length[0]} (dimension 1), which "
                f"{self._ranks} ranks of tensor parallelism cannot share in sequence parallelism: "
                "pad the batch to a multiple of it."
            )


def _replicate(module: torch.nn.Module, mesh: Any) -> None:
    """Replicate the parameters of a module of which each rank sees a part of the activations."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from accel_callbacks.engines.tensor.styles import local_parameters

    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            placed = parameter.detach().to(mesh.device_type) if not parameter.is_meta else parameter
            whole = DTensor.from_local(placed.detach(), mesh, [Replicate()], run_check=False)
            module._parameters[name] = torch.nn.Parameter(whole, parameter.requires_grad)
    local_parameters(module, lambda _, parameter: parameter.to_local(grad_placements=[Partial()]))


# What Conv1D of transformers, which has its weight the other way round, is cut by.
_OF_CONV1D = ("colwise", "colwise_by_head", "colwise_sequence", "rowwise", "rowwise_sequence")
# Styles of modules that are no layers by themselves.
_OF_MODULES = (
    "all_reduce",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
)


def _is_conv1d(module: torch.nn.Module) -> bool:
    # By name: one of transformers is here only if the script has imported it.
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def _check_layer(name: str, module: torch.nn.Module, style: Any, ranks: int) -> None:
    if not isinstance(style, str):
        return
    packed = style.startswith("packed")
    cuts = packed or style.startswith(("colwise", "rowwise", "embedding"))
    kinds = (torch.nn.Linear,) if packed else (torch.nn.Linear, torch.nn.Embedding)
    conv1d = _is_conv1d(module) and (packed or style in _OF_CONV1D)
    if cuts and not conv1d and not isinstance(module, kinds):
        raise ValueError(
            f"{name} is a {type(module).__name__}, and {style!r} cuts "
            f"{'Linear and Conv1D' if packed else 'Linear and Embedding'} only: "
            "replace the layer, leave it out of the plan, or write a ParallelStyle of torch."
        )
    if cuts and any(True for child in module.children() for _ in child.parameters()):
        raise ValueError(
            f"{name} is a {type(module).__name__}, which has layers of its own, and {style!r} cuts "
            "plain layers: leave it out of the plan, or write a ParallelStyle of torch."
        )
    weight = getattr(module, "weight", None)
    # Parts of a vocabulary may be unequal: no layer takes the part as it is.
    of_vocabulary = style.startswith("embedding") or style.endswith(("_output", "loss_parallel"))
    if not cuts or of_vocabulary or not isinstance(weight, torch.Tensor):
        return
    dimension = int("rowwise" in style) ^ int(conv1d)
    parts = parts_of(style)
    if parts > 1 and weight.shape[dimension] % (parts * ranks):
        raise ValueError(
            f"{name}.weight has {weight.shape[dimension]} {'columns' if dimension else 'rows'}, of "
            f"which {style!r} cuts each of {parts} equal parts over {ranks} ranks: choose a "
            "tp_size that divides the parts, or the number of parts that there are "
            '("packed_colwise:3" for queries, keys and values), or leave the layer out of the plan.'
        )
    if weight.shape[dimension] % ranks:
        raise ValueError(
            f"{name}.weight has {weight.shape[dimension]} "
            f"{'columns' if dimension else 'rows'}, which {ranks} ranks of tensor parallelism "
            "cannot share: choose a tp_size that divides it, or leave the layer out of the plan."
        )


_Slots = list[tuple[torch.nn.Module, str]]


def _ties(model: torch.nn.Module) -> list[_Slots]:
    """Return the places of each parameter that has several."""
    places: dict[int, _Slots] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, key))
    return [slots for slots in places.values() if len(slots) > 1]


def _tie_again(model: torch.nn.Module, ties: list[_Slots]) -> None:
    for slots in ties:
        parameters = [module._parameters[key] for module, key in slots]
        kinds = {getattr(parameter, "placements", None) for parameter in parameters}
        if len(kinds) > 1:
            names = {id(module): name for name, module in model.named_modules()}
            shown = " and ".join(f"{names[id(module)]}.{key}" for module, key in slots)
            raise ValueError(
                f"{shown} are one tensor, and the plan of tensor parallelism cuts them in "
                "different ways: give both the same (for an embedding and its head: "
                '"embedding_rowwise" and "colwise_gather_output").'
            )
        for module, key in slots[1:]:
            module._parameters[key] = parameters[0]
