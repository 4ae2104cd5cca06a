"""Context managers around a loop: evaluate, join_uneven_inputs, and the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.checkpointer import Checkpointer
from accel_callbacks.checkpoint.restore import LoadOptions
from accel_callbacks.data.prepare import Loaders
from accel_callbacks.distributed.abort import abort_run, refuse_aborted_group, watch_for_failures
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import nearest
from accel_callbacks.logging import notice
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.passes import Passes
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.strategies import Strategy
from accel_callbacks.strategies.join import state_from
from accel_callbacks.tracking.trackers import Tracking

__all__ = ["Evaluate", "RunContext", "join_uneven_inputs"]

_STAGES = ("validation", "test")


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
        self, passes: Passes, models: tuple[torch.nn.Module, ...], stage: str = "validation"
    ) -> None:
        if stage not in _STAGES:
            hint = nearest(str(stage), _STAGES)
            raise ValueError(f"stage={stage!r} is neither 'validation' nor 'test'.{hint}")
        self._passes = passes
        self._models = models
        self._stage = stage
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._grad = torch.no_grad()

    def __enter__(self) -> Evaluate:
        self._passes.begin_evaluation(self._stage)
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
        self._passes.end_evaluation(self._stage, failed=error is not None)


class RunContext(AbstractContextManager[TrainingRun]):
    """The context of ``Accelerator.run``: resume at its start, hooks and trackers at its end.

    Args:
        new_run: makes the run.
        loop: fires the hooks.
        checkpointer: restores a checkpoint.
        tracking: the trackers.
        resume: see ``Accelerator.run``.
    """

    def __init__(
        self,
        new_run: Callable[[], TrainingRun],
        loop: Loop,
        checkpointer: Checkpointer,
        tracking: Tracking,
        resume: bool | str,
    ) -> None:
        self._new_run = new_run
        self._loop = loop
        self._checkpointer = checkpointer
        self._tracking = tracking
        self._resume = resume
        self._stop_watching: Callable[[], None] = lambda: None

    def __enter__(self) -> TrainingRun:
        refuse_aborted_group("run")
        self._run = self._new_run()
        try:
            self._begin()
        except BaseException as error:
            self._fail(error)
            raise
        return self._run

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._fail(error)
            return
        try:
            self._finish()
        except BaseException as problem:
            self._fail(problem)
            raise
        # A launcher ends the other ranks as soon as one has left with an exit code.
        if self._run.preempted:
            collectives.barrier()
        self._run._leave()

    def _begin(self) -> None:
        loop, run = self._loop, self._run
        loop.end_warm_up()
        loop.end_fit()  # of a plain loop that came before, with its saves
        self._tracking.close("success")
        loop.share_identity(run)
        self._take_over(loop.run)
        loop.run = run
        self._stop_watching = watch_for_failures()
        loop.begin_fit(self._restore)

    def _take_over(self, before: TrainingRun) -> None:
        """Start where a ``load_state`` before this run led to, else with the first epoch."""
        if before.awaits_training:
            self._run.load_state_dict(before.state_dict())
            self._run.resumed_from = before.resumed_from
            return
        for loader in self._loop.loaders:
            loader.rewind()

    def _restore(self) -> None:
        run = self._run
        if run.resumed_from is not None:
            self._report(run.resumed_from)
        elif self._resume is True:
            self._restore_newest()
        elif self._resume is not False:
            self._report(self._checkpointer.load_state(self._resume))
        run.loaded_step = None  # consumed: a run after this one does not take it over
        with shared_failure("starting the trackers"):
            self._tracking.open(run)

    def _restore_newest(self) -> None:
        """Restore from the first callback that has a valid checkpoint."""
        for callback in self._loop.savers:
            root, storage_options = callback.resume_root(self._run)
            options = LoadOptions(storage_options=storage_options)
            found = self._checkpointer.restore_newest(root, options)
            if found is not None:
                self._report(found)
                return

    def _report(self, url: str) -> None:
        place = f"step {self._run.global_step}, epoch {self._run.current_epoch}"
        notice(f"resumed from {url} ({place}); resume=False starts afresh")

    def _finish(self) -> None:
        """Fire the end hooks on all ranks, and close the trackers."""
        run = self._run
        collectives.barrier()
        self._loop.finish_fit()
        # No rank leaves before the end hooks of all ranks have succeeded.
        collectives.barrier()
        self._stop_watching()
        self._tracking.close(run._ending)
        if run.stop_reason is not None:
            who = f", as rank {run.stop_rank} asked" if run.world_size > 1 else ""
            notice(f"stopped at step {run.global_step}{who}: {run.stop_reason}")

    def _fail(self, error: BaseException) -> None:
        """End the run on all ranks; raise the error of another rank if that is the cause."""
        # First of all: hooks and trackers may take long, and the other ranks are waiting.
        cause = abort_run(error, f"the run {self._run.name!r}")
        self._stop_watching()
        try:
            self._loop.fail_fit(cause)
        finally:
            self._tracking.close("failed" if isinstance(cause, Exception) else "interrupted")
        if cause is not error:
            raise cause from error


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
    here, device = strategy.topology.rank, strategy.topology.device

    def follow(source: int) -> None:
        """Take over the states of the rank ``source``, which took the most steps."""
        for follower in followers():
            state = state_from(source, follower.state_dict(), device)
            if here != source:
                follower.load_state_dict(state)
        loop.run.global_step = state_from(source, loop.run.global_step, device)
        if loop.window.is_open:
            warnings.warn(
                "join_uneven_inputs ended inside of a gradient window on this process: its "
                "gradients are dropped. Give each process a multiple of "
                "gradient_accumulation_steps batches.",
                stacklevel=6,
            )
            loop.window.abandon()

    counts = loop.window.normalizer
    # A rank without a batch takes part in the hooks of the start and the end too.
    loop.withdraw_consumed_stop()
    loop.begin_training()
    with loaders.even_batches(even_batches), strategy.join(list(joinables), follow):
        counts.closed = strategy.topology.world_size > 1
        try:
            yield
        finally:
            counts.closed = False
