"""Runs, evaluation and logging, as methods."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.restore import LoadOptions, restore_newest
from accel_callbacks.distributed.abort import end_with, group_is_torn, refuse_torn, watch_others
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.topology import destroy_topology
from accel_callbacks.facade.parts import Parts
from accel_callbacks.loop.contexts import Evaluate
from accel_callbacks.loop.run import TrainingRun

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = ["RunningMethods"]


class RunningMethods(Parts):
    """What surrounds the loop."""

    def run(
        self,
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        *,
        resume: bool | str = True,
    ) -> AbstractContextManager[TrainingRun]:
        """Context manager around the whole loop: resume, stop, and a tidy end.

        Entering it fires ``setup``, restores the newest valid checkpoint that a callback knows
        of, starts the trackers, and fires ``on_fit_start``. Leaving it fires the end hooks (or
        ``on_exception``), and closes the trackers with the right status. Enter it after
        ``prepare``. All processes leave it together.

        An error on one process ends the run on all: it is raised there, and the others raise
        :class:`RemoteError` with its traceback. After that, make a new Accelerator on all
        processes to go on, as a sweep does, or let the script end.

        Args:
            name: of the run (or project), for trackers and messages.
            config: hyperparameters; given to the trackers.
            resume: ``True`` to resume where a ``Checkpoint`` callback finds something, ``False``
                to start afresh, or the path of a checkpoint.

        Raises:
            SystemExit: on leaving it, after a preemption for which a callback has set
                ``run.exit_code``; everything is closed then.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> with Accelerator(cpu=True).run("demo", config={"lr": 0.1}) as run:
            ...     run.name
            'demo'
        """
        return _RunContext(cast("Accelerator", self), name, dict(config or {}), resume)

    def evaluate(self, *models: torch.nn.Module, stage: str = "validation") -> Evaluate:
        """Context manager around an evaluation loop, inside of training or not.

        Models are in eval mode and gradients are off inside; afterwards every module is in the
        mode that it was in. Loaders iterated inside count as validation, or as test.

        Args:
            *models: prepared models; all of them if none.
            stage: ``"validation"`` (default) or ``"test"``: which hooks fire.

        Raises:
            ValueError: another stage.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.evaluate(model):
            ...     model(torch.ones(1, 1)).requires_grad
            False
        """
        return Evaluate(self.loop, models or tuple(self.models), stage)

    def end_training(self) -> None:
        """End a loop that does without :meth:`run`, close the trackers, leave the group.

        All processes must call it. The process group is left only if this library joined it.

        Raises:
            SystemExit: the loop was preempted, and a callback has set ``run.exit_code``.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).end_training()
        """
        error = sys.exc_info()[1]  # in a `finally`, the error that ends the script
        self.loop.end_fit(error)
        self.loop.saves.free_memory()
        run = self.loop.run
        broken = "failed" if isinstance(error, Exception) else "interrupted"
        self.tracking.close(run._ending if error is None else broken)
        if group_is_torn():  # an error has ended the run; the others still read which one
            return
        if error is None:  # else the others may be gone
            self.wait_for_everyone()
        destroy_topology()
        if error is None:
            run._leave()


class _RunContext(AbstractContextManager[TrainingRun]):
    """The context of :meth:`RunningMethods.run`."""

    def __init__(
        self, accel: Accelerator, name: str, config: dict[str, Any], resume: bool | str
    ) -> None:
        self._accel = accel
        self._name = name
        self._config = config
        self._resume = resume
        self._watch: Callable[[], None] = lambda: None

    def __enter__(self) -> TrainingRun:
        refuse_torn("run")
        try:
            return self._begin()
        except BaseException as error:
            self._fail(error)
            raise

    def _begin(self) -> TrainingRun:
        accel = self._accel
        accel.loop.end_fit()  # of a plain loop that came before, with its saves
        accel.tracking.close("success")
        run = TrainingRun(accel, self._name)
        accel._meet(run)
        run.config = self._config
        self._take_over(accel.loop.run, run)
        accel.loop.run = run
        self._watch = watch_others()
        accel.loop.begin_fit(self._restore)
        return run

    def _take_over(self, before: TrainingRun, run: TrainingRun) -> None:
        """Begin where a ``load_state`` before this run led to, or with the first epoch."""
        if before.awaits_training:
            run.load_state_dict(before.state_dict())
            run.resumed_from = before.resumed_from
            return
        for loader in self._accel.loaders:
            loader.rewind()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._fail(error)
            return
        try:
            self._finish()
        except BaseException as problem:
            self._fail(problem)
            raise
        run = self._accel.loop.run
        if run.preempted:  # a launcher ends the others as soon as one has left with a code
            collectives.barrier()
        run._leave()

    def _finish(self) -> None:
        """All processes have come to the end: the end hooks, and nobody leaves before all."""
        accel = self._accel
        collectives.barrier()
        accel.loop.finish_fit()
        collectives.barrier()
        self._watch()
        run = accel.loop.run
        accel.tracking.close(run._ending)
        if run.stop_reason is not None:
            who = f", as rank {run.stop_rank} asked" if run.world_size > 1 else ""
            accel._notice(f"stopped at step {run.global_step}{who}: {run.stop_reason}")

    def _fail(self, error: BaseException) -> None:
        """End the run on all processes; raises where another process's error is the cause."""
        accel = self._accel
        # First of all: the hooks and the trackers may take long, and the others are waiting.
        cause = end_with(error, f"the run {self._name!r}")
        self._watch()
        try:
            accel.loop.fail_fit(cause)
        finally:
            accel.tracking.close("failed" if isinstance(cause, Exception) else "interrupted")
        if cause is not error:
            raise cause from error

    def _restore(self) -> None:
        accel = self._accel
        if accel.loop.run.resumed_from is not None:
            self._report(accel.loop.run.resumed_from)
        elif self._resume is True:
            self._restore_newest()
        elif self._resume is not False:
            self._report(accel.load_state(self._resume))
        accel.loop.run.loaded_step = None  # taken over: a run after this one begins anew
        with shared_failure("starting the trackers"):
            accel._open_trackers()

    def _restore_newest(self) -> None:
        """From the first callback that knows a valid checkpoint."""
        accel = self._accel
        for callback in accel.loop.dispatch.savers:
            root, storage_options = callback.resume_root(accel.loop.run)
            found = restore_newest(accel, root, LoadOptions(storage_options=storage_options))
            if found is not None:
                self._report(found)
                return

    def _report(self, url: str) -> None:
        run = self._accel.loop.run
        place = f"step {run.global_step}, epoch {run.current_epoch}"
        self._accel._notice(f"resumed from {url} ({place}); resume=False starts afresh")
