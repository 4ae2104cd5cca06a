"""Stages of a pipeline: runs of a model's own forward, each with the layers of one stage.

The modules that hold the split points are containers, and the modules that they call are layers.
Each stage runs the forward of the whole model, as it is written, with the micro-batch of its own
rank: layers of earlier stages return what was received, or zeros where no later stage reads it, and
the first layer of a later stage ends the run. So nothing is traced, each stage computes its masks
and positions itself, and arguments and outputs may have any structure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

__all__ = [
    "Call",
    "Outline",
    "Route",
    "Slot",
    "Stage",
    "StagePlan",
    "Value",
    "balanced_split_points",
    "call_of",
    "calls_answered",
    "slots_filled",
]


class Slot(NamedTuple):
    """A place of a module that holds a parameter.

    Args:
        module: the module.
        key: of the parameter in it.
    """

    module: torch.nn.Module
    key: str


class Layer(NamedTuple):
    """A module that is called as a whole.

    Args:
        module: the module.
        stage: of its parameters.
        is_plain: False if it has parameters; a layer without runs wherever its inputs are.
    """

    module: torch.nn.Module
    stage: int
    is_plain: bool


class StagePlan:
    """The layers of the stages of a model, and which tensors are whose.

    Layers belong to the stage that has begun where they are registered.

    Args:
        model: the model; its values are not read.
        split_points: names of modules, in their order; each begins a stage.

    Attributes:
        count: the number of stages.
        layers: the modules that are called as a whole, by name.
        modules: the same, without their stages.
        containers: the stage of each module that holds split points, by name.
        owner: the stage that trains and saves each parameter and buffer, by name.
        canonical: the first name of each parameter and buffer, by name.
        shared: parameters that layers of several stages hold, by their canonical name: for each
            stage but the owner the slots.

    Raises:
        ValueError: a split point is not in the model, or they are in another order.
    """

    def __init__(self, model: torch.nn.Module, split_points: Sequence[str]) -> None:
        self.name = type(model).__name__
        self.count = len(split_points) + 1
        self.layers: dict[str, Layer] = {}
        self.containers: dict[str, int] = {}
        self.owner: dict[str, int] = {}
        self.canonical: dict[str, str] = {}
        self.shared: dict[str, dict[int, list[Slot]]] = {}
        self._points = list(split_points)
        self._check_points(model)
        self._stage = 0
        self._add_container("", model)
        if self._stage < len(self._points):
            begun = self._points[self._stage]
            raise ValueError(
                f"split_points: {self.name} has {begun!r} before another of them: name them in the "
                "order of the modules."
            )
        self.modules = {path: layer.module for path, layer in self.layers.items()}
        self._find_owners(model)

    def _check_points(self, model: torch.nn.Module) -> None:
        known = {name for name, _ in model.named_modules()}
        for point in self._points:
            if point not in known or not point:
                children = ", ".join(name for name, _ in model.named_children())
                raise ValueError(
                    f"split_points: {self.name} has no module {point!r}; it has {children}."
                )
        if not self._points:
            raise ValueError(
                "split_points is empty: name the first module of each stage but the first"
            )

    def _add_container(self, name: str, module: torch.nn.Module) -> None:
        self.containers[name] = self._stage
        seen = {id(layer.module) for layer in self.layers.values()}
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if path in self._points[self._stage : self._stage + 1]:
                self._stage += 1
            if any(point.startswith(f"{path}.") for point in self._points):
                self._add_container(path, child)
            elif id(child) not in seen:
                is_plain = next(child.parameters(), None) is None
                self.layers[path] = Layer(child, self._stage, is_plain)

    def _place_of(self, name: str) -> Layer | int:
        """Return the layer of a parameter or buffer, or the stage of its container."""
        path = name.rpartition(".")[0]
        while path not in self.containers:
            if path in self.layers:
                return self.layers[path]
            path = path.rpartition(".")[0]
        return self.containers[path]

    def stage_of(self, name: str) -> int:
        """Return the stage where a parameter or buffer of this name is registered."""
        place = self._place_of(name)
        return place.stage if isinstance(place, Layer) else place

    def _find_owners(self, model: torch.nn.Module) -> None:
        first: dict[int, str] = {}
        for name, tensor in _named(model):
            canonical = self.canonical[name] = first.setdefault(id(tensor), name)
            stage, owner = self.stage_of(name), self.stage_of(canonical)
            self.owner[name] = owner
            if stage != owner and isinstance(tensor, torch.nn.Parameter):
                path, _, key = name.rpartition(".")
                slots = self.shared.setdefault(canonical, {}).setdefault(stage, [])
                slots.append(Slot(model.get_submodule(path), key))

    def keeps(self, name: str, stage: int, *, is_parameter: bool) -> bool:
        """Return whether a stage has the values of a tensor; all have buffers that several read."""
        if self.owner[name] == stage:
            return True
        if is_parameter:
            return False
        place = self._place_of(name)
        return not isinstance(place, Layer) or place.is_plain or place.stage == stage


def balanced_split_points(model: torch.nn.Module, count: int) -> list[str]:
    """Return the first modules of stages with about as many parameters each, among its blocks.

    Args:
        model: the model; its blocks are in the outermost ModuleLists and Sequentials.
        count: of stages.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    blocks = [block for block in _blocks("", model) if block[1] > 0]
    if len(blocks) < count:
        raise ValueError(
            f"{type(model).__name__} has {len(blocks)} blocks in its ModuleLists, and {count} "
            'stages of a pipeline are asked for: pass split_points=["layers.4", ...], the first '
            "module of each stage but the first."
        )
    total, seen, points = sum(size for _, size in blocks), 0, list[str]()
    for number, (name, size) in enumerate(blocks):
        stage, left = len(points) + 1, len(blocks) - number
        is_due = seen + size / 2 > total * stage / count or left == count - stage
        if number and stage < count and is_due:
            points.append(name)
        seen += size
    return points


