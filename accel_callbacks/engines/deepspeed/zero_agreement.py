"""Gradients and gathers under ZeRO: of the same parameters on all ranks, in the same order.

DeepSpeed lays the gradients that arrive one behind the other into a bucket, and adds up the buckets
of all ranks. A rank that lacks one would add gradients of different parameters. Stage 3 gathers
parameters in the same way, wherever a module is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.engines.deepspeed.zero_state import is_zero
from accel_callbacks.engines.rank_agreement import END, Event, RankAgreement, unused_advice
from accel_callbacks.terminal_text import listed

__all__ = ["ZeroAgreement"]

_END_OF_BACKWARD = "independent_gradient_partition_epilogue"
_REDUCE = "reduce_ready_partitions_and_remove_grads"
_GATHERS = ("forward", "backward")
_SAME_PARAMETERS = unused_advice("ZeRO")
_SAME_ORDER = (
    ": gradients come in another order, and ZeRO would add up those of different parameters. Call "
    "the modules in the same order on all ranks, or pass kwargs_handlers="
    "[DistributedDataParallelKwargs(find_unused_parameters=True)], which puts them in order."
)
_SAME_MODULES = (
    ": stage 3 gathers parameters on all ranks at once, and would mix different ones. Call the "
    "same modules in the same order on all ranks, and use their outputs in the loss; or let it "
    "gather modules such as experts with what is around them, "
    "DeepSpeedPlugin(transformer_moe_cls_names=...); or shard with zero_stage=2 and "
    "DistributedDataParallelKwargs(find_unused_parameters=True), with which a missing gradient "
    "counts as zero."
)


class ZeroAgreement(RankAgreement):
    """Compares the parameters that ranks gather, and those whose gradients they reduce.

    Args:
        fills: a gradient that is missing counts as zero; else it must be missing on all ranks.
    """

    def __init__(self, *, fills: bool) -> None:
        super().__init__()
        self.fills = fills
        self._names: list[str] = []
        self._reductions: WeakKeyDictionary[Any, _Reduction] = WeakKeyDictionary()

    def watch(self, engine: Any) -> None:
        """Compare what an engine of stage 1, 2 or 3 does from now on; stage 0 adds zeros itself."""
        # Those without it reduce whole vectors, with zeros for what is missing.
        if not is_zero(engine) or not hasattr(engine.optimizer, _END_OF_BACKWARD):
            return
        numbers: dict[int, int] = {}
        for name, parameter in engine.module.named_parameters():
            numbers[id(parameter)] = len(self._names)
            self._names.append(name)
        self._reductions[engine] = _Reduction(self, engine, numbers)
        if hasattr(engine.optimizer, "parameter_offload"):
            self._watch_gathers(engine.optimizer.parameter_offload.get_param_coordinator(), numbers)

    def _watch_gathers(self, coordinator: Any, numbers: dict[int, int]) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
        from deepspeed.utils import z3_leaf_module

        fetch = coordinator.fetch_sub_module

        # What DeepSpeed prefetches follows from the modules before, so that it needs no event.
        def fetch_as_others(module: torch.nn.Module, forward: bool) -> None:
            missing = sorted(
                numbers[id(parameter)]
                for parameter in set(iter_params(module, recurse=z3_leaf_module(module)))
                if parameter.ds_status.name == "NOT_AVAILABLE" and id(parameter) in numbers
            )
            if missing:
                self.follow((_GATHERS[not forward], *missing))
            fetch(module, forward)

        coordinator.fetch_sub_module = fetch_as_others

    def start_backward(self, engine: Any) -> None:
        """Hold back the reductions of a backward until it ends, if missing gradients are zeros."""
        if self.fills and engine in self._reductions:
            self._reductions[engine].holds = True

    def finish_backward(self, engine: Any, is_last: bool) -> None:
        """End a backward; collective after the last one of a window if missing ones are zeros."""
        reduction = self._reductions.get(engine)
        if reduction is None:
            return
        if not self.fills:
            self.follow(END)
        elif is_last:
            reduction.share_used()

    def take_unused(self, engine: Any) -> list[torch.nn.Parameter]:
        """Return the parameters that no rank has used in a window, and begin another one."""
        reduction = self._reductions.get(engine)
        return [] if reduction is None else reduction.take_unused()

    def _conflict_error(self, sides: Sequence[tuple[int, Event]]) -> RuntimeError:
        (rank, event), (other, other_event) = sides
        advice = _SAME_MODULES if {event[0], other_event[0]} & {*_GATHERS} else _SAME_PARAMETERS
        if event[0] == other_event[0] and sorted(event[1:]) == sorted(other_event[1:]):
            advice = _SAME_ORDER
        return RuntimeError(
            f"rank {rank} came to {self._describe(event, other_event)}, and rank {other} to "
            f"{self._describe(other_event, event)}{advice}"
        )

    def _timeout_error(self, event: Event) -> RuntimeError:
        known = self._next.get((self._phase, self._last))
        before = "" if known is None else f", where {self._describe(known, event)} came before"
        advice = _SAME_MODULES if event[0] in _GATHERS else _SAME_PARAMETERS
        return RuntimeError(
            f"rank {collectives.rank()} came to {self._describe(event, known or END)}{before}, and "
            f"not all ranks did{advice}"
        )

    def _describe(self, event: Event, other: Event = END) -> str:
        """Return an event as a noun of an error, by what another event lacks."""
        kind, *numbers = event
        if set(numbers) != set(other[1:]):
            numbers = sorted(set(numbers).difference(other[1:]))
        if not numbers:
            return "the end of backward"
        names = listed((repr(self._names[number]) for number in numbers), 1)
        return (
            f"the gather of {names} in {kind}" if kind in _GATHERS else f"the gradients of {names}"
        )


class _Reduction:
    """The gradients of an engine: compared, or filled, where DeepSpeed reduces them."""

    def __init__(self, agreement: ZeroAgreement, engine: Any, numbers: dict[int, int]) -> None:
        self._agreement = agreement
        self._engine = engine
        self._optimizer = engine.optimizer
        self._numbers = numbers
        self._is_stage_3 = hasattr(self._optimizer, "fp32_partitioned_groups_flat")
        groups = self._optimizer.fp16_groups if self._is_stage_3 else self._optimizer.bit16_groups
        #: With the number of its group.
        self._parameters = [
            (index, parameter) for index, group in enumerate(groups) for parameter in group
        ]
        # DeepSpeed puts hooks on these alone.
        self._hooked = {id(p) for _, p in self._parameters if p.requires_grad}
        self._used: set[int] = set()  # numbers, in this window
        self._reduced: set[int] = set()  # in this backward
        self._fills_stale = False
        self.holds = False  # back gradients that arrive
        # By torch's own hook: DeepSpeed gives zeros to parameters of leaf modules, used or not.
        for _, parameter in self._parameters:
            if id(parameter) in self._hooked:
                self._note_use(parameter)
        if agreement.fills:
            self._fill_at_end()
        else:
            self._watch_buckets()
            self._watch_end()

    def _note_use(self, parameter: torch.nn.Parameter) -> None:
        number = self._numbers[id(parameter)]
        note: Any = parameter.register_post_accumulate_grad_hook
        note(lambda _: self._used.add(number))

    # --- parameters that are missing are an error -----------------------------------------------

    def _watch_buckets(self) -> None:
        optimizer, reduce = self._optimizer, getattr(self._optimizer, _REDUCE)

        def reduce_as_others(parameter: Any, *index: int) -> None:
            if not self._fills_stale:
                bucket = optimizer.ipg_buckets[optimizer.get_param_comm_dtype(parameter)]
                count = getattr(parameter, "ds_numel", parameter.numel())
                # Then DeepSpeed reduces the bucket before it takes this gradient.
                if bucket.params and bucket.elements + count > optimizer.reduce_bucket_size:
                    self._agreement.follow(("bucket", *self._numbers_in(bucket)))
                self._reduced.add(self._numbers[id(parameter)])
            reduce(parameter, *index)

        setattr(optimizer, _REDUCE, reduce_as_others)

    def _watch_end(self) -> None:
        finish = getattr(self._optimizer, _END_OF_BACKWARD)

        def finish_as_others() -> None:
            buckets = self._optimizer.ipg_buckets.values()
            numbers = [number for bucket in buckets for number in self._numbers_in(bucket)]
            self._agreement.follow(("last", *numbers))
            self._fills_stale = True
            try:
                self._fill_stale()
                finish()
            finally:
                self._fills_stale = False
                self._reduced.clear()

        setattr(self._optimizer, _END_OF_BACKWARD, finish_as_others)

    def _numbers_in(self, bucket: Any) -> list[int]:
        if self._is_stage_3:
            numbers = [self._numbers[id(parameter)] for parameter in bucket.params]
            return sorted(numbers) if self._optimizer.reduce_scatter else numbers
        groups = self._optimizer.bit16_groups
        return [self._numbers[id(groups[index][place])] for index, place, _ in bucket.params]

    def _fill_stale(self) -> None:
        """Add zeros for what no rank has used, where DeepSpeed would keep the last gradient."""
        stale = self._is_stage_3 or self._optimizer.cpu_offload
        if not stale or len(self._reduced) == len(self._hooked):
            return
        for index, parameter in self._parameters:
            if self._is_missing(parameter) and self._numbers[id(parameter)] not in self._reduced:
                self._give_zeros(parameter)
                self._feed(index, parameter)
                if not self._is_stage_3 and not self._reduces_early:
                    getattr(self._optimizer, _REDUCE)(parameter, index)

    # --- parameters that are missing count as zero ----------------------------------------------

    def _fill_at_end(self) -> None:
        name = self._feeder
        take, reduce = getattr(self._optimizer, name), self._engine.allreduce_gradients

        def take_after_backward(*args: Any) -> None:
            if not self.holds:
                take(*args)

        def reduce_all(*args: Any, **kwargs: Any) -> None:
            self.holds = False
            is_last = self._engine.is_gradient_accumulation_boundary()
            reduces = is_last or self._engine.zero_optimization_partition_gradients()
            # In the order of the groups, which is the same on all ranks.
            for index, parameter in self._parameters:
                if id(parameter) not in self._hooked:
                    continue
                if self._is_missing(parameter):
                    if not (reduces and parameter.requires_grad):
                        continue
                    self._give_zeros(parameter)
                self._feed(index, parameter)
            reduce(*args, **kwargs)

        setattr(self._optimizer, name, take_after_backward)
        self._engine.allreduce_gradients = reduce_all

    @property
    def _reduces_early(self) -> bool:
        """True if stage 1 or 2 reduces each gradient as it arrives, not at the end of a window."""
        return bool(self._optimizer.partition_gradients or self._optimizer.overlap_comm)

    def _is_missing(self, parameter: torch.nn.Parameter) -> bool:
        return parameter.grad is None and getattr(parameter, "grad_accum", None) is None

    def _give_zeros(self, parameter: torch.nn.Parameter) -> None:
        parameter.grad = torch.zeros_like(parameter)
        if self._is_stage_3:  # in which the parameter itself may be empty
            shape = parameter.ds_shape  # type: ignore[attr-defined]
            parameter.grad.data = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

    @property
    def _feeder(self) -> str:
        """The method that DeepSpeed calls with a gradient that arrives."""
        return _REDUCE if self._is_stage_3 else "process_gradients"

    def _feed(self, index: int, parameter: torch.nn.Parameter) -> None:
        arguments = (parameter,) if self._is_stage_3 else (parameter, index)
        getattr(self._optimizer, self._feeder)(*arguments)

    def share_used(self) -> None:
        """Collective: count what another rank has used as used."""
        if not collectives.has_peers():
            return
        numbers = [self._numbers[id(parameter)] for _, parameter in self._parameters]
        used = torch.tensor(
            [number in self._used for number in numbers],
            dtype=torch.int32,
            device=self._engine.device,
        )
        dist.all_reduce(used, dist.ReduceOp.MAX, group=collectives.group_for(used))
        self._used.update(
            number for number, is_used in zip(numbers, used.tolist(), strict=True) if is_used
        )

    def take_unused(self) -> list[torch.nn.Parameter]:
        used, self._used = self._used, set()
        if len(used) == len(self._parameters):
            return []
        return [p for _, p in self._parameters if self._numbers[id(p)] not in used]
