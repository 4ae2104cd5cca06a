"""Units that come when their module runs: the hooks, and what they share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from accel_callbacks.offload.placeholder import (
    ON_DISK,
    AbsentWeight,
    AbsentWeightError,
    placeholder,
)
from accel_callbacks.offload.source import Reader, Reads, StoredWeights, plan_reads
from accel_callbacks.offload.units import Slot, Unit
from accel_callbacks.offload.window import Traffic, Window
from accel_callbacks.warning import warn

__all__ = ["Offload", "OffloadOptions", "UnitHook", "offload_hooks", "onloaded"]

_ALIGNMENT = 64


class OffloadOptions(NamedTuple):
    """How offloaded weights are fetched.

    Args:
        direct: read past the page cache, for models larger than the free memory.
        ahead: units that are read ahead.
        patience: seconds without a byte after which a read counts as failed.
    """

    direct: bool = False
    ahead: int = 1
    patience: float = 300.0


DEFAULTS = OffloadOptions()


class _Weight(NamedTuple):
    """A weight in the memory of a unit."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        part = memory[self.offset : self.offset + self.nbytes]
        if self.nbytes:
            return part.view(self.dtype).view(self.shape)
        return torch.empty(self.shape, dtype=self.dtype, device=memory.device)


@dataclass(frozen=True)
class _Contents:
    """What a unit's memory holds, and how it is filled.

    Args:
        nbytes: of the memory.
        weights: by name.
        reads: of stored weights that are read to their places.
        converted: reads of stored weights of another dtype or device, to memory of their own.
    """

    nbytes: int
    weights: Mapping[str, _Weight]
    reads: Reads | None
    converted: Reads | None


class _Filler:
    """Fills the memory of units, on the thread of the window.

    It knows no modules: the thread keeps it alive.
    """

    def __init__(
        self,
        contents: Sequence[_Contents],
        stored: StoredWeights,
        held: Mapping[str, torch.Tensor],
        progress: Callable[[int], None],
    ) -> None:
        self._contents = contents
        self._stored = stored
        self._held = held
        self._progress = progress
        self._reader = Reader(stored, progress)

    def __call__(self, unit: int, memory: torch.Tensor) -> int:
        contents = self._contents[unit]
        count = 0
        if contents.reads is not None:
            count += self._reader.fill(contents.reads, memory)
        raw = None
        if contents.converted is not None:
            raw = host_memory(contents.converted.nbytes)
            count += self._reader.fill(contents.converted, raw)
        for name, weight in contents.weights.items():
            held = self._held.get(name)
            if held is not None:
                weight.of(memory).copy_(held)
                self._progress(held.nbytes)
            elif raw is not None and contents.converted is not None:
                at, stored = contents.converted.places[name], self._stored.tensors[name]
                part = raw[at : at + stored.nbytes].view(stored.dtype).view(stored.shape)
                weight.of(memory).copy_(part)
        return count

    def describe(self, unit: int) -> str:
        names = list(self._contents[unit].weights)
        shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        return f"{shown} from {self._reader.reading or 'memory'}"