def _blocks(path: str, module: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of blocks."""
    if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            yield inner, sum(parameter.numel() for parameter in child.parameters())
        return
    for name, child in module.named_children():
        yield from _blocks(f"{path}.{name}" if path else name, child)


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class Outline(NamedTuple):
    """A tensor without its values.

    Args:
        shape: of the tensor.
        dtype: where it is computed.
        sent: the dtype in which it is passed on.
        requires_grad: whether a gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: torch.dtype
    requires_grad: bool

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Return zeros of this shape, where it is computed."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def on_meta(self) -> torch.Tensor:
        """Return a tensor without memory, as it is passed on."""
        empty = torch.empty(self.shape, dtype=self.sent, device="meta")
        return empty.requires_grad_(self.requires_grad)


class Call(NamedTuple):
    """A call of a layer in the forward of a model.

    Args:
        layer: its name.
        stage: that runs it; None if each stage does.
        structure: of its output.
        leaves: of its output: numbers of values, or constants.
    """

    layer: str
    stage: int | None
    structure: Any = None
    leaves: tuple[Any, ...] = ()


class Value(NamedTuple):
    """The number of a tensor that a layer returns, in a `Route`."""

    number: int


class Route(NamedTuple):
    """The calls of a forward with inputs of some shapes, and what passes from stage to stage.

    Args:
        calls: in order.
        values: the tensors that layers return.
        passed: for each stage the numbers of the values that it receives.
        borrowed: parameters of other stages that a stage reads, by their name: for each such
            stage the slots.
        filled: for each stage slots of containers whose parameters it does not read.
        structure: of the result.
        result: the leaves of the result: outlines of tensors, or constants.
        loss: which leaf of the result is its attribute ``loss``, None without one.
        written: values that are written into between layers, of which those get copies.
    """

    calls: Sequence[Call]
    values: Sequence[Outline]
    passed: Sequence[Sequence[int]]
    borrowed: Mapping[str, Mapping[int, Sequence[Slot]]]
    filled: Sequence[Mapping[Slot, Outline]]
    structure: Any
    result: Sequence[Any]
    loss: int | None
    written: Collection[Any]

    def outputs_on_meta(self) -> list[tuple[torch.Tensor, ...]]:
        """Return what each stage receives, and what the last one returns, on the meta device."""
        received = [tuple(self.values[n].on_meta() for n in numbers) for numbers in self.passed]
        outputs = (
            outline if outline.shape else outline._replace(shape=(1,)) for outline in self.tensors()
        )
        return [*received, tuple(outline.on_meta() for outline in outputs)]

    def tensors(self) -> list[Outline]:
        """Return the tensors of the result."""
        return [leaf for leaf in self.result if isinstance(leaf, Outline)]

    def flatten(self, result: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a result; of numbers, with one dimension."""
        leaves = _pytree.tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(tensors) != len(self.tensors()):
            raise RuntimeError(
                f"the last stage of the pipeline returns {len(tensors)} tensors, and the forward "
                f"of the whole model {len(self.tensors())}: outputs that layers collect on their "
                "way are not passed on; leave them out."
            )
        return tuple(tensor.reshape(1) if not tensor.dim() else tensor for tensor in tensors)

    def with_loss(self, loss: torch.Tensor) -> Any:
        """Return a result whose loss is a tensor, and of which nothing else is there."""
        leaves = [None if isinstance(leaf, Outline) else leaf for leaf in self.result]
        assert self.loss is not None
        leaves[self.loss] = loss
        return _pytree.tree_unflatten(leaves, self.structure)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result of the forward that has some tensors."""
        remaining = iter(tensors)
        leaves = [
            next(remaining).reshape(() if not leaf.shape else (-1, *leaf.shape[1:]))
            if isinstance(leaf, Outline)
            else leaf
            for leaf in self.result
        ]
        return _pytree.tree_unflatten(leaves, self.structure)


class _EndOfStage(BaseException):
    """Ends the forward of a model where the next stage begins; no code of a model catches it."""


class Stage(torch.nn.Module):
    """The layers of a stage, under their names in the model.

    Args:
        plan: of the model.
        model: the model, whose forward is run.
        number: of the stage.
        device: of its inputs.
    """

    def __init__(
        self, plan: StagePlan, model: torch.nn.Module, number: int, device: torch.device
    ) -> None:
        super().__init__()
        self._plan, self._model, self._number, self._device = plan, (model,), number, device
        self._route: Route | None = None
        self._microbatches: Iterator[Any] = iter(())
        self._loans: Mapping[Slot, torch.Tensor] = {}
        self._no_split_modules = getattr(model, "_no_split_modules", None)
        self._add("", model)
        for path, layer in plan.layers.items():
            if layer.stage == number:
                self._add(path, layer.module)

    def _add(self, path: str, module: torch.nn.Module) -> None:
        """Put a module under its name; a container gives its tensors, if they are of this stage."""
        if path in self._plan.containers:
            shell = self.get_submodule(path)
            if self._plan.containers[path] == self._number:
                # One dictionary, because FSDP changes what is in it.
                shell._parameters, shell._buffers = module._parameters, module._buffers
                shell._non_persistent_buffers_set = module._non_persistent_buffers_set
            for name, child in module.named_children():
                inner = f"{path}.{name}" if path else name
                if inner in self._plan.containers:
                    shell.add_module(name, torch.nn.Module())
                    self._add(inner, child)
            return
        parent, _, key = path.rpartition(".")
        self.get_submodule(parent).add_module(key, module)

    def begin(
        self, route: Route, microbatches: Sequence[Any], loans: Mapping[Slot, torch.Tensor]
    ) -> None:
        """Set what the next forwards are: one for each micro-batch, in order.

        Args:
            route: of micro-batches of their shapes.
            microbatches: positional and keyword arguments of the model.
            loans: parameters of other stages, by where the layers of this one look for them.
        """
        self._route, self._microbatches, self._loans = route, iter(microbatches), loans

    def forward(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the layers of this stage on the next micro-batch; return what is passed on."""
        route, number = self._route, self._number
        assert route is not None
        args, kwargs = next(self._microbatches)
        values = dict(zip(route.passed[number], received, strict=True))
        calls = iter(route.calls)
        name, layers = self._plan.name, self._plan.modules

        def answer(layer: str, args: Any, kwargs: Any) -> Any:
            call = next(calls, None)
            if call is None or call.layer != layer:
                raise RuntimeError(
                    f"the forward of {name} called {layer!r} where it had called "
                    f"{call.layer if call else 'nothing more'!r} with a batch of the same shapes: "
                    "which layers are called must not change from one micro-batch to the next."
                )
            if call.stage is None:
                return call_of(layers[layer])(*args, **kwargs)
            if call.stage > number:
                raise _EndOfStage
            if call.stage < number:
                return _pytree.tree_unflatten(
                    [self._received(leaf, values) for leaf in call.leaves], call.structure
                )
            output = call_of(layers[layer])(*args, **kwargs)
            leaves = _pytree.tree_leaves(output)
            for place, leaf in enumerate(call.leaves):
                if isinstance(leaf, Value):
                    values[leaf.number] = leaves[place]
                    if leaf.number in route.written:
                        leaves[place] = leaves[place].clone()
            return _pytree.tree_unflatten(leaves, call.structure)

        zeros = {
            slot: outline.zeros(self._device) for slot, outline in route.filled[number].items()
        }
        (model,) = self._model
        with slots_filled({**zeros, **self._loans}), calls_answered(layers, answer):
            try:
                # Not its call, which `generate` has sent here.
                result = model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            except _EndOfStage:
                received_too = route.passed[number]
                return tuple(
                    self._sent(values[n].to(route.values[n].sent), n in received_too)
                    for n in route.passed[number + 1]
                )
        return route.flatten(result)

    @staticmethod
    def _sent(value: torch.Tensor, is_passed_on: bool) -> torch.Tensor:
        # A copy, because it has a gradient of its own here, and FSDP warns of views.
        return (
            value.clone(memory_format=torch.contiguous_format)
            if is_passed_on or value._is_view()
            else value.contiguous()
        )

    def _received(self, leaf: Any, values: Mapping[int, torch.Tensor]) -> Any:
        assert self._route is not None
        if not isinstance(leaf, Value):
            return leaf
        outline = self._route.values[leaf.number]
        value = values.get(leaf.number)
        if value is None:
            return outline.zeros(self._device)
        value = value.to(outline.dtype)
        return value.clone() if leaf.number in self._route.written else value


def call_of(module: torch.nn.Module) -> Callable[..., Any]:
    """Return what a call of a module runs."""
    compiled = getattr(module, "_before_answer", None)
    return compiled or module._call_impl


@contextmanager
def calls_answered(
    layers: Mapping[str, torch.nn.Module], answer: Callable[[str, Any, Any], Any]
) -> Iterator[None]:
    """Context manager: calls of layers are answered by a function, of name and arguments.

    Modules are callable through ``_compiled_call_impl``, where there is one. So code that reads
    attributes of a layer finds the layer, and its hooks run where it runs.
    """
    inside = 0

    def called(name: str, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # a layer calls another, or itself
            return call_of(module)(*args, **kwargs)
        inside += 1
        try:
            return answer(name, args, kwargs)
        finally:
            inside -= 1

    def bound(name: str, module: torch.nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: called(name, module, *args, **kwargs)

    for name, layer in layers.items():
        attributes = layer.__dict__
        attributes["_before_answer"] = attributes.get("_compiled_call_impl")
        attributes["_compiled_call_impl"] = bound(name, layer)
    try:
        yield
    finally:
        for layer in layers.values():
            attributes = layer.__dict__
            before = attributes.pop("_before_answer")
            if before is None:
                del attributes["_compiled_call_impl"]
            else:
                attributes["_compiled_call_impl"] = before


@contextmanager
def slots_filled(tensors: Mapping[Slot, torch.Tensor]) -> Iterator[None]:
    """Context manager: tensors are in the place of parameters."""
    before = {slot: slot.module._parameters[slot.key] for slot in tensors}
    try:
        for slot, tensor in tensors.items():
            slot.module._parameters[slot.key] = tensor  # type: ignore[assignment]
        yield
    finally:
        for slot, parameter in before.items():
            slot.module._parameters[slot.key] = parameter
