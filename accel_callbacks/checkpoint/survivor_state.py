"""SurvivorState: the state of the newest boundary, from a rank that outlives the loss of others.

After the loss of a rank, the weights of a whole replica are still in the memory of the others. They
are those of the last boundary until the next optimizer step, and become a snapshot for the restart.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.boundary_records import BoundaryRecords, RecordTooLargeError
from accel_callbacks.checkpoint.kept_tensors import KeptTensors, own_weights
from accel_callbacks.errors import RemoteError
from accel_callbacks.logging import notice
from accel_callbacks.terminal_text import size_of

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.training_state import TrainingState
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["SurvivorState"]

_LARGEST = 4 << 20  # bytes beside the weights that are written after each step
_PATIENCE = 10.0  # seconds for the rows of trackers
_RANKS_WAIT = 60.0  # seconds that the threads of a save wait for each other


class SurvivorState:
    """Keeps the state of each boundary, and writes it as a snapshot once another rank is lost.

    The parameters and the states of their optimizers, which all ranks have alike under DDP, are
    kept by reference. What belongs to one rank, such as its random generators, and what a forward
    writes to, such as the statistics of batch norm, is written to the memory of the launch at each
    boundary, as the rank may be the one that is lost.

    The state is refused where it is not certain to be that of a boundary of all ranks; the
    restart then resumes from an older one.

    Args:
        place: returns the path of the snapshot of a step.
        records: the folder for what each rank writes.
        attempt: a name that the ranks of this attempt have agreed on.
    """

    def __init__(self, place: Callable[[int], str], records: str, attempt: str) -> None:
        self._place = place
        self._records = BoundaryRecords(records, attempt, _LARGEST)
        self._tensors = KeptTensors()
        self._step: int | None = None  # of the boundary that is kept
        self._refusal: str | None = None  # why none is kept in this run
        self._replicated: dict[str, set[str]] = {}  # names of parameters, by model

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
        if self._step is None and self._refusal is None:
            self._refusal = _refusal(training, trainable_only=trainable_only)
            replicated = training.strategy.replicated_parameters
            self._replicated = _numbered(map(replicated, training.models))
        self._step = None
        if self._refusal:
            return
        try:
            self._write_record(training, run.global_step)
        except RecordTooLargeError as error:
            nbytes = error.args[0]
            self._refuse(f"{size_of(nbytes)} beside the weights would be copied after each step")
        except OSError as error:
            self._refuse(f"{error.strerror or error}")
        except Exception as error:  # a state that cannot be captured fails its save, and not here
            self._refuse(f"{type(error).__name__}: {error}")
        else:
            parameters = [p for model in training.bare_models for p in model.parameters()]
            self._tensors.keep([*parameters, *_states(training)], parameters)
            self._step = run.global_step

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        notice(f"a loss takes the state of the last snapshot, and not of a living rank: {reason}")

    def _write_record(self, training: TrainingState, step: int) -> None:
        """Write what the other ranks do not have."""
        hub, rank = training.tracking.hub, training.strategy.topology.rank
        content: dict[str, Any] = {"rows": bool(hub and hub.trackers)}
        if rank:
            content["local"] = training.capture_random()
        else:
            content["shared"], content["local"] = training.capture_position()
            content["buffers"] = _numbered(map(_buffers, training.bare_models))
            content["groups"] = _numbered(
                [_without(group, "params") for group in prepared.param_groups]
                for prepared in training.optimizers
            )
        if "streams" in content["local"]:
            raise ValueError("only the rank that reads a stream knows its place in it")
        self._records.write(rank, step, content)

    # --- after a loss -------------------------------------------------------------------------

    def leave(self, run: TrainingRun, error: BaseException) -> None:
        """Write the boundary that is kept, if its state is whole and another rank has failed.

        Args:
            run: the run, which has ended.
            error: that has ended it.
        """
        step, self._step = self._step, None
        if step is None or not isinstance(error, RemoteError):
            return
        try:
            with own_weights(run.callbacks):
                problem = self._write(run.accelerator.training_state, step)
        except Exception as failure:  # the restart takes an older state
            problem = f"{type(failure).__name__}: {failure}"
        if problem:
            notice(f"the state of this process is not kept for the restart: {problem}")

    def _write(self, training: TrainingState, step: int) -> str:
        """Write the boundary of a step; return why it is not written, empty if it is."""
        if not self._tensors.unchanged() or training.loop.borrowed or training.loop.half_loaded:
            return f"the weights are no longer those of step {step}"
        topology = training.strategy.topology
        records = [self._records.read(rank, step) for rank in range(topology.world_size)]
        if None in records:
            return f"rank {records.index(None)} was lost before the end of step {step}"
        logging = [rank for rank, record in enumerate(records) if record["rows"]]
        if logging == [0] and topology.rank:
            return ""  # rank 0 has rows of trackers in its memory: only its state is complete
        hub = training.tracking.hub
        if logging not in ([], [0]) or (logging and not (hub and hub.flush(_PATIENCE))):
            return "rows of trackers would be lost"
        state = self._assembled(training, records[0])
        path = self._place(step)
        try:
            os.makedirs(path, mode=0o700)
        except FileExistsError:  # another rank writes it
            return ""
        try:
            free, needed = _free(path), sum(t.nbytes for t in collectives.tensors_in(state))
            if free < needed:
                raise OSError(f"it needs {size_of(needed)}, and {size_of(free)} are free")
            _save_for_all(path, step, state, [record["local"] for record in records])
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return ""

    def _assembled(self, training: TrainingState, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that all ranks share, with the tensors of this one.

        Raises:
            ValueError: it has a tensor of which another rank may have another value.
        """
        sections = training.capture_tensors()
        for number, weights in sections["models"].items():
            buffers = record["buffers"][number]
            if unknown := weights.keys() - buffers.keys() - self._replicated[number]:
                raise ValueError(f"{sorted(unknown)[0]} may differ between ranks")
            sections["models"][number] = {
                name: buffers.get(name, weights[name]) for name in weights
            }
        names = {f"{i}.{name}" for i, model in self._replicated.items() for name in model}
        for number, optimizer in sections["optimizers"].items():
            if unknown := optimizer["state"].keys() - names:
                raise ValueError(f"the optimizer's {sorted(unknown)[0]} may differ between ranks")
            pairs = zip(optimizer["param_groups"], record["groups"][number], strict=True)
            groups = [{"params": now["params"], **then} for now, then in pairs]
            sections["optimizers"][number] = {**optimizer, "param_groups": groups}
        return {**sections, **record["shared"]}