def host_memory(nbytes: int) -> torch.Tensor:
    """Return page-aligned bytes of host memory, as direct reads ask for.

    Example:
        >>> from accel_callbacks.offload.residence import host_memory
        >>> host_memory(3).numel()
        3
    """
    from checkpoint_io.storage.buffers import aligned

    return torch.frombuffer(aligned(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


class Offload:
    """The offloaded weights of one dispatched model.

    It has no reference to the model: hooks of its modules refer to this.

    Args:
        units: what is fetched together, in the order of the model.
        device: where the units run.
        stored: weights on disk, by name.
        held: weights in host memory, by name.
        options: how they are fetched.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        stored: StoredWeights,
        held: Mapping[str, torch.Tensor],
        options: OffloadOptions = DEFAULTS,
    ) -> None:
        self.device = device
        self.stored = stored
        self.held = dict(held)
        self.options = options
        self._contents = [self._lay_out(unit) for unit in units]
        self._sizes = _alike([one.nbytes for one in self._contents])
        self._limit = _window_bytes(units, self._sizes)
        self._window: Window | None = None
        self._mapped: weakref.WeakValueDictionary[str, torch.Tensor]
        self._mapped = weakref.WeakValueDictionary()
        self._warned_of_casts = False

    def _lay_out(self, unit: Unit) -> _Contents:
        """Return where the weights of a unit are in its memory."""
        tensors = {name: slots[0].get() for name, slots in unit.slots.items()}
        wanted = {
            name: _Weight(0, one.dtype, tuple(one.shape))
            for name, one in tensors.items()
            if one is not None and not self.is_direct(name)
        }
        on_disk = {name: self.stored.tensors[name] for name in wanted if name not in self.held}
        as_stored = {
            name: one
            for name, one in on_disk.items()
            if one.dtype == wanted[name].dtype and self.device.type == "cpu"
        }
        reads = plan_reads(as_stored, self.options.direct) if as_stored else None
        rest = {name: one for name, one in on_disk.items() if name not in as_stored}
        converted = plan_reads(rest, self.options.direct) if rest else None
        position = 0 if reads is None else _up(reads.nbytes)
        for name, weight in wanted.items():
            if reads is not None and name in reads.places:
                wanted[name] = weight._replace(offset=reads.places[name])
            else:
                wanted[name] = weight._replace(offset=position)
                position = _up(position + weight.nbytes)
        return _Contents(position, wanted, reads, converted)

    def is_direct(self, name: str) -> bool:
        """Return whether a weight is used where it is held, without a window."""
        return name in self.held and self.held[name].device == self.device

    @property
    def window(self) -> Window:
        """The window; its thread and buffers begin with the first use."""
        if self._window is None:
            progress = _Progress()
            filler = _Filler(self._contents, self.stored, self.held, progress)
            self._window = progress.window = Window(
                self._sizes,
                filler,
                host_memory if self.device.type == "cpu" else _on(self.device),
                self._limit,
                ahead=self.options.ahead,
                patience=self.options.patience,
                describe=filler.describe,
            )
            weakref.finalize(self, self._window.close)
        return self._window

    @property
    def traffic(self) -> Traffic:
        """What has passed through the window."""
        return Traffic() if self._window is None else self._window.traffic

    @property
    def window_limit(self) -> int:
        """Bytes of buffers that are kept."""
        return self._limit

    def warn_of_casts(self) -> None:
        """Warn once if autocast makes copies of weights, which stay until the backward pass."""
        kind = self.device.type
        if self._warned_of_casts or not torch.is_autocast_enabled(kind):
            return
        self._warned_of_casts = True
        fast = torch.get_autocast_dtype(kind)
        found = [
            name
            for contents in self._contents
            for name, weight in contents.weights.items()
            if weight.dtype == torch.float32 and len(weight.shape) > 1
        ]
        if found:
            warn(
                f"{found[0]} and other offloaded weights are float32: autocast makes a copy of "
                f"each in {fast}, which stays in memory until the backward pass. Dispatch the "
                f"model with dtype={fast}, or checkpoint the activations of its blocks."
            )

    def is_empty(self, unit: int) -> bool:
        """Return whether a unit needs no memory of the window."""
        return not self._contents[unit].weights

    def weights(self, unit: int, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in a unit's memory."""
        for name, weight in self._contents[unit].weights.items():
            yield name, weight.of(memory)

    def weight(self, unit: int, name: str) -> torch.Tensor:
        """Return a weight where its module runs; its memory lasts as long as the tensor."""
        weight = self._contents[unit].weights.get(name)
        return self.held[name] if weight is None else self.window.view(unit, weight.of)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight where it is held, or as a view of its mapped file."""
        held = self.held.get(name)
        if held is None:
            held = self._mapped.get(name)  # one tensor for all names of a tied weight
        if held is None:
            held = self._mapped[name] = self.stored.mapped(name)
        return held

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the window: a copy has its own."""
        return {**self.__dict__, "_window": None, "_mapped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._mapped = weakref.WeakValueDictionary()


class _Progress:
    """Tells the window about bytes; made before it."""

    window: Window | None = None

    def __call__(self, count: int) -> None:
        if self.window is not None:
            self.window.progress(count)


class _Refusal(NamedTuple):
    """A gradient hook that raises: the gradient of a weight that goes away would be lost."""

    name: str

    def __call__(self, gradient: torch.Tensor) -> None:
        raise AbsentWeightError(
            f"{self.name} is offloaded and requires a gradient, which would be lost: freeze it "
            "with requires_grad_(False), or keep it resident by a device in the device_map."
        )


def _on(device: torch.device) -> Callable[[int], torch.Tensor]:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)


def _up(value: int) -> int:
    return -(-value // _ALIGNMENT) * _ALIGNMENT


def _alike(sizes: Sequence[int]) -> list[int]:
    """Return sizes rounded up to the largest within a hundredth, so that units share buffers.

    Equal blocks differ by a page where a file ends within one; the buffer of the smaller one would
    not do for the next, and there would be no room to read ahead.
    """
    largest: list[int] = []
    for size in sorted(set(sizes), reverse=True):
        if not largest or size < largest[-1] * 0.99:
            largest.append(size)
    return [min(one for one in largest if one >= size) for size in sizes]


def _window_bytes(units: Sequence[Unit], sizes: Sequence[int]) -> int:
    """Return the bytes that two modules in a row need, with what runs around them."""
    scoped = sum(size for unit, size in zip(units, sizes, strict=True) if unit.scoped)
    needs: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        if not unit.scoped:
            for trigger in unit.triggers:
                needs.setdefault(id(trigger), set()).add(index)
    order = list(needs.values())
    pairs = [first | second for first, second in zip(order, [*order[1:], *order[:1]], strict=True)]
    return scoped + max((sum(sizes[index] for index in pair) for pair in pairs), default=0)


class _Use:
    """Units that are in their modules' slots."""

    def __init__(self, offload: Offload, units: Sequence[tuple[int, Unit]]) -> None:
        self._offload = offload
        self._left = ExitStack()
        self._versions: list[tuple[int, Unit, torch.Tensor, int]] = []
        self._storages: dict[int, int] = {}
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        try:
            for index, unit in units:
                self._put(index, unit)
            if torch.is_grad_enabled() and self._storages:
                offload.warn_of_casts()
                self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
                hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                self._left.enter_context(hooks)
        except BaseException:
            self._left.close()
            raise

    def _put(self, index: int, unit: Unit) -> None:
        values: dict[str, torch.Tensor] = {}
        if not self._offload.is_empty(index):
            memory = self._offload.window.acquire(index)
            self._left.callback(self._offload.window.release, index)
            values.update(self._offload.weights(index, memory))
            self._storages[memory.untyped_storage().data_ptr()] = index
            self._versions.append((index, unit, memory, memory._version))
        for name, slots in unit.slots.items():
            value = values.get(name)
            if value is None:
                value = self._offload.tensor(name)
            value = _in_place_of(slots[0].get(), name, value)
            for slot in slots:
                stands = slot.get()
                assert stands is not None
                self._left.callback(slot.put, stands)
                slot.put(value)

    def end(self) -> None:
        """Put back the placeholders."""
        changed = [
            (index, unit)
            for index, unit, memory, version in self._versions
            if memory._version != version
        ]
        self._left.close()
        if changed:
            for index, _ in changed:
                self._offload.window.discard(index)
            unit = changed[0][1]
            raise AbsentWeightError(
                f"a weight of {unit.name} was changed in place while it was in memory, and "
                "the change would be lost: keep it resident, by a device in the device_map "
                f"(it has {', '.join(list(unit.slots)[:3])})."
            )

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Save where a view of a unit is, in place of the view."""
        unit = self._storages.get(tensor.untyped_storage().data_ptr())
        if unit is None or tensor.is_conj() or tensor.is_neg():
            return tensor if self._outer is None else (self._outer[1], self._outer[0](tensor))
        return _Saved(
            self._offload,
            unit,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    @staticmethod
    def _unpack(saved: Any) -> Any:
        if isinstance(saved, _Saved):
            return saved.fetch()
        return saved[0](saved[1]) if isinstance(saved, tuple) else saved


class _Saved(NamedTuple):
    """A view of a unit that the backward pass needs: fetched again for it."""

    offload: Offload
    unit: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> torch.Tensor:
        """Return the same view of the unit's memory."""
        return self.offload.window.view(self.unit, self._look)

    def _look(self, memory: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(0, dtype=self.dtype, device=memory.device)
        whole.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)
        return whole


@dataclass(frozen=True)
class _Fetch:
    """Fetches one weight outside of its module."""

    offload: Offload
    unit: int
    name: str

    def __call__(self) -> torch.Tensor:
        return self.offload.weight(self.unit, self.name)


def _in_place_of(stands: torch.Tensor | None, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as the parameter or buffer that a placeholder stands for."""
    if not isinstance(stands, torch.nn.Parameter):
        return weight
    trained = stands.is_trained if isinstance(stands, AbsentWeight) else stands.requires_grad
    parameter = torch.nn.Parameter(weight, trained)
    if trained and torch.is_grad_enabled():
        parameter.register_hook(_Refusal(name))  # type: ignore[no-untyped-call]
    return parameter


class UnitHook:
    """Brings the units of a module while it runs: a forward pre-hook and a forward hook.

    Args:
        offload: where weights come from.
        units: what the module needs, with their numbers.
    """

    def __init__(self, offload: Offload, units: Sequence[tuple[int, Unit]]) -> None:
        self.offload = offload
        self.units = list(units)
        self._uses: list[_Use | None] = []

    def attach(self, module: torch.nn.Module) -> None:
        """Register the hooks, and put placeholders into the slots."""
        self.put_placeholders()
        before = module.register_forward_pre_hook(self.before, prepend=True)
        after = module.register_forward_hook(self.after, always_call=True)
        self._handles = [before, after]
        owners = {id(slot.module): slot.module for slot in self._slots()}
        for owner in owners.values():
            register: Any = owner.register_state_dict_post_hook
            self._handles.append(register(_StateHook(self)))
        vars(module)["_offload_hook"] = self

    def _slots(self) -> Iterator[Slot]:
        return (slot for _, unit in self.units for slots in unit.slots.values() for slot in slots)

    def put_placeholders(self) -> None:
        """Put placeholders where the weights were."""
        for index, unit in self.units:
            for name, slots in unit.slots.items():
                was = slots[0].get()
                assert was is not None
                where = "in host memory" if name in self.offload.held else ON_DISK
                stands = placeholder(
                    was, name, where, self.offload.device, _Fetch(self.offload, index, name)
                )
                for slot in slots:
                    slot.put(stands)

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """Fetch the units."""
        self._uses.append(None)
        self._uses[-1] = _Use(self.offload, self.units)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Let go of the units."""
        use = self._uses.pop() if self._uses else None
        if use is not None:
            use.end()


class _StateHook:
    """Puts weights in place of the placeholders in a state dict.

    Args:
        hook: of the module that needs them.
    """

    #: Names and shapes of the state are those of the tensors.
    leaves_names = True

    def __init__(self, hook: UnitHook) -> None:
        self._hook = hook

    def __call__(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for _, unit in self._hook.units:
            for name, slots in unit.slots.items():
                for slot in slots:
                    if slot.module is module and prefix + slot.key in state:
                        state[prefix + slot.key] = self._hook.offload.tensor(name)


def offload_hooks(model: torch.nn.Module) -> Iterator[UnitHook]:
    """Yield the hooks of a dispatched model.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.residence import offload_hooks
        >>> list(offload_hooks(torch.nn.Linear(1, 1)))
        []
    """
    for module in model.modules():
        hook = vars(module).get("_offload_hook")
        if hook is not None:
            yield hook


def held_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the offloaded weights of a model that are held in host memory, each once.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.residence import held_weights
        >>> held_weights(torch.nn.Linear(1, 1))
        []
    """
    offloads = {id(hook.offload): hook.offload for hook in offload_hooks(model)}
    found = {id(one): one for offload in offloads.values() for one in offload.held.values()}
    return list(found.values())


@contextmanager
def onloaded(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: all weights of a module are in memory, to be read.

    Args:
        module: a dispatched model, or a part of one.

    Raises:
        AbsentWeightError: at the end, if one was changed in place.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.residence import onloaded
        >>> with onloaded(torch.nn.Linear(1, 1)):
        ...     pass
    """
    with ExitStack() as stack:
        for hook in offload_hooks(module):
            use = _Use(hook.offload, hook.units)
            stack.callback(use.end)
        yield
