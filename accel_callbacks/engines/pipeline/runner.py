"""A batch through the stages of a rank, by a schedule of torch: forward and backward at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree

from accel_callbacks import collectives
from accel_callbacks.engines.context.sequences import plain_attention
from accel_callbacks.engines.fsdp.unit_agreement import UnitAgreement
from accel_callbacks.engines.pipeline.rehearsal import Rehearsal, keep_generators
from accel_callbacks.engines.pipeline.stages import (
    Route,
    StagePlan,
    balanced_split_points,
)
from accel_callbacks.engines.shared_buffers import SharedBuffers
from accel_callbacks.engines.tensor.cut_dropout import draws_random_numbers
from accel_callbacks.errors.removed import REMOVED, advice
from accel_callbacks.gradients import local_part

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
# Options of transformers' models, with which layers collect outputs besides the result.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
_NO_LOSS = (
    "a pipeline runs backward inside of the call, so it needs the loss there: call "
    "model(*inputs, target=target) with the loss_fn of prepare_pipeline(), or pass labels to a "
    "model whose outputs have a loss. For outputs without gradients call it under torch.no_grad()."
)


@dataclass(frozen=True)
class PipelineOptions:
    """Options for cutting a model into stages; see ``Accelerator.prepare_pipeline``."""

    split_points: Sequence[str] | None = None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    schedule: str = "1F1B"
    microbatches: int | None = None
    reduction: str = "mean"

    def resolve(self, ranks: int, model: torch.nn.Module) -> PipelineOptions:
        """Return the options with defaults of the split points and the number of micro-batches.

        Args:
            ranks: of the pipeline.
            model: that is cut.

        Raises:
            ValueError: they do not fit together, or the number of ranks.
        """
        known = {name.lower(): name for name in SCHEDULES}
        name = known.get(self.schedule.lower())
        if name is None:
            gone = advice(REMOVED, self.schedule)
            hint = f".{gone}" if gone else f"; use one of {[*SCHEDULES]}."
            raise ValueError(f"schedule={self.schedule!r} is unknown{hint}")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction={self.reduction!r} must be "mean" or "sum".')
        several = SCHEDULES[name]
        usual = 2 * ranks if several else ranks
        points = self.split_points
        if points is None:
            points = balanced_split_points(model, usual)
        stages = len(points) + 1
        if stages % ranks or (stages > ranks) != several:
            raise ValueError(
                f"schedule={name!r} gives each of the {ranks} ranks "
                f"{'several stages' if several else 'one stage'}, and {len(points)} split_points "
                f"make {stages}: give {usual - 1}{' or more' if several else ''}."
            )
        count = 2 * ranks if self.microbatches is None else self.microbatches
        if count < ranks:
            raise ValueError(
                f"microbatches={count}: {ranks} ranks of a pipeline need at least {ranks}, or some "
                "idle."
            )
        return PipelineOptions(list(points), self.loss_fn, name, count, self.reduction)


@dataclass(frozen=True)
class StageReplicas:
    """Agreement of ranks that have the same stages, and read different data.

    Attributes:
        units: the units that they gather, and the gradients that they reduce.
        buffers: those of the first of them, None if each has its own.
    """

    units: UnitAgreement
    buffers: SharedBuffers | None = None


class _Batch(NamedTuple):
    """The arguments of a call of the model, and the rows of their tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int

    def key(self) -> Any:
        """Return what batches have in common that take the same way."""
        leaves, structure = _pytree.tree_flatten((self.args, self.kwargs))
        return structure, tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves
        )

    def pad(self, more: int) -> _Batch:
        """Return a batch with more copies of its first row."""

        def pad(leaf: torch.Tensor) -> torch.Tensor:
            if not leaf.dim() or leaf.shape[0] != self.rows:
                return leaf
            return torch.cat([leaf, leaf[:1].expand(more, *leaf.shape[1:])])

        args, kwargs = _pytree.tree_map_only(torch.Tensor, pad, (self.args, self.kwargs))
        return _Batch(args, kwargs, self.rows + more)


class _BatchPlan(NamedTuple):
    """A schedule of torch, the micro-batches of a batch, and their way through the model."""

    schedule: Any
    microbatches: int
    route: Route


