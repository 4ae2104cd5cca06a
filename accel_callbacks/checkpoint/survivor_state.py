"""SurvivorState: the state of the newest boundary, from a rank that outlives the loss of others.

After the loss of a rank, the weights of a whole replica are still in the memory of the others: of
each under DDP, of several together where shards have replicas (HSDP). They are those of the last
boundary until the next optimizer step, and become a snapshot for the restart.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.boundary_parts import LOST_ROWS, PART, ROWS, name_of
from accel_callbacks.checkpoint.boundary_records import BoundaryRecords, RecordTooLargeError
from accel_callbacks.checkpoint.boundary_shards import BoundaryShards
from accel_callbacks.checkpoint.boundary_snapshot import merge, save_for_all
from accel_callbacks.checkpoint.kept_tensors import KeptTensors, local_tensor, own_weights
from accel_callbacks.checkpoint.training_state import labels_of, numbered
from accel_callbacks.errors import RemoteError
from accel_callbacks.logging import notice
from accel_callbacks.terminal_text import size_of

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.training_state import TrainingState
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["SurvivorState"]

_LARGEST = 4 << 20  # bytes beside the weights that are written after each step
_ROOM = 4  # of the free memory, copies take the part at most
_PATIENCE = 10.0  # seconds for the rows of trackers
_INCOMPLETE = "other ranks have the rest"


class SurvivorState:
    """Keeps the state of each boundary, and writes it as a snapshot once another rank is lost.

    The parameters and the states of their optimizers, which other ranks have alike, are kept by
    reference, and copied before an optimizer writes to them: a rank may be lost at the end of a
    step that the others have done, who have to go back then. What belongs to one rank, such as its
    random generators, and what a forward writes to, such as the statistics of batch norm, is
    written to the memory of the launch at each boundary, as that rank may be the one that is lost.

    After a loss each rank leaves its shards, if there are any, and the first to see all that is
    needed saves for all of them.

    The state is refused where it is not certain to be that of a boundary of all ranks; the
    restart then resumes from an older one.

    Of several machines, none has all that is needed: each leaves the part that its ranks have, from
    which the restart makes the snapshot.

    Args:
        place: returns the path of the snapshot of a step.
        records: the folder for what each rank of this machine writes.
        attempt: a name that the ranks of this attempt have agreed on.
        ranks: of this machine.
    """

    def __init__(
        self, place: Callable[[int], str], records: str, attempt: str, ranks: Sequence[int]
    ) -> None:
        self._place, self._ranks = place, ranks
        self._folder, self._attempt = Path(records), attempt
        self._records = BoundaryRecords(records, attempt, _LARGEST)
        self._tensors = KeptTensors()
        self._kept: list[torch.Tensor] = []
        self._count = 0  # of boundaries, on all ranks alike: steps may come again
        self._boundary: int | None = None  # the number of the one that is kept
        self._refusal: str | None = None  # why none is kept in this run
        self._replicated: dict[str, set[str]] = {}  # names of parameters, by model
        self._copies = _Copies()
        self._step_hooks: list[Any] = []

    # --- at a boundary ------------------------------------------------------------------------

    def keep(self, run: TrainingRun, *, trainable_only: bool) -> None:
        """Keep the state of this boundary, in place of the one before.

        Args:
            run: the run.
            trainable_only: its snapshots leave frozen parameters out.
        """
        training: TrainingState = run.accelerator.training_state
        if training.loop.in_window:
            return  # the last one stands: a window writes to no weight
        first, self._count, self._boundary = not self._count, self._count + 1, None
        if self._refusal:
            return
        try:
            for model in training.models:  # a forward without a backward leaves whole weights
                training.strategy.free_gathered(model)
            if first:
                self._begin(training, trainable_only=trainable_only)
            if not self._refusal:
                self._write_record(training)
                parameters = _all_parameters(training)
                self._kept = [*parameters, *_states(training)]
                self._tensors.keep(self._kept, parameters)
                self._boundary = self._count
        except RecordTooLargeError as error:
            nbytes = error.args[0]
            self._refuse(f"{size_of(nbytes)} beside the weights would be copied after each step")
        except OSError as error:
            self._refuse(f"{error.strerror or error}")
        except Exception as error:  # a state that cannot be captured fails its save, and not here
            self._refuse(f"{type(error).__name__}: {error}")

    def _begin(self, training: TrainingState, *, trainable_only: bool) -> None:
        """Decide what is kept in this run."""
        # Not by those that left them, as others may still read.
        if training.strategy.topology.rank == self._ranks[0]:
            for folder in self._folder.glob(name_of("*", "*")):
                shutil.rmtree(folder, ignore_errors=True)
        self._refusal = _refusal(training, trainable_only=trainable_only)
        if self._refusal:
            return
        self._replicated = numbered(
            _replicated(training, model, bare)
            for model, bare in zip(training.models, training.bare_models, strict=True)
        )
        if _has_room_for_copies(training, len(self._ranks)):
            for prepared in training.optimizers:
                handle = prepared.optimizer.register_step_pre_hook(self._copy_before_step)
                self._step_hooks.append(handle)

    def _copy_before_step(self, *_: Any) -> None:
        """Copy the tensors of the boundary before the first optimizer step after it."""
        number = self._boundary
        try:
            if number not in (None, self._copies.boundary) and self._tensors.unchanged():
                self._copies.take(number, self._kept)
        except Exception as error:  # such as no memory, which must not fail the step
            self._refuse(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Let go of the optimizers, at the end of the run."""
        for handle in self._step_hooks:
            handle.remove()
        self._step_hooks, self._boundary, self._kept = [], None, []
        self._copies = _Copies()

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        notice(f"a loss takes the state of the last snapshot, and not of a living rank: {reason}")

    def _write_record(self, training: TrainingState) -> None:
        """Write what the other ranks do not have."""
        hub, rank = training.tracking.hub, training.strategy.topology.rank
        content: dict[str, Any] = {"rows": bool(hub and hub.trackers)}
        if rank:
            content["local"] = training.capture_random()
        else:
            content["shared"], content["local"] = training.capture_position()
            content["world_size"] = training.strategy.topology.world_size
            content["buffers"] = numbered(map(_buffers, training.bare_models))
            content["groups"] = numbered(
                [_without(group, "params") for group in prepared.param_groups]
                for prepared in training.optimizers
            )
        if "streams" in content["local"]:
            raise ValueError("only the rank that reads a stream knows its place in it")
        self._records.write(rank, self._count, content)

    # --- after a loss -------------------------------------------------------------------------

    def leave(self, run: TrainingRun, error: BaseException) -> None:
        """Write the boundary that is kept, if its state is whole and another rank has failed.

        Args:
            run: the run, which has ended.
            error: that has ended it.
        """
        if self._refusal or not isinstance(error, RemoteError):
            return
        training: TrainingState = run.accelerator.training_state
        problem = ""
        try:
            with own_weights(run.callbacks):
                for boundary, copies in self._boundaries(training):
                    problem = self._write(training, boundary, copies)
                    # Other machines may not have come as far.
                    if not problem and self._holds_all(training):
                        break
        except Exception as failure:  # the restart takes an older state
            problem = f"{type(failure).__name__}: {failure}"
        if problem and problem != _INCOMPLETE:
            notice(f"the state of this process is not kept for the restart: {problem}")

    def _boundaries(self, training: TrainingState) -> Iterator[tuple[int, _Copies | None]]:
        """Yield the boundaries of which this rank has the weights, with copies if it needs them."""
        loop = training.loop
        whole = self._tensors.unchanged() and not (loop.borrowed or loop.half_loaded)
        if self._boundary is not None and whole:
            yield self._boundary, None
        if self._copies.boundary is not None:
            yield self._copies.boundary, self._copies

    def _holds_all(self, training: TrainingState) -> bool:
        """Return whether all ranks are of this machine."""
        return len(self._ranks) == training.strategy.topology.world_size

    def _write(self, training: TrainingState, boundary: int, copies: _Copies | None) -> str:
        """Write a boundary; return why it is not written, empty if it is.

        Args:
            training: the state, of which the tensors are taken.
            boundary: its number.
            copies: of the tensors, in place of those that have been written to since.
        """
        rank = training.strategy.topology.rank
        records = {peer: self._records.read(peer, boundary) for peer in self._ranks}
        for peer, record in records.items():
            if record is None:
                return f"rank {peer} was lost before the end of the step"
        folder = self._folder / name_of(self._attempt, boundary)
        holds_all = self._holds_all(training)
        if holds_all:
            path = self._place(records[0]["shared"]["run"]["global_step"])
        else:
            path = str(folder / PART)
        if os.path.exists(path):
            return ""
        sections = self._sections(training, copies)
        if holds_all:
            labels = labels_of(records[0]["shared"]["run"])
            own_states = [records[peer]["local"] for peer in self._ranks]
            state = merge(sections, self._replicated, records[0])
        else:
            labels, own_states = {}, [{}]
            replicated = {number: sorted(names) for number, names in self._replicated.items()}
            state = {"sections": sections, "replicated": replicated}
        sharded = list(filter(collectives.is_sharded, collectives.tensors_in(state)))
        shards, rows = BoundaryShards(folder, sharded), folder / ROWS
        if sharded:
            shards.leave()
        # Rank 0 has rows of trackers in its memory, and says when they are written.
        logging = [peer for peer, record in records.items() if record["rows"]]
        if logging and not rank:
            hub = training.tracking.hub
            if not (hub and hub.flush(_PATIENCE)):
                return LOST_ROWS
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            rows.touch()
        if logging not in ([], [0]):
            return LOST_ROWS
        if (logging and not rows.exists()) or not shards.are_complete():
            return _INCOMPLETE

        def whole_state() -> dict[str, Any]:
            tensors = iter(shards.whole())
            return collectives.map_leaves(
                state, lambda _: next(tensors), collectives.is_sharded, by_key=True
            )

        nbytes = sum(tensor.nbytes for tensor in [*collectives.tensors_in(state), *sharded])
        return save_for_all(path, nbytes, whole_state, own_states, labels)

    def _sections(self, training: TrainingState, copies: _Copies | None) -> dict[str, Any]:
        """Return the models and optimizers of this rank, with copies in place of their tensors."""
        sections = training.capture_tensors()
        if copies is not None:
            for number, optimizer in sections["optimizers"].items():
                sections["optimizers"][number] = copies.in_place_of(optimizer)
            for number, weights in sections["models"].items():
                own = {n: w for n, w in weights.items() if n in self._replicated[number]}
                sections["models"][number] = {**weights, **copies.in_place_of(own)}
        return sections


