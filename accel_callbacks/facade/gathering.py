"""Collectives, as methods; metrics that count every sample once."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import torch

from accel_callbacks import collectives
from accel_callbacks.facade.parts import Parts

__all__ = ["GatherMethods"]

T = TypeVar("T")


class GatherMethods(Parts):
    """What brings values of all processes together."""

    def gather(self, tensor: T) -> T:
        """Concatenate each tensor over all processes; see :func:`accel_callbacks.gather`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).gather(torch.tensor([1, 2]))
            tensor([1, 2])
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop what was read twice to fill up the last batch.

        Call it inside of the loop over a prepared loader: that loader knows how many samples of
        its current batch are real.

        Args:
            input_data: a tensor of shape ``(batch, ...)`` or a nested structure of them; anything
                else is gathered as objects. Batches may have another size on each process.
            use_gather_object: gather objects; lists are joined in rank order.

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
        loader = self.loop.active[-1] if self.loop.active else None
        real, padded = (loader.real, loader.padded) if loader is not None else (0, 0)
        tensors = [] if use_gather_object else collectives.tensors_in(input_data)
        # Asked first, so that no process takes another way than the rest.
        sizes = None if use_gather_object else collectives.sizes_on_all(tensors)
        if not tensors:
            parts = collectives.gather_object(input_data)
            joined = list(chain(*parts)) if isinstance(input_data, list) else parts
            return joined[:real] if len(joined) == padded else joined
        # A tensor without dimensions becomes one with an entry for each process, not each sample.
        per_sample = iter([tensor.dim() > 0 for tensor in tensors])

        def keep_real(gathered: torch.Tensor) -> torch.Tensor:
            whole = next(per_sample) and gathered.shape[0] == padded
            return gathered[:real] if whole else gathered

        gathered = collectives.gather_sized(input_data, sizes)
        return collectives.map_tensors(gathered, keep_real)

    def reduce(
        self,
        tensor: T,
        reduction: str = "sum",
        scale: float = 1.0,
        *,
        weight: float | torch.Tensor = 1.0,
    ) -> T:
        """Combine each tensor over all processes; see :func:`accel_callbacks.reduce`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).reduce(torch.tensor(2.0), "mean", weight=5)
            tensor(2.)
        """
        return collectives.reduce(tensor, reduction, scale, weight=weight)

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
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)