class PipelineRunner:
    """Runs batches through the stages of this rank, by a schedule of torch.

    Stages go round the ranks: that of number ``n`` is on rank ``n % ranks``. A batch of training
    goes in this order, on all ranks of a pipeline alike:

    1. The owners of parameters that other stages read send them there.
    2. The schedule runs the micro-batches. Stage ``n`` sends activations to ``n + 1``, and gets
       their gradients back; see `stages`.
    3. The gradients of what was lent go back to the owners, which add them up.
    4. The last stage sends the loss, one number, to all.
    5. Backward of that loss puts the gradients into the parameters, times its own gradient: of the
       window, and of what the script has computed from the loss.

    In an evaluation the last stage sends the outputs to all, ``[rows, ...]`` each.
    """

    def __init__(
        self,
        plan: StagePlan,
        stages: Mapping[int, Any],
        rehearsal: Rehearsal,
        options: PipelineOptions,
        model: torch.nn.Module,
        group: Any,
        device: torch.device,
        replicas: StageReplicas | None = None,
        checked_call: Callable[..., Any] | None = None,
    ) -> None:
        self._checked_call = checked_call
        self._plan = plan
        self._replicas = replicas
        self._stages = stages
        self._rehearsal = rehearsal
        self._options = options
        self._model = model
        self._signature = inspect.signature(model.forward)
        self._group = group
        self._device = device
        self._last = dist.get_global_rank(group, group.size() - 1)
        self._random = draws_random_numbers(model)
        self._targets: Sequence[Any] = ()
        self._route: Route | None = None
        self._batch_plans: dict[Any, _BatchPlan] = {}
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self._dtype = torch.float64 if torch.float64 in kinds else torch.float32

    # --- a batch --------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """Return the loss of a batch, or its outputs."""
        if self._checked_call is not None:
            # A stage is not called as the model is, which has this as a hook.
            args, kwargs = self._checked_call(self._model, args, kwargs) or (args, kwargs)
        batch = self._bind(args, kwargs)
        loss_fn = self._options.loss_fn
        if target is not None and loss_fn is None:
            raise ValueError("a target, and no loss: pass loss_fn to prepare_pipeline().")
        if torch.is_grad_enabled():
            if target is None and loss_fn is not None:
                raise ValueError(_NO_LOSS)
            return self._train(batch, target)
        outputs = self._evaluate(batch)
        if target is None:
            return outputs
        assert loss_fn is not None
        return loss_fn(outputs, target)

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Batch:
        """Return the arguments of a call, checked."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"the forward of {self._plan.name}: {error}. The target of the loss is passed as "
                "target=."
            ) from None
        config = getattr(self._model, "config", None)
        for name in _COLLECTED:
            if kwargs.get(name, getattr(config, name, None)):
                raise ValueError(
                    f"{name}=True: what layers collect on their way is not passed from stage to "
                    "stage of a pipeline: leave it out."
                )
        if "use_cache" in self._signature.parameters and "use_cache" not in kwargs:
            kwargs = {**kwargs, "use_cache": False}  # stages would each keep their own
        leaves = _pytree.tree_leaves((args, kwargs))
        rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(rows) > 1:
            rows.discard(1)  # of all rows, such as positions
        if len(rows) != 1:
            raise TypeError(
                "the inputs of a pipeline must have tensors with the same number of rows, which "
                f"are cut into micro-batches; they have {sorted(rows) or 'none'}."
            )
        return _Batch(args, kwargs, rows.pop())

    # --- forward and backward -------------------------------------------------------------------

    def _train(self, batch: _Batch, target: Any) -> Any:
        plan = self._plan_of(batch, training=True)
        count = plan.microbatches
        if self._options.loss_fn is None and plan.route.loss is None:
            raise ValueError(_NO_LOSS)
        self._targets = _cut_rows(target, count, batch.rows, "the target has")
        self._route = plan.route
        losses: list[torch.Tensor] = []
        self._share_buffers()
        # Once each: what is tied is in several stages of this rank.
        parameters = list(
            dict.fromkeys(p for stage in self._stages.values() for p in stage.parameters())
        )
        try:
            with self._draw_per_stage(), _set_gradients_aside(parameters):
                loans = self._lend(plan.route)
                self._begin(plan, batch, loans)
                # Of the ranks, only that of the last stage has a loss. Its loss_fn gets the output
                # of a micro-batch, and a piece of the target, by which it finds its own.
                numbers = {"target": torch.arange(count, device="cpu")} if self._has_last else {}
                plan.schedule.step(**numbers, losses=losses)
                if self._replicas is not None:
                    self._replicas.units.finish_backward()
                # After all micro-batches, so that each loan is returned once.
                self._return_loans(plan.route, loans)
                gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        finally:
            self._targets = ()
        total = torch.zeros((), dtype=self._dtype, device=self._device)
        for loss in losses:
            total += loss.detach()
        dist.broadcast(total, src=self._last, group=self._group)
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        owners, values = [p for p, _ in gradients], [gradient for _, gradient in gradients]
        apply: Any = _BatchLoss.apply
        # A rank whose parameters are all frozen has the anchor, so that its loss has a backward.
        loss_of_batch: torch.Tensor = apply(total, values, anchor, *owners)
        if self._options.loss_fn is None:
            return plan.route.with_loss(loss_of_batch)
        return loss_of_batch

    def _begin(self, plan: _BatchPlan, batch: _Batch, loans: Mapping[str, torch.Tensor]) -> None:
        microbatches = _cut_rows((batch.args, batch.kwargs), plan.microbatches, batch.rows)
        for stage in self._stages.values():
            stage.begin(plan.route, microbatches, loans)

    # --- parameters that several stages read ----------------------------------------------------

    def _lend(self, route: Route) -> dict[str, torch.Tensor]:
        """Collective: give stages the parameters that they share with an earlier one, by name.

        The owner trains and saves them; the others have them for a batch, and send gradients back.
        Ranks send pairwise, in the order of the names in the route, which is that of all ranks.
        What is sent has the shape of the parameter, of its part under tensor parallelism; under
        FSDP it is gathered first, and each borrower gets it from the owner with the same samples.
        """
        loans: dict[str, torch.Tensor] = {}
        for name, owner, borrowers in self._loans_of(route):
            parameter = self._model.get_parameter(name)
            part = _part_of_stage(parameter)
            if self._rank == owner:
                for rank in borrowers:
                    if rank != owner:
                        dist.send(part, dst=self._global_rank(rank), group=self._group)
                if owner in borrowers and collectives.is_sharded(parameter):
                    loans[name] = _cut_like(part.clone(), parameter)
            elif self._rank in borrowers:
                received = torch.empty(part.shape, dtype=part.dtype, device=self._device)
                dist.recv(received, src=self._global_rank(owner), group=self._group)
                loans[name] = _cut_like(received, parameter)
            if name in loans:
                loans[name].requires_grad_(parameter.requires_grad and torch.is_grad_enabled())
        return loans

    def _return_loans(self, route: Route, loans: Mapping[str, torch.Tensor]) -> None:
        """Collective: add the gradients of lent parameters to those of their owners."""
        for name, owner, borrowers in self._loans_of(route):
            parameter = self._model.get_parameter(name)
            if not parameter.requires_grad:
                continue
            gradient = _part_of_gradient(loans[name]) if name in loans else None
            if self._rank != owner:
                if gradient is not None:
                    part = gradient.contiguous()
                    dist.send(part, dst=self._global_rank(owner), group=self._group)
                continue
            total = torch.zeros_like(_part_of_stage(parameter))
            if gradient is not None:  # another stage of this rank has borrowed it too
                total += gradient
            for rank in borrowers:
                if rank != owner:
                    part = torch.empty_like(total)
                    dist.recv(part, src=self._global_rank(rank), group=self._group)
                    total += part
            total = _average_shard(total, parameter)
            parameter.grad = total if parameter.grad is None else parameter.grad + total

    def _loans_of(self, route: Route) -> Iterator[tuple[str, int, list[int]]]:
        """Yield the names of parameters that are lent, their owners and who borrows, as ranks."""
        size = self._group.size()
        for name, stages in route.borrowed.items():
            borrowers = sorted({stage % size for stage in stages})
            yield name, self._plan.owner[name] % size, borrowers

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group)

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    def _share_buffers(self) -> None:
        if self._replicas is not None and self._replicas.buffers is not None:
            for stage in self._stages.values():
                self._replicas.buffers.share(stage)

    @property
    def _has_last(self) -> bool:
        return self._plan.count - 1 in self._stages

    def _loss(self, output: Any, index: torch.Tensor) -> torch.Tensor:
        """Return the part of a micro-batch in the loss of the batch."""
        assert self._route is not None
        result = self._route.unflatten(output)
        loss_fn = self._options.loss_fn
        loss = result.loss if loss_fn is None else loss_fn(result, self._targets[int(index)])
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError("loss_fn must return a tensor with one number, of the micro-batch.")
        return loss / len(self._targets) if self._options.reduction == "mean" else loss

    def _evaluate(self, batch: _Batch) -> Any:
        rows = batch.rows
        if self._count_microbatches(rows) is None:
            # By copies of the first row, whose outputs are dropped.
            batch = batch.pad(-rows % self._group.size())
        plan = self._plan_of(batch, training=False)
        tensors = plan.route.tensors()
        if batch.rows != rows and any(not outline.shape for outline in tensors):
            raise ValueError(
                f"a batch of {rows} rows cannot be cut into equal micro-batches, and the model "
                "returns a number that would count copies of a row: compute it from the outputs."
            )
        self._share_buffers()
        with self._draw_per_stage():
            self._begin(plan, batch, self._lend(plan.route))
            merged = plan.schedule.step()
        _free_gathered(self._stages.values())
        outputs = []
        for number, outline in enumerate(tensors):
            shape = outline.shape or (1,)
            if self._has_last:
                whole = merged[number].detach().contiguous()
            else:
                shape = (shape[0] * plan.microbatches, *shape[1:])
                whole = torch.empty(shape, dtype=outline.dtype, device=self._device)
            dist.broadcast(whole, src=self._last, group=self._group)
            if not outline.shape:
                whole = whole.mean() if self._options.reduction == "mean" else whole.sum()
            outputs.append(whole[:rows] if outline.shape else whole)
        return plan.route.unflatten(outputs)

    @contextmanager
    def _draw_per_stage(self) -> Iterator[None]:
        """Context manager: draw other numbers than other stages, from a seed that all draw.

        Outside, ranks that share a model draw the same numbers.
        """
        if not self._random or not self._model.training:
            yield
            return
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        with keep_generators(self._device):
            torch.manual_seed((seed + dist.get_rank(self._group) * _GOLDEN) % (1 << 63))
            yield

    # --- schedules ------------------------------------------------------------------------------

    def _plan_of(self, batch: _Batch, *, training: bool) -> _BatchPlan:
        """Return the schedule for batches of these shapes, its micro-batches, and their route.

        It has memory for what other stages send, so each shape has its own.
        """
        key = (training, self._model.training, batch.key())
        known = self._batch_plans.pop(key, None)
        if known is None:
            known = self._make_plan(batch, training)
        self._batch_plans[key] = known  # the last used is the last
        while len(self._batch_plans) > _KEPT_SCHEDULES:
            del self._batch_plans[next(iter(self._batch_plans))]
        return known

    def _make_plan(self, batch: _Batch, training: bool) -> _BatchPlan:
        rows = batch.rows
        count, fewest = self._count_microbatches(rows), self._group.size()
        if count is None:
            raise ValueError(
                f"a batch of {rows} rows cannot be cut into equal micro-batches, at most "
                f"{self._max_microbatches} and at least {fewest}: give the loader drop_last=True, "
                f"or pad the last batch to a multiple of {fewest}."
            )
        args, kwargs = _cut_rows((batch.args, batch.kwargs), count, rows)[0]
        # On each rank, with the same inputs: all find the same route, or raise the same error.
        with torch.enable_grad() if training else torch.no_grad(), plain_attention():
            route = self._rehearsal.route(args, kwargs)
        return _BatchPlan(self._build_schedule(count, route, training), count, route)

    @property
    def _max_microbatches(self) -> int:
        return self._options.microbatches or 1

    def _count_microbatches(self, rows: int) -> int | None:
        """Return the number of micro-batches that a batch is cut into, None if none fits."""
        ranks = self._group.size()
        # torch's schedules of several stages on a rank take rounds of as many as there are ranks.
        step = ranks if SCHEDULES[self._options.schedule] else 1
        allowed = range(self._max_microbatches // step * step, ranks - 1, -step)
        return next((count for count in allowed if rows and rows % count == 0), None)

    def _build_schedule(self, count: int, route: Route, training: bool) -> Any:
        # Imported here, because most runs have no pipeline.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        shapes = route.outputs_on_meta()
        # With shapes on the meta device, torch sends none before the first batch.
        stages = [
            PipelineStage(
                module,
                number,
                self._plan.count,
                self._device,
                input_args=shapes[number],
                output_args=shapes[number + 1],
                group=self._group,
            )
            for number, module in self._stages.items()
        ]
        return get_schedule_class(self._options.schedule)(
            stages if SCHEDULES[self._options.schedule] else stages[0],
            count,
            loss_fn=self._loss if training else None,
            # The loss of a micro-batch is its part of the batch's, so nothing is left to be scaled.
            scale_grads=False,
        )


class _BatchLoss(torch.autograd.Function):
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
            for gradient in gradients:
                part = local_part(gradient)
                part.mul_(factor.to(part.dtype))
        return None, None, None, *gradients


@contextmanager
def _set_gradients_aside(parameters: Sequence[Any]) -> Iterator[None]:
    """Context manager: parameters have no gradients of earlier batches, and no hooks on new ones.

    So hooks, and the gradients of a window, see nothing of the backward passes in the schedule:
    they get the sum over the micro-batches, once, when backward is called on the loss.
    """
    # Of both kinds, emptied in place, because torch keeps the dictionaries.
    hooks = [
        known
        for parameter in parameters
        for known in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if known
    ]
    before = [dict(known) for known in hooks]
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        for known in hooks:
            known.clear()
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for known, set_aside in zip(hooks, before, strict=True):
            known.update(set_aside)


def _free_gathered(stages: Iterable[torch.nn.Module]) -> None:
    """Free what FSDP has left whole after forwards without a backward."""
    for stage in stages:
        for module in stage.modules():
            reshard = getattr(module, "reshard", None)
            if hasattr(module, "_get_fsdp_state") and reshard is not None:
                reshard()


def _cut_dimensions(parameter: Any) -> list[int]:
    """Return the dimensions of a mesh over which a parameter is cut by tensor parallelism."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return [number for number, name in enumerate(names) if name == "tp"]


