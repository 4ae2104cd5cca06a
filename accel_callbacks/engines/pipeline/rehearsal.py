"""A rehearsal of a forward, which finds what its stages pass on: without its layers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
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
    parameter_slots,
    slots_filled,
    zeros_without_memory,
)

__all__ = ["Rehearsal", "keep_generators"]

#: Values that an output may have besides tensors, as they are the same on all ranks.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Rehearsal:
    """Runs the forward of a model on a micro-batch, with zeros in the place of what layers return.

    What is computed between the layers is followed from those zeros to the layers that read it.

    Args:
        plan: of the model.
        model: the model, before its tensors are sharded or dropped.
        device: of the inputs.
    """

    def __init__(self, plan: StagePlan, model: torch.nn.Module, device: torch.device) -> None:
        self._plan, self._model, self._device = plan, model, device
        self._shapes = {
            name: _LayerShapes(layer.module, device) for name, layer in plan.layers.items()
        }

    def route(self, args: Any, kwargs: Mapping[str, Any]) -> Route:
        """Return the calls of a forward, and what passes from stage to stage.

        Args:
            args: positional arguments of a micro-batch.
            kwargs: keyword arguments of it.

        Raises:
            ValueError: the model cannot be cut there.
        """
        return _Run(self._plan, self._model, self._shapes, self._device).route(args, kwargs)


class _LayerShapes:
    """Compute the outputs of a layer on fake tensors: their shapes and types, without values."""

    def __init__(self, layer: torch.nn.Module, device: torch.device) -> None:
        # Imported here, because most runs have no pipeline.
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._original, self._device, self._needs_values = layer, device, False
        # Fake tensors of the device, not of "meta", because autocast looks at the device.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            self._layer = _copy_without_values(layer, device)

    def __call__(self, args: Any, kwargs: Any) -> Any:
        for copied, original in zip(self._layer.modules(), self._original.modules(), strict=True):
            copied.training = original.training
        if not self._needs_values:
            with self._mode, _silent(), suppress(Exception):
                return self._layer(*_zeros(args), **_zeros(kwargs))
        # Its shapes depend on values inside, as those of experts do: run it on zeros. An error of
        # the layer itself is raised again there.
        self._needs_values = True
        return _copy_without_values(self._layer, self._device)(*_zeros(args), **_zeros(kwargs))


@contextmanager
def _silent() -> Iterator[None]:
    """Context manager: torch does not log what has no result without values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _copy_without_values(layer: torch.nn.Module, device: torch.device) -> torch.nn.Module:
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
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.enabled = True
        self._name = name
        self._origins: dict[int, frozenset[Any]] = {}
        self._kept: list[torch.Tensor] = []  # so that no memory is used again

    def add(self, tensor: torch.Tensor, origin: Any) -> torch.Tensor:
        """Note where a tensor comes from."""
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
        # An operation that writes into a tensor returns it, and so adds to its origins.
        origins = self.of((args, kwargs))
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
        self._stage = 0  # the stage that has begun
        self._readers: dict[Any, set[int]] = {}  # the stages that read a value, by its origin
        self._values: list[Outline] = []
        self._producers: list[int] = []  # the stage of each value
        self._slots: dict[Slot, str] = {}  # the names of parameters, by where they are

    def route(self, args: Any, kwargs: Mapping[str, Any]) -> Route:
        """Run, and return the route; the tensors of the result have no values."""
        # Parameters of layers too, which code between the layers may read.
        zeros = {}
        for slot, name, parameter in parameter_slots(self._model):
            self._slots[slot] = name
            zero = zeros_without_memory(parameter, self._device)
            zero.requires_grad_(parameter.requires_grad and torch.is_grad_enabled())
            zeros[slot] = self._origins.add(zero, name)
        with (
            keep_generators(self._device),
            slots_filled(zeros),
            calls_answered(self._plan.modules, self._answer),
            self._origins,
        ):
            result = self._model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        last = self._plan.count - 1
        self._note_read(result, last)
        if self._stage != last:
            raise ValueError(
                f"split_points: the forward of {self._plan.name} calls no layer of stage "
                f"{self._stage + 1} of {self._plan.count}."
            )
        leaves, structure = _pytree.tree_flatten(result)
        loss = getattr(result, "loss", None)
        places = [place for place, leaf in enumerate(leaves) if loss is not None and leaf is loss]
        return Route(
            self._calls,
            self._values,
            [self._values_for(stage) for stage in range(self._plan.count)],
            self._loan_slots(),
            structure,
            [self._outline(leaf, "it returns") for leaf in leaves],
            places[0] if places else None,
        )

    def _values_for(self, stage: int) -> list[int]:
        """Return the values that a stage receives: of earlier ones, read there or later."""
        return [
            number
            for number, producer in enumerate(self._producers)
            if producer < stage <= max(self._readers.get(number, (0,)))
        ]

    def _loan_slots(self) -> dict[str, dict[int, list[Slot]]]:
        """Return the slots of parameters that other stages than their owners read."""
        borrowed = {
            name: {stage: list(slots) for stage, slots in stages.items()}
            for name, stages in self._plan.shared.items()
        }
        for slot, name in self._slots.items():
            for stage in sorted(self._readers.get(name, set()) - {self._plan.owner[name]}):
                lent = borrowed.setdefault(self._plan.canonical[name], {}).setdefault(stage, [])
                if slot not in lent:
                    lent.append(slot)
        return borrowed

    def _zeros_like(self, tensor: Any) -> torch.Tensor:
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
        # A clone, because code may write into what a layer returned.
        return zeros.requires_grad_(tensor.requires_grad and torch.is_grad_enabled()).clone()

    def _note_read(self, tree: Any, stage: int) -> None:
        for origin in self._origins.of(tree):
            stages = self._readers.setdefault(origin, set())
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
            answered, noted = [], list[Any]()
            for leaf in leaves:
                outline = self._outline(leaf, f"{name!r} returns")
                if isinstance(leaf, torch.Tensor):
                    value = Value(len(self._values))
                    answered.append(self._origins.add(self._zeros_like(leaf), value.number))
                    noted.append(value)
                    self._values.append(outline)
                    self._producers.append(stage)
                else:
                    answered.append(leaf)
                    noted.append(leaf)
            self._calls.append(Call(name, stage, structure, tuple(noted)))
            return _pytree.tree_unflatten(answered, structure)
        finally:
            self._origins.enabled = True

    def _outline(self, leaf: Any, source: str) -> Any:
        """Return the outline of a tensor, or a constant; refuse other objects."""
        if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
            raise ValueError(
                f"{self._plan.name}: {source} a {type(leaf).__name__}, and only tensors and "
                "constants go from stage to stage: leave it out (a cache, by use_cache=False)."
            )
        return Outline.of(leaf)


@contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Context manager: what is drawn inside is drawn again after it."""
    devices = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