def _refusal(training: TrainingState, *, trainable_only: bool) -> str | None:
    """Return why a state can never be kept in this run; None if it can."""
    strategy, dispatch = training.strategy, training.loop.dispatch
    if strategy.topology.device.type != "cpu":
        # Steps that are queued behind a failed collective are still taken, with wrong gradients.
        return "a device is ahead of what the host knows"
    if trainable_only or training.pre_hooks.save_some or dispatch.saves_differ_between_ranks:
        return "hooks or options change what is saved"
    for model, bare in zip(training.models, training.bare_models, strict=True):
        names = {name for name, _ in bare.named_parameters(remove_duplicate=False)}
        if names != _replicated(training, model, bare) or not strategy.loads_in_place(model):
            return "a rank has a part of the weights that no other one has"
    return None if training.models else "there is no model"


def _replicated(training: TrainingState, model: torch.nn.Module, bare: torch.nn.Module) -> set[str]:
    """Return the names of parameters of which another rank holds what this one does."""
    named = bare.named_parameters(remove_duplicate=False)
    sharded = {name for name, parameter in named if _has_replica(parameter)}
    return sharded | training.strategy.replicated_parameters(model)


def _has_replica(parameter: Any) -> bool:
    """Return whether another rank holds the same shard."""
    return collectives.is_sharded(parameter) and any(
        placement.is_replicate() and size > 1
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )


