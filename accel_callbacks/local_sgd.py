"""Local SGD: ranks train independently, and average their parameters every few steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_callbacks import collectives

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = ["LocalSGD"]

_AVERAGED_TOGETHER = 1 << 24  # elements of an all-reduce: 64 MiB in float32


class LocalSGD(AbstractContextManager["LocalSGD"]):
    """Context manager: keep gradients local, and average parameters every few steps.

    Every ``local_sgd_steps`` optimizer steps, and once more at the end of the block, the trained
    parameters and the floating-point buffers (such as running statistics) are averaged, with one
    all-reduce for each dtype and 16 million elements; 16-bit dtypes are sent as float32. Optimizer
    states stay local. Between two averages the models differ, so evaluate and save after the block.
    All processes must take the same number of steps, as they do with prepared loaders. On one
    process the block has no effect; after an exception in the block nothing is averaged.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: a prepared model.
        local_sgd_steps: optimizer steps between two averages, at least 1.
        enabled: if False, gradients are averaged in each step, as without the block.

    Raises:
        TypeError: ``local_sgd_steps`` is no integer.
        ValueError: it is below 1, or the model is not prepared.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator, LocalSGD
        >>> accel = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> with LocalSGD(accel, model, local_sgd_steps=2) as local_sgd:
        ...     for _ in range(4):
        ...         accel.backward(model(torch.ones(1, 1)).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local_sgd.step()
        >>> local_sgd.num_steps
        4
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if not isinstance(local_sgd_steps, int) or isinstance(local_sgd_steps, bool):
            raise TypeError(f"local_sgd_steps={local_sgd_steps!r} must be an integer.")
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps={local_sgd_steps} must be at least 1.")
        self.accelerator = accelerator
        self.model = _find_prepared(accelerator, model)
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._averaged_at = 0
        self._trained: set[int] = set()
        self._local: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> LocalSGD:
        self.num_steps = self._averaged_at = 0
        self._trained.clear()
        self._note_trained()
        if self.enabled:
            strategy = self.accelerator.strategy
            if strategy.sequences.shared:
                raise ValueError(
                    "LocalSGD does not work with cp_size or sp_size above 1: ranks that share a "
                    "sequence must have the same weights. Use gradient_accumulation_steps to "
                    "communicate less."
                )
            strategy.gradients.mark_unsynced(self.model)
            self._local = strategy.gradients.no_sync(self.model)
        self._local.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._local.__exit__(None, None, None)
        if error is None and self.num_steps > self._averaged_at:
            self._average()

    def step(self) -> None:
        """Count an optimizer step; has no effect inside of a gradient window.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator, LocalSGD
            >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with LocalSGD(accel, model, local_sgd_steps=8) as local_sgd:
            ...     for _ in range(4):
            ...         with accel.accumulate(model):
            ...             local_sgd.step()
            >>> local_sgd.num_steps
            2
        """
        if not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        self._averaged_at = self.num_steps
        if self.enabled:
            self._note_trained()
            _average(self._tensors_to_average(), self.accelerator.num_processes)

    def _note_trained(self) -> None:
        # Collected over the block: a parameter that was trained and then frozen differs too.
        self._trained |= {id(p) for p in self.model.parameters() if p.requires_grad}

    def _tensors_to_average(self) -> Iterator[torch.Tensor]:
        """Yield the tensors to average, in an order that is the same on all ranks."""
        yield from (p for p in self.model.parameters() if id(p) in self._trained)
        yield from (buffer for buffer in self.model.buffers() if buffer.is_floating_point())


def _find_prepared(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    inner = accelerator.strategy.unwrap(model)
    for known in accelerator.models:
        if accelerator.strategy.unwrap(known) is inner:
            return known
    raise ValueError(
        f"LocalSGD: this {type(inner).__name__} is not prepared; pass it to accelerator.prepare() "
        "first."
    )


@torch.no_grad()
def _average(tensors: Iterable[torch.Tensor], world_size: int) -> None:
    """Collective: replace each tensor by its mean over all ranks, in place."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        groups.setdefault((real.device, _carrier(real.dtype)), []).append(real.detach())
    for (_, dtype), group in groups.items():
        for batch in _batches(group):
            flat = torch.cat([part.to(dtype) for part in batch])
            flat /= world_size  # before the sum, which could overflow
            dist.all_reduce(flat, group=collectives.group_for(flat))
            means = torch.split(flat, [len(part) for part in batch])
            for part, mean in zip(batch, means, strict=True):
                part.copy_(mean)


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield flat parts of all tensors, so many at once that copies of them need little memory.

    The parts share memory with the tensors. One that is not contiguous goes through a copy, which
    is written back once its parts are done.
    """
    batch: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    room = _AVERAGED_TOGETHER
    for tensor in tensors:
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        if not tensor.is_contiguous():
            copies.append((tensor, flat))
        while len(flat):
            part, flat = flat[:room], flat[room:]
            batch.append(part)
            room -= len(part)
            if room == 0:
                yield batch
                _write_back(copies, still_open=tensor if len(flat) else None)
                batch, room = [], _AVERAGED_TOGETHER
    if batch:
        yield batch
    _write_back(copies)


def _write_back(
    copies: list[tuple[torch.Tensor, torch.Tensor]], still_open: torch.Tensor | None = None
) -> None:
    """Copy averaged copies into their tensors; keep that of a tensor of which parts are left."""
    for tensor, flat in copies:
        if tensor is not still_open:
            tensor.copy_(flat.view(tensor.shape))
    copies[:] = [pair for pair in copies if pair[0] is still_open]


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32 for dtypes with fewer bits."""
    return dtype if dtype.itemsize > 4 else torch.float32
