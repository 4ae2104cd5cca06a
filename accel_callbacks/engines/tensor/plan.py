"""Plans of tensor parallelism: which modules are cut, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from accel_callbacks.engines.checks import is_of_transformers
from accel_callbacks.errors import nearest

__all__ = [
    "STYLES",
    "check_heads",
    "check_own",
    "check_pairs",
    "check_parameters",
    "cut_dim",
    "first_pattern",
    "is_cut_after",
    "matched_parameters",
    "matched_styles",
    "output_features",
    "part_size",
    "parts_of",
    "plan_of",
    "propose_plan",
]

#: What a plan may say of a module. Those with "sequence" are for activations that are cut along the
#: sequence outside of attention and MLPs; those with "loss_parallel" leave the vocabulary cut.
#: "packed_colwise:3" is for queries, keys and values in one layer; the number is 2 by default.
STYLES = (
    "colwise",
    "colwise_by_head",
    "colwise_gather_output",
    "colwise_loss_parallel",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "packed_colwise",
    "packed_colwise_sequence",
    "packed_rowwise",
    "colwise_sequence",
    "colwise_sequence_gather_output",
    "colwise_sequence_loss_parallel",
    "rowwise_sequence",
    "embedding_rowwise_sequence",
    "sequence_parallel",
    "sequence_split",
    "replicated",
    "replicated_with_grad_allreduce",
    "all_reduce",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
)
# Names of transformers and of others for the same.
_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "embedding_rowwise",
    "embedding_colwise": "colwise_gather_output",
    "sequence": "sequence_parallel",
    "replicate": "replicated",
}
# The last part of the names of linear layers in attention and MLPs.
_COLWISE = (
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin", "wq", "wk"),
    *("wv", "to_q", "to_k", "to_v"),
    *("gate_proj", "up_proj", "fc1", "c_fc", "lin1", "w1", "w3", "dense_h_to_4h", "wi", "wi_0"),
    *("wi_1", "q_attn", "relative_attention_bias"),
)
_ROWWISE = (
    *("o_proj", "out_proj", "out_lin", "wo", "to_out", "c_proj"),
    *("down_proj", "fc2", "lin2", "w2", "dense_4h_to_h"),
)
# The same by the last two parts, where layers of blocks and of heads have one name.
_T5 = ("SelfAttention", "EncDecAttention")
_T5_HEADS = tuple(f"{attention}.{layer}" for attention in _T5 for layer in "qkv")
_COLWISE_IN = ("intermediate.dense", *_T5_HEADS)
_ROWWISE_IN = ("output.dense", *(f"{attention}.o" for attention in _T5))
# One linear layer for several: its columns are not those of a head, so cutting them is wrong.
_PACKED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj", "gate_up_proj", "Wqkv")
# Layers of attention whose output has the features of one head after the other.
_OF_KEYS = ("k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "wk", "wv", "to_k", "to_v")
_OF_HEADS = ("q_proj", "query", "q_lin", "wq", "to_q", *_OF_KEYS)
# What attention calls the features of a head, its heads, and those of keys and values.
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")
_HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
# Norms of the heads of a rank: their weights are whole, and their gradients parts of sums.
_HEAD_NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
_HEADS = ("lm_head", "head", "output", "embed_out", "unembed")
_PARTS = re.compile(r"packed_(colwise(_sequence)?|rowwise):([2-9]|[1-9][0-9]+)")
# Styles whose output each rank has a part of, and those of layers that "rowwise" goes with.
_LEAVE_FEATURES = ("colwise", "colwise_by_head", "colwise_sequence")
_CUT_AFTER = (
    *_LEAVE_FEATURES,
    *("rowwise_sequence", "embedding_rowwise_sequence", "sequence_split", "sequence_parallel"),
)
# Styles of modules without an output of their own kind: as their input, or of whole parts.
_AS_INPUT = ("local_params", "mla_kv_a_proj", "moe_identity_expert")
# Styles of modules that compute with parts of their own parameters, and those that then sum.
_SUMS = ("all_reduce", "moe_tp_experts")
_LOCAL = ("local_params", *_SUMS)
# Styles of parameters that a plan names by themselves.
_OF_PARAMETERS = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "replicated")
# Modules with parameters that see parts of activations, beside a layer that leaves parts.
_ON_PARTS = (*_HEAD_NORMS, "act_fn")
# A layer of queries, keys and values whose columns are one head's after the other, in transformers.
_BY_HEAD = "query_key_value"


def plan_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the plan that a model brings along, as those of transformers do; empty if none.

    A plan of transformers is for all configurations of a model: what this one lacks is left out.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    return _complete_plan(model, plan) if is_of_transformers(model) else dict(plan)


def _complete_plan(model: torch.nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan of transformers for one model, with what its authors leave to the reader."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    present: dict[str, Any] = {}
    for pattern, style in plan.items():
        if any(_matches(name, pattern) for name in names):
            by_head = style == "colwise" and pattern.rpartition(".")[2] == _BY_HEAD
            present[pattern] = "colwise_by_head" if by_head else style
    added = {}
    for parent, module in model.named_modules():
        prefix = f"{parent}." if parent else ""
        styles = {
            key: present.get(first_pattern(prefix + key, present) or "")
            for key, _ in module.named_children()
        }
        if "colwise" in styles.values():
            for key, child in module.named_children():
                if (
                    styles[key] is None
                    and key in _ON_PARTS
                    and any(True for _ in child.parameters())
                ):
                    added[_pattern(prefix + key)] = "replicated_with_grad_allreduce"
    return {**present, **added}


def matched_styles(
    model: torch.nn.Module, plan: Mapping[str, Any]
) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Yield the modules that a plan names, with their names and styles; the first pattern wins.

    Args:
        model: the model.
        plan: patterns of module names, with ``*`` for one part, and a style for each: one of
            :data:`STYLES` or a ``ParallelStyle`` of torch.

    Raises:
        ValueError: a pattern matches no module, or a style is unknown.
    """
    modules = dict(model.named_modules())
    known = _check_plan(model, plan)
    for name, module in modules.items():
        pattern = first_pattern(name, known)
        if pattern is not None:
            yield name, module, known[pattern]


