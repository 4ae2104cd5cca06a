"""Training on unequal numbers of batches, as a method."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accel_callbacks.facade.loading import LoadingMethods
from accel_callbacks.strategies.join import state_from

__all__ = ["UnevenMethods"]


class UnevenMethods(LoadingMethods):
    """What lets processes run out of data at different times."""

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """A block in which processes may have unequal numbers of batches, and none hangs.

        For loaders that the script has split itself; prepared loaders give all processes equal
        numbers. A process that is done takes part in the gradient averages of the others with
        zeros, so that each sample counts alike. At the end all processes have the weights, and
        the state of prepared optimizers and schedulers, of one that took all steps. Gradients of
        a gradient window that is open then are dropped, where the numbers were unequal. On one
        process the block just runs.

        Inside, only backward may meet the other processes: no ``gather`` or ``save_state``, and
        no ``backward(normalizer=...)``.

        Args:
            joinables: the prepared models that are trained in the block.
            even_batches: overrides that of prepared loaders for the passes in the block.

        Raises:
            TypeError: something in ``joinables`` is no prepared model.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.join_uneven_inputs([model]):
            ...     for batch in torch.utils.data.DataLoader(torch.ones(3, 1)):
            ...         accel.backward(model(batch).sum())
        """
        counts = self.window.normalizer
        with self._even(even_batches), self.strategy.join(list(joinables), self._follow):
            counts.closed = self.use_distributed
            try:
                yield
            finally:
                counts.closed = False

    @contextmanager
    def _even(self, even_batches: bool | None) -> Iterator[None]:
        if even_batches is None:
            yield
            return
        before = self.even_batches
        self.even_batches = even_batches
        try:
            yield
        finally:
            self.even_batches = before

    def _follow(self, source: int) -> None:
        """Stand where the process ``source`` stands, which took more steps than some others."""
        followers: list[Any] = [optimizer.optimizer for optimizer in self.optimizers]
        followers += [*self.schedulers, self.precision]
        for follower in followers:
            state = state_from(source, follower.state_dict(), self.device)
            if self.process_index != source:
                follower.load_state_dict(state)
        run = self.loop.run
        run.global_step = state_from(source, run.global_step, self.device)
        if self.window.is_open:
            warnings.warn(
                "join_uneven_inputs ended inside of a gradient window on this process: its "
                "gradients are dropped. Give each process a multiple of "
                "gradient_accumulation_steps batches.",
                stacklevel=6,
            )
            self.window.abandon()
