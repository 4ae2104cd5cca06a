"""A rehearsal of a forward, which finds what its stages pass on: without its layers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accel_callbacks.engines.pipeline.stages import (
    Call,
    Outline,
    Route,
    Slot,
    StagePlan,
    Value,
    call_of,
    calls_answered,
    slots_filled,
)

__all__ = ["Rehearsal"]

#: Values that an output may have besides tensors, as they are the same on all ranks.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Rehearsal(torch.nn.Module):
    """Runs the forward of a model on a micro-batch, with zeros in the place of what layers return.

    What is computed between the layers is followed from those zeros to the layers that read it.

    Args:
        plan: of the model.
        model: the model, before its tensors are sharded or dropped.
        device: of the inputs.
    """

    def __init__(self, plan: StagePlan, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        self._plan, self._model, self._device = plan, (model,), device
        self._shapes = {
            name: _LayerShapes(layer.module, device) for name, layer in plan.layers.items()
        }

    def forward(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what :meth:`route` needs; called through it, in the precision of the model."""
        run = _Run(self._plan, self._model[0], self._shapes, self._device)
        result = run(args, kwargs)
        # Together, because the precision of the model may change the types of outputs.
        return run, [run.tensors, result]

    def route(self, wrapped: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Route:
        """Return the calls of a forward, and what passes from stage to stage.

        Args:
            wrapped: this module, in the precision of the model.
            args: positional arguments of a micro-batch.
            kwargs: keyword arguments of it.

        Raises:
            ValueError: the model cannot be cut there.
        """
        run: _Run
        run, (sent, result) = wrapped(args, kwargs)
        return run.route(sent, result)


class _LayerShapes:
    """Compute the outputs of a layer on fake tensors: their shapes and types, without values."""

    def __init__(self, layer: torch.nn.Module, device: torch.device) -> None:
        # Imported here, because most runs have no pipeline.
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._original, self._device, self._needs_values = layer, device, False
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            self._layer = _emptied(layer, device)

    def __call__(self, args: Any, kwargs: Any) -> Any:
        for copied, original in zip(self._layer.modules(), self._original.modules(), strict=True):
            copied.training = original.training
        if not self._needs_values:
            with self._mode, _silent(), suppress(Exception):
                return self._layer(*_fake(args), **_fake(kwargs))
        # Its shapes depend on values inside, as those of experts do: run it on zeros.
        self._needs_values = True
        return _emptied(self._layer, self._device)(*_zeros(args), **_zeros(kwargs))


@contextmanager
def _silent() -> Iterator[None]:
    """Context manager: torch does not log what has no result without values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _emptied(layer: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a copy of a layer without values and hooks."""
    memo: dict[int, Any] = {}
    for parameter in layer.parameters():
        empty = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
    for buffer in layer.buffers():
        memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    copied = copy.deepcopy(layer, memo)
    for module in copied.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return copied


def _fake(tree: Any) -> Any:
    """Return tensors without values, inside of a FakeTensorMode."""
    return _pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        ),
        tree,
    )