def matched_parameters(
    model: torch.nn.Module, plan: Mapping[str, Any]
) -> Iterator[tuple[str, torch.nn.Module, str, str]]:
    """Yield the parameters that a plan names by themselves, as those of experts.

    Args:
        model: the model.
        plan: see :func:`matched_styles`.

    Yields:
        The name of the module that has the parameter, the module, the parameter's key, its style.

    Raises:
        ValueError: as for :func:`matched_styles`, or the style is none of a parameter.
    """
    known = _check_plan(model, plan)
    for module_name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            name = f"{module_name}.{key}" if module_name else key
            pattern = None if parameter is None else first_pattern(name, known)
            if pattern is None:
                continue
            style = known[pattern]
            if not isinstance(style, str) or style.partition(":")[0] not in _OF_PARAMETERS:
                raise ValueError(
                    f"the plan of tensor parallelism has the style {style!r} for {name!r}, which "
                    f"is a parameter and no layer: use one of {', '.join(_OF_PARAMETERS)}."
                )
            yield module_name, module, key, style


def cut_dim(parameter: torch.Tensor, style: str) -> int | None:
    """Return the dimension along which a style cuts a parameter that a plan names, None for none.

    Outputs are along the last dimension but one, as in a Linear, experts along the first of three.
    """
    if style == "replicated":
        return None
    return max(parameter.dim() - (1 if "rowwise" in style else 2), 0)


