"""Fetch offloaded weights before a module's forward, and release them after it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch

from accel_callbacks.models.offload.contents import Filler, host_memory, lay_out
from accel_callbacks.models.offload.device_copies import device_copies, pinned
from accel_callbacks.models.offload.placeholder import (
    ON_DISK,
    AbsentWeight,
    AbsentWeightError,
    LostGradient,
    placeholder,
)
from accel_callbacks.models.offload.slots import Lent, Loan, Slot
from accel_callbacks.models.offload.source import StoredWeights
from accel_callbacks.models.offload.units import FetchUnit
from accel_callbacks.models.offload.window import Traffic, Window, forks
from checkpoint_io.warning import warn

__all__ = [
    "Offload",
    "OffloadOptions",
    "UnitHook",
    "attach",
    "offload_hook",
    "offload_hooks",
    "onloaded",
]

_CACHED = 0.9  # of the free memory; the rest is for activations
_IN_HOST_MEMORY = "in host memory"


class OffloadOptions(NamedTuple):
    """Options of fetching offloaded weights.

    Args:
        direct: read past the page cache; by default if the weights on disk do not fit the free
            host memory.
        ahead: units that are read ahead.
        patience: seconds without a byte after which a read counts as failed.

    Example:
        >>> from accel_callbacks.offload import OffloadOptions
        >>> OffloadOptions(patience=60.0).ahead
        1
    """

    direct: bool | None = None
    ahead: int = 1
    patience: float = 300.0


DEFAULTS = OffloadOptions()


class _Present(Lent):
    """A unit that is in the slots of its modules."""

    def __init__(self, memory: torch.Tensor | None) -> None:
        super().__init__(by_pointer=True)
        self.memory = memory


class Offload:
    """The offloaded weights of one dispatched model.

    It has no reference to the model: hooks of its modules refer to this. A copy (``deepcopy``,
    pickle) has a window of its own on the same files.

    Args:
        units: what is fetched together, in the order of the model.
        device: where the units run.
        stored: weights on disk, by name.
        held: weights in host memory, by name.
        options: how they are fetched.

    Raises:
        ValueError: a weight is neither held nor stored, or has another shape.
    """

    def __init__(
        self,
        units: Sequence[FetchUnit],
        device: torch.device,
        stored: StoredWeights,
        held: Mapping[str, torch.Tensor],
        options: OffloadOptions = DEFAULTS,
    ) -> None:
        self.device = device
        self.stored = stored
        self.held = dict(held)
        self.options = options
        wanted = [self._through_window(unit) for unit in units]
        names = {name for tensors in wanted for name in tensors if name not in self.held}
        self.direct = bool(options.direct)
        if options.direct is None:
            files = {stored.tensors[name] for name in names if name in stored.tensors}
            self.direct = not _fit_page_cache(sum(tensor.nbytes for tensor in files))
        self._contents = [lay_out(tensors, self.held, stored, self.direct) for tensors in wanted]
        self._dtypes = {
            name: tensor.dtype
            for unit in units
            for name, slots in unit.slots.items()
            if (tensor := slots[0].get()) is not None
        }
        self._sizes = _alike([contents.nbytes for contents in self._contents])
        self._limit = _window_bytes(units, self._sizes)
        self._warned_of_casts = False
        self._begin()

    def _begin(self) -> None:
        self._window: Window | None = None
        self._filler: Filler | None = None
        self._present: dict[int, _Present] = {}
        self._lock = threading.RLock()
        self._shared: set[str] = set()  # held weights that copies of this hold too
        self._given: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        forks().add(self)

    def after_fork(self) -> None:
        """Replace the lock in the child of a fork, which another thread may have held."""
        self._lock = threading.RLock()

    def _through_window(self, unit: FetchUnit) -> dict[str, torch.Tensor]:
        tensors = ((name, slots[0].get()) for name, slots in unit.slots.items())
        return {
            name: tensor
            for name, tensor in tensors
            if tensor is not None and not self._is_in_place(name)
        }

    def _is_in_place(self, name: str) -> bool:
        """Return whether a weight is used where it is held, without a window."""
        return name in self.held and self.held[name].device == self.device

    @property
    def window(self) -> Window:
        """The window; its thread and buffers begin with the first use."""
        with self._lock:
            if self._window is None:
                self._window = self._open_window()
            return self._window

    def _open_window(self) -> Window:
        copies = device_copies(self.device)
        if copies is not None:
            for name, tensor in self.held.items():
                self.held[name] = pinned(tensor)
        progress = _Progress()
        filler = Filler(self._contents, self.stored, self.held, progress, copies)
        allocate = host_memory if self.device.type == "cpu" else _on(self.device)
        window = progress.window = Window(
            self._sizes,
            filler,
            allocate if copies is None else copies.allocate,
            self._limit,
            ahead=self.options.ahead,
            patience=self.options.patience,
            describe=filler.describe,
            reading=filler.reading,
            copies=copies,
        )
        self._filler = filler
        weakref.finalize(self, window.close)
        return window

    @property
    def traffic(self) -> Traffic:
        """Counters of the window's traffic."""
        return Traffic() if self._window is None else self._window.traffic

    @property
    def window_limit(self) -> int:
        """Bytes of buffers that are kept."""
        return self._limit

    @property
    def window_bytes(self) -> int:
        """Bytes of buffers now."""
        return 0 if self._window is None else self._window.nbytes

    @property
    def escaped_bytes(self) -> int:
        """Bytes of evicted buffers that are still in use."""
        return 0 if self._window is None else self._window.escaped_nbytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory through which weights are converted, or copied to a device."""
        return 0 if self._filler is None else self._filler.staging_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the offloaded weights in files."""
        return sum(contents.stored_bytes for contents in self._contents)

    def warn_of_casts(self) -> None:
        """Warn once if autocast makes copies of weights, which stay until the backward pass."""
        kind = self.device.type
        if self._warned_of_casts or not torch.is_autocast_enabled(kind):
            return
        self._warned_of_casts = True
        fast = torch.get_autocast_dtype(kind)
        names = [
            name
            for contents in self._contents
            for name, weight in contents.weights.items()
            if weight.dtype == torch.float32 and len(weight.shape) > 1
        ]
        if names:
            warn(
                f"{names[0]} and other offloaded weights are float32: autocast makes a copy of "
                f"each in {fast}, which stays in memory until the backward pass. Dispatch the "
                f"model with dtype={fast}, or checkpoint the activations of its blocks."
            )

    def enter(self, index: int, unit: FetchUnit) -> torch.Tensor | None:
        """Put the weights of a unit into its slots; return its memory in the window.

        Raises:
            WeightReadError: it cannot be read.
        """
        # Before the lock is taken: a read may be slow, and other units go on meanwhile.
        memory = self.window.acquire(index) if self._contents[index].weights else None
        try:
            with self._lock:
                present = self._present.get(index)
                if present is None:
                    present = _Present(memory)
                    try:
                        self._put(index, unit, present)
                    except BaseException:
                        present.take()
                        raise
                    self._present[index] = present
                present.begin()
        except BaseException:
            if memory is not None:
                self.window.release(index)
            raise
        return memory

    def leave(self, index: int) -> bool:
        """Release a unit; return whether its weights have changed since.

        Buffers that a module in training has written to are held from then on.
        """
        is_changed = False
        with self._lock:
            present = self._present[index]
            if present.end():
                del self._present[index]
                for loan in present.take():
                    if loan.values is None:
                        is_changed = True
                    else:
                        self._keep(index, loan, present.memory)
        if present.memory is not None:
            self.window.release(index)
        return is_changed

    def _keep(self, index: int, loan: Loan, memory: torch.Tensor | None) -> None:
        """Hold the weights that have been written to a buffer."""
        self.hold(loan.name, loan.tensor, loan.instead_of)
        weight = self._contents[index].weights.get(loan.name)
        if weight is not None and memory is not None:
            weight.of(memory).copy_(loan.tensor)  # not read again for the next use

    def forget(self, index: int) -> None:
        """Discard the memory of a unit, which is read again for its next use."""
        if self._contents[index].weights:
            self.window.discard(index)

    def present(self, index: int) -> list[torch.Tensor]:
        """Return the weights of a unit that are in their slots now."""
        with self._lock:
            return [loan.tensor for loan in self._present.get(index, ())]

    def _put(self, index: int, unit: FetchUnit, present: _Present) -> None:
        memory = present.memory
        weights = self._contents[index].weights
        # Weights are plain tensors for torch.func and outside of inference mode too.
        with torch._C._DisableFuncTorch(), torch.inference_mode(False):
            for name, slots in unit.slots.items():
                stands = unit.placeholders[name]
                weight = weights.get(name)
                if weight is not None and memory is not None:
                    value = stands.filled(weight.of(memory))
                else:
                    value = stands.filled(self.held[name].detach())
                # The tensor of this call is dropped at its end, and a gradient with it.
                if value.requires_grad:
                    refusal = LostGradient(stands.weight_name)
                    value.register_hook(refusal)  # type: ignore[no-untyped-call]
                # Not where somebody has put another tensor, as torch.func.functional_call does.
                present.put(name, slots, value, stands)

    def fetched(self, index: int, name: str) -> torch.Tensor:
        """Return a weight as a view of the window, which lasts as long as the view."""
        weight = self._contents[index].weights.get(name)
        with torch._C._DisableFuncTorch():
            return self.held[name] if weight is None else self.window.view(index, weight.of)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight where it is held, or as a view of its mapped file.

        It has the dtype of the model, so that one that is stored in another dtype is read.
        """
        held = self.held.get(name)
        if held is not None:
            return held
        with self._lock:
            tensor = self._given.get(name)
            if tensor is None:
                mapped = self.stored.mapped(name)
                tensor = self._given[name] = mapped.to(self._dtypes.get(name, mapped.dtype))
            return tensor

    def writable(self, name: str) -> torch.Tensor:
        """Return a weight that is held in host memory, to be written to; not one of a copy's.

        Raises:
            AbsentWeightError: it is in use.
        """
        with self._lock:
            for index, present in self._present.items():
                if name in present:
                    raise AbsentWeightError(
                        f"{name} cannot be loaded into while its module runs (unit {index})."
                    )
            if name in self._shared:
                self._hold(name, self.held[name].clone())
            return self.held[name]

    def hold(self, name: str, value: torch.Tensor, stands: torch.Tensor) -> None:
        """Hold a weight in host memory, in place of what was held or stored.

        Args:
            name: of the weight.
            value: its values.
            stands: its placeholder.
        """
        assert isinstance(stands, AbsentWeight)
        stands.weight_place = _IN_HOST_MEMORY
        self._hold(name, value)

    def _hold(self, name: str, value: torch.Tensor) -> None:
        value = value.detach()
        if value.device.type != "cpu" and self.device.type != "cpu":
            value = value.cpu()
        with self._lock:
            opened = self._window is not None
            if opened and device_copies(self.device) is not None:
                value = pinned(value)
            self._shared.discard(name)
            self.held[name] = value
        # The window has the values of before.
        if opened:
            for index, contents in enumerate(self._contents):
                if name in contents.weights:
                    self.window.discard(index)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the window: a copy has its own."""
        left_out = ("_window", "_filler", "_present", "_lock", "_given", "_shared")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        """Return a copy that shares held weights, which are replaced and never changed."""
        offload = memo[id(self)] = Offload.__new__(Offload)
        offload.__setstate__({**self.__getstate__(), "held": dict(self.held)})
        offload._shared, self._shared = set(self.held), set(self.held)
        return offload


