"""The recorder of a run's journal: notes a row for each optimizer step, and marks between them."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from accel_callbacks import collectives
from accel_callbacks.addons.journal.format import ROUTINE, SKIPPED
from accel_callbacks.callbacks.observer import Observer
from accel_callbacks.errors import LostRankError
from accel_callbacks.logging import notice
from accel_callbacks.precision.base import StepFinding
from checkpoint_io.local_files import local_path

if TYPE_CHECKING:
    from accel_callbacks.addons.journal.writer import JournalWriter
    from accel_callbacks.loop.loop import Loop
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import Lease
    from loggers import TrackerHub

__all__ = ["Recorder"]

# Steps between two looks at random generators, which take as long as the rest of a row: at those of
# torch, and at those of Python and NumPy. Both are looked at too where a replay may begin.
_GENERATORS_EVERY = 8
_HOST_GENERATORS_EVERY = 64
_LONG = 60.0  # seconds of an attempt after which its goodput is worth a line
#: Kinds of marks that the recorder writes by itself.
_OWN_KINDS = frozenset({*ROUTINE, "end", "save", "preempt", "lost_rank"}) - {"commands"}
_UNREADABLE = ("xla", "meta")  # devices whose values a thread cannot read beside the loop


class Recorder(Observer):
    """Observes the hooks of a run, and hands what it has noted to a hub with one writer.

    Nothing waits for a device: losses and norms are read by the hub's thread. Nothing is drawn from
    a generator.

    Args:
        project_dir: the project folder.
    """

    _loop: Loop
    _device: torch.device

    def __init__(self, project_dir: str) -> None:
        self._project_dir = project_dir
        self._on_host = True
        self._hub: TrackerHub | None = None
        self._writer: JournalWriter | None = None
        self._lease: Lease | None = None
        # Of a row: to the writer where all that it has is on the host, else by way of the hub.
        self._leave: Callable[[tuple[Any, ...]], None] = self._put
        self._began = 0.0
        self._forget()

    def _forget(self) -> None:
        self._losses: list[Any] = []
        self._layout: dict[str, Any] = {}  # of the pass, as it was noted last
        self._rates: list[Any] = []
        self._met = 0.0  # when the backward began in which ranks exchange gradients
        self._norm: Any = None
        self._step = self._rows = 0
        self._looks_at_generators = True
        self._reads_rates = True  # they are no plain numbers, as far as was seen last
        self._finding: StepFinding | None = None  # of the last step that had one
        self._unread: list[tuple[tuple[Any, ...], StepFinding]] = []
        self._evaluation_s = self._evaluation_began = 0.0
        self._evaluations = 0
        self._new_pass = True  # also where a resumed one goes on
        self._may_begin_here = True  # a replay, with the next row

    # --- the life of a journal ----------------------------------------------------------------

    def open(self, run: TrainingRun) -> bool:
        """Collective: begin the files of a new attempt, once the identity of the run is known."""
        from accel_callbacks.addons.journal.facts import process_began, start_facts
        from accel_callbacks.addons.journal.format import Header
        from accel_callbacks.addons.journal.launch_goodput import leave_note
        from accel_callbacks.addons.journal.writer import JournalWriter, next_attempt
        from accel_callbacks.checkpoint.project import path_in
        from loggers import RunInfo, TrackerConfig, TrackerHub

        folder = path_in(self._project_dir, "journal", run.run_id)
        attempt, problem = 0, ""
        if run.is_global_zero:
            try:
                attempt = next_attempt(folder)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        attempt = collectives.broadcast_object(attempt)
        if not attempt:
            if problem:
                notice(
                    f"no journal of this run ({problem}): give a folder that can be written as "
                    "project_dir, or journal=False"
                )
            return False
        now = self._began = time()
        header = Header(run.global_rank, run.world_size, attempt, now, run.run_id)
        facts = {**_options_of(run), "config": run.config, "process_began": process_began()}
        writer = JournalWriter(
            folder, header, (lambda: start_facts(facts)) if run.is_global_zero else None
        )
        hub = TrackerHub(
            [writer],
            run=RunInfo(run.name, self._project_dir, run.run_id, rank=run.global_rank),
            before_write=run.accelerator.loop.leases.check_recent,
            **asdict(TrackerConfig()),
        )
        hub.start()
        local = local_path(folder)
        if run.is_global_zero:
            place = folder if local is None else os.path.abspath(local)
            leave_note({"folder": place, "run_id": run.run_id})
        if run.is_global_zero and local is not None:
            self._lease = _lease_of(local, run)
        self._forget()
        self._loop, self._device = run.accelerator.loop, run.accelerator.device
        self._step_state, self._position = self._loop.step, self._loop.position
        self._on_host = self._device.type == "cpu"
        self._hub, self._writer, self._step = hub, writer, run.global_step
        self._leave = writer.waiting.append if self._on_host else self._put
        start = {"kind": "start", "time": now, "attempt": attempt, "name": run.name}
        start |= {"run_id": run.run_id, "step": run.global_step, "epoch": run.current_epoch}
        start["in_window"] = run.in_window
        hub.log_config({**start, "resumed_from": run.resumed_from, "world_size": run.world_size})
        run.noted = self._note_of_others
        for url, problem in self._loop.leases.unguarded.items():
            self.note("unguarded", folder=url, problem=problem)
        self._step_state.note_norm = self._note_norm
        return True

    def close(self, status: Any, error: BaseException | None = None) -> dict[str, float]:
        """Write the rest, with how the run has ended; return the goodput, as values for trackers.

        It is printed too, and both only for a run of a minute or more, on rank 0.
        """
        hub = self._hub
        if hub is None:
            return {}
        run = self._loop.run
        self._step_state.note_norm = None
        run.noted = None
        try:
            self._write_end(run, status, error)
        except Exception:
            if error is None:  # a folder that was lost must not hide the error that ends the run
                raise
        finally:
            self._hub = self._writer = None
            hub.finish(status)
            if self._lease is not None:
                self._lease.release()
                self._lease = None
        long = time() - self._began >= _LONG
        return self._goodput(run) if long and run.is_global_zero else {}

    def _write_end(self, run: TrainingRun, status: Any, error: BaseException | None) -> None:
        if error is None:
            self._read_findings(keep=0)
        elif isinstance(error, LostRankError):
            self.note("lost_rank", rank=error.rank, error=str(error))
        text = None if error is None else f"{type(error).__name__}: {error}"
        totals = {"data_s": run.data_wait_s, "save_s": run.save_s}
        self.note("end", status=status, error=text, evaluation_s=self._evaluation_s, **totals)

    def _goodput(self, run: TrainingRun) -> dict[str, float]:
        """Read the journal, print the goodput of all attempts, and return it."""
        from accel_callbacks.addons.journal.goodput import Goodput
        from accel_callbacks.addons.journal.reader import Journal

        try:
            goodput = Goodput.of(Journal.read(self._project_dir, run.run_id))
        except (ValueError, OSError) as error:  # the run itself has ended well
            notice(f"no goodput of this run: {error}")
            return {}
        notice(
            f"goodput {goodput.share:.1%} of {goodput.wall_s:.0f} s: `accel report "
            f"{self._project_dir}` shows where the rest went"
        )
        return goodput.metrics()

    def note(self, kind: str, **facts: Any) -> None:
        """Write a mark."""
        if self._hub is not None and self._loop.run.is_global_zero:
            run = self._loop.run
            mark = {"kind": kind, "time": time(), "step": run._global_step}
            # A row among the others: written in the same call, and never dropped as media may be.
            self._hub.put({"mark": json.dumps({**mark, **facts}, default=str)}, self._rows)

    def _note_of_others(self, kind: str, **facts: Any) -> None:
        """Write a mark that a script or a callback asks for, on all ranks with the same refusal."""
        from accel_callbacks.addons.journal.marks import mark_problem, plain_mark

        if kind in _OWN_KINDS:
            raise ValueError(f"run.note({kind!r}, ...): the run notes that itself: name another")
        if problem := mark_problem(plain_mark({"kind": kind, "time": 0.0, "step": 0, **facts})):
            raise ValueError(f"run.note({kind!r}, ...): {problem}, as readers of a mark expect")
        self.note(kind, **facts)

    # --- hooks --------------------------------------------------------------------------------

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Begin the span of the first step; what came before belongs to the start."""
        if self._writer is not None:
            self._writer.began = time()
        self.note("train", data_s=run.data_wait_s, save_s=run.save_s)

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Note with the next row how the samples of the pass are chosen."""
        self._new_pass = self._may_begin_here = True

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Note it again for a sampler that has drawn in the middle of the pass."""
        loader = self._loop.train_loader
        if loader is not None and not self._new_pass:
            records = [layout.get("record") or {} for layout in (self._layout, loader.layout())]
            if records[0].get("entries") != records[1].get("entries"):
                self._note_pass()

    def _note_pass(self) -> None:
        loader, self._new_pass = self._loop.train_loader, False
        if loader is not None:
            self._layout = loader.layout()
            self.note("pass", epoch=loader.epoch, layout=self._layout)

    def _note_beginning(self, batch: Any) -> None:
        """Note, where a pass begins and after a save, what a replay is compared with first."""
        self._may_begin_here = False
        if self._new_pass:
            self._note_pass()
        if self._loop.run.is_global_zero and (digest := _content_digest(batch)) is not None:
            self.note("batch", content=digest)

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Note the loss as the user computed it, and the rates of the step that follows."""
        # Hot path. Read at once on a CPU, where that costs less than a copy; a number is never in
        # the way.
        try:
            self._losses.append(loss.item() if self._on_host else self._copy_value(loss))
        except RuntimeError:  # it has several values
            self._losses.append(self._copy_value(loss))
        if self._loop.window.sync:
            self._met = time()
            # A loop, because a comprehension is a call.
            self._rates = rates = []
            for optimizer in self._loop.optimizers:
                for group in optimizer.optimizer.param_groups:  # type: ignore[attr-defined]
                    rates.append(group.get("lr"))

    def end_batch(self, run: TrainingRun, batch: Any) -> None:
        """Note the row of the step, if one was taken or left out."""
        # Hot path: most batches take a step, of which the host knows.
        step = run._global_step
        if step == self._step or self._unread or self._step_state.unsettled:
            if self._loop.window.stepped:
                self._note_unusual(run)
            return
        self._step = step
        if self._may_begin_here:
            self._note_beginning(batch)
        self._leave(self._row(run))

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """Begin the clock of evaluations."""
        if not self._evaluations:
            self._evaluation_began = perf_counter()
        self._evaluations += 1

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Stop the clock of evaluations."""
        self._evaluations = max(self._evaluations - 1, 0)
        if not self._evaluations:
            self._evaluation_s += perf_counter() - self._evaluation_began

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Write all rows up to the checkpoint: a resume from it does not repeat them."""
        self.end_batch(run, None)
        self._read_findings(keep=0)
        self._looks_at_generators = self._may_begin_here = True
        if self._hub is not None:
            self._hub.flush(timeout=0.0)

    def on_checkpoint_saved(self, run: TrainingRun, model: Any, path: str) -> None:
        """Mark a checkpoint that is durable."""
        self.note("save", path=path)

    def on_preempt(self, run: TrainingRun, model: Any, reason: str) -> None:
        """Mark a preemption."""
        self.note("preempt", reason=reason)

    # --- a row --------------------------------------------------------------------------------

    def _note_norm(self, norm: Any) -> None:
        self._norm = norm if type(norm) is torch.Tensor else None

    def _note_unusual(self, run: TrainingRun) -> None:
        """Note a step that was left out, or of which only the device knows; or none."""
        first = next(iter(self._loop.optimizers), None)  # none where others step within backward
        outcome = getattr(first, "outcome", True)
        if isinstance(outcome, StepFinding) and outcome is not self._finding:
            self._finding = outcome
            self._unread.append((self._row(run), outcome))
            self._read_findings(keep=1)
        elif not isinstance(outcome, StepFinding):
            self._read_findings(keep=0)
            if (outcome is False and self._losses) or run._global_step != self._step:
                self._step = run._global_step
                self._leave((*self._row(run)[:-1], SKIPPED * (outcome is False)))

    def _read_findings(self, keep: int) -> None:
        """Put the rows of steps of which only the device knew whether they were taken."""
        while len(self._unread) > keep:
            row, finding = self._unread.pop(0)
            self._step += finding.stepped
            self._leave((self._step, *row[1:-1], SKIPPED * (not finding.stepped)))

    def _put(self, row: tuple[Any, ...]) -> None:
        """Leave a row to the hub, which reads values from their device for the writer."""
        if self._hub is not None:
            # Numbered by themselves: a load may bring the steps back, which a hub warns of.
            self._rows += 1
            *_, losses, norm, _ = row
            values: dict[Any, Any] = {"row": row, "norm": norm}
            values.update(enumerate(losses))
            self._hub.put(values, self._rows)

    def _row(self, run: TrainingRun) -> tuple[Any, ...]:
        """Return what is known of a step that was taken, as :class:`JournalWriter` describes it."""
        losses, rates, norm = self._losses, self._rates, self._norm
        loader = self._position.outer
        self._losses = []
        if norm is not None:
            self._norm = None
            norm = norm.item() if norm.is_cpu else self._copy_value(norm)
        states: tuple[Any, ...] = ()
        if self._looks_at_generators or not self._step % _GENERATORS_EVERY:
            states = self._random_states()
            self._reads_rates = bool(rates) and type(rates[0]) is not float
        if self._reads_rates:
            rates = list(map(_number, rates))
        return (
            self._step,
            run.current_epoch if loader is None else loader.epoch,
            run.batch_idx,
            None if loader is None else loader.position,
            run.data_wait_s,
            run.save_s,
            self._evaluation_s,
            time(),
            self._met,
            rates,
            states,
            losses,
            norm,
            0,
        )

    def _random_states(self) -> tuple[Any, ...]:
        """Return the states of torch's generators, and now and then those of Python and NumPy."""
        states: list[Any] = [torch.default_generator.get_state()]
        if self._device.type == "cuda":
            # Its state is kept on the host: two numbers, which no kernel changes.
            generators = torch.cuda.default_generators
            states.append(generators[self._device.index or 0].get_state())
        host: tuple[Any, ...] = ()
        if self._looks_at_generators or not self._step % _HOST_GENERATORS_EVERY:
            numpy: Any = sys.modules.get("numpy")
            host = random.getstate(), None if numpy is None else numpy.random.get_state()
        self._looks_at_generators = False
        return states, host

    def _copy_value(self, value: torch.Tensor) -> Any:
        """Return a number, or a copy on the device: a graph of CUDA writes its outputs again."""
        value = value.detach()
        if value.device.type in _UNREADABLE:
            return math.nan
        value = value.sum() if value.dim() else value
        if value.is_cpu:
            return value.item()
        self._leave = self._put
        if value.device.type == "cuda":
            from loggers.values import order_before_reads

            value = value.clone()
            order_before_reads(value.device)
            return value
        return value.clone()


