"""Plans of tensor parallelism: which modules are cut, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from accel_callbacks.errors import nearest

__all__ = [
    "STYLES",
    "check_heads",
    "check_pairs",
    "first_pattern",
    "is_cut_after",
    "matched_styles",
    "parts_of",
    "plan_of",
    "propose_plan",
]

#: What a plan may say of a module. Those with "sequence" are for activations that are cut along the
#: sequence outside of attention and MLPs; those with "loss_parallel" leave the vocabulary cut.
#: "packed_colwise:3" is for queries, keys and values in one layer; the number is 2 by default.
STYLES = (
    "colwise",
    "colwise_gather_output",
    "colwise_loss_parallel",
    "rowwise",
    "embedding_rowwise",
    "packed_colwise",
    "packed_colwise_sequence",
    "colwise_sequence",
    "colwise_sequence_gather_output",
    "colwise_sequence_loss_parallel",
    "rowwise_sequence",
    "embedding_rowwise_sequence",
    "sequence_parallel",
    "sequence_split",
    "replicated",
    "replicated_with_grad_allreduce",
)
# Names of transformers and of others for the same.
_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "embedding_rowwise",
    "sequence": "sequence_parallel",
    "replicate": "replicated",
}
# The last part of the names of linear layers in attention and MLPs.
_COLWISE = (
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin", "wq", "wk"),
    *("wv", "to_q", "to_k", "to_v"),
    *("gate_proj", "up_proj", "fc1", "c_fc", "lin1", "w1", "w3", "dense_h_to_4h", "wi", "wi_0"),
    *("wi_1",),
)
_ROWWISE = (
    *("o_proj", "out_proj", "out_lin", "wo", "to_out"),
    *("down_proj", "fc2", "lin2", "w2", "dense_4h_to_h"),
)
# The same by the last two parts, where layers of blocks and of heads have one name.
_COLWISE_IN = ("intermediate.dense",)
_ROWWISE_IN = ("output.dense",)
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
_PARTS = re.compile(r"packed_colwise(_sequence)?:([2-9]|[1-9][0-9]+)")
# Styles whose output each rank has a part of.
_CUT_AFTER = ("colwise", "rowwise_sequence", "embedding_rowwise_sequence", "sequence_split")


def plan_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the plan that a model brings along, as those of transformers do; empty if none.

    Example:
        >>> import torch
        >>> from accel_callbacks.strategies.tensor_plan import plan_of
        >>> plan_of(torch.nn.Linear(1, 1))
        {}
    """
    found = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return dict(found) if isinstance(found, Mapping) else {}


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

    Example:
        >>> import torch
        >>> from accel_callbacks.strategies.tensor_plan import matched_styles
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
        >>> [(name, style) for name, _, style in matched_styles(model, {"0": "colwise"})]
        [('0', 'colwise')]
    """
    names = dict(model.named_modules())
    known = {pattern: _known(pattern, style) for pattern, style in plan.items()}
    for pattern, style in known.items():
        last = pattern.rpartition(".")[2]
        if last in _PACKED and style in ("colwise", "colwise_sequence"):
            raise ValueError(
                f"the plan of tensor parallelism cuts {pattern!r}, whose name is that of several "
                "layers in one: a rank would get columns of the first and none of the last. For "
                'equal parts, one after the other, say "packed_colwise:3" (queries, keys and '
                'values) or "packed_colwise:2" (gate and up); for columns that are ordered by '
                "head, ColwiseParallel() of torch; else split it into one layer each."
            )
    for name, module in names.items():
        pattern_of = first_pattern(name, known)
        if pattern_of is not None:
            yield name, module, known[pattern_of]
    for pattern in known:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(
                f"the plan of tensor parallelism names {pattern!r}, and {type(model).__name__} has "
                f"no such module.{nearest(pattern, names)}"
            )


def is_cut_after(style: Any) -> bool | None:
    """Return whether each rank has a part of what a module of this style returns, None if unknown.

    Example:
        >>> from accel_callbacks.strategies.tensor_plan import is_cut_after
        >>> is_cut_after("colwise"), is_cut_after("rowwise")
        (True, False)
    """
    if isinstance(style, str):
        short = _ALIASES.get(style, style)
        if short.startswith("replicated"):
            return None  # as its input
        if short.startswith("packed"):
            return True
        cut = short in _CUT_AFTER or short in ("colwise_sequence", "sequence_parallel")
        return cut or short.endswith("loss_parallel")
    layouts = getattr(style, "desired_output_layouts", None) or getattr(
        style, "output_layouts", getattr(style, "sequence_sharding", None)
    )
    if layouts is None:
        return None
    each = layouts if isinstance(layouts, (tuple, list)) else (layouts,)
    return any(one is not None and one.is_shard() for one in each)


def check_pairs(chosen: Iterable[tuple[str, torch.nn.Module, Any]]) -> None:
    """Refuse a layer that leaves each rank a part of its features, if no layer takes such parts.

    And one that takes parts which no layer leaves. Layers belong together that have the innermost
    module around both in common.

    Args:
        chosen: what :func:`matched_styles` yields.

    Raises:
        ValueError: a layer has no other that goes with it.

    Example:
        >>> import torch
        >>> from accel_callbacks.strategies.tensor_plan import check_pairs
        >>> check_pairs([("up", torch.nn.Linear(2, 4), "colwise")])
        Traceback (most recent call last):
        ValueError: 'up' leaves each rank a part of its output ('colwise'), and the plan of tensor \
