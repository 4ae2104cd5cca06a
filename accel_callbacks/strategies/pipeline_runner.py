"""A batch through the stages of a rank, by a schedule of torch: forward and backward at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

from accel_callbacks import collectives
from accel_callbacks.gradients import local_part
from accel_callbacks.strategies.cut_dropout import draws_random_numbers
from accel_callbacks.strategies.pipeline_stages import StagePlan
from accel_callbacks.strategies.shared_buffers import SharedBuffers
from accel_callbacks.strategies.unit_agreement import UnitAgreement

__all__ = ["SCHEDULES", "PipelineOptions", "PipelineRunner", "StageReplicas"]

#: The schedules of torch that are tested here; True if a rank has several stages.
SCHEDULES: Mapping[str, bool] = {
    "GPipe": False,
    "1F1B": False,
    "Interleaved1F1B": True,
    "LoopedBFS": True,
}
_KEPT_SCHEDULES = 8  # each has buffers to receive in
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is cut into stages; see ``Accelerator.prepare_pipeline``.

    Example:
        >>> from accel_callbacks.strategies.pipeline_runner import PipelineOptions
        >>> PipelineOptions(["4"], None).schedule
        '1F1B'
    """

    split_points: Sequence[str]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    schedule: str = "1F1B"
    microbatches: int | None = None
    inputs: Sequence[str] | None = None
    reduction: str = "mean"

    def checked(self, ranks: int) -> PipelineOptions:
        """Return the options with the default number of micro-batches.

        Raises:
            ValueError: they do not fit together, or the number of ranks.
        """
        known = {name.lower(): name for name in SCHEDULES}
        name = known.get(self.schedule.lower())
        if name is None:
            raise ValueError(f"schedule={self.schedule!r} is unknown; use one of {[*SCHEDULES]}.")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction={self.reduction!r} must be "mean" or "sum".')
        stages = len(self.split_points) + 1
        if SCHEDULES[name] and (stages % ranks or stages == ranks):
            raise ValueError(
                f"schedule={name!r} gives each of the {ranks} ranks several stages, and there are "
                f"{stages}: give a multiple of pp_size, minus one, of split_points, such as "
                f"{2 * ranks - 1}."
            )
        if not SCHEDULES[name] and stages != ranks:
            raise ValueError(
                f"schedule={name!r} gives each of the {ranks} ranks one stage, and "
                f"{len(self.split_points)} split_points make {stages}: give {ranks - 1}, or "
                'schedule="Interleaved1F1B" for several a rank.'
            )
        count = 2 * ranks if self.microbatches is None else self.microbatches
        if count < ranks:
            raise ValueError(
                f"microbatches={count}: {ranks} ranks of a pipeline need as many, or some idle."
            )
        return PipelineOptions(
            list(self.split_points), self.loss_fn, name, count, self.inputs, self.reduction
        )


@dataclass(frozen=True)
class StageReplicas:
    """What ranks with the same stages agree on, as they read different data.

    Attributes:
        units: the units that they gather, and the gradients that they reduce.
        buffers: those of the first of them, None if each has its own.

    Example:
        >>> from accel_callbacks.strategies.pipeline_runner import StageReplicas
        >>> from accel_callbacks.strategies.unit_agreement import UnitAgreement
        >>> StageReplicas(UnitAgreement(fills=False)).buffers is None
        True
    """

    units: UnitAgreement
    buffers: SharedBuffers | None = None


