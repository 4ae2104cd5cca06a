"""The units of a model that FSDP gathers and frees together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from accel_callbacks.errors import nearest
from accel_callbacks.models.compile import regions
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from checkpoint_io.warning import warn

__all__ = ["Unit", "find_units", "ignored_parameters"]

_DEFAULT_SIZE = 100_000_000  # elements, as in torch's size_based_auto_wrap_policy
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


class Unit(NamedTuple):
    """Modules that are gathered together.

    Args:
        modules: one, or several that are called one after the other.
        is_last: backward needs it at once, so that it is not freed in between.
    """

    modules: tuple[torch.nn.Module, ...]
    is_last: bool = False


def find_units(
    model: torch.nn.Module,
    options: FullyShardedDataParallelPlugin,
    ignored: Collection[torch.nn.Parameter] = (),
) -> list[Unit]:
    """Return the units of a model, inner ones first; what is in none belongs to the model itself.

    The embedding is one more unit, and so are the last norm and the head, where the model tells
    which these are, by ``get_input_embeddings`` and ``get_output_embeddings``. A module with a
    parameter that is used outside of it too (tied weights) is none: both must be gathered together.

    Args:
        model: the model, not sharded.
        options: how units are chosen.
        ignored: parameters that are not sharded.

    Raises:
        ValueError: no module has a class that was named.
    """
    uses = Counter(map(id, _parameters(model)))
    skipped = {id(parameter) for parameter in ignored}

    def fits(module: torch.nn.Module) -> bool:
        if module is model or isinstance(module, _CONTAINERS):
            return False
        counts = Counter(map(id, _parameters(module)))
        apart = all(uses[key] == count for key, count in counts.items())
        return apart and bool(counts.keys() - skipped)

    blocks = [block for block in _blocks(model, options, skipped) if fits(block)]
    if not blocks or callable(options.auto_wrap_policy):
        return [Unit((block,)) for block in blocks]
    inside = {id(module) for block in blocks for module in block.modules()}
    ends = [
        Unit(modules, is_last)
        for modules, is_last in _ends(model, blocks)
        if all(fits(module) and id(module) not in inside for module in modules)
    ]
    return [*(Unit((block,)) for block in blocks), *ends]


def _parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield each parameter once for each module that it is registered in."""
    return (
        parameter
        for owner in module.modules()
        for parameter in owner._parameters.values()
        if parameter is not None
    )


def _blocks(
    model: torch.nn.Module, options: FullyShardedDataParallelPlugin, skipped: Collection[int]
) -> Iterable[torch.nn.Module]:
    """Return the chosen modules, inner ones first."""
    policy, names = options.auto_wrap_policy, options.transformer_cls_names_to_wrap
    size = options.min_num_params
    if policy == "NO_WRAP":
        return ()
    inner_first = list(model.modules())[::-1]
    if callable(policy):
        chosen = _predicate(policy)
        if isinstance(chosen, int):
            return _large(model, chosen, skipped)
        return [module for module in inner_first if chosen(module)]
    if policy == "SIZE_BASED_WRAP" or (policy is None and not names and size):
        return _large(model, _DEFAULT_SIZE if size is None else size, skipped)
    declared = list(getattr(model, "_no_split_modules", None) or ())
    wanted = tuple(names or ()) or tuple(declared)
    if wanted:
        return _of_classes(inner_first, wanted, required=bool(names))
    if policy == "TRANSFORMER_BASED_WRAP":
        raise ValueError(
            f"auto_wrap_policy='TRANSFORMER_BASED_WRAP': {type(model).__name__} has no "
            "_no_split_modules; name the classes of its layers in transformer_cls_names_to_wrap, "
            "or leave auto_wrap_policy out, which takes the repeated blocks."
        )
    return list(regions(model))[::-1]


def _of_classes(
    modules: Sequence[torch.nn.Module], names: Collection[str], *, required: bool
) -> list[torch.nn.Module]:
    known = {type(module).__name__ for module in modules}
    missing = [name for name in names if name not in known]
    if missing and required:
        raise ValueError(
            f"transformer_cls_names_to_wrap: the model has no module of class {missing[0]!r}."
            f"{nearest(missing[0], known)}"
        )
    return [module for module in modules if type(module).__name__ in names]