def _zeros(tree: Any) -> Any:
    return _pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: torch.zeros_like(tensor).requires_grad_(tensor.requires_grad),
        tree,
    )


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors from where they come, by their memory.

    Attributes:
        enabled: False while operations are not followed.
        used: the origins of what operations have read.
        written: the origins of tensors that operations have written into.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.enabled = True
        self._name = name
        self._origins: dict[int, frozenset[Any]] = {}
        self._kept: list[torch.Tensor] = []  # so that no memory is used again
        self.used: set[Any] = set()
        self.written: set[Any] = set()
        self._homes: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor, origin: Any) -> torch.Tensor:
        """Note where a tensor comes from."""
        self._homes[_memory(tensor)] = origin
        self._note(tensor, frozenset((origin,)))
        return tensor

    def of(self, tree: Any) -> frozenset[Any]:
        """Return where the tensors of a tree come from."""
        sets = [self._origins.get(_memory(t), frozenset()) for t in _tensors(tree)]
        return frozenset().union(*sets)

    def _note(self, tensor: torch.Tensor, origins: frozenset[Any]) -> None:
        self._kept.append(tensor)
        key = _memory(tensor)
        self._origins[key] = self._origins.get(key, frozenset()) | origins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self.enabled:
            return output
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[number] if number < len(args) else kwargs.get(argument.name)
                self.written |= {self._homes.get(_memory(tensor)) for tensor in _tensors(target)}
        origins = self.of((args, kwargs))
        self.used |= origins
        if origins and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(
            func.tags
        ):
            raise ValueError(
                f"the forward of {self._name} depends on the values of what its layers return "
                f"({func}), between the layers: other stages do not have them. Move it into a "
                "layer, or choose split points outside."
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins |= {_Draw()}
        if origins and func.overloadpacket.__name__ not in _SHAPES_ONLY:
            for tensor in _tensors(output):
                self._note(tensor, origins)
        return output


_SHAPES_ONLY = (
    *("zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
)


class _Draw:
    """Random numbers that are drawn between layers; equal to none that are drawn elsewhere."""


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class _Run:
    """One forward without layers."""

    def __init__(
        self,
        plan: StagePlan,
        model: torch.nn.Module,
        shapes: Mapping[str, _LayerShapes],
        device: torch.device,
    ) -> None:
        self._plan, self._model, self._shapes, self._device = plan, model, shapes, device
        self._origins = _Origins(plan.name)
        self._calls: list[Call] = []
        self._stage = 0
        self._read: dict[Any, set[int]] = {}  # the stages that read a value, by its origin
        self._made: list[int] = []  # the stage of each value
        self._slots = {
            Slot(module, key): f"{path}.{key}" if path else key
            for path, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        }
        self.tensors: list[torch.Tensor] = []

    def __call__(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run; return the result, whose tensors have no values."""
        # Those of layers too, which code between the layers may read.
        zeros = {
            slot: self._origins.add(self._without_memory(slot.module._parameters[slot.key]), name)
            for slot, name in self._slots.items()
        }
        with (
            _generators_kept(self._device),
            slots_filled(zeros),
            calls_answered(self._plan.modules, self._answer),
            self._origins,
        ):
            result = self._model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._note_read(result, self._plan.count - 1)
        if self._stage != self._plan.count - 1:
            raise ValueError(
                f"split_points: the forward of {self._plan.name} calls no layer of stage "
                f"{self._stage + 1} of {self._plan.count}."
            )
        return result

    def _zeros_like(self, tensor: Any) -> torch.Tensor:
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
        # A clone, because code may write into what a layer returned.
        return zeros.requires_grad_(tensor.requires_grad and torch.is_grad_enabled()).clone()

    def _without_memory(self, parameter: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=parameter.dtype, device=self._device)
        zero.requires_grad_(parameter.requires_grad and torch.is_grad_enabled())
        return zero.expand(parameter.shape)

    def _note_read(self, tree: Any, stage: int) -> None:
        for origin in self._origins.of(tree):
            stages = self._read.setdefault(origin, set())
            stages.add(stage)
            if isinstance(origin, _Draw) and len(stages) > 1:
                raise ValueError(
                    f"the forward of {self._plan.name} draws random numbers between its layers, "
                    f"which stages {sorted(stages)} read, and each would draw its own: draw them "
                    "in a layer, such as torch.nn.Dropout."
                )

    def _answer(self, name: str, args: Any, kwargs: Any) -> Any:
        layer, self._origins.enabled = self._plan.layers[name], False
        try:
            origins = self._origins.of((args, kwargs))
            if layer.is_plain and not origins:
                self._calls.append(Call(name, None))
                self._origins.enabled = True
                return call_of(layer.module)(*args, **kwargs)
            stage = self._stage if layer.is_plain else layer.stage
            if stage < self._stage:
                raise ValueError(
                    f"split_points: {self._plan.name} calls {name!r}, of stage {stage}, after the "
                    f"first layer of stage {self._stage}: choose split points with its calls in "
                    "one stage, or register it where it is called."
                )
            if stage > self._stage + 1:
                raise ValueError(
                    f"split_points: the forward of {self._plan.name} calls no layer of stage "
                    f"{self._stage + 1} before {name!r}, of stage {stage}."
                )
            self._stage = stage
            self._note_read((args, kwargs), stage)
            output = self._shapes[name](args, kwargs)
            leaves, structure = _pytree.tree_flatten(output)
            answered, outlines = [], []
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    value = Value(len(self.tensors))
                    answered.append(self._origins.add(self._zeros_like(leaf), value.number))
                    self.tensors.append(answered[-1])
                    self._made.append(stage)
                    outlines.append(value)
                else:
                    self._check_constant(leaf, f"{name!r} returns")
                    answered.append(leaf)
                    outlines.append(leaf)
            self._calls.append(Call(name, stage, structure, tuple(outlines)))
            return _pytree.tree_unflatten(answered, structure)
        finally:
            self._origins.enabled = True

    def _check_constant(self, leaf: Any, source: str) -> None:
        if not isinstance(leaf, _CONSTANTS):
            raise ValueError(
                f"{self._plan.name}: {source} a {type(leaf).__name__}, and only tensors and "
                "constants go from stage to stage: leave it out (a cache, by use_cache=False)."
            )

    def route(self, sent: Sequence[torch.Tensor], result: Any) -> Route:
        """Return the route, with the types in which values are sent."""
        count = self._plan.count
        values = [
            Outline(tuple(tensor.shape), tensor.dtype, as_sent.dtype, tensor.requires_grad)
            for tensor, as_sent in zip(self.tensors, sent, strict=True)
        ]
        passed = [
            [
                number
                for number, producer in enumerate(self._made)
                if producer < stage <= max(self._read.get(number, (0,)))
            ]
            for stage in range(count)
        ]
        leaves, structure = _pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._check_constant(leaf, "it returns")
        loss = getattr(result, "loss", None)
        is_loss = [leaf is loss for leaf in leaves if loss is not None]
        borrowed = {
            name: {stage: list(slots) for stage, slots in stages.items()}
            for name, stages in self._plan.shared.items()
        }
        filled: list[dict[Slot, Outline]] = [{} for _ in range(count)]
        shared = {
            slot for stages in self._plan.shared.values() for s in stages.values() for slot in s
        }
        for slot, name in self._slots.items():
            parameter = slot.module._parameters[slot.key]
            assert parameter is not None
            readers = self._read.get(name, set())
            outline = Outline(tuple(parameter.shape), parameter.dtype, parameter.dtype, False)
            for stage in range(count):
                if stage == self._plan.owner[name]:
                    continue
                if stage in readers and slot not in shared:
                    lent = borrowed.setdefault(self._plan.canonical[name], {})
                    lent.setdefault(stage, []).append(slot)
                elif name in self._origins.used:
                    filled[stage][slot] = outline
        return Route(
            self._calls,
            values,
            passed,
            borrowed,
            filled,
            structure,
            [
                Outline(tuple(leaf.shape), leaf.dtype, leaf.dtype, leaf.requires_grad)
                if isinstance(leaf, torch.Tensor)
                else leaf
                for leaf in leaves
            ],
            is_loss.index(True) if any(is_loss) else None,
            self._origins.written,
        )


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Context manager: what is drawn inside is drawn again after it."""
    devices = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
