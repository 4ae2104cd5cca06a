"""A pass over a loader with the models in eval mode: it trains, or it evaluates."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain
from typing import Any

import torch

from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.loop.loop import Loop
from accel_callbacks.models.compile import hook_calls

__all__ = ["UndecidedPass"]

Pass = Callable[[DataLoaderShard, Iterator[Any]], Generator[Any, None, None]]


class UndecidedPass:
    """Waits with the hooks of a pass until its first batch shows what it is for.

    A model of ``from_pretrained`` is in eval mode, and a script that forgets ``model.train()``
    trains it all the same. Before anything was trained, hooks that come late miss nothing: the pass
    trains from the first backward or ``accumulate`` on, evaluates from a call without gradients on,
    and evaluates too if its first batch ends without either.

    Args:
        loop: tells which pass goes on.
        training: iterates training data with its hooks.
        evaluation: likewise of an evaluation.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(1, 1).eval()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.utils.data.DataLoader(torch.ones(2, 1))
        >>> model, optimizer, data = accel.prepare(model, optimizer, data)
        >>> with accel.run("in eval mode") as run:
        ...     for batch in data:
        ...         accel.backward(model(batch).sum())
        ...         optimizer.step()
        ...         print(run.training, run.batch_idx)
        True 0
        True 1
    """

    def __init__(self, loop: Loop, training: Pass, evaluation: Pass) -> None:
        self._loop = loop
        self._training, self._evaluation = training, evaluation
        self._open: Callable[[bool], None] | None = None  # of the first batch of a pass

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate a loader, as training or as an evaluation."""
        loop = self._loop
        batches = loader.batches()
        first = list(next(([batch] for batch in batches), ()))
        rest = chain(first, batches)
        chosen: Generator[Any, None, None] | None = None

        def choose(trains: bool) -> None:
            nonlocal chosen
            self._open = None
            for handle in handles:
                handle.remove()
            loop.position.leave(loader, token)
            loop.run.in_eval_mode = trains
            chosen = (self._training if trains else self._evaluation)(loader, rest)
            next(chosen, None)  # to where it yields the batch that the script has

        def note_call(*_: Any) -> None:
            if not torch.is_grad_enabled():
                choose(False)

        handles = hook_calls(loop.models, note_call)
        token = loop.position.enter(loader)  # for what reads the position of the batch
        if not first:
            choose(False)
            return
        self._open = choose
        try:
            yield first[0]
            if self._open is choose:
                choose(False)
        except GeneratorExit:
            if self._open is choose:
                choose(False)
            if chosen is not None:
                chosen.close()
            raise
        finally:
            self._open = None
        if chosen is not None:
            yield from chosen

    def begin_training(self) -> bool:
        """Take the pass for a training; return False if none is undecided."""
        if self._open is None:
            return False
        self._open(True)
        return True