def _predicate(policy: Callable[..., Any]) -> Callable[[torch.nn.Module], Any] | int:
    """Return the predicate of a policy; a number for a policy of torch's by size.

    Policies of torch's FSDP1 take other arguments.
    """
    keywords = getattr(policy, "keywords", {})  # of functools.partial
    if "min_num_params" in keywords:
        return int(keywords["min_num_params"])
    if "policies" in keywords:  # a unit is what one of them chooses, as PEFT's policy says it
        choices = [_predicate(choice) for choice in keywords["policies"]]
        wanted = [choice for choice in choices if not isinstance(choice, int)]
        if len(wanted) < len(choices):
            raise ValueError(
                "auto_wrap_policy: a policy by size does not go with others; give min_num_params, "
                "or a function of a module."
            )
        return lambda module: any(choice(module) for choice in wanted)
    classes = keywords.get("transformer_layer_cls") or keywords.get("module_classes")
    classes = classes or getattr(policy, "_module_classes", None)
    if classes:
        kinds = tuple(classes)
        return lambda module: isinstance(module, kinds)
    by_module = keywords.get("lambda_fn") or getattr(policy, "_lambda_fn", policy)
    return cast("Callable[[torch.nn.Module], Any]", by_module)


def _large(model: torch.nn.Module, size: int, skipped: Collection[int]) -> list[torch.nn.Module]:
    """Return modules of at least this many elements, without those of units inside of them."""
    units: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> set[int]:
        ids = {id(p) for p in module.parameters(recurse=False) if id(p) not in skipped}
        for child in module.children():
            ids |= visit(child)
        if not isinstance(module, _CONTAINERS) and sum(elements[key] for key in ids) >= size:
            units.append(module)
            return set()
        return ids

    elements = {id(parameter): parameter.numel() for parameter in model.parameters()}
    visit(model)
    return units


def _ends(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module]
) -> Iterator[tuple[tuple[torch.nn.Module, ...], bool]]:
    """Yield the embedding, and the last norm and the head, with True for the latter."""
    # Only of models that name them: others may use their weights without calling them.
    embedding = _ask_model(model, "get_input_embeddings")
    if embedding is not None:
        yield (embedding,), False
    head = _ask_model(model, "get_output_embeddings")
    if head is None:
        return
    order = list(model.modules())
    place = {id(module): index for index, module in enumerate(order)}
    end = max(place[id(module)] for block in blocks for module in block.modules())
    between = [
        module
        for module in order[end + 1 :]
        if module is not head
        and not list(module.children())
        and any(True for _ in module.parameters(recurse=False))
        and "norm" in type(module).__name__.lower()
    ]
    yield (*between[-1:], head), True


def _ask_model(model: torch.nn.Module, method: str) -> torch.nn.Module | None:
    ask = getattr(model, method, None)
    if not callable(ask):
        return None
    try:
        module = ask()
    except NotImplementedError:
        return None
    return module if isinstance(module, torch.nn.Module) else None


def ignored_parameters(
    model: torch.nn.Module, options: FullyShardedDataParallelPlugin
) -> list[torch.nn.Parameter]:
    """Return the parameters that are not sharded: of the modules to ignore, and scalars."""
    ignored = options.ignored_modules or ()
    if isinstance(ignored, str):
        ignored = [ignored]
    patterns = [entry for entry in ignored if isinstance(entry, str)]
    modules = [entry for entry in ignored if isinstance(entry, torch.nn.Module)]
    for pattern in patterns:
        named = [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]
        if not named:
            known = [name for name, _ in model.named_modules()]
            warn(
                f"ignored_modules: no module of {type(model).__name__} is named {pattern!r}."
                f"{nearest(pattern, known)}"
            )
        modules += named
    ignored_ids = {id(parameter) for module in modules for parameter in module.parameters()}
    # fully_shard cuts along the first dimension, which a scalar has not.
    return [p for p in model.parameters() if id(p) in ignored_ids or p.dim() == 0]