parallelism has no layer that takes parts: give the layer after it "rowwise", or 'up' \
"colwise_gather_output", after which its output is whole on each rank.
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
        if style.startswith("packed") or style in ("colwise", "colwise_sequence"):
            return "leaves"
        return "takes" if style in ("rowwise", "rowwise_sequence") else None
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if type(style) is SequenceParallel:
        return None
    if type(style) is ColwiseParallel and style.use_local_output:
        return "leaves" if is_cut_after(style) else None
    if type(style) is RowwiseParallel:
        return "takes" if any(one.is_shard() for one in style.input_layouts) else None
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

    Example:
        >>> import torch
        >>> from accel_callbacks.strategies.tensor_plan import check_heads
        >>> attention = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(6, 6)})
        >>> attention.head_dim = 2
        >>> check_heads(attention, [("q_proj", attention["q_proj"], "colwise")], 3)
    """
    for name, module, style in chosen:
        parent, _, last = name.rpartition(".")
        packed = isinstance(style, str) and style.startswith("packed") and last in _PACKED
        if _role(style) != "leaves" or not (packed or last in _OF_HEADS):
            continue
        attention = model.get_submodule(parent)
        heads = _heads(attention, module, style, of_keys=last in _OF_KEYS)
        if heads is not None and heads % ranks:
            what = ("head" if heads == 1 else "heads") + " of keys and values" * (last in _OF_KEYS)
            raise ValueError(
                f"{parent or type(model).__name__!r} ({type(attention).__name__}) has {heads} "
                f"{what}, which tp_size={ranks} does not divide, so that {name!r} would be cut "
                "inside of a head: choose a tp_size that does, or leave the layers of the "
                "attention out of the plan."
            )


def _heads(
    attention: torch.nn.Module, layer: torch.nn.Module, style: Any, *, of_keys: bool
) -> int | None:
    """Return how many heads a layer computes the features of, None if nothing tells."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    # Conv1D of transformers has its weight the other way round.
    features: int = getattr(layer, "nf", None) or weight.shape[0]
    features //= parts_of(style) if isinstance(style, str) else 1
    places = [attention, getattr(attention, "config", None)]
    size = _number(places[:1], _HEAD_SIZES)
    if size is not None and features % size == 0:
        return features // size
    return (_number(places, _KEY_COUNTS) if of_keys else None) or _number(places, _HEAD_COUNTS)


def _number(places: Iterable[Any], names: Iterable[str]) -> int | None:
    found = (getattr(place, name, None) for place in places for name in names)
    return next((one for one in found if type(one) is int and one > 0), None)


