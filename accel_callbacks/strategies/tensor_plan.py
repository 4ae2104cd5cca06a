"""Plans of tensor parallelism: which modules are cut, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from accel_callbacks.errors import nearest

__all__ = ["STYLES", "matched_styles", "plan_of", "propose_plan"]

#: What a plan may say of a module.
STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "embedding_rowwise",
    "sequence_parallel",
    "replicated",
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
# One linear layer for several: its columns are not those of a head, so cutting them is wrong.
_PACKED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj", "gate_up_proj", "Wqkv")


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
    used: set[str] = set()
    for name, module in names.items():
        for pattern, style in known.items():
            if _matches(name, pattern):
                used.add(pattern)
                yield name, module, style
                break
    for pattern in known:
        if pattern not in used and not any(_matches(name, pattern) for name in names):
            raise ValueError(
                f"the plan of tensor parallelism names {pattern!r}, and {type(model).__name__} has "
                f"no such module.{nearest(pattern, names)}"
            )


def _known(pattern: str, style: Any) -> Any:
    if not isinstance(style, str):
        return style
    short = _ALIASES.get(style, style)
    if short not in STYLES:
        raise ValueError(
            f"the plan of tensor parallelism has the style {style!r} for {pattern!r}: use one of "
            f"{', '.join(STYLES)}, or a ParallelStyle of torch.{nearest(style, STYLES)}"
        )
    return short


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def propose_plan(model: torch.nn.Module) -> dict[str, str]:
    """Return a plan by the usual names of layers in attention and MLPs; to be read before use.

    Layers of one name in repeated blocks are one pattern. What is not recognized is left whole.

    Raises:
        ValueError: nothing is recognized, or a layer packs several (such as ``c_attn``).

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
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(getattr(module, "weight", None), torch.Tensor) or list(module.children()):
            continue
        if last in _PACKED:
            raise ValueError(
                f"{name!r} packs several layers into one, whose columns cannot be cut by a plan: "
                "split it into one layer each."
            )
        style = "colwise" if last in _COLWISE else "rowwise" if last in _ROWWISE else None
        if style is not None:
            parts = ["*" if part.isdigit() else part for part in name.split(".")]
            found[".".join(parts)] = style
    if "rowwise" not in found.values() or "colwise" not in found.values():
        raise ValueError(
            f"{type(model).__name__} has no layers with the usual names of attention and MLPs: "
            'give a plan, such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}.'
        )
    return found
