"""The units of sharded models that ranks gather and reduce: the same ones, with the same gradients.

FSDP pairs the collectives of ranks by their order. A rank that calls another unit than the others,
or has gradients of other parameters in one, would add up tensors that have nothing in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import class_of
from accel_callbacks.engines.fsdp.groups import has_whole_gradient, parameter_groups
from accel_callbacks.engines.rank_agreement import END, Event, RankAgreement, unused_advice

__all__ = ["UnitAgreement"]

_SAME_PARAMETERS = unused_advice("FSDP")
_SAME_UNITS = (
    ": FSDP gathers and reduces a unit on all ranks at once, and would mix different ones. Call "
    "the same modules in the same order on all ranks, not inside of `if accel.is_main_process:`, "
    "and use their outputs in the loss; or keep these modules whole with "
    "FullyShardedDataParallelPlugin(ignored_modules=[...]), of which a missing gradient counts as "
    "zero."
)


class _Unit(NamedTuple):
    name: str
    parameters: list[str]


class UnitAgreement(RankAgreement):
    """Compares the units that ranks gather, and the gradients that they reduce.

    Args:
        fills: a gradient that is missing in a unit counts as zero; else it must be missing on all.
        group: of the ranks that share the units; all of them if None.
    """

    def __init__(self, *, fills: bool, group: Any = None) -> None:
        super().__init__(None if group is None else dist.get_process_group_ranks(group))
        self._group = group
        self._fills = fills
        self._units: list[_Unit] = []
        self._reduced: dict[
            Any, _ReducedGradients
        ] = {}  # by group, since zeros were last taken back

    def watch(self, model: torch.nn.Module) -> None:
        """Compare the units of a sharded model from now on."""
        modules = {module: name for name, module in model.named_modules()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in parameter_groups(model):
            unit = " and ".join(filter(None, (modules[module] for module in group.modules)))
            parameters = [names[id(parameter.sharded_param)] for parameter in group.fsdp_params]
            self._watch(group, len(self._units), is_root=model in group.modules)
            self._units.append(_Unit(unit or class_of(model).__name__, parameters))

    def _watch(self, group: Any, unit: int, is_root: bool) -> None:
        # Attributes of the group, because hooks of modules would be compiled with these.
        before_forward, before_backward = group.pre_forward, group.pre_backward
        reduce = group.post_backward

        def pre_forward(*args: Any) -> Any:
            # Blocks that backward computes again follow from those that forward has computed.
            if torch._C._current_graph_task_id() == -1:
                # Odd with gradients, and 2 more for each call of a unit in a row.
                again = self._last[:2] == ("forward", unit)
                count = self._last[2] + 2 if again else int(torch.is_grad_enabled())
                self.follow(("forward", unit, count))
            return before_forward(*args)

        def pre_backward(*args: Any) -> None:
            self.follow(("backward", unit, 0))
            before_backward(*args)

        def post_backward(*args: Any) -> None:
            if group.reduce_grads:
                self._compare_gradients(group, unit, is_root)
            reduce(*args)

        group.pre_forward, group.pre_backward = pre_forward, pre_backward
        group.post_backward = post_backward

    def _compare_gradients(self, group: Any, unit: int, is_root: bool) -> None:
        present = list(map(has_whole_gradient, group.fsdp_params))
        if not self._fills:
            if True in present:
                mask = sum(1 << place for place, has_one in enumerate(present) if has_one)
                self.follow(("gradients", unit, mask))
        elif True in present or is_root:  # which comes last on all ranks, whatever they have used
            self.follow(("gradients", unit, 0))
            reduced = self._reduced.setdefault(group, _ReducedGradients(group))
            reduced.note(present)
            _fill(group, present)

    def finish_backward(self) -> None:
        """Collective: take back the zeros of parameters that no rank has used in a backward."""
        kind = self._last[0]
        if kind in ("backward", "gradients") or (kind == "forward" and self._last[2] % 2):
            self.follow(END)
        if not self._reduced or not all(group.all_reduce_grads for group in self._reduced):
            return
        reduced = list(self._reduced.values())
        self._reduced.clear()
        # One message for all units, at the end of a window: a parameter that any rank has used
        # keeps its gradient on all of them.
        device = reduced[0].group.device
        local_flags = [flag for reduction in reduced for flag in reduction.used]
        used = torch.tensor(local_flags, dtype=torch.int32, device="cpu")
        absent = not used.all()
        used = used.to(device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group or collectives.group_for(used))
        if absent:  # others need not wait for what they know
            flags = iter(used.tolist())
            for reduction in reduced:
                reduction.take_back([next(flags) for _ in reduction.used])

    def _timeout_error(self, event: Event) -> RuntimeError:
        rank, known = collectives.rank(), self._next.get((self._phase, self._last))
        if known is None:
            context = ", and not all ranks did"
        elif event[0] == "gradients" and known[:2] == event[:2]:
            name, has_one = self._difference(event, known)
            now, before = ("a gradient", "none") if has_one else ("no gradient", "one")
            return RuntimeError(
                f"{name!r} has {now} on rank {rank}, where it had {before} before, and it is not "
                f"so on all ranks{_SAME_PARAMETERS}"
            )
        else:
            context = f", where {self._describe(known)} came before, and not all ranks did"
        return RuntimeError(f"rank {rank} came to {self._describe(event)}{context}{_SAME_UNITS}")

    def _conflict_error(self, sides: Sequence[tuple[int, Event]]) -> RuntimeError:
        (rank, event), (other, other_event) = sides
        if event[0] == "gradients" and other_event[:2] == event[:2]:
            name, has_one = self._difference(event, other_event)
            has, lacks = (rank, other) if has_one else (other, rank)
            return RuntimeError(
                f"{name!r} has a gradient on rank {has} and none on rank {lacks}{_SAME_PARAMETERS}"
            )
        return RuntimeError(
            f"rank {rank} came to {self._describe(event)}, and rank {other} to "
            f"{self._describe(other_event)}{_SAME_UNITS}"
        )

    def _difference(self, event: Event, other: Event) -> tuple[str, bool]:
        """Return the first parameter that differs in the gradients of a unit, and if it has one."""
        _, unit, mask = event
        for place, name in enumerate(self._units[unit].parameters):
            if (mask ^ other[2]) >> place & 1:
                return name, bool(mask >> place & 1)
        raise AssertionError("equal gradients")

    def _describe(self, event: Event) -> str:
        if event == END:
            return "the end of backward"
        kind, unit, count = event
        without = " without gradients" if kind == "forward" and count % 2 == 0 else ""
        return f"the {kind} of {self._units[unit].name!r}{without}"


class _ReducedGradients:
    """The parameters of a group that had gradients, and those that had none before."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.used = [False] * len(group.fsdp_params)
        self._fresh = [parameter.sharded_param.grad is None for parameter in group.fsdp_params]

    def note(self, present: Sequence[bool]) -> None:
        self.used = [before or now for before, now in zip(self.used, present, strict=True)]

    def take_back(self, used: Sequence[int]) -> None:
        parameters = self.group.fsdp_params
        for parameter, was_used, fresh in zip(parameters, used, self._fresh, strict=True):
            if fresh and not was_used:
                parameter.sharded_param.grad = None


def _fill(group: Any, present: Sequence[bool]) -> None:
    """Add zeros for missing gradients, in the attribute that holds those of the others."""
    parameters = group.fsdp_params
    # Of earlier backward passes of a window that were not reduced, where FSDP reduces in another
    # type than it computes in.
    accumulates = any(parameter.unsharded_accumulated_grad is not None for parameter in parameters)
    for parameter, is_present in zip(parameters, present, strict=True):
        if is_present or not parameter.sharded_param.requires_grad:
            continue
        if not hasattr(parameter, "_unsharded_param"):
            continue
        whole = parameter._unsharded_param
        if accumulates:
            parameter.unsharded_accumulated_grad = torch.zeros_like(
                whole, dtype=parameter.reduce_dtype or whole.dtype
            )
        else:
            whole.grad = torch.zeros_like(whole)
