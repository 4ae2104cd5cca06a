"""Models with random trees of modules, budgets for them, and what Accelerate makes of these.

`python tests/support/random_trees.py` writes tests/data/accelerate_maps.json anew, with the real
Accelerate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

FIGURES = Path(__file__).parents[1] / "data" / "accelerate_maps.json"
WHOLE = "Whole"
_STORES = ("cpu", "disk")


class Leaf(nn.Module):
    """Parameters and buffers, no children."""

    def __init__(self, elements: int, buffered: int) -> None:
        super().__init__()
        if elements:
            self.weight = nn.Parameter(torch.empty(elements, device="meta"))
        if buffered:
            self.register_buffer("table", torch.empty(buffered, device="meta"))


class Branch(nn.Module):
    """Children, and tensors of its own."""

    def __init__(self, children: Iterable[nn.Module], elements: int, buffered: int) -> None:
        super().__init__()
        if elements:
            self.direct = nn.Parameter(torch.empty(elements, device="meta"))
        for number, child in enumerate(children):
            self.add_module(f"part{number}", child)
        if buffered:
            self.register_buffer("table", torch.empty(buffered, device="meta"))


class Whole(Branch):
    """A branch that is not split."""


@dataclass(frozen=True)
class Case:
    """A model and budgets."""

    model: nn.Module
    memory: dict[Any, int]
    offload_buffers: bool


def case(seed: int) -> Case:
    """The same for each seed; a third has ties, half have buffers."""
    source = random.Random(seed)
    with_ties, with_buffers = seed % 3 == 0, seed % 2 == 0

    def tree(depth: int) -> nn.Module:
        if depth == 0 or source.random() < 0.25:
            elements = source.choice([0, 1, 2, 3, 5, 8, 13, 40])
            return Leaf(elements, source.choice([0, 0, 1, 2]) if with_buffers else 0)
        kind = Whole if source.random() < 0.3 else Branch
        inside = [tree(depth - 1) for _ in range(source.randint(1, 4))]
        buffered = source.choice([0, 0, 0, 2]) if with_buffers else 0
        return kind(inside, source.choice([0, 0, 1, 3]), buffered)

    model = Branch([tree(3) for _ in range(source.randint(1, 5))], 0, 0)
    leaves = [one for one in model.modules() if isinstance(one, Leaf) and hasattr(one, "weight")]
    if with_ties and len(leaves) > 2:
        for _ in range(source.choice([1, 2])):
            one, other = source.sample(leaves, 2)
            one.weight = other.weight
    total = sum(4 * t.numel() for t in [*model.parameters(), *model.buffers()])
    memory: dict[Any, int] = {
        number: int(total * source.uniform(0.1, 0.9)) for number in range(source.randint(1, 3))
    }
    memory["cpu"] = int(total * source.choice([0.2, 0.5, 2]))
    return Case(model, memory, source.random() < 0.5)


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a tensor or module in a map; None without one."""
    while name:
        if name in device_map:
            return device_map[name]
        name = name.rpartition(".")[0]
    return device_map.get("")


def uses(one: Case, device_map: Mapping[str, Any]) -> tuple[int, dict[Any, int]] | None:
    """Bytes on no accelerator, and bytes needed of each device; None if a tensor has none, or two.

    Counted tensor by tensor and module by module, without the planner.
    """
    needed: dict[Any, int] = {}
    away = 0
    windows: dict[Any, int] = {}
    devices = {name: device_of(name, device_map) for name, _ in tensors(one.model)}
    ties: dict[int, set[Any]] = {}
    for name, parameter in one.model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), set()).add(devices[name])
    if None in devices.values() or any(len(places) > 1 for places in ties.values()):
        return None
    on = [device for device in one.memory if device != "cpu" and device in devices.values()]
    runs_on = on[0] if on else "cpu"
    seen: set[int] = set()
    for name, tensor in tensors(one.model):
        device, nbytes = devices[name], 4 * tensor.numel()
        fetched = device in _STORES and device != runs_on
        stays = fetched and not isinstance(tensor, nn.Parameter) and not one.offload_buffers
        if fetched and not stays:
            unit = unit_of(one.model, name)
            windows[unit, device] = windows.get((unit, device), 0) + nbytes
        if id(tensor) not in seen:
            seen.add(id(tensor))
            place = runs_on if stays else device
            needed[place] = needed.get(place, 0) + nbytes
            goes = isinstance(tensor, nn.Parameter) or one.offload_buffers
            away += nbytes if device in _STORES and goes else 0
    window = max(windows.values(), default=0)
    staged = max([nbytes for (_, device), nbytes in windows.items() if device == "disk"], default=0)
    needed[runs_on] = needed.get(runs_on, 0) + window
    if runs_on != "cpu":
        needed["cpu"] = needed.get("cpu", 0) + staged
    return away, needed


def tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """All names, those of tied parameters too."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def unit_of(model: nn.Module, name: str) -> str:
    """The module that is fetched for a tensor, or the tensor itself."""
    module, path = model, ""
    for key in name.split(".")[:-1]:
        module = module.get_submodule(key)
        path = f"{path}.{key}" if path else key
        if isinstance(module, (Whole, Leaf)):
            return path
    return name


def accelerates(one: Case) -> int | None:
    """Bytes that Accelerate's map offloads; None where it has none that keeps the budgets."""
    from accelerate.utils import infer_auto_device_map

    try:
        device_map = infer_auto_device_map(
            one.model,
            dict(one.memory),
            no_split_module_classes=[WHOLE],
            offload_buffers=one.offload_buffers,
        )
    except (IndexError, KeyError):  # of ties that it does not find
        return None
    found = uses(one, device_map)
    if found is None or any(n > one.memory[d] for d, n in found[1].items() if d != "disk"):
        return None
    return found[0]


if __name__ == "__main__":
    import accelerate

    figures = {str(seed): accelerates(case(seed)) for seed in range(300)}
    kept = {seed: nbytes for seed, nbytes in figures.items() if nbytes is not None}
    FIGURES.write_text(
        json.dumps({"accelerate": accelerate.__version__, "offloaded": kept}) + "\n",
        encoding="utf-8",
    )
