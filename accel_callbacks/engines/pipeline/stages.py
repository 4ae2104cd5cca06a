"""Stages of a pipeline: runs of a model's own forward, each with the layers of one stage.

The modules that hold the split points are containers, and the modules that they call are layers.
Each stage runs the forward of the whole model, as it is written, with the micro-batch of its own
rank: layers of earlier stages return what was received, or zeros where no later stage reads it, and
the first layer of a later stage ends the run. So nothing is traced, each stage computes its masks
and positions itself, and arguments and outputs may have any structure.

Stage ``n`` receives ``route.passed[n]`` from stage ``n - 1``, in this order: of each value the
tensor of one micro-batch, contiguous, in the dtype in which its layer computed it, such as
``[rows / microbatches, tokens, width]`` in bfloat16. A value that a later stage reads goes through
all stages between. Backward sends a gradient of the same shape and dtype the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "parameter_slots",
    "slots_filled",
    "zeros_without_memory",
]


class Slot(NamedTuple):
    """A place of a module that holds a parameter.

    Args:
        module: the module.
        key: of the parameter in it.
    """

    module: torch.nn.Module
    key: str


def parameter_slots(model: torch.nn.Module) -> Iterator[tuple[Slot, str, torch.nn.Parameter]]:
    """Yield where a model holds parameters, their names, and the parameters; tied ones again."""
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield Slot(module, key), f"{path}.{key}" if path else key, parameter


def zeros_without_memory(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return zeros of the shape of a parameter, which all are one number."""
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


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
        for name, tensor in _tensors_by_name(model):
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


def _tensors_by_name(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class Outline(NamedTuple):
    """A tensor without its values.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        requires_grad: whether a gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Return the outline of a tensor, other leaves as they are."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return cls(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)

    def on_meta(self) -> torch.Tensor:
        """Return a tensor without memory."""
        empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
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
        structure: of the result.
        result: the leaves of the result: outlines of tensors, or constants.
        loss: which leaf of the result is its attribute ``loss``, None without one.
    """

    calls: Sequence[Call]
    values: Sequence[Outline]
    passed: Sequence[Sequence[int]]
    borrowed: Mapping[str, Mapping[int, Sequence[Slot]]]
    structure: Any
    result: Sequence[Any]
    loss: int | None

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
        # In a tuple, so that the model is no submodule, whose parameters FSDP would shard here.
        self._plan, self._model, self._number, self._device = plan, (model,), number, device
        self._route: Route | None = None
        self._microbatches: Iterator[Any] = iter(())
        # The run replays code of earlier stages, which may read parameters that are not here.
        self._absent = {
            slot: zeros_without_memory(parameter, device)
            for slot, name, parameter in parameter_slots(model)
            if plan.owner[name] != number
        }
        self._filled: dict[Slot, torch.Tensor] = {}
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
        self, route: Route, microbatches: Sequence[Any], loans: Mapping[str, torch.Tensor]
    ) -> None:
        """Set what the next forwards are: one for each micro-batch, in order.

        Args:
            route: of micro-batches of their shapes.
            microbatches: positional and keyword arguments of the model.
            loans: parameters of other stages that this rank has borrowed, by their names.
        """
        self._route, self._microbatches = route, iter(microbatches)
        self._filled = dict(self._absent)
        for name, stages in route.borrowed.items():
            for slot in stages.get(self._number, ()):
                if name in loans:
                    self._filled[slot] = loans[name]
                else:  # a stage of this rank owns it, and it is in its slot
                    self._filled.pop(slot, None)

    def forward(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the layers of this stage on the next micro-batch; return what is passed on."""
        route, number = self._route, self._number
        assert route is not None
        args, kwargs = next(self._microbatches)
        inputs = dict(zip(route.passed[number], received, strict=True))
        outgoing = route.passed[number + 1] if number + 1 < self._plan.count else ()
        # Copies, because what is sent gets a gradient of its own, and the next stage replays what
        # code between the layers writes into the outputs of this one.
        sent = {n: tensor.clone() for n, tensor in inputs.items() if n in outgoing}
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
                answered = [self._input(leaf, inputs) for leaf in call.leaves]
                return _pytree.tree_unflatten(answered, call.structure)
            output = call_of(layers[layer])(*args, **kwargs)
            for leaf, tensor in zip(call.leaves, _pytree.tree_leaves(output), strict=True):
                if isinstance(leaf, Value) and leaf.number in outgoing:
                    sent[leaf.number] = tensor.clone(memory_format=torch.contiguous_format)
            return output

        (model,) = self._model
        with slots_filled(self._filled), calls_answered(layers, answer):
            try:
                # Not its call, which `generate` has sent here.
                result = model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            except _EndOfStage:
                return tuple(sent[n] for n in outgoing)
        return route.flatten(result)

    def _input(self, leaf: Any, inputs: Mapping[int, torch.Tensor]) -> Any:
        """Return what a layer of an earlier stage has returned there."""
        assert self._route is not None
        if not isinstance(leaf, Value):
            return leaf
        if leaf.number not in inputs:  # no layer from here on reads it
            outline = self._route.values[leaf.number]
            return torch.zeros(outline.shape, dtype=outline.dtype, device=self._device)
        # A copy, because code between the layers may write into it, and torch needs it in backward.
        return inputs[leaf.number].clone()


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
    is_inside = False

    def bind(name: str, module: torch.nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # a layer calls another, or itself
                return call_of(module)(*args, **kwargs)
            is_inside = True
            try:
                return answer(name, args, kwargs)
            finally:
                is_inside = False

        return call

    for name, layer in layers.items():
        attributes = layer.__dict__
        attributes["_before_answer"] = attributes.get("_compiled_call_impl")
        attributes["_compiled_call_impl"] = bind(name, layer)
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