class _Progress:
    """Report bytes to the window, which is created later."""

    window: Window | None = None

    def __call__(self, count: int) -> None:
        if self.window is not None:
            self.window.progress(count)


def _fit_page_cache(nbytes: int) -> bool:
    """Return whether files of this size are likely to stay in the page cache."""
    from checkpoint_io.memory import free_memory

    free = free_memory()
    return free is None or nbytes <= _CACHED * free


def _on(device: torch.device) -> Callable[[int], torch.Tensor]:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)


def _alike(sizes: Sequence[int]) -> list[int]:
    """Return sizes rounded up to the largest within a hundredth, so that units share buffers.

    Equal blocks differ by a page where a file ends within one; the buffer of the smaller one would
    not do for the next, and there would be no room to read ahead.
    """
    largest: list[int] = []
    for size in sorted(set(sizes), reverse=True):
        if not largest or size < largest[-1] * 0.99:
            largest.append(size)
    return [min(bound for bound in largest if bound >= size) for size in sizes]


def _window_bytes(units: Sequence[FetchUnit], sizes: Sequence[int]) -> int:
    """Return the bytes that two consecutive modules need, with the units around them."""
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
    """The units in their modules' slots during one call.

    Args:
        offload: the weights of the model.
        units: the units to fetch, by index.
        summed: compare sums of the bytes too, since changes of ``weight.data`` count no version.
    """

    def __init__(
        self, offload: Offload, units: Sequence[tuple[int, FetchUnit]], summed: bool = False
    ) -> None:
        self._offload = offload
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._units: list[tuple[int, FetchUnit]] = []
        self._storages: dict[int, int] = {}
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._hooks: Any = None
        try:
            for index, unit in units:
                memory = offload.enter(index, unit)
                self._units.append((index, unit))
                if memory is not None:
                    self._storages[memory.untyped_storage()._cdata] = index
                    if summed:
                        self._sums[index] = memory, _sum_of(memory)
            if self._storages and torch.is_grad_enabled() and _may_pack():
                offload.warn_of_casts()
                self._outer = _outer_hooks()
                self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                self._hooks.__enter__()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> list[FetchUnit]:
        """Restore the placeholders; return the units that were changed."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        units, self._units = self._units, []
        changed = []
        for index, unit in reversed(units):
            before = self._sums.get(index)
            differs = before is not None and not torch.equal(before[1], _sum_of(before[0]))
            if self._offload.leave(index) or differs:
                changed.append(unit)
                self._offload.forget(index)
        return changed

    def end(self, failed: bool = False) -> None:
        """Restore the placeholders.

        Args:
            failed: the call has raised, and nothing else is raised.

        Raises:
            AbsentWeightError: a weight was changed in place.
        """
        changed = self._leave()
        if changed and not failed:
            names = list(changed[0].slots)
            raise AbsentWeightError(
                f"a weight of {changed[0].name or 'the model'} was changed in place while it was "
                "in memory, and the change would be lost: keep it resident, by a device in the "
                f"device_map (it has {', '.join(names[:3])})."
            )

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Save the position of a view in its unit, in place of the view."""
        unit = self._unit_of(tensor)
        if unit is None:
            return tensor if self._outer is None else (self._outer[1], self._outer[0](tensor))
        return _Saved(
            self._offload,
            unit,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def _unit_of(self, tensor: torch.Tensor) -> int | None:
        if type(tensor) not in _PLAIN or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            return self._storages.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # it has none, as sparse tensors
            return None

    @staticmethod
    def _unpack(saved: Any) -> Any:
        if isinstance(saved, _Saved):
            return saved.fetch()
        return saved[0](saved[1]) if isinstance(saved, tuple) else saved


def _sum_of(memory: torch.Tensor) -> torch.Tensor:
    whole = memory[: memory.numel() // 8 * 8].view(torch.int64).sum()
    return whole + memory[memory.numel() // 8 * 8 :].sum()


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _may_pack() -> bool:
    """Return False inside of torch.func's transforms, which allow no hooks of saved tensors."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled


def _outer_hooks() -> Any:
    """Return the hooks of saved tensors that are in force, None before torch 2.8."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


class _Saved(NamedTuple):
    """A view of a unit that backward fetches again."""

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
        with torch.no_grad():
            whole.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)
        return whole


class _Fetch(NamedTuple):
    """The way from a placeholder to its weight; copied and pickled with it."""

    offload: Offload
    unit: int
    name: str

    def __call__(self) -> torch.Tensor:
        """Return the weight as a view of the window."""
        return self.offload.fetched(self.unit, self.name)

    def held(self) -> torch.Tensor | None:
        """Return the tensor in host memory, None for a weight in a file."""
        return self.offload.held.get(self.name)


class UnitHook:
    """Brings the units of a module while it runs, around all of its other hooks.

    It takes the place of the module's ``_call_impl``, so that ``Module.compile`` compiles what is
    inside, and an exception in any hook finds it in force.

    Args:
        offload: where weights come from.
        units: what the module needs, with their numbers.
    """

    def __init__(self, offload: Offload, units: Sequence[tuple[int, FetchUnit]]) -> None:
        self.offload = offload
        self.units = list(units)
        self._handles: list[Any] = []

    def attach(self, module: torch.nn.Module) -> None:
        """Put placeholders into the slots, and bring the weights whenever the module is called."""
        _skip_frames(UnitHook.call, UnitHook.run, UnitHook._end, _Compiled.__call__)
        self.module = module
        self.put_placeholders()
        vars(module).update(_offload_hook=self, _call_impl=self.call, compile=self.compile)
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = self.around(module._compiled_call_impl)
        _Guard.on(module)
        for owner in {id(slot.module): slot.module for slot in self.slots()}.values():
            _Guard.on(owner)
            register: Any = owner.register_state_dict_post_hook
            self._handles.append(register(_state_hook(_fill, self)))
            register = owner.register_load_state_dict_pre_hook
            self._handles.append(register(_state_hook(_let_load, self)))
            register = owner.register_load_state_dict_post_hook
            self._handles.append(register(_state_hook(_hold_loaded, self)))

    def detach(self) -> None:
        """Leave the module as it was; what is in its slots stays there."""
        self.leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def leave(self) -> None:
        """Let calls of the module find its slots as they are."""
        for name in ("_offload_hook", "_call_impl", "compile"):
            vars(self.module).pop(name, None)
        compiled: Any = self.module._compiled_call_impl
        if isinstance(compiled, _Compiled):
            self.module._compiled_call_impl = compiled.call

    def slots(self) -> Iterator[Slot]:
        """Yield the places of all weights."""
        return (slot for _, unit in self.units for slots in unit.slots.values() for slot in slots)

    def put_placeholders(self) -> None:
        """Put placeholders where the weights were."""
        for index, unit in self.units:
            for name, slots in unit.slots.items():
                if name not in unit.placeholders:
                    was = slots[0].get()
                    assert was is not None
                    place = _IN_HOST_MEMORY if name in self.offload.held else ON_DISK
                    fetch = _Fetch(self.offload, index, name)
                    unit.placeholders[name] = placeholder(
                        was, name, place, self.offload.device, fetch
                    )
                for slot in slots:
                    slot.put(unit.placeholders[name])

    def placeholder_of(self, name: str) -> AbsentWeight:
        """Return what stands for a weight."""
        return next(u.placeholders[name] for _, u in self.units if name in u.placeholders)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its weights in memory."""
        return self.run(self.inside(), args, kwargs)

    def inside(self) -> Callable[..., Any]:
        """Return the call of the module without this."""
        return MethodType(type(self.module)._call_impl, self.module)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's call, and bring the weights outside of the compiled region."""
        call = torch.compile(self.inside(), *args, **kwargs)
        self.module._compiled_call_impl = self.around(call)

    def around(self, call: Callable[..., Any] | None) -> Any:
        """Return what brings the weights around a compiled call."""
        return None if call is None or isinstance(call, _Compiled) else _Compiled(self, call)

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call something with the module's weights in memory."""
        before = _set_eval_frame(None)  # nothing of the fetch is to be compiled
        try:
            use = _Use(self.offload, self.units)
        finally:
            _set_eval_frame(before)
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self._end(use, failed=True)
            raise
        self._end(use)
        return result

    def _end(self, use: _Use, failed: bool = False) -> None:
        before = _set_eval_frame(None)
        try:
            use.end(failed)
        finally:
            _set_eval_frame(before)

    _function: Any
    for _function in (call, run, _end):
        _function._torchdynamo_disable = True
        _function._torchdynamo_disable_msg = "offloaded weights are fetched"
    del _function


class _Compiled:
    """Brings the weights around the compiled call of a module."""

    def __init__(self, hook: UnitHook, call: Callable[..., Any]) -> None:
        self.hook = hook
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook.run(self.call, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["call"], name)


_set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def _skip_frames(*functions: Any) -> None:
    """Let dynamo leave the frames of functions alone, and compile what they call."""
    # Not through torch._dynamo, whose import takes seconds.
    frames: Any = torch._C._dynamo.eval_frame
    for function in functions:
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
            frames.set_code_exec_strategy(function.__code__, skip)
        elif hasattr(frames, "skip_code"):
            frames.skip_code(function.__code__)


class _Guard:
    """Refuses, before anything is changed, what would change weights that are in files.

    Args:
        module: a dispatched model, or a part of it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._guarded = module
        self.leaves_names = True

    @classmethod
    def on(cls, module: torch.nn.Module) -> None:
        """Guard a module."""
        if "_offload_guard" not in vars(module):
            guard = vars(module)["_offload_guard"] = cls(module)
            vars(module)["_apply"] = guard.apply
            register: Any = module.register_load_state_dict_pre_hook
            guard._handle = register(guard)

    def off(self) -> None:
        """Guard it no longer."""
        self._handle.remove()
        for name in ("_offload_guard", "_apply"):
            vars(self._guarded).pop(name, None)

    _handle: Any = None

    def __call__(
        self, module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Raise if a state dict has weights that are in files."""
        for name, weight in _absent_in(module):
            if weight.weight_place == ON_DISK and prefix + name in state:
                raise AbsentWeightError(
                    f"{weight.weight_name} is on disk and cannot be loaded into, nor can others of "
                    "this model: dispatch the new checkpoint, or leave the names of offloaded "
                    "weights out of the state dict and load it with strict=False."
                )

    def apply(self, function: Callable[..., Any], recurse: bool = True) -> Any:
        """Raise in ``to``, ``half`` and the like, before the rest of the model is changed."""
        for _, weight in _absent_in(self._guarded):
            raise AbsentWeightError(
                f"{weight.weight_name} is {weight.weight_place}, so the model can neither be moved "
                "nor converted: give the device_map and dtype= to load_checkpoint_and_dispatch, or "
                "take the weights back with "
                "accel_callbacks.utils.remove_hook_from_submodules(model)."
            )
        return type(self._guarded)._apply(self._guarded, function, recurse)  # type: ignore[no-untyped-call]


def _absent_in(module: torch.nn.Module) -> Iterator[tuple[str, AbsentWeight]]:
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if isinstance(tensor, AbsentWeight):
                yield name, tensor


def _state_hook(function: Callable[..., None], hook: UnitHook) -> Any:
    """Return a hook of state dicts that copies and pickles with a module's hook."""
    state_hook = partial(function, hook)
    vars(state_hook)["leaves_names"] = True  # names and shapes of the state are the tensors'
    return state_hook


def _fill(
    hook: UnitHook, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Put weights in place of the placeholders in a state dict."""
    for name, slot in _slots_of(hook, module):
        value = state.get(prefix + slot.key)
        if isinstance(value, AbsentWeight):
            state[prefix + slot.key] = value.filled(hook.offload.tensor(name))  # keep_vars


def _let_load(
    hook: UnitHook, module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any
) -> None:
    """Let ``load_state_dict`` write to the weights that are held in host memory."""
    for name, slot in _slots_of(hook, module):
        stands = slot.get()
        if isinstance(stands, AbsentWeight) and prefix + slot.key in state:
            slot.put(stands.filled(hook.offload.writable(name)))


def _hold_loaded(hook: UnitHook, module: torch.nn.Module, incompatible: Any) -> None:
    """Hold what ``load_state_dict`` has written, and put back the placeholders."""
    for name, slot in _slots_of(hook, module):
        loaded, stands = slot.get(), hook.placeholder_of(name)
        if loaded is not stands and loaded is not None and name in hook.offload.held:
            hook.offload.hold(name, loaded, stands)
            slot.put(stands)


def _slots_of(hook: UnitHook, module: torch.nn.Module) -> list[tuple[str, Slot]]:
    return [
        (name, slot)
        for _, unit in hook.units
        for name, slots in unit.slots.items()
        for slot in slots
        if slot.module is module
    ]


def attach(model: torch.nn.Module, offload: Offload, units: Sequence[FetchUnit]) -> None:
    """Put placeholders into a model, and hooks that bring the weights.

    Args:
        model: the model.
        offload: where weights come from.
        units: those that it was made of.
    """
    needed: dict[int, tuple[torch.nn.Module, list[tuple[int, FetchUnit]]]] = {}
    for index, unit in enumerate(units):
        for module in unit.triggers:
            needed.setdefault(id(module), (module, []))[1].append((index, unit))
    for module, pairs in needed.values():
        UnitHook(offload, pairs).attach(module)
    for module in model.modules():
        if next(_absent_in(module), None) is not None:
            _Guard.on(module)


def offload_hooks(model: torch.nn.Module) -> Iterator[UnitHook]:
    """Yield the hooks of a dispatched model."""
    for module in model.modules():
        hook = vars(module).get("_offload_hook")
        if hook is not None:
            yield hook


def offload_hook(module: torch.nn.Module) -> Any:
    """Return the hook around a module's forward that offloads its weights; None without one."""
    pending = [getattr(module, "_hf_hook", None)]
    while pending:
        hook = pending.pop()
        if getattr(hook, "offload", False) is True:
            return hook
        pending.extend(getattr(hook, "hooks", ()))
    return None


@contextmanager
def onloaded(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: all weights of a module are in memory, to be read.

    Args:
        module: a dispatched model, or a part of one; or one whose weights hooks around its forwards
            offload, which keep changes in place.

    Raises:
        AbsentWeightError: at the end, if one of a dispatched model was changed in place.

    Example:
        >>> import torch
        >>> from accel_callbacks.models.offload.residence import onloaded
        >>> with onloaded(torch.nn.Linear(1, 1)):
        ...     pass
    """
    with ExitStack() as stack:
        for hook in offload_hooks(module):
            use = _Use(hook.offload, hook.units, summed=True)
            stack.push(lambda kind, *details, use=use: use.end(failed=kind is not None))
        for owner in module.modules():
            if (hook_around := offload_hook(owner)) is not None:
                hook_around.pre_forward(owner)
                stack.callback(hook_around.post_forward, owner, None)
        yield
