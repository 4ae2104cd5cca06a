"""TinyTraining and Recorder: run a small training, and record its hooks."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from accel_callbacks.accelerator import Accelerator
from accel_callbacks.callbacks.base import HOOKS, Callback
from accel_callbacks.callbacks.dispatch.functions import checked_hook
from accel_callbacks.distributed.rng import capture_rng, restore_rng
from accel_callbacks.loop.run import TrainingRun

__all__ = ["Recorder", "TinyTraining", "record", "tiny_training"]

FOLDER_PREFIX = "tiny-training-"
_BATCH = 2  # samples
_VALIDATION = 2  # batches


def tiny_training(callbacks: Iterable[Any] = (), **options: Any) -> TinyTraining:
    """Run a small real training with these callbacks, on the CPU.

    Args:
        callbacks: those to test.
        **options: of :class:`TinyTraining`, such as ``epochs=2``, ``batches=3``, ``window=1``.

    Returns:
        The training: ``accel``, ``run``, ``trace``, and the rest of a :class:`TinyTraining`.

    Raises:
        Exception: any that a callback raises.

    Example:
        >>> from accel_callbacks import Callback
        >>> from accel_callbacks.testing import tiny_training
        >>> class StopAt(Callback):
        ...     def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        ...         if run.global_step == 2:
        ...             run.stop("enough")
        >>> done = tiny_training([StopAt()], epochs=5)
        >>> done.run.global_step, done.run.stop_reason
        (2, 'enough')
    """
    return TinyTraining(callbacks, **options).play()


class TinyTraining:
    """A loop over a small model, with an evaluation in each epoch; :meth:`play` runs it.

    It is deterministic: random generators are seeded inside it and restored afterwards.

    Args:
        callbacks: those to test; a :class:`Recorder` comes first, before all of them.
        epochs: of the run.
        batches: of an epoch, of two samples each.
        window: micro-batches of an optimizer step.
        evaluate: evaluate after each epoch, and log ``val/loss``.
        test: evaluate with ``stage="test"`` after the last one.
        leave_at: leave each epoch with ``break`` after the batch with this index.
        each_batch: called with this object at the end of the loop body of each batch.
        model: makes the model; two linear layers, named ``0`` and ``2``, if ``None``.
        data: a dataset, instead of ``batches`` of pairs of numbers.
        loss: ``loss(model, batch)``; the mean square of the outputs if ``None``.
        **options: of the Accelerator; ``cpu=True`` and a temporary ``project_dir`` by default.

    Attributes:
        accel: the Accelerator.
        run: the :class:`TrainingRun` of the last :meth:`play`.
        recorder: has recorded the hooks.
        model, optimizer, train, val: the prepared objects.
        folder: the ``project_dir``.

    Example:
        >>> from accel_callbacks.testing import TinyTraining
        >>> training = TinyTraining(epochs=1, batches=4, window=2)
        >>> training.play().run.global_step
        2
        >>> training.trace[0], training.trace[-1]
        ('setup fit', 'teardown fit')
    """

    def __init__(
        self,
        callbacks: Iterable[Any] = (),
        *,
        epochs: int = 2,
        batches: int = 3,
        window: int = 1,
        evaluate: bool = True,
        test: bool = False,
        leave_at: int | None = None,
        each_batch: Callable[[TinyTraining], Any] | None = None,
        model: Callable[[], torch.nn.Module] | None = None,
        data: Any = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.epochs = epochs
        self.evaluate, self.test = evaluate, test
        self.leave_at = leave_at
        self.each_batch = each_batch
        self._loss = loss or _mean_square
        self.recorder = Recorder("TinyTraining")
        self.folder = str(options.pop("project_dir", None) or _temporary_folder(self))
        options = {"cpu": True, "gradient_accumulation_steps": window, **options}
        self.accel = Accelerator(
            callbacks=[self.recorder, *callbacks], project_dir=self.folder, **options
        )
        with seeded_rng(self.accel.device):
            samples: Any = _pairs(_BATCH * batches) if data is None else data
            first = Subset(samples, range(min(len(samples), _BATCH * _VALIDATION)))
            inner = (model or _two_layers)()
            parts = self.accel.prepare(
                inner,
                torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9),
                DataLoader(samples, _BATCH, shuffle=True),
                DataLoader(first, _BATCH),
            )
        self.model, self.optimizer, self.train, self.val = parts
        self.run: TrainingRun = self.accel.current_run
        self._weights = deepcopy(inner.state_dict())

    @property
    def trace(self) -> list[str]:
        """The called hooks, as lines of a :class:`Recorder`."""
        return self.recorder.trace

    def play(self, *, resume: bool | str = False) -> TinyTraining:
        """Train, in ``accel.run``; returns this object.

        Args:
            resume: as in ``accel.run``; a new run by default.

        Raises:
            Exception: any that a callback or ``each_batch`` raises.
        """
        with seeded_rng(self.accel.device), self.accel.run("tiny", resume=resume) as run:
            self.run = run
            for _ in run.epochs(self.epochs):
                self._train_epoch()
                if self.evaluate:
                    self.accel.log({"val/loss": self._evaluate("validation")})
            if self.test:
                self._evaluate("test")
        return self

    def _train_epoch(self) -> None:
        for index, batch in enumerate(self.train):
            with self.accel.accumulate(self.model):
                loss = self._loss(self.model, batch)
                self.accel.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.accel.log({"train/loss": loss})
            if self.each_batch is not None:
                self.each_batch(self)
            if index == self.leave_at:
                break

    def _evaluate(self, stage: str) -> torch.Tensor:
        with self.accel.evaluate(self.model, stage=stage):
            losses = torch.stack([self._loss(self.model, batch) for batch in self.val])
            return self.accel.reduce(losses.mean(), "mean")

    def begin_again(self) -> TinyTraining:
        """Reset weights, optimizer and trace, so that the next :meth:`play` repeats the first."""
        self.accel.unwrap_model(self.model).load_state_dict(self._weights)
        self.optimizer.state.clear()
        self.optimizer.zero_grad()
        self.recorder.take()
        return self


def _temporary_folder(owner: object) -> str:
    """Create a folder that is removed with its owner."""
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _pairs(samples: int) -> torch.Tensor:
    """Return pairs of numbers."""
    return torch.linspace(-1.0, 1.0, 2 * samples, device="cpu").reshape(samples, 2)


def _two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def _mean_square(model: Any, batch: Any) -> torch.Tensor:
    result: torch.Tensor = model(batch).square().mean()
    return result


@contextmanager
def seeded_rng(device: torch.device) -> Iterator[None]:
    """Seed the random generators in the block, and restore them afterwards."""
    before = capture_rng(device)
    try:
        random.seed(0)
        if device.type == "cpu":  # torch.manual_seed is slow: it captures a stack for each backend
            torch.default_generator.manual_seed(0)
        else:
            torch.manual_seed(0)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)
        yield
    finally:
        restore_rng(before, device)


def record(*only: str) -> Recorder:
    """Return a callback that records each hook, or the given ones.

    Raises:
        ValueError: a hook is unknown.

    Example:
        >>> from accel_callbacks.testing import record, tiny_training
        >>> steps = record("after_optimizer_step")
        >>> _ = tiny_training([steps], epochs=1, batches=2)
        >>> steps.trace
        ['after_optimizer_step 1', 'after_optimizer_step 2']
    """
    return Recorder(only=only or None)


class Recorder(Callback):
    """Record each hook that is called as a line of text.

    A line is the hook without its ``on_``, and what identifies the call: the index of a batch or
    an epoch, the steps so far of an optimizer step, the names and the step of a log.

    Args:
        name: the ``state_key``, so that several can be used.
        only: hooks to record, with or without their ``on_``; all if ``None``.

    Attributes:
        trace: the lines.

    Raises:
        ValueError: ``only`` names an unknown hook.

    Example:
        >>> from accel_callbacks.testing import Recorder, tiny_training
        >>> recorder = Recorder(only=["train_epoch_start", "train_epoch_end"])
        >>> _ = tiny_training([recorder], epochs=2)
        >>> recorder.trace
        ['train_epoch_start 0', 'train_epoch_end 0', 'train_epoch_start 1', 'train_epoch_end 1']
    """

    def __init__(self, name: str = "Recorder", *, only: Iterable[str] | None = None) -> None:
        self.name = name
        self.trace: list[str] = []
        for hook in HOOKS if only is None else map(checked_hook, only):
            setattr(self, hook, self._make_recorder(hook))

    @property
    def state_key(self) -> str:
        """The given name."""
        return self.name

    def _make_recorder(self, hook: str) -> Callable[..., None]:
        return lambda run, model, *args: self.trace.append(line_of(hook, run, args))

    def take(self) -> list[str]:
        """Return the lines recorded since the last call."""
        lines, self.trace[:] = list(self.trace), []
        return lines

    def assert_order(self, *expected: str) -> None:
        """Check that the lines come in this order, possibly with others between them.

        Args:
            *expected: a full line, or a hook for its next line.

        Raises:
            AssertionError: a line is missing. The message names it and lists the recorded ones.

        Example:
            >>> from accel_callbacks.testing import tiny_training
            >>> done = tiny_training(epochs=1)
            >>> done.recorder.assert_order("train_batch_start 1", "after_backward", "train_end")
        """
        rest = iter(self.trace)
        for number, entry in enumerate(expected):
            wanted = entry.removeprefix("on_")
            if not any(wanted in (line, line.partition(" ")[0]) for line in rest):
                before = f" after {expected[number - 1]!r}" if number else ""
                seen = "\n  ".join(self.trace) or "nothing"
                raise AssertionError(f"{wanted!r} did not come{before}. Recorded:\n  {seen}")

    def __str__(self) -> str:
        return "\n".join(self.trace)


def line_of(hook: str, run: Any, args: tuple[Any, ...]) -> str:
    """Format one call as a line."""
    details = _DETAILS.get(hook)
    values = details(run, args) if details is not None else ()
    return " ".join([hook.removeprefix("on_"), *map(str, values)])


def _epoch(run: Any, args: tuple[Any, ...]) -> Iterable[Any]:
    return (run.current_epoch,)


def _args_from(first: int) -> Callable[[Any, tuple[Any, ...]], Iterable[Any]]:
    return lambda run, args: args[first:]


#: For each hook the values that identify a call, from the run and the arguments after the model.
_DETAILS: dict[str, Callable[[Any, tuple[Any, ...]], Iterable[Any]]] = {
    "setup": _args_from(0),
    "teardown": _args_from(0),
    "on_preempt": _args_from(0),
    "on_train_epoch_start": _epoch,
    "on_train_epoch_end": _epoch,
    **{f"on_{stage}_batch_start": _args_from(1) for stage in ("train", "validation", "test")},
    **{f"on_{stage}_batch_end": _args_from(2) for stage in ("train", "validation", "test")},
    "on_after_optimizer_step": lambda run, args: (run.global_step,),
    "on_log": lambda run, args: (*args[0], args[1]),
    "on_exception": lambda run, args: (type(args[0]).__name__,),
}
