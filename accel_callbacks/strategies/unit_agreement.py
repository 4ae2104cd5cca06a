"""The units of sharded models that ranks gather and reduce: the same ones, with the same gradients.

FSDP pairs the collectives of ranks by their order. A rank that calls another unit than the others,
or has gradients of other parameters in one, would add up tensors that have nothing in common.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import abort_run
from accel_callbacks.distributed.remote_failure import remote_failure
from accel_callbacks.modeling.original_class import class_of
from accel_callbacks.strategies.fsdp_groups import has_whole_gradient, parameter_groups

__all__ = ["UnitAgreement"]

_POLLING = 0.001, 0.05  # seconds between two looks at the store: at first, and at most
_count = itertools.count()
_Event = tuple[str, int, int]  # what happens, to which unit, and how
_END: _Event = ("end", 0, 0)
_SAME_PARAMETERS = (
    ": FSDP would add up gradients of different parameters. If ranks use different ones, pass "
    "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)], with which a "
    "missing gradient counts as zero; else let the loss of each rank depend on the same ones."
)
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


class UnitAgreement:
    """Compares what ranks gather and reduce, wherever it is not what followed the last time.

    Each rank compares what it is about to do with what all did last time at this place, and goes on
    if it is the same. Else it tells the others, and waits until they tell the same. So the first
    step costs some messages in the store, and a loop that repeats itself none afterwards.

    Args:
        fills: a gradient that is missing in a unit counts as zero; else it must be missing on all.

    Example:
        >>> from accel_callbacks.strategies.unit_agreement import UnitAgreement
        >>> agreement = UnitAgreement(fills=False)
        >>> agreement.follow(("forward", 0, 0))  # on one rank
        >>> agreement.finish_backward()
    """

    def __init__(self, *, fills: bool) -> None:
        self._fills = fills
        self._units: list[_Unit] = []
        self._keys = f"units{next(_count)}"
        self._rounds = 0
        self._last = self._phase = _END
        # What followed on each event when the ranks last compared; the same on all of them. By what
        # the backward before it ended with too, as losses may take turns.
        self._next: dict[tuple[_Event, _Event], _Event] = {}
        self._reduced: dict[Any, _Reduced] = {}  # by group, since zeros were last taken back

    def watch(self, model: torch.nn.Module) -> None:
        """Compare the units of a sharded model from now on."""
        modules = {module: name for name, module in model.named_modules()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in parameter_groups(model):
            unit = " and ".join(filter(None, (modules[module] for module in group.modules)))
            parameters = [names[id(one.sharded_param)] for one in group.fsdp_params]
            self._watch(group, len(self._units), is_root=model in group.modules)
            self._units.append(_Unit(unit or class_of(model).__name__, parameters))

    def _watch(self, group: Any, unit: int, is_root: bool) -> None:
        # Attributes of the group, because hooks of modules would be compiled with these.
        before_forward, before_backward = group.pre_forward, group.pre_backward
        reduce = group.post_backward

        def pre_forward(*args: Any) -> Any:
            # Blocks that backward computes again follow from those that forward has computed.
            if torch._C._current_graph_task_id() == -1:
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

    def follow(self, event: _Event) -> None:
        """Come to an event, and wait for the other ranks if another one followed the last time."""
        place = self._phase, self._last
        if self._next.get(place) != event:
            if collectives.has_peers():
                self._agree(event)
            self._next[place] = event
        if event == _END:
            self._phase = self._last
        self._last = event

    def _compare_gradients(self, group: Any, unit: int, is_root: bool) -> None:
        present = list(map(has_whole_gradient, group.fsdp_params))
        if not self._fills:
            if True in present:
                mask = sum(1 << place for place, has_one in enumerate(present) if has_one)
                self.follow(("gradients", unit, mask))
        elif True in present or is_root:  # which comes last on all ranks, whatever they have used
            self.follow(("gradients", unit, 0))
            reduced = self._reduced.setdefault(group, _Reduced(group))
            reduced.note(present)
            _fill(group, present)

    def finish_backward(self) -> None:
        """Collective: take back the zeros of parameters that no rank has used in a backward."""
        kind, _, count = self._last
        if kind in ("backward", "gradients") or (kind == "forward" and count % 2):
            self.follow(_END)
        if not self._reduced or not all(group.all_reduce_grads for group in self._reduced):
            return
        reduced = list(self._reduced.values())
        self._reduced.clear()
        device = reduced[0].group.device
        own = [flag for one in reduced for flag in one.used]
        used = torch.tensor(own, dtype=torch.int32, device="cpu")
        absent = not used.all()
        used = used.to(device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=collectives.group_for(used))
        if absent:  # others need not wait for what they know
            flags = iter(used.tolist())
            for one in reduced:
                one.take_back([next(flags) for _ in one.used])

    def _agree(self, event: _Event) -> None:
        """Collective: wait until all ranks come to an event.

        Raises:
            RuntimeError: a rank comes to another event, or to none within the timeout.
        """
        keys = f"{self._keys}/{self._rounds}"
        self._rounds += 1
        rank, world = collectives.rank(), collectives.world_size()
        mine = json.dumps([rank, event, [self._phase, self._last]])

        def arrive(store: Any) -> Any:
            if store.add(f"{keys}/came", 1) == 1:  # a file has no compare_set
                store.set(f"{keys}/first", mine)
            first = json.loads(store.get(f"{keys}/first"))
            if tuple(first[1]) != event:
                store.set(f"{keys}/go", json.dumps([rank, event]))
                return first[0], tuple(first[1])
            if first[2] != json.loads(mine)[2]:
                store.add(f"{keys}/apart", 1)
            if store.add(f"{keys}/count", 1) == world:
                store.set(f"{keys}/go", json.dumps(store.add(f"{keys}/apart", 0)))
                if self._rounds > 1:  # which all ranks have left
                    for name in ("came", "first", "apart", "count", "go"):
                        store.delete_key(f"{self._keys}/{self._rounds - 2}/{name}")
            return None

        other = collectives.store().call(arrive)
        if other is not None:
            raise self._conflict([(rank, event), other])
        outcome = self._wait(f"{keys}/go", event)
        if isinstance(outcome, list):
            raise self._conflict([(rank, event), (outcome[0], tuple(outcome[1]))])
        if outcome:  # ranks came from different events, as after an error, and know different ones
            self._next.clear()

    def _wait(self, key: str, event: _Event) -> Any:
        """Return the value of a key that another rank sets."""
        # One rank alone in a forward fails as in the gather that would follow. In backward it knows
        # more than the others, whose collectives must not time out first.
        in_forward = event[0] == "forward"
        timeout = collectives.group_timeout().total_seconds()
        deadline = time.monotonic() + (1.0 if in_forward else 0.9) * timeout
        pause, longest = _POLLING
        where = self._describe(event)
        while True:
            value = collectives.store().read([key])[0]
            if value is not None:
                return json.loads(value)
            remote_failure.raise_in(where)
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        problem = self._left_alone(event)
        if in_forward:
            raise RuntimeError(f"Timed out in the process group: {problem}")
        cause = abort_run(problem, where)
        raise cause from (None if cause is problem else problem)

    def _left_alone(self, event: _Event) -> RuntimeError:
        rank, known = collectives.rank(), self._next.get((self._phase, self._last))
        if known is None:
            what = ", and not all ranks did"
        elif event[0] == "gradients" and known[:2] == event[:2]:
            name, has_one = self._difference(event, known)
            now, before = ("a gradient", "none") if has_one else ("no gradient", "one")
            return RuntimeError(
                f"{name!r} has {now} on rank {rank}, where it had {before} before, and it is not "
                f"so on all ranks{_SAME_PARAMETERS}"
            )
        else:
            what = f", where {self._describe(known)} came before, and not all ranks did"
        return RuntimeError(f"rank {rank} came to {self._describe(event)}{what}{_SAME_UNITS}")

    def _conflict(self, sides: list[tuple[int, _Event]]) -> RuntimeError:
        (rank, event), (other, other_event) = sorted(sides)
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

    def _difference(self, event: _Event, other: _Event) -> tuple[str, bool]:
        """Return the first parameter that differs in the gradients of a unit, and if it has one."""
        _, unit, mask = event
        for place, name in enumerate(self._units[unit].parameters):
            if (mask ^ other[2]) >> place & 1:
                return name, bool(mask >> place & 1)
        raise AssertionError("equal gradients")

    def _describe(self, event: _Event) -> str:
        kind, unit, count = event
        if kind == "end":
            return "the end of backward"
        without = " without gradients" if kind == "forward" and count % 2 == 0 else ""
        return f"the {kind} of {self._units[unit].name!r}{without}"


class _Reduced:
    """The parameters of a group that had gradients, and those that had none before."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.used = [False] * len(group.fsdp_params)
        self._fresh = [one.sharded_param.grad is None for one in group.fsdp_params]

    def note(self, present: Sequence[bool]) -> None:
        self.used = [before or now for before, now in zip(self.used, present, strict=True)]

    def take_back(self, used: Sequence[int]) -> None:
        for one, was_used, fresh in zip(self.group.fsdp_params, used, self._fresh, strict=True):
            if fresh and not was_used:
                one.sharded_param.grad = None


def _fill(group: Any, present: Sequence[bool]) -> None:
    """Add zeros for missing gradients, where the gradients are that are there."""
    held = any(one.unsharded_accumulated_grad is not None for one in group.fsdp_params)
    for one, has_one in zip(group.fsdp_params, present, strict=True):
        if has_one or not one.sharded_param.requires_grad or not hasattr(one, "_unsharded_param"):
            continue
        whole = one._unsharded_param
        if held:
            one.unsharded_accumulated_grad = torch.zeros_like(
                whole, dtype=one.reduce_dtype or whole.dtype
            )
        else:
            whole.grad = torch.zeros_like(whole)
