"""Context managers around a loop: evaluate, join_uneven_inputs, and the run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.open import together, unwrapped_failure
from accel_callbacks.checkpoint.part import LoadOptions
from accel_callbacks.checkpoint.restore import find, restore_from, restore_newest
from accel_callbacks.checkpoint.trained_parameters import require_saved
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.data.prepare import Loaders
from accel_callbacks.distributed.abort import abort_run, refuse_aborted_group
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.heartbeat import remote_failure
from accel_callbacks.errors import RemoteError, ResumeError, nearest
from accel_callbacks.logging import notice
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.passes import Passes
from accel_callbacks.loop.run import RunLeft, TrainingRun
from accel_callbacks.loop.step_boundary import StepBoundary
from accel_callbacks.strategy import Strategy
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.callbacks.observer import Observer
    from accel_callbacks.checkpoint.borrowed_weights import BorrowedWeights
    from checkpoint_io import CheckpointReader

__all__ = ["Evaluate", "RunContext", "join_uneven_inputs"]

_STAGES = ("validation", "test")
_ANYWAY = "anyway"  # resume, also from a checkpoint of another run


class Evaluate(AbstractContextManager["Evaluate"]):
    """An evaluation; see ``Accelerator.evaluate``.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> model = accel.prepare(torch.nn.Dropout(0.5))
        >>> with accel.evaluate(model):
        ...     print(model.training, torch.is_grad_enabled())
        False False
        >>> model.training
        True
    """

    def __init__(
        self,
        passes: Passes,
        models: tuple[torch.nn.Module, ...],
        stage: str,
        training: TrainingState,
        checkpoint: str | PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if stage not in _STAGES:
            hint = nearest(str(stage), _STAGES)
            raise ValueError(f"stage={stage!r} is neither 'validation' nor 'test'.{hint}")
        self._passes = passes
        self._models = models
        self._stage = stage
        self._training = training
        self._checkpoint = None if checkpoint is None else fspath(checkpoint)
        self._storage_options = storage_options
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._grad = torch.no_grad()
        self._lent = ExitStack()

    def __enter__(self) -> Evaluate:
        remote_failure.raise_in("evaluate")
        # Lent before the hooks at the start and until those at the end, so that all see the same
        # weights.
        with ExitStack() as lent:
            if self._checkpoint is not None:
                lent.enter_context(self._borrow(self._checkpoint))
            self._passes.begin_evaluation(self._stage)
            self._lent = lent.pop_all()
        # Every module's own mode, so that frozen parts kept in eval mode stay so afterwards.
        self._modes = [(m, m.training) for model in self._models for m in model.modules()]
        for model in self._models:
            model.eval()
        self._grad.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._grad.__exit__(kind, error, trace)
        for module, mode in self._modes:
            module.training = mode
        for model in self._models:
            self._training.strategy.unwrap(model)  # frees the weights that this left gathered
        with self._lent:
            try:
                if error is None:
                    remote_failure.raise_in("evaluate")
            except RemoteError:
                self._passes.end_evaluation(self._stage, failed=True)
                raise
            self._passes.end_evaluation(self._stage, failed=error is not None)

    def _borrow(self, checkpoint: str) -> BorrowedWeights:
        """Collective: return the context of the weights of a checkpoint."""
        # Few runs evaluate a checkpoint, and it imports the room of offloaded weights.
        from accel_callbacks.checkpoint.borrowed_weights import BorrowedWeights

        refuse_aborted_group("evaluate")
        loop, options = self._training.loop, self._storage_options
        loop.settle()
        loop.begin_fit()  # whose hooks set up the averages
        loop.saves.wait()
        if checkpoint in ("best", "last"):
            checkpoint, options = _find_saved(loop, checkpoint)
        return BorrowedWeights(self._training, self._models, checkpoint, options)


def _find_saved(loop: Loop, choice: str) -> tuple[str, Mapping[str, Any] | None]:
    """Collective: return the best or last checkpoint of the callbacks that save, and its options.

    Raises:
        ValueError: no callback saves, or none has a monitor.
        FileNotFoundError: none is saved yet.
    """
    call = f"evaluate(checkpoint={choice!r})"
    savers = [saver for saver in loop.savers if hasattr(saver, "find_saved")]
    if not savers:
        raise ValueError(
            f"{call}: no Checkpoint callback is registered. Give callbacks=[Checkpoint(...)] to "
            "the Accelerator, or the path of a checkpoint here."
        )
    if choice == "best":
        savers = [saver for saver in savers if saver.monitor is not None][:1]
    if not savers:
        raise ValueError(
            f"{call}: no Checkpoint has a metric to compare by. Give it one, "
            "Checkpoint(monitor='val/loss'), or use checkpoint='last' or a path."
        )
    newest = [(*saver.find_saved(loop.run, choice), saver) for saver in savers]
    saved = [(position, path, saver) for path, position, saver in newest if path is not None]
    if not saved:
        name = savers[0].monitor.name if choice == "best" else ""
        needed = f"log {name!r} before a checkpoint is saved" if name else "save one first"
        folder = savers[0].resume_root(loop.run)[0]
        raise FileNotFoundError(f"{call}: there is none in {folder} yet: {needed}.")
    _, path, saver = max(saved, key=lambda entry: entry[0])
    return path, saver.storage_options


class RunContext(AbstractContextManager[TrainingRun]):
    """The context of ``Accelerator.run``: resume at its start, hooks and trackers at its end.

    Args:
        new_run: makes the run.
        training: what a checkpoint restores, with the loop that fires the hooks, and the trackers.
        resume: see ``Accelerator.run``.
    """

    def __init__(
        self,
        new_run: Callable[[], TrainingRun],
        training: TrainingState,
        resume: bool | str,
    ) -> None:
        self._new_run = new_run
        self._training = training
        self._loop, self._tracking = training.loop, training.tracking
        self._resume = resume
        self._path = fspath(resume) if not isinstance(resume, bool) and resume != _ANYWAY else None
        self._reader: CheckpointReader | None = None
        self._finder: Any = None  # the callback in whose folder that checkpoint is
        self._differences: list[str] = []
        self._accepted: CheckpointReader | None = None  # the last, which the restore asks for again
        self._observing: list[Observer] = []

    def __enter__(self) -> TrainingRun:
        refuse_aborted_group("run")
        before, self._run = self._loop.run, self._new_run()
        if before.prepared_at_start is not None:
            # Not _fail: it is the outer run that ends, by this error, and not this one.
            raise RuntimeError(
                f"accel.run({self._run.name!r}) inside of accel.run({before.name!r}), whose steps "
                "would no longer be counted or saved: an Accelerator has one run at a time. Leave "
                "the outer `with` first, or give the inner training an Accelerator of its own."
            )
        try:
            self._begin()
        except BaseException as error:
            self._fail(error)
            raise
        # To the script, that is: hooks of the start have asked.
        self._run.epoch_unknown = self._run.resumed_from is not None
        return self._run

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        left = error if isinstance(error, RunLeft) else None
        try:
            if error is not None and left is None:
                self._fail(error)
                return
            self._end(left)
        finally:
            self._training.left_state = None
            self._loop.boundary.keep = lambda: None
            self._run.prepared_at_start = None
        # A launcher ends the other ranks as soon as one has left with an exit code.
        if self._run.preempted:
            collectives.barrier()
        self._run._leave()

    def _end(self, left: RunLeft | None) -> None:
        """End a run that has succeeded, or was left for a preemption."""
        try:
            if left is not None:
                self._loop.drop_passes()  # the resumed run does again what was left
                left.go_back()
                StepBoundary(self._loop).carry_out({"preempt": (left.reason, left.rank)})
            self._finish()
        except BaseException as problem:
            self._fail(problem)
            raise

    def _begin(self) -> None:
        loop, run = self._loop, self._run
        loop.end_warm_up()
        loop.end_fit()  # of a plain loop that came before, with its saves
        self._tracking.close("success")
        # In this order: the leases show the id to other runs, and are held before a checkpoint is
        # looked for, so that no other run writes to the folders from then on.
        loop.share_identity(run)
        self._take_over(loop.run)
        loop.step.settle(loop.run)
        loop.run = run
        self._hold_folders()
        self._find()
        loop.begin_fit(self._restore)
        loop.boundary.keep()

    def _hold_folders(self) -> None:
        """Collective: take the leases of the folders to which this run writes."""
        loop, project = self._loop, self._training.project
        folders = loop.saved_folders()
        if loop.leases.is_main_process:
            folders += self._tracking.folders()
        if project.automatic_checkpoint_naming or project.total_limit is not None:
            folders.append((project.path("checkpoints"), None))
        loop.leases.hold_together(folders, self._run)

    def _take_over(self, before: TrainingRun) -> None:
        """Start where a ``load_state`` before this run led to, else with the first epoch."""
        if before.awaits_training:
            self._run.load_state_dict(before.state_dict())
            self._run.resumed_from = before.resumed_from
            self._run.resumed_without_model = before.resumed_without_model
            return
        for loader in self._loop.loaders:
            loader.rewind()

    def _find(self) -> None:
        """Open the checkpoint to resume from, so that the run has its id from ``setup`` on."""
        if self._run.resumed_from is not None or self._resume is False:
            return
        if self._path is not None:
            self._reader = find(self._training, self._path, LoadOptions(), newest=False)
        else:
            for callback in self._loop.savers:
                self._reader = find(self._training, *self._place(callback), newest=True)
                if self._reader is not None:
                    self._finder = callback
                    break
        if self._reader is None or "run" not in self._reader.state:
            return  # what is no training state, the restore reports
        with unwrapped_failure():
            self._accept(self._reader)
        position = self._reader.state["run"]
        self._run.run_id = position["run_id"]
        self._tracking.await_resume(self._reader.state.get("trackers", {}), position["global_step"])

    def _place(self, callback: Any) -> tuple[str, LoadOptions]:
        """Return the folder in which a callback saves, and how it is restored from."""
        root, storage_options = callback.resume_root(self._run)
        source = callback.resume_source(self._run) if hasattr(callback, "resume_source") else None
        options = LoadOptions(storage_options=storage_options, accept=self._accept, source=source)
        return root, options

    def _accept(self, reader: CheckpointReader) -> None:
        """Collective: compare the run with that of a checkpoint.

        Raises:
            LoadFailed: it is another one, and ``resume=True``.
        """
        if reader is self._accepted:
            return
        identity = self._run.identity
        saved = reader.state.get("run", {}).get("identity")
        if identity is None or saved is None:  # saved before checkpoints had it
            self._differences = []
            return
        operation = f"comparing the run with that of {reader.path}"
        lines = together(operation, partial(identity.differences, saved))
        # Those of rank 0: a config may have what differs between ranks, such as a device.
        differences = self._differences = collectives.broadcast_object(lines)

        def check() -> None:
            if self._resume is True:
                raise ResumeError(identity.refusal(reader.path, differences))

        if differences:
            together(operation, check)
        self._accepted = reader

    def _restore(self) -> None:
        run = self._run
        run.prepared_at_start = self._training.prepared
        if self._loop.savers:
            require_saved(self._training, "run")
        if run.resumed_from is not None:
            self._report(run.resumed_from)
        elif self._path is not None:
            options = LoadOptions(accept=self._accept)
            self._report(restore_from(self._training, self._path, options, self._reader))
        elif self._resume is not False:
            self._restore_newest()
        self._loop.leases.describe(run)  # a resumed run has the id of before
        self._reader = self._accepted = None
        run.loaded_step = None  # consumed: a run after this one does not take it over
        with shared_failure("starting the trackers"):
            self._tracking.open(run)
        for observer in self._loop.observers:
            if observer.open(run):
                self._observing.append(observer)
        self._loop.dispatch.observe(self._observing)

    def _restore_newest(self) -> None:
        """Restore from the first callback that has a valid checkpoint."""
        for callback in self._loop.savers:
            root, options = self._place(callback)
            first = self._reader if callback is self._finder else None
            url = restore_newest(self._training, root, options, first=first)
            if url is not None:
                in_memory = options.source is not None and options.source.holds(url)
                self._report(f"memory, {url}" if in_memory else url)
                return

    def _report(self, source: str) -> None:
        place = f"step {self._run.global_step}, epoch {self._run.current_epoch + 1}"
        notice(f"resumed from {source} ({place}); resume=False starts afresh")
        if self._differences:
            notice(f"it is of another run (saved -> now): {'; '.join(self._differences)}")

    def _finish(self) -> None:
        """Fire the end hooks on all ranks, and close the trackers."""
        run = self._run
        collectives.barrier()
        self._loop.finish_fit()
        # No rank leaves before the end hooks of all ranks have succeeded.
        collectives.barrier()
        self._close_observers(run._end_status)
        self._tracking.close(run._end_status)
        self._loop.leases.release()
        if run.stop_reason is not None:
            who = f", as rank {run.stop_rank} asked" if run.world_size > 1 else ""
            notice(f"stopped at step {run.global_step}{who}: {run.stop_reason}")

    def _fail(self, error: BaseException) -> None:
        """End the run on all ranks; raise the error of another rank if that is the cause."""
        # First of all: hooks and trackers may take long, and the other ranks are waiting.
        self._run.prepared_at_start = None
        cause = abort_run(error, f"the run {self._run.name!r}")
        try:
            self._loop.fail_fit(cause)
        finally:
            status = "failed" if isinstance(cause, Exception) else "interrupted"
            self._close_observers(status, cause)
            self._tracking.close(status)
            self._loop.leases.release()
        if cause is not error:
            raise cause from error

    def _close_observers(self, status: str, error: BaseException | None = None) -> None:
        """Close the observers, also where one of them raises."""
        observing, self._observing = self._observing, []
        self._loop.dispatch.observe(())
        with ExitStack() as closing:
            for observer in reversed(observing):  # the stack calls the last one first
                closing.callback(self._close_observer, observer, status, error)

    def _close_observer(self, observer: Observer, status: str, error: BaseException | None) -> None:
        """Close an observer; the trackers get the values of a run that succeeds."""
        try:
            values = observer.close(status, error)
        except Exception:
            if error is None:
                raise
            traceback.print_exc()  # raised is the error that ends the run
            return
        if error is None:
            self._tracking.put(values, self._run.global_step)


@contextmanager
def join_uneven_inputs(
    joinables: Iterable[Any],
    even_batches: bool | None,
    *,
    strategy: Strategy,
    loop: Loop,
    loaders: Loaders,
    followers: Callable[[], Sequence[Any]],
) -> Iterator[None]:
    """Train on unequal numbers of batches; see ``Accelerator.join_uneven_inputs``.

    Args:
        joinables: the prepared models that are trained in the block.
        even_batches: overrides that of prepared loaders for the passes in the block.
        strategy: joins the ranks.
        loop: has the run and the gradient window.
        loaders: the prepared loaders.
        followers: returns the objects whose states the ranks take over from the one that took the
            most steps.
    """

    def follow(newest: Callable[[Any], Any]) -> None:
        """Take over the states of the rank that took the most steps."""
        for follower in followers():
            own = follower.state_dict()
            if (state := newest(own)) is not own:
                follower.load_state_dict(state)
        loop.run.global_step = newest(loop.run.global_step)
        if loop.window.is_open:
            warn(
                "join_uneven_inputs ended inside of a gradient window on this process: its "
                "gradients are dropped. Give each process a multiple of "
                "gradient_accumulation_steps batches.",
            )
            loop.window.abandon()

    counts = loop.window.normalizer
    # A rank without a batch takes part in the hooks of the start and the end too.
    loop.flags.withdraw_consumed_stop(loop.run)
    loop.begin_training()
    try:
        with loaders.even_batches(even_batches), strategy.gradients.join(list(joinables), follow):
            # The sum of counts is a collective, which ranks that are done would not answer.
            counts.closed = strategy.topology.world_size > 1
            yield
    finally:
        counts.closed = False
        if loop.pass_ends is not None:
            loop.pass_ends.count_from_here()