def _known(pattern: str, style: Any) -> Any:
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
    """Return how many layers a style takes a weight for.

    Example:
        >>> from accel_callbacks.strategies.tensor_plan import parts_of
        >>> parts_of("packed_colwise:3"), parts_of("packed_colwise"), parts_of("colwise")
        (3, 2, 1)
    """
    if not style.startswith("packed"):
        return 1
    return int(style.rpartition(":")[2]) if ":" in style else 2


def first_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first of the patterns that a name matches, None if there is none.

    Example:
        >>> from accel_callbacks.strategies.tensor_plan import first_pattern
        >>> first_pattern("blocks.3.up", ["blocks.*.down", "blocks.*.up"])
        'blocks.*.up'
    """
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
        >>> from accel_callbacks.strategies.tensor_plan import propose_plan
        >>> mlp = lambda: torch.nn.ModuleDict(
        ...     {"fc1": torch.nn.Linear(2, 8), "fc2": torch.nn.Linear(8, 2)}
        ... )
        >>> propose_plan(torch.nn.ModuleList([mlp(), mlp()]))
        {'*.fc1': 'colwise', '*.fc2': 'rowwise'}
    """
    found: dict[str, str] = {}
    suffix = "_sequence" if sequence_parallel else ""
    for name, module in model.named_modules():
        last, inner = name.rpartition(".")[2], ".".join(name.split(".")[-2:])
        if not isinstance(getattr(module, "weight", None), torch.Tensor) or list(module.children()):
            continue
        if last in _PACKED:
            raise ValueError(
                f"{name!r} packs several layers into one, and its name does not say how: give a "
                'plan, with "packed_colwise:3" for queries, keys and values of the same size, one '
                'after the other, or "packed_colwise:2" for gate and up; else split it.'
            )
        style = None
        if last in _COLWISE or inner in _COLWISE_IN:
            style = f"colwise{suffix}"
        elif last in _ROWWISE or inner in _ROWWISE_IN:
            style = f"rowwise{suffix}"
        elif last in _HEAD_NORMS:
            style = "replicated_with_grad_allreduce"
        elif sequence_parallel and _is_norm(module):
            style = "sequence_parallel"
        if style is not None:
            found[_pattern(name)] = style
    if not {f"rowwise{suffix}", f"colwise{suffix}"} <= set(found.values()):
        raise ValueError(
            f"{type(model).__name__} has no layers with the usual names of attention and MLPs: "
            'give a plan, such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}.'
        )
    _refuse_wide(model, found)
    return {**_ends(model), **found} if sequence_parallel else found


def _refuse_wide(model: torch.nn.Module, styles: Mapping[str, str]) -> None:
    """Refuse layers that return more than the next one takes: a gate beside values, in one."""
    for parent, module in model.named_modules():
        cut: dict[str, list[tuple[str, torch.nn.Linear]]] = {"colwise": [], "rowwise": []}
        for key, child in module.named_children():
            name = f"{parent}.{key}" if parent else key
            style = styles.get(_pattern(name), "").removesuffix("_sequence")
            if style in cut and isinstance(child, torch.nn.Linear):
                cut[style].append((name, child))
        taken = max((one.in_features for _, one in cut["rowwise"]), default=None)
        for name, layer in cut["colwise"]:
            if taken is not None and layer.out_features > taken:
                raise ValueError(
                    f"{name!r} returns {layer.out_features} features, of which the next layer "
                    f"takes {taken}: it packs several layers into one. Split it into one layer "
                    "each; or give a plan yourself, if its features are ordered by head."
                )


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _is_norm(module: torch.nn.Module) -> bool:
    weight: Any = module.weight
    return "norm" in type(module).__name__.lower() and weight.dim() == 1


def _ends(model: torch.nn.Module) -> dict[str, str]:
    """Return the styles of the embedding, after which the sequence is cut, and of the head."""
    embeddings = [n for n, one in model.named_modules() if isinstance(one, torch.nn.Embedding)]
    heads = [
        name
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear) and name.rpartition(".")[2] in _HEADS
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
