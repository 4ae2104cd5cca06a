"""Report the memory, files and traffic of a dispatched model, from the tensors alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from accel_callbacks.models.offload.placeholder import AbsentWeight
from accel_callbacks.models.offload.residence import Offload, offload_hooks
from accel_callbacks.models.offload.window import Traffic
from accel_callbacks.terminal_text import size_of

__all__ = ["OffloadReport", "report"]


@dataclass(frozen=True)
class OffloadReport:
    """The places of a model's weights, and the traffic so far, in bytes.

    Args:
        resident: of the weights that stay on each device, by its name.
        held: of the offloaded weights that are held in host memory.
        on_disk: of the offloaded weights in files, as they are stored.
        window: of the buffers for units in use and on their way, now.
        window_limit: of the buffers that are kept.
        window_device: where the buffers are.
        escaped: of the buffers that were given up and that somebody still has a view of.
        staging: of the host memory for conversions and for copies to an accelerator.
        traffic: what has passed through the window; its ``peak`` is the most that it has had.
        direct: files are read past the page cache.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload import report
        >>> report(torch.nn.Linear(3, 1)).window
        0
    """

    resident: Mapping[str, int]
    held: int
    on_disk: int
    window: int
    window_limit: int
    window_device: str
    escaped: int
    staging: int
    traffic: Traffic
    direct: bool

    def table(self) -> str:
        """Return the report as text, one figure a line.

        Example:
            >>> import torch
            >>> from accel_callbacks.offload import report
            >>> print(report(torch.nn.Linear(3, 1)).table().splitlines()[0])
            resident on cpu            16 B
        """
        traffic = self.traffic
        lines = [(f"resident on {device}", size_of(n)) for device, n in self.resident.items()]
        if self.held or self.on_disk:
            how = "past the page cache" if self.direct else "through the page cache"
            lines += [
                ("held in host memory", size_of(self.held)),
                ("on disk", f"{size_of(self.on_disk)}, read {how}"),
                (f"window on {self.window_device}", f"{size_of(self.window)} now"),
                ("  limit", size_of(self.window_limit)),
                ("  peak", size_of(traffic.peak)),
                ("  given up, still in use", f"{size_of(self.escaped)}, {traffic.escapes} buffers"),
                ("staging in host memory", size_of(self.staging)),
                ("bytes read", f"{size_of(traffic.bytes_read)} in {traffic.fetches} fetches"),
                ("hits and misses", f"{traffic.hits} and {traffic.misses}"),
                ("waited", f"{traffic.waited:.3f} s"),
            ]
        return "\n".join(f"{name:<26} {value}" for name, value in lines)


def report(model: torch.nn.Module) -> OffloadReport:
    """Return the memory, files and traffic of a model.

    Args:
        model: a dispatched model, or a part of one; of a part, only the weights are its own: its
            window is that of the whole model.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload import report
        >>> dict(report(torch.nn.Linear(3, 1)).resident)
        {'cpu': 16}
    """
    names: dict[int, tuple[Offload, set[str]]] = {}
    for hook in offload_hooks(model):
        _, slots = names.setdefault(id(hook.offload), (hook.offload, set()))
        slots.update(name for _, unit in hook.units for name in unit.slots)
    offloads = [offload for offload, _ in names.values()]
    held = [
        offload.held[name]
        for offload, slots in names.values()
        for name in slots & set(offload.held)
    ]
    files = {
        offload.stored.tensors[name]
        for offload, slots in names.values()
        for name in slots - set(offload.held)
    }
    return OffloadReport(
        _resident(model),
        sum(_storages(held).values()),
        sum(entry.nbytes for entry in files),
        sum(offload.window_bytes for offload in offloads),
        sum(offload.window_limit for offload in offloads),
        ", ".join(sorted({str(offload.device) for offload in offloads})),
        sum(offload.escaped_bytes for offload in offloads),
        sum(offload.staging_bytes for offload in offloads),
        _sum(offloads),
        any(offload.direct for offload in offloads),
    )


def _resident(model: torch.nn.Module) -> dict[str, int]:
    """Return the bytes of the weights that stay on each device, each storage once."""
    # The memory of weights that are in their slots now is the window's.
    fetched = {
        id(tensor)
        for hook in offload_hooks(model)
        for index, _ in hook.units
        for tensor in hook.offload.present(index)
    }
    by_device: dict[str, list[torch.Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, AbsentWeight) and id(tensor) not in fetched:
            by_device.setdefault(str(tensor.device), []).append(tensor)
    return {
        device: sum(_storages(tensors).values()) for device, tensors in sorted(by_device.items())
    }


def _storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # it has none, as sparse tensors
            sizes[id(tensor)] = tensor.nbytes
    return sizes


def _sum(offloads: list[Offload]) -> Traffic:
    total = Traffic()
    for offload in offloads:
        for name, value in vars(offload.traffic).items():
            setattr(total, name, getattr(total, name) + value)
    return total