class PipelineRunner:
    """Runs batches through the stages of this rank, by a schedule of torch."""

    def __init__(
        self,
        plan: StagePlan,
        stages: Mapping[int, torch.nn.Module],
        shapes: Sequence[torch.nn.Module],
        options: PipelineOptions,
        model: torch.nn.Module,
        group: Any,
        device: torch.device,
        replicas: StageReplicas | None = None,
    ) -> None:
        self._plan = plan
        self._replicas = replicas
        self._stages = stages
        self._shapes = shapes
        self._options = options
        self._model = model
        self._group = group
        self._device = device
        self._last = dist.get_global_rank(group, (len(shapes) - 1) % group.size())
        self._random = draws_random_numbers(model)
        self._targets: Sequence[Any] = ()
        self._schedules: dict[Any, tuple[Any, int, list[torch.Tensor]]] = {}
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self._dtype = torch.float64 if torch.float64 in kinds else torch.float32

    # --- a batch --------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """Return the loss of a batch, or its outputs."""
        inputs = self._bound(args, kwargs)
        loss_fn = self._options.loss_fn
        if target is not None and loss_fn is None:
            raise ValueError("a target, and no loss: pass loss_fn to prepare_pipeline().")
        if torch.is_grad_enabled():
            if target is None:
                raise ValueError(
                    "a pipeline runs backward inside of the call, so it needs the loss there: pass "
                    "loss_fn to prepare_pipeline(), and call model(*inputs, target=target). For "
                    "outputs without gradients call it under torch.no_grad()."
                )
            return self._train(inputs, target)
        outputs = self._evaluate(inputs)
        if target is None:
            return outputs
        assert loss_fn is not None
        return loss_fn(outputs, target)

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the inputs in order, checked."""
        names = self._plan.inputs
        given = dict(zip(names, args, strict=False), **kwargs)
        unknown = [name for name in kwargs if name not in names]
        if len(args) > len(names) or unknown or set(given) != set(names):
            what = unknown[0] if unknown else f"{len(args) + len(kwargs)} inputs"
            raise TypeError(
                f"the pipeline was cut for the inputs {names}, and got {what}: pass "
                "prepare_pipeline(inputs=[...]) the names of all that are passed; the target is "
                "passed as target=."
            )
        inputs = tuple(given[name] for name in names)
        rows = {
            one.shape[0] if isinstance(one, torch.Tensor) and one.dim() else None for one in inputs
        }
        if None in rows or len(rows) != 1:
            raise TypeError(
                f"the inputs {names} must be tensors with the same number of rows, which are cut "
                "into micro-batches."
            )
        return inputs

    # --- forward and backward -------------------------------------------------------------------

    def _train(self, inputs: tuple[torch.Tensor, ...], target: Any) -> torch.Tensor:
        schedule, count, _ = self._schedule(inputs, training=True)
        self._targets = _pieces(target, count, inputs[0].shape[0])
        losses: list[torch.Tensor] = []
        self._share_buffers()
        try:
            with self._own_random(), _apart(self._stages.values()) as pairs:
                schedule.step(
                    *(inputs if 0 in self._stages else ()),
                    **({"target": torch.arange(count, device="cpu")} if self._has_last else {}),
                    losses=losses,
                )
                if self._replicas is not None:
                    self._replicas.units.finish_backward()
                held = [(own, one.grad) for own, one in pairs if one.grad is not None]
        finally:
            self._targets = ()
        total = torch.zeros((), dtype=self._dtype, device=self._device)
        for loss in losses:
            total += loss.detach()
        dist.broadcast(total, src=self._last, group=self._group)
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        settle: Any = _Settled.apply
        loss_of_batch: torch.Tensor = settle(
            total, [one for _, one in held], anchor, *(own for own, _ in held)
        )
        return loss_of_batch

    def _share_buffers(self) -> None:
        if self._replicas is not None and self._replicas.buffers is not None:
            for stage in self._stages.values():
                self._replicas.buffers.share(stage)

    @property
    def _has_last(self) -> bool:
        return len(self._shapes) - 1 in self._stages

    def _loss(self, output: Any, index: torch.Tensor) -> torch.Tensor:
        """Return the part of a micro-batch in the loss of the batch."""
        loss_fn = self._options.loss_fn
        assert loss_fn is not None
        loss = loss_fn(self._plan.result(output), self._targets[int(index)])
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError("loss_fn must return a tensor with one number, of the micro-batch.")
        return loss / len(self._targets) if self._options.reduction == "mean" else loss

    def _evaluate(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        rows = inputs[0].shape[0]
        if self._count(rows) is None:  # copies of the first row, which are dropped again
            more = -rows % self._group.size()
            inputs = tuple(torch.cat([one, one[:1].expand(more, *one.shape[1:])]) for one in inputs)
        schedule, count, results = self._schedule(inputs, training=False)
        self._share_buffers()
        with self._own_random():
            merged = schedule.step(*(inputs if 0 in self._stages else ()))
        _free_gathered(self._stages.values())
        own = list(merged) if isinstance(merged, (tuple, list)) else [merged]
        outputs = []
        for number, meta in enumerate(results):
            if self._has_last:
                whole = own[number].detach().contiguous()
            else:
                shape = (meta.shape[0] * count, *meta.shape[1:])
                whole = torch.empty(shape, dtype=meta.dtype, device=self._device)
            dist.broadcast(whole, src=self._last, group=self._group)
            outputs.append(whole[:rows])
        return self._plan.result(outputs)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Context manager: draw other numbers than other stages, from a seed that all draw.

        Outside, ranks that share a model draw the same numbers.
        """
        if not self._random or not self._model.training:
            yield
            return
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        devices = [] if self._device.type == "cpu" else [self._device.index or 0]
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            torch.manual_seed((seed + dist.get_rank(self._group) * _GOLDEN) % (1 << 63))
            yield

    # --- schedules ------------------------------------------------------------------------------

    def _schedule(
        self, inputs: tuple[torch.Tensor, ...], *, training: bool
    ) -> tuple[Any, int, list[torch.Tensor]]:
        """Return the schedule for batches of these shapes, its micro-batches, and what they give.

        It has memory for what other stages send, so each shape has its own.
        """
        key = (training, *((tuple(one.shape), one.dtype) for one in inputs))
        known = self._schedules.pop(key, None)
        if known is None:
            known = self._made(inputs, training)
        self._schedules[key] = known  # the last used is the last
        while len(self._schedules) > _KEPT_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return known

    def _made(
        self, inputs: tuple[torch.Tensor, ...], training: bool
    ) -> tuple[Any, int, list[torch.Tensor]]:
        rows = inputs[0].shape[0]
        count = self._count(rows)
        if count is None:
            raise ValueError(
                f"a batch of {rows} rows cannot be cut into equal micro-batches, at most "
                f"{self._most} and at least one for each rank: give the loader drop_last=True, or "
                f"pad the last batch to a multiple of {self._group.size()}."
            )
        passed = self._passed(inputs, rows // count, training)
        return self._built(count, passed, training), count, list(passed[-1])

    @property
    def _most(self) -> int:
        return self._options.microbatches or 1

    def _count(self, rows: int) -> int | None:
        """Return the number of micro-batches that a batch is cut into, None if none fits."""
        ranks = self._group.size()
        # torch's schedules of several stages on a rank take rounds of as many as there are ranks.
        step = ranks if SCHEDULES[self._options.schedule] else 1
        allowed = range(self._most // step * step, ranks - 1, -step)
        return next((count for count in allowed if rows and rows % count == 0), None)

    def _passed(
        self, inputs: tuple[torch.Tensor, ...], rows: int, training: bool
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return what each stage takes in a micro-batch, and what the last one returns, on meta."""
        values = tuple(
            torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device="meta") for one in inputs
        )
        passed = [values]
        for number, stage in enumerate(self._shapes):
            with torch.enable_grad() if training else torch.no_grad():
                result = stage(*values)
            found = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            for one in found:
                if not isinstance(one, torch.Tensor):
                    raise ValueError(
                        f"stage {number} of the pipeline passes on {one!r}, and only tensors go "
                        "from rank to rank: compute it in the stage that uses it."
                    )
            values = tuple(one.detach().requires_grad_(one.requires_grad) for one in found)
            passed.append(values)
        return passed

    def _built(self, count: int, passed: Sequence[tuple[torch.Tensor, ...]], training: bool) -> Any:
        # Imported here, because most runs have no pipeline.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        kind = get_schedule_class(self._options.schedule)
        stages = [
            PipelineStage(
                module,
                number,
                len(self._shapes),
                self._device,
                input_args=passed[number],
                output_args=passed[number + 1],
                group=self._group,
            )
            for number, module in self._stages.items()
        ]
        # The loss of a micro-batch is its part of the batch's, so nothing is left to be scaled.
        known = inspect.signature(kind.__init__).parameters
        options = {"scale_grads": False} if "scale_grads" in known else {}
        several = SCHEDULES[self._options.schedule]
        return kind(
            stages if several else stages[0],
            count,
            loss_fn=self._loss if training else None,
            **options,
        )


class _Settled(torch.autograd.Function):
    """The loss of a batch, whose gradients are known: backward multiplies them by its own."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        gradients: list[torch.Tensor],
        anchor: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "backward through a pipeline a second time: call the model again for that."
            )
        (factor,) = grad
        with torch.no_grad():
            for one in gradients:
                part = local_part(one)
                part.mul_(factor.to(part.dtype))
        return None, None, None, *gradients


@contextmanager
def _apart(
    stages: Iterable[torch.nn.Module],
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Context manager: stages have other parameters of the same memory, with own gradients.

    So hooks on parameters, and gradients of earlier micro-batches of a window, see nothing of the
    backward passes inside of the schedule. Shards of FSDP have no such hooks, and stay.
    """
    stages = list(stages)
    if any(map(collectives.is_sharded, (p for stage in stages for p in stage.parameters()))):
        with _own_gradients([p for stage in stages for p in stage.parameters()]) as pairs:
            yield pairs
        return
    slots = [
        (slots, key, parameter)
        for stage in stages
        for module in stage.modules()
        for slots in (module._parameters,)
        for key, parameter in slots.items()
        if parameter is not None
    ]
    shadows: dict[int, torch.nn.Parameter] = {}
    pairs = []
    for _, _, parameter in slots:
        if id(parameter) not in shadows:
            shadow = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
            shadows[id(parameter)] = shadow
            if parameter.requires_grad:
                pairs.append((parameter, shadow))
    try:
        for own, key, parameter in slots:
            own[key] = shadows[id(parameter)]
        yield pairs
    finally:
        for own, key, parameter in slots:
            own[key] = parameter


@contextmanager
def _own_gradients(
    parameters: Sequence[torch.Tensor],
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Context manager: set the gradients of parameters aside."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield [(parameter, parameter) for parameter in parameters if parameter.requires_grad]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _free_gathered(stages: Iterable[torch.nn.Module]) -> None:
    """Free what FSDP has left whole after forwards without a backward."""
    for stage in stages:
        for module in stage.modules():
            reshard = getattr(module, "reshard", None)
            if hasattr(module, "_get_fsdp_state") and reshard is not None:
                reshard()


def _pieces(target: Any, count: int, rows: int) -> list[Any]:
    """Return the targets of the micro-batches: tensors with a row for each of the batch are cut."""
    leaves, spec = _pytree.tree_flatten(target)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] != rows:
            raise ValueError(
                f"the target has {leaf.shape[0]} rows, and the inputs have {rows}: both are cut "
                "into micro-batches."
            )
    cut = [
        leaf.chunk(count) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * count
        for leaf in leaves
    ]
    return [_pytree.tree_unflatten([one[n] for one in cut], spec) for n in range(count)]