def _part_of_stage(parameter: Any) -> torch.Tensor:
    """Collective over ranks that share a stage: return what one of them computes with."""
    whole = parameter.detach()
    part: torch.Tensor
    if not collectives.is_sharded(parameter):
        part = whole.contiguous()
        return part
    from torch.distributed.tensor import Replicate

    cut = _cut_dimensions(parameter)
    placements = [
        placement if number in cut else Replicate()
        for number, placement in enumerate(parameter.placements)
    ]
    part = whole.redistribute(placements=placements).to_local().contiguous()
    return part


def _cut_like(part: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a part of a parameter as a layer takes it that is cut by tensor parallelism."""
    if not collectives.is_sharded(parameter) or not _cut_dimensions(parameter):
        return part
    from torch.distributed.tensor import DTensor

    (number,) = _cut_dimensions(parameter)
    mesh = parameter.device_mesh
    if mesh.ndim > 1:
        mesh = mesh["tp"]
    return DTensor.from_local(
        part, mesh, [parameter.placements[number]], run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _part_of_gradient(loan: Any) -> torch.Tensor:
    gradient = loan.grad
    if gradient is None:
        return torch.zeros_like(local_part(loan))
    if collectives.is_sharded(gradient):
        gradient = gradient.redistribute(placements=loan.placements)
    return local_part(gradient)


def _average_shard(gradient: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a gradient, averaged over the ranks that share the stage."""
    if not collectives.is_sharded(parameter):
        return gradient
    from torch.distributed.tensor import DTensor, Partial

    cut, mesh = _cut_dimensions(parameter), parameter.device_mesh
    data = [number for number in range(mesh.ndim) if number not in cut]
    for number in data:
        gradient = gradient / mesh.size(number)
    placements = [
        Partial() if number in data else placement
        for number, placement in enumerate(parameter.placements)
    ]
    parts = DTensor.from_local(
        gradient, mesh, placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    shard: torch.Tensor = parts.redistribute(placements=parameter.placements)
    return shard


def _cut_rows(tree: Any, count: int, rows: int, subject: str = "an input has") -> list[Any]:
    """Return the micro-batches of a tree: tensors with a row for each of the batch are cut."""
    leaves, structure = _pytree.tree_flatten(tree)

    def pieces(leaf: Any) -> Sequence[Any]:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return [leaf] * count
        if leaf.shape[0] == rows:
            return leaf.chunk(count)
        if leaf.shape[0] == 1 and not subject.startswith("the target"):
            return [leaf] * count
        raise ValueError(
            f"{subject} {leaf.shape[0]} rows, and the inputs have {rows}: both are cut into "
            "micro-batches."
        )

    cut = [pieces(leaf) for leaf in leaves]
    return [_pytree.tree_unflatten([chunks[n] for chunks in cut], structure) for n in range(count)]