def _refusal(training: TrainingState, *, trainable_only: bool) -> str | None:
    """Return why a state can never be kept in this run; None if it can."""
    strategy, dispatch = training.strategy, training.loop.dispatch
    if strategy.topology.device.type != "cpu":
        # Steps that are queued behind a failed collective are still taken, with wrong gradients.
        return "a device is ahead of what the host knows"
    if training.loop.rounds is not None:
        return "replicas heal each other"
    if trainable_only or training.pre_hooks.save_some or dispatch.saves_differ_between_ranks:
        return "hooks or options change what is saved"
    for model, bare in zip(training.models, training.bare_models, strict=True):
        names = {name for name, _ in bare.named_parameters(remove_duplicate=False)}
        if names != strategy.replicated_parameters(model) or not strategy.loads_in_place(model):
            return "a rank has a part of the weights only"
    return None if training.models else "there is no model"


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


def _numbered(items: Iterable[Any]) -> dict[str, Any]:
    return {str(index): item for index, item in enumerate(items)}


def _without(group: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != key}


def _free(path: str) -> int:
    """Return the bytes that are free in host memory."""
    from checkpoint_io.memory import free_memory

    free = shutil.disk_usage(path).free
    return min(free, free_memory() or free)


# --- one process saves for all ranks ------------------------------------------------------------


class _Seats:
    """What the threads that stand for the ranks of a save exchange."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.objects: list[Any] = [None] * count


class _Seat:
    """The group of a save, as one of the threads sees it."""

    def __init__(self, seats: _Seats, rank: int) -> None:
        self._seats = seats
        self.rank, self.world_size = rank, len(seats.objects)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all threads, in rank order."""
        self._seats.objects[self.rank] = obj
        self._seats.barrier.wait(_RANKS_WAIT)
        gathered = list(self._seats.objects)
        self._seats.barrier.wait(_RANKS_WAIT)
        return gathered

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one of them."""
        return self.all_gather_object(obj)[src]


def _save_for_all(
    path: str, step: int, state: Mapping[str, Any], own_states: Sequence[Mapping[str, Any]]
) -> None:
    """Save as all ranks would together; the rank of each own state is its index."""
    from checkpoint_io import save

    position = state["run"]
    labels = {
        "run_id": position["run_id"],
        "run_name": position["name"],
        "step": step,
        "epoch": position["current_epoch"],
        "epochs_done": position["epochs_done"],
    }
    seats, problems = _Seats(len(own_states)), list[BaseException]()

    def take_part(rank: int) -> None:
        try:
            save(
                path,
                {} if rank else state,
                local_state=own_states[rank],
                metadata=labels,
                group=_Seat(seats, rank),
                generation=step,
                replicated=False,
                progress=False,
            )
        except BaseException as problem:
            problems.append(problem)
            seats.barrier.abort()

    threads = [
        threading.Thread(target=take_part, args=(rank,), name=f"accel-save-{rank}")
        for rank in range(1, len(own_states))
    ]
    for thread in threads:
        thread.start()
    take_part(0)
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