def _options_of(run: TrainingRun) -> dict[str, Any]:
    """Return what the start of a journal tells of the options of its Accelerator."""
    accel = run.accelerator
    return {
        "distributed_type": accel.distributed_type.value,
        "mixed_precision": accel.mixed_precision,
        "gradient_accumulation_steps": accel.window.num_steps,
        "device": str(accel.device),
        "data_world": accel.data_world,
    }


def _lease_of(folder: str, run: TrainingRun) -> Lease | None:
    """Return a lease by which others see that the run goes on, None if it cannot be had."""
    from checkpoint_io import Lease, LeaseError

    lease = Lease(folder, run_id=run.run_id, run_name=run.name)
    try:
        # It guards nothing, as each start has files of its own: the newest one has it.
        lease.attempt("take_over")
    except (OSError, LeaseError) as error:
        notice(f"`accel runs` cannot see that this run goes on: {error}")
        return None
    return lease


def _number(rate: Any) -> float:
    """Return a learning rate as a number; NaN where that would wait for a device."""
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.is_cpu else math.nan
    return math.nan if rate is None else float(rate)


def _content_digest(batch: Any) -> str | None:
    """Return a digest of the tensors, arrays, texts and numbers of a batch.

    None if the batch has none on the host: nothing is read from a device, which would wait for it.
    """
    digest, empty = xxhash.xxh3_64(), True
    for content in _contents(batch):
        digest.update(content)
        empty = False
    return None if empty else digest.hexdigest()


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _contents(part)
    elif isinstance(value, torch.Tensor):
        if value.is_cpu and value.layout == torch.strided and not value.is_quantized:
            yield value.detach().flatten().view(torch.uint8).numpy()
    elif isinstance(value, (str, bytes, bool, int, float)):
        yield repr(value).encode()
    elif callable(getattr(value, "tobytes", None)):  # an array, an image
        yield value.tobytes()