def _check_plan(model: torch.nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with the styles' own names, after it was compared with the model."""
    known = {pattern: _resolve_style(pattern, style) for pattern, style in plan.items()}
    for pattern, style in known.items():
        last = pattern.rpartition(".")[2]
        if last in _PACKED and style in ("colwise", "colwise_sequence"):
            raise ValueError(
                f"the plan of tensor parallelism cuts {pattern!r}, whose name is that of several "
                "layers in one: a rank would get columns of the first and none of the last. For "
                'equal parts, one after the other, say "packed_colwise:3" (queries, keys and '
                'values) or "packed_colwise:2" (gate and up); for columns that are ordered by '
                'head, "colwise_by_head"; else split it into one layer each.'
            )
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for pattern in known:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(
                f"the plan of tensor parallelism names {pattern!r}, and {type(model).__name__} has "
                f"no such module.{nearest(pattern, names)}"
            )
    return known


def is_cut_after(style: Any) -> bool | None:
    """Return whether outputs of a module of this style are cut over ranks, None if unknown."""
    if isinstance(style, str):
        short = _ALIASES.get(style, style)
        if short.startswith("replicated") or short in _AS_INPUT:
            return None  # as its input
        cut = short in _CUT_AFTER or short.startswith("packed_colwise")
        return cut or short.endswith("loss_parallel")
    layouts = getattr(style, "desired_output_layouts", None) or getattr(
        style, "output_layouts", getattr(style, "sequence_sharding", None)
    )
    if layouts is None:
        return None
    outputs = layouts if isinstance(layouts, (tuple, list)) else (layouts,)
    return any(layout is not None and layout.is_shard() for layout in outputs)


def check_pairs(chosen: Iterable[tuple[str, torch.nn.Module, Any]]) -> None:
    """Refuse a layer that leaves each rank a part of its features, if no layer takes such parts.

    And one that takes parts which no layer leaves. Layers belong together that have the innermost
    module around both in common.

    Args:
        chosen: what :func:`matched_styles` yields.

    Raises:
        ValueError: a layer has no other that goes with it.
    """
    leaving: dict[str, Any] = {}
    taking: dict[str, Any] = {}
    for name, module, style in chosen:
        role = _role(style)
        if role == "unknown":  # a style of the user's own may join what others cut
            return
        if role == "takes" and isinstance(module, torch.nn.Embedding):
            raise ValueError(
                f"{name!r} is an Embedding, which takes whole tokens: give it "
                '"embedding_rowwise" in place of "rowwise".'
            )
        if role is not None:
            (leaving if role == "leaves" else taking)[name] = style
    _drop_pairs(leaving, taking)
    for name, style in leaving.items():
        raise ValueError(
            f"{name!r} leaves each rank a part of its output ({style!r}), and the plan of tensor "
            'parallelism has no layer that takes parts: give the layer after it "rowwise", or '
            f'{name!r} "colwise_gather_output", after which its output is whole on each rank.'
        )
    for name, style in taking.items():
        raise ValueError(
            f"{name!r} takes a part of its input on each rank ({style!r}), and the plan of tensor "
            'parallelism has no layer that leaves parts: give the layer before it "colwise", or '
            f"leave {name!r} out of the plan."
        )


def _role(style: Any) -> str | None:
    """Return whether a layer ``"leaves"`` or ``"takes"`` parts of features, None for neither."""
    if isinstance(style, str):
        if style.startswith("packed_colwise") or style in _LEAVE_FEATURES:
            return "leaves"
        takes = style.startswith("packed_rowwise") or style in ("rowwise", "rowwise_sequence")
        return "takes" if takes else None
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if type(style) is SequenceParallel:
        return None
    if type(style) is ColwiseParallel and style.use_local_output:
        return "leaves" if is_cut_after(style) else None
    if type(style) is RowwiseParallel:
        return "takes" if any(layout.is_shard() for layout in style.input_layouts) else None
    return "unknown"


def _drop_pairs(leaving: dict[str, Any], taking: dict[str, Any]) -> None:
    """Remove the layers that have one of the other kind in the innermost module around both."""
    depth = max((name.count(".") for name in (*leaving, *taking)), default=0)
    for level in range(depth, -1, -1):
        around: dict[tuple[str, ...], set[str]] = {}
        for name in (*leaving, *taking):
            parts = tuple(name.split("."))
            if len(parts) > level:
                around.setdefault(parts[:level], set()).add(name)
        for names in around.values():
            if not names.isdisjoint(leaving) and not names.isdisjoint(taking):
                for name in names:
                    leaving.pop(name, None)
                    taking.pop(name, None)


def check_own(model: torch.nn.Module, plan: Mapping[str, Any]) -> None:
    """Refuse the plan of a model of transformers that forgets a parameter beside layers it cuts.

    Raises:
        ValueError: a module has one, of which the plan does not say what a rank computes with.
    """
    if not is_of_transformers(model) or dict(plan) != plan_of(model):
        return
    for name, module in model.named_modules():
        keys = [key for key, parameter in module._parameters.items() if parameter is not None]
        forgotten = [key for key in keys if first_pattern(f"{name}.{key}", plan) is None]
        styles = {
            plan.get(first_pattern(f"{name}.{key}", plan) or "")
            for key, _ in module.named_children()
        }
        if forgotten and "colwise" in styles:
            raise ValueError(
                f"the plan that {type(model).__name__} brings along cuts layers of {name!r}, and "
                f"does not say what a rank computes with of its parameter {forgotten[0]!r}: pass a "
                f"plan without the layers of {_pattern(name)!r} in TorchTensorParallelConfig(plan="
                "...), or one that gives it a style."
            )


def check_parameters(
    parameters: Iterable[tuple[str, torch.nn.Module, str, str]],
    chosen: Iterable[tuple[str, torch.nn.Module, Any]],
    ranks: int,
) -> None:
    """Refuse parameters that cannot be cut, or whose module would not compute with parts of them.

    Args:
        parameters: what :func:`matched_parameters` yields.
        chosen: what :func:`matched_styles` yields.
        ranks: number of ranks that share each.

    Raises:
        ValueError: the ranks cannot share one equally, or its module has another style.
    """
    styles = {name: style for name, _, style in chosen}
    cut: dict[str, set[str]] = {}
    for module_name, module, key, style in parameters:
        parameter = module._parameters[key]
        assert parameter is not None
        dimension = cut_dim(parameter, style)
        if dimension is None:
            continue
        name = f"{module_name}.{key}" if module_name else key
        cut.setdefault(module_name, set()).add(key)
        if styles.get(module_name) not in _LOCAL:
            raise ValueError(
                f"the plan of tensor parallelism cuts {name!r}, a parameter with which "
                f"{type(module).__name__} computes itself: give {module_name!r} the style "
                '"moe_tp_experts" if the sum over the parts is its output, "local_params" if it '
                "computes with the heads or features of a rank."
            )
        parts = parts_of(style)
        if parameter.shape[dimension] % (parts * ranks):
            raise ValueError(
                f"{name} has {parameter.shape[dimension]} elements in dimension {dimension}, of "
                f"which {style!r} cuts each of {parts} equal parts over {ranks} ranks: choose a "
                f"tp_size that divides them, or leave {module_name!r} and its parameters out of "
                "the plan."
            )
    for module_name, module, style in chosen:
        if style not in _SUMS or (style == "all_reduce" and module_name not in cut):
            continue
        for key, parameter in module.named_parameters():
            if key not in cut.get(module_name, ()):
                raise ValueError(
                    f"the output of {module_name!r} ({style!r}) is a sum over ranks, and each "
                    f"would add {key!r}, of shape {tuple(parameter.shape)}, whole: name "
                    f'"{module_name}.{key}" in the plan, or leave {module_name!r} out of it.'
                )


def check_heads(
    model: torch.nn.Module, chosen: Iterable[tuple[str, torch.nn.Module, Any]], ranks: int
) -> None:
    """Refuse to cut a layer of attention inside of a head.

    Args:
        model: the model.
        chosen: what :func:`matched_styles` yields.
        ranks: number of ranks that share the heads.

    Raises:
        ValueError: they cannot; the message names the attention, its heads and ``tp_size``.
    """
    for name, module, style in chosen:
        parent, _, last = name.rpartition(".")
        packed = (
            isinstance(style, str)
            and last in _PACKED
            and (style.startswith("packed") or style == "colwise_by_head")
        )
        inner = ".".join(name.split(".")[-2:])
        of_heads = packed or last in _OF_HEADS or inner in _T5_HEADS
        if _role(style) != "leaves" or not of_heads:
            continue
        attention = model.get_submodule(parent)
        heads = _heads(attention, module, style, of_keys=last in _OF_KEYS)
        if heads is not None and heads % ranks:
            nouns = ("head" if heads == 1 else "heads") + " of keys and values" * (last in _OF_KEYS)
            raise ValueError(
                f"{parent or type(model).__name__!r} ({type(attention).__name__}) has {heads} "
                f"{nouns}, which tp_size={ranks} does not divide, so that {name!r} would be cut "
                "inside of a head: choose a tp_size that does, or leave the layers of the "
                "attention out of the plan."
            )


def _heads(
    attention: torch.nn.Module, layer: torch.nn.Module, style: Any, *, of_keys: bool
) -> int | None:
    """Return how many heads a layer computes the features of, None if nothing tells."""
    features = output_features(layer) // (parts_of(style) if isinstance(style, str) else 1)
    places = [attention, getattr(attention, "config", None)]
    if style == "colwise_by_head":  # one after the other, each with its queries, keys and values
        return _number(places, _HEAD_COUNTS)
    size = _number(places[:1], _HEAD_SIZES)
    if size is not None and features % size == 0:
        return features // size
    return (_number(places, _KEY_COUNTS) if of_keys else None) or _number(places, _HEAD_COUNTS)


def _number(places: Iterable[Any], names: Iterable[str]) -> int | None:
    numbers = (getattr(place, name, None) for place in places for name in names)
    return next((number for number in numbers if type(number) is int and number > 0), None)


def _resolve_style(pattern: str, style: Any) -> Any:
    if not isinstance(style, str):
        return style
    short = _ALIASES.get(style, style)
    if short not in STYLES and not _PARTS.fullmatch(short):
        raise ValueError(
            f"the plan of tensor parallelism has the style {style!r} for {pattern!r}: use one of "
            f"{', '.join(STYLES)}, or a ParallelStyle of torch.{nearest(style, STYLES)}"
        )
    return short


def parts_of(style: str) -> int:
    """Return how many layers a style takes a weight for."""
    if not style.startswith("packed"):
        return 1
    return int(style.rpartition(":")[2]) if ":" in style else 2


def first_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first of the patterns that a name matches, None if there is none."""
    return next((pattern for pattern in patterns if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def propose_plan(model: torch.nn.Module, *, sequence_parallel: bool = False) -> dict[str, str]:
    """Return a plan by the usual names of layers in attention and MLPs; to be read before use.

    Layers of one name in repeated blocks are one pattern. What is not recognized is left whole.

    Args:
        model: the model, which is not changed.
        sequence_parallel: cut the sequence between the blocks too, in norms and dropout.

    Raises:
        ValueError: nothing is recognized, or a layer packs several (such as ``c_attn``, or a gate
            beside values), or the sequence cannot be cut by names alone.

    Example:
        >>> import torch
        >>> from accel_callbacks.engines.tensor.plan import propose_plan
        >>> mlp = lambda: torch.nn.ModuleDict(
        ...     {"fc1": torch.nn.Linear(2, 8), "fc2": torch.nn.Linear(8, 2)}
        ... )
        >>> propose_plan(torch.nn.ModuleList([mlp(), mlp()]))
        {'*.fc1': 'colwise', '*.fc2': 'rowwise'}
    """
    plan: dict[str, str] = {}
    suffix = "_sequence" if sequence_parallel else ""
    for name, module in model.named_modules():
        last, inner = name.rpartition(".")[2], ".".join(name.split(".")[-2:])
        if not isinstance(getattr(module, "weight", None), torch.Tensor) or list(module.children()):
            continue
        style = None
        if last in _PACKED:
            style = f"packed_colwise{suffix}:{_count_parts(model, name)}"
        elif last in _COLWISE or inner in _COLWISE_IN:
            style = f"colwise{suffix}"
        elif last in _ROWWISE or inner in _ROWWISE_IN:
            style = f"rowwise{suffix}"
        elif last in _HEAD_NORMS:
            style = "replicated_with_grad_allreduce"
        elif sequence_parallel and _is_norm(module):
            style = "sequence_parallel"
        if style is not None:
            plan[_pattern(name)] = style
    leaves = any(_role(style) == "leaves" for style in plan.values())
    if not leaves or f"rowwise{suffix}" not in plan.values():
        raise ValueError(
            f"{type(model).__name__} has no layers with the usual names of attention and MLPs: "
            'give a plan, such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}.'
        )
    _refuse_wide(model, plan)
    return {**_ends(model), **plan} if sequence_parallel else plan


def _count_parts(model: torch.nn.Module, name: str) -> int:
    """Return of how many equal layers one consists, where the module around splits its output."""
    layer, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    size = part_size(parent)
    if size is None or output_features(layer) % size or output_features(layer) == size:
        raise ValueError(
            f"{name!r} packs several layers into one, and its name does not say how: give a "
            'plan, with "packed_colwise:3" for queries, keys and values of the same size, one '
            'after the other, or "packed_colwise:2" for gate and up; else split it.'
        )
    return output_features(layer) // size


def part_size(module: torch.nn.Module) -> int | None:
    """Return the width by which the attention of GPT-2 splits what its packed layer returns."""
    return _number([module], ("split_size",))


def output_features(layer: torch.nn.Module) -> int:
    """Return how many features a Linear, or a Conv1D of transformers, returns, over all ranks."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    # Conv1D has its weight the other way round, and its width is an attribute.
    features: int = weight.shape[1 if isinstance(getattr(layer, "nf", None), int) else 0]
    return features


def _refuse_wide(model: torch.nn.Module, styles: Mapping[str, str]) -> None:
    """Refuse layers that return more than the next one takes: a gate beside values, in one."""
    for parent, module in model.named_modules():
        cut: dict[str, list[tuple[str, torch.nn.Linear]]] = {"colwise": [], "rowwise": []}
        for key, child in module.named_children():
            name = f"{parent}.{key}" if parent else key
            style = styles.get(_pattern(name), "").removesuffix("_sequence")
            if style in cut and isinstance(child, torch.nn.Linear):
                cut[style].append((name, child))
        features = max((layer.in_features for _, layer in cut["rowwise"]), default=None)
        for name, layer in cut["colwise"]:
            if features is not None and layer.out_features > features:
                raise ValueError(
                    f"{name!r} returns {layer.out_features} features, of which the next layer "
                    f"takes {features}: it packs several layers into one. Split it into one layer "
                    "each; or give a plan yourself, if its features are ordered by head."
                )


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _is_norm(module: torch.nn.Module) -> bool:
    weight: Any = module.weight
    return "norm" in type(module).__name__.lower() and weight.dim() == 1


def _ends(model: torch.nn.Module) -> dict[str, str]:
    """Return the styles of the embedding, after which the sequence is cut, and of the head."""
    embeddings = [
        n for n, module in model.named_modules() if isinstance(module, torch.nn.Embedding)
    ]
    heads = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in _HEADS
    ]
    if len(embeddings) != 1 or len(heads) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(embeddings)} embeddings and {len(heads)} heads with "
            "the usual names, and one each is where a sequence is cut and joined: take the plan "
            'without sequence_parallel, and give the module before the first block "sequence_split"'
            ', the norms "sequence_parallel", the others their styles with "_sequence".'
        )
    return {
        embeddings[0]: "embedding_rowwise_sequence",
        heads[0]: "colwise_sequence_gather_output",
    }
