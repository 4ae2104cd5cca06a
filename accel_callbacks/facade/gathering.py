"""Collectives, as methods; metrics that count every sample once."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.metrics import gather_counted, gather_counted_objects
from accel_callbacks.facade.parts import Parts

__all__ = ["GatherMethods"]

T = TypeVar("T")


class GatherMethods(Parts):
    """What brings values of all processes together."""

    @property
    def debug(self) -> bool:
        """Whether the processes compare what they hold before each collective method."""
        return self.config.debug

    def gather(self, tensor: T) -> T:
        """Concatenate each tensor over all processes; see :func:`accel_callbacks.gather`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).gather(torch.tensor([1, 2]))
            tensor([1, 2])
        """
        return collectives.gather(tensor, debug=self.debug)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop what was read twice to fill up the last batch.

        Call it inside of the loop over a prepared loader: that loader knows how many samples of
        its current batch are real. Outside of any loop it only gathers. Of loops inside of each
        other the innermost counts; of loaders side by side, as in ``zip``, the one whose batch
        has the size of what is gathered.

        Args:
            input_data: a tensor of shape ``(batch, ...)`` or a nested structure of them, with
                lists of other objects between them; anything else is gathered as objects. Batches
                may have another size on each process.
            use_gather_object: gather objects; lists and tuples become one list in rank order,
                and of anything else there is a list with what each process has.

        Returns:
            The same structure over the samples of all processes, each counted once. Tensors that
            have no entry for each sample (a mean, say) are only gathered.

        Raises:
            ValueError: on all processes; see :func:`accel_callbacks.gather`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> loader = accel.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
            >>> [accel.gather_for_metrics(batch).tolist() for batch in loader]
            [[0, 1], [2]]
        """
        tensors = () if use_gather_object else input_data
        collectives.begin("gather_for_metrics", self.debug, lambda: collectives.rows_held(tensors))
        active = self.loop.active
        if use_gather_object:
            return gather_counted_objects(input_data, active)
        return gather_counted(input_data, active)

    def reduce(
        self,
        tensor: T,
        reduction: str = "sum",
        scale: float = 1.0,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> T:
        """Combine each tensor over all processes; see :func:`accel_callbacks.reduce`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).reduce(torch.tensor(2.0), "mean", weight=5)
            tensor(2.)
        """
        return collectives.reduce(tensor, reduction, scale, weight=weight, debug=self.debug)

    def pad_across_processes(
        self, tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> T:
        """Pad to the largest size of all processes.

        See :func:`accel_callbacks.pad_across_processes`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).pad_across_processes(torch.ones(2)).shape
            torch.Size([2])
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, debug=self.debug)
