"""Stages of a pipeline: the forward of a model, cut where the layers of the next ranks begin."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

__all__ = ["StagePlan", "skeleton_of"]


class StagePlan:
    """The graphs of the stages of a model, and which tensors are whose.

    The forward of the model is followed down to the modules that hold the split points; all others
    are called as they are, with their hooks and modes.

    Args:
        model: the model; its values are not read.
        split_points: names of modules, in the order of their calls; each begins a stage.
        inputs: the arguments of the forward that are passed; those without a default if None.

    Attributes:
        graphs: one for each stage.
        inputs: the arguments that are passed, in order.
        owner: the stage of each parameter and buffer by name; 0 for those that none uses.

    Raises:
        ValueError: the forward cannot be followed, a split point is not in it, or two stages share
            a tensor.

    Example:
        >>> import torch
        >>> from accel_callbacks.strategies.pipeline_stages import StagePlan
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> plan = StagePlan(model, ["1"])
        >>> len(plan.graphs), plan.inputs, plan.owner["1.bias"]
        (2, ['input'], 1)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        split_points: Sequence[str],
        inputs: Sequence[str] | None = None,
    ) -> None:
        self._name = type(model).__name__
        _check_points(model, split_points)
        graph, self.inputs = _traced(model, split_points, inputs)
        stages = _stages(self._name, graph, split_points)
        self.owner = self._owners(model, stages)
        last = next(node for node in graph.nodes if node.op == "output")
        leaves, self._result = _pytree.tree_flatten(last.args[0])
        if not all(isinstance(leaf, fx.Node) for leaf in leaves):
            raise ValueError(
                f"{self._name} returns values besides tensors, of which micro-batches cannot be "
                "joined: return tensors alone."
            )
        self.graphs = list(_graphs(graph, stages, leaves, len(split_points) + 1))

    def module(self, model: torch.nn.Module, stage: int) -> fx.GraphModule:
        """Return a stage as a module, of the modules of a model and under their names."""
        return fx.GraphModule(model, self.graphs[stage], f"Stage{stage}")

    def result(self, outputs: Any) -> Any:
        """Return what the forward of the whole model would, from the outputs of the last stage."""
        leaves = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        return _pytree.tree_unflatten(leaves, self._result)

    def _owners(self, model: torch.nn.Module, stages: dict[fx.Node, int]) -> dict[str, int]:
        used: dict[int, int] = {}
        named = dict(_named(model))
        for node, stage in stages.items():
            if node.op == "call_module":
                tensors = [one for _, one in _named(model.get_submodule(str(node.target)))]
            elif node.op == "get_attr":
                tensors = [one for n, one in named.items() if n == node.target]
            else:
                continue
            for tensor in tensors:
                if used.setdefault(id(tensor), stage) != stage:
                    names = [name for name, one in named.items() if one is tensor]
                    raise ValueError(
                        f"{self._name}: stages {used[id(tensor)]} and {stage} of the pipeline "
                        f"share {' and '.join(names)}, of which each would train its own: untie "
                        "the weights, or choose split points with both uses in one stage."
                    )
        return {name: used.get(id(tensor), 0) for name, tensor in named.items()}


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check_points(model: torch.nn.Module, points: Sequence[str]) -> None:
    known = {name for name, _ in model.named_modules()}
    for point in points:
        if point not in known or not point:
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"split_points: {type(model).__name__} has no module {point!r}; it has {children}."
            )
    if not points:
        raise ValueError("split_points is empty: name the first module of each stage but the first")


class _Tracer(fx.Tracer):
    """Follows the forwards of the modules around the split points, and of no others."""

    def __init__(self, points: Sequence[str]) -> None:
        super().__init__()
        self._points = points

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return not any(point.startswith(f"{module_qualified_name}.") for point in self._points)


def _traced(
    model: torch.nn.Module, points: Sequence[str], inputs: Sequence[str] | None
) -> tuple[fx.Graph, list[str]]:
    """Return the graph of the forward, and the names of its inputs."""
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    plain = {n: p for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    required = [n for n, p in plain.items() if p.default is p.empty]
    wanted = required if inputs is None else [n for n in plain if n in set(inputs)]
    if inputs is not None and (missing := set(inputs) - set(plain)):
        raise ValueError(f"inputs: the forward of {name} takes no {sorted(missing)[0]!r}.")
    if missing := set(required) - set(wanted):
        raise ValueError(f"inputs: the forward of {name} needs {sorted(missing)[0]!r} too.")
    fixed = {n: p.default for n, p in plain.items() if n not in wanted}
    try:
        graph = _Tracer(points).trace(model, concrete_args=fixed)
    except Exception as error:
        raise ValueError(
            f"the forward of {name} cannot be cut at {list(points)}: {error}. What stands between "
            "the layers must not depend on the values of tensors; write it as plain calls of "
            "layers, such as a torch.nn.Sequential."
        ) from error
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        if node.target not in wanted:
            _erase(graph, node)
    return graph, wanted


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase an argument with the default, and what fx asserts of it: its value is in the graph."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _stages(name: str, graph: fx.Graph, points: Sequence[str]) -> dict[fx.Node, int]:
    """Return the stage of each node but the output."""
    stage, stages = 0, {}
    for node in graph.nodes:
        if node.op == "call_module":
            target = f"{node.target}."
            begun = [i + 1 for i, p in enumerate(points) if target.startswith(f"{p}.")]
            if begun and begun[0] > stage:
                if begun[0] != stage + 1:
                    raise ValueError(
                        f"split_points: {name} calls {points[begun[0] - 1]!r} before "
                        f"{points[stage]!r}; name them in the order of their calls."
                    )
                stage = begun[0]
        if node.op != "output":
            stages[node] = stage
    if stage != len(points):
        raise ValueError(f"split_points: the forward of {name} never calls {points[stage]!r}.")
    for node in stages:
        if node.op == "placeholder":
            stages[node] = 0
        elif node.op == "get_attr" and node.users:
            users = {stages.get(user, len(points)) for user in node.users}
            stages[node] = min(users)
            if len(users) > 1:
                raise ValueError(
                    f"{name}: several stages of the pipeline use {node.target}: let one stage use "
                    "it, or pass on what is computed from it."
                )
    return stages


def _graphs(
    graph: fx.Graph, stages: dict[fx.Node, int], leaves: Sequence[fx.Node], count: int
) -> Iterator[fx.Graph]:
    """Yield the graph of each stage; it takes what the one before passes on."""
    taken = [node for node in stages if node.op == "placeholder"]
    for stage in range(count):
        own = fx.Graph()
        copies = {node: own.placeholder(node.name) for node in taken}
        for node in stages:
            if stages[node] == stage and node.op != "placeholder":
                copies[node] = own.node_copy(node, copies.__getitem__)
        if stage == count - 1:
            taken = list(leaves)
        else:
            taken = [node for node in copies if _is_used_after(node, stage, stages)]
        passed = tuple(copies[node] for node in taken)
        own.output(passed[0] if len(passed) == 1 else passed)
        yield own


def _is_used_after(node: fx.Node, stage: int, stages: dict[fx.Node, int]) -> bool:
    return any(stages.get(user, len(stages)) > stage for user in node.users)


def skeleton_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model on the meta device, to find the shapes between stages.

    Example:
        >>> import torch
        >>> from accel_callbacks.strategies.pipeline_stages import skeleton_of
        >>> skeleton_of(torch.nn.Linear(1, 1)).weight.device.type
        'meta'
    """
    memo: dict[int, Any] = {}
    for _, tensor in _named(model):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = (
            torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        )
    return copy.deepcopy(model, memo)