def _all_parameters(training: TrainingState) -> list[torch.nn.Parameter]:
    return [parameter for model in training.bare_models for parameter in model.parameters()]


class _Copies:
    """Copies of the tensors of a boundary.

    Attributes:
        boundary: the number of that, None before the first.
    """

    def __init__(self) -> None:
        self.boundary: int | None = None
        self._tensors: list[torch.Tensor] = []
        self._places: list[tuple[Any, ...]] = []

    @torch.no_grad()
    def take(self, boundary: int | None, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of a boundary, or their shards, over those of the one before."""
        self.boundary = None
        local = list(map(local_tensor, tensors))
        places = list(map(_place_of, local))
        if places != self._places:
            self._places, self._tensors = places, [tensor.clone() for tensor in local]
        else:
            torch._foreach_copy_(self._tensors, local)
        self.boundary = boundary

    @torch.no_grad()
    def in_place_of(self, tree: Mapping[str, Any]) -> Any:
        """Return a tree with the copies in place of its tensors.

        Raises:
            ValueError: one was not copied.
        """
        by_place = dict(zip(self._places, self._tensors, strict=True))

        def copy_of(tensor: Any) -> Any:
            place = _place_of(local_tensor(tensor))
            if place not in by_place:
                raise ValueError("the step has made or moved a tensor")
            if not collectives.is_sharded(tensor):
                return by_place[place]
            return type(tensor).from_local(
                by_place[place],
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )

        return collectives.map_leaves(tree, copy_of, torch.is_tensor)


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where a tensor is in memory, which it shares with what a state dict has of it."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _has_room_for_copies(training: TrainingState, ranks: int) -> bool:
    """Return whether all ranks of a machine can hold a copy, and it is all that a step changes."""
    from checkpoint_io.memory import free_memory

    for prepared in training.optimizers:
        for state in prepared.optimizer.state.values():
            if not all(value is None or torch.is_tensor(value) for value in state.values()):
                return False  # a number of its own, such as of steps
    tensors = [*_all_parameters(training), *_states(training)]
    nbytes = sum(local_tensor(tensor).nbytes for tensor in tensors)
    return (free_memory() or 0) > _ROOM * nbytes * ranks


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are saved: a forward may write to them, on each rank its own."""
    buffers = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{key}" if prefix else key] = buffer
    return buffers


def _states(training: TrainingState) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimizers' states."""
    for prepared in training.optimizers:
        for state in prepared.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _without(group: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != key}
