"""Load weights of any supported format into a model, or as a state dict."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from checkpoint_io.errors import (
    CheckpointError,
    CheckpointWarning,
    StateMismatchError,
    TornLoadError,
)
from checkpoint_io.format.safetensors import as_bytes
from checkpoint_io.loader.selection import (
    Matched,
    Only,
    Rename,
    match_names,
    reusable,
    unmatched_patterns,
)
from checkpoint_io.progress import TransferProgress
from checkpoint_io.sharding.dtensor import is_dtensor
from checkpoint_io.warning import warn
from checkpoint_io.weights.find import open_weights
from checkpoint_io.weights.mapped import map_tensors, mappable, misaligned, read_ahead
from checkpoint_io.weights.safetensors import SafetensorsSource
from checkpoint_io.weights.source import WeightInfo, WeightSource

__all__ = ["LoadReport", "load_model", "load_model_state"]

WantedDtype = torch.dtype | Callable[[str], "torch.dtype | None"] | None
Slot = tuple[dict[str, Any], str]  # the _parameters or _buffers of a module, and a key in it
_SHOWN = 8


def load_model(
    model: torch.nn.Module,
    url: str | os.PathLike[str],
    *,
    only: Only | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    dtype: WantedDtype = None,
    device: torch.device | str | None = None,
    mapped: bool = False,
    model_index: int = 0,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load weights into a model's own parameters and buffers.

    All names, shapes and dtypes are checked before anything changes. No second copy of the
    weights is made. Tied parameters stay tied; different values stored for them are an error.
    Sharded parameters (DTensors) load their local part, so every rank calls this. Hooks of modules
    around `load_state_dict` do not run.

    Args:
        model: the module, which may be wrapped by DDP or `torch.compile`.
        url: a path or any fsspec URL of one of these:
            a `.safetensors` file; a `.bin`, `.pt` or `.pth` file of `torch.save`, which must hold
            a dict of tensors and is read with `weights_only=True`; an `.index.json`; a folder
            with `model.safetensors`, or an index and its shards, or `pytorch_model.bin`; a
            checkpoint of this package (of it, `models/<model_index>`, or else `model`); a folder
            of `torch.distributed.checkpoint` (of it, the model), or one that DeepSpeed wrote (of
            it, the weights that the optimizer steps with), whose pickles are not executed.
        only: which stored names to load: glob patterns or a function; default all.
        rename: prefixes of stored names mapped to their replacements, or a function.
        strict: missing and unexpected names, and patterns that match nothing, are errors.
        dtype: the floating-point dtype of the loaded tensors, or a function of the name that
            returns it; default: that of the parameters. Values are converted between floating
            dtypes; any other difference is an error.
        device: the device of the loaded tensors; default: that of the parameters (those on the
            meta device get memory on the CPU).
        mapped: whether the loaded tensors become views of the safetensors files, mapped into
            memory, see `checkpoint_io.weights.map_tensors`: loading reads and copies nothing, and
            weights that nobody writes to take no memory of this process. A tensor that cannot be
            mapped, since the model has another dtype, layout or device for it, is copied, and a
            warning names it. The files must not be truncated or overwritten in place while the
            model lives; replacing them by rename is safe.
        model_index: number of the model in a checkpoint that holds several.
        progress: a progress bar; None shows one for a long load on a terminal.
        storage_options: passed to the fsspec driver.

    Returns:
        The names that did not match; empty lists unless `strict=False`.

    Raises:
        CheckpointNotFoundError: there are no weights.
        CorruptCheckpointError: they are damaged, refer to files outside of their folder, or are a
            pickle of more than tensors; nothing was changed.
        StateMismatchError: names, shapes or dtypes do not fit; nothing was changed.
        TornLoadError: reading failed after the model had been written to.
        CheckpointError: with `mapped`, the weights are in another format than safetensors or not on
            this machine, or no tensor can be mapped; nothing was changed.
        ValueError: `mapped` with a device other than the CPU.

    Example:
        >>> import torch
        >>> from checkpoint_io import load_model, save_model
        >>> trained, fresh = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> _ = save_model(trained.state_dict(), "memory://doc-weights/m")
        >>> load_model(fresh, "memory://doc-weights/m")
        LoadReport(missing=[], unexpected=[])
        >>> torch.equal(fresh.weight, trained.weight)
        True
    """
    to_device = None if device is None else torch.device(device)
    if mapped and to_device is not None and to_device.type != "cpu":
        raise ValueError(f"mapped=True is for weights on the CPU, not on {to_device}: leave it out")
    source = open_weights(url, model_index, storage_options)
    files = mappable(source) if mapped else None
    targets = ModelTargets(model)
    available, only = [*source.infos, *source.tied], reusable(only)
    unmatched = unmatched_patterns(only, available, source.where, strict)
    matched = _without_tied(match_names(targets.tensors, available, only, rename), targets)
    if strict:
        matched.require(source.where)
    chosen = _once_each(matched.pairs, source, targets)
    _check(chosen, source, targets)
    _check_ties(matched.pairs, source, targets)
    views: dict[str, torch.Tensor] = {}
    if files is not None:
        stored_as = dict(chosen)
        views, chosen = _map(chosen, files, targets, dtype, to_device)
    # no error up to here has changed the model; every one from here on may have
    with torch.no_grad(), _mixture_on_failure(source.where, targets):
        targets.prepare([name for name, _ in chosen], dtype, to_device)
        targets.changed = True
        targets.replace(views)
        if files is not None:
            read_ahead(files, {stored_as[name] for name in views})
        _read(source, [(stored, targets.tensors[name]) for name, stored in chosen], progress)
    return LoadReport([*matched.missing, *unmatched], matched.unexpected)


class LoadReport(NamedTuple):
    """The names that `load_model(..., strict=False)` could not match.

    Attributes:
        missing: names of the model for which nothing was stored; they keep their values.
        unexpected: stored names that the model does not have.

    Example:
        >>> from checkpoint_io import LoadReport
        >>> missing, unexpected = LoadReport(["head.weight"], [])
    """

    missing: list[str]
    unexpected: list[str]


def load_model_state(
    url: str | os.PathLike[str],
    *,
    model_index: int = 0,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Load model weights as a state dict, from any format that `load_model` reads.

    Args:
        url: a file of weights, an index, or a folder: see `load_model`.
        model_index: number of the model in a checkpoint that holds several.
        progress: a progress bar; None shows one for a long load on a terminal.
        storage_options: passed to the fsspec driver.

    Returns:
        Names to new CPU tensors; tied names that `save_model` noted share one tensor.

    Raises:
        CheckpointNotFoundError: there are no weights.
        CorruptCheckpointError: a file is missing, damaged, or outside the folder. (Only
            checkpoints of this package have checksums: use `save` where flipped bits must be
            detected.)

    Example:
        >>> import torch
        >>> from checkpoint_io import load_model_state, save_model
        >>> _ = save_model({"w": torch.ones(2)}, "memory://doc-hf/load")
        >>> load_model_state("memory://doc-hf/load")
        {'w': tensor([1., 1.])}
    """
    source = open_weights(url, model_index, storage_options)
    state = {
        key: torch.empty(i.shape, dtype=i.dtype, device="cpu") for key, i in source.infos.items()
    }
    size = sum(info.nbytes for info in source.infos.values())
    with TransferProgress("loading", size, progress) as bar:
        source.read(list(state.items()), bar)
    return {**{key: state[kept] for key, kept in source.tied.items()}, **state}


class ModelTargets:
    """Parameters and persistent buffers of a model, under the names of its state dict.

    Args:
        model: a module; the wrappers of DDP and `torch.compile` are removed.

    Attributes:
        changed: whether `prepare` has discarded the values of a tensor.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = _bare(model)
        state = self._model.state_dict(keep_vars=True)
        self.tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        self.changed = False
        self._own: set[int] | None = None
        self._storages: Counter[int] | None = None
        by_mark: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            by_mark.setdefault(id(tensor), []).append(name)
        self._names = {name: names for names in by_mark.values() for name in names}

    def is_own(self, name: str) -> bool:
        """Return whether this is the model's own memory, not a copy that a hook has made."""
        if self._own is None:
            self._own = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        return id(self.tensors[name]) in self._own

    def names_of(self, name: str) -> list[str]:
        """Return all names of the tensor that has this one, in the model's order."""
        return self._names[name]

    def placed(
        self, name: str, dtype: WantedDtype, device: torch.device | None
    ) -> tuple[torch.dtype, torch.device]:
        """Return the dtype and device that a tensor has once it is loaded."""
        tensor = self.tensors[name]
        wanted = dtype(name) if callable(dtype) else dtype
        to_dtype = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        return to_dtype, device or (torch.device("cpu") if tensor.is_meta else tensor.device)

    def replace(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Let tensors have other memory, of the same shape and under all of their names."""
        slots = _slots_of(self._model) if memory else {}
        for name, values in memory.items():
            self._replace(name, values, slots)
            # what refers to the old values must notice, as it does when they are written to
            torch.autograd.graph.increment_version(self.tensors[name])

    def has_own_memory(self, name: str) -> bool:
        """Return whether a tensor shares its memory with no other, and is laid out as stored."""
        tensor = self.tensors[name].detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return False
        if not tensor.is_contiguous() or tensor.is_inference():
            return False
        if tensor.is_meta:
            return True
        if self._storages is None:
            state = [*self._model.parameters(), *self._model.buffers()]
            real = [t for t in state if type(t.detach()) is torch.Tensor and not t.is_meta]
            plain = [t for t in real if t.layout == torch.strided]
            self._storages = Counter(t.untyped_storage().data_ptr() for t in plain)
        storage = tensor.untyped_storage()
        # replaced, it would no longer be a part of what it is a view of now
        alone = self._storages[storage.data_ptr()] == 1 and storage.nbytes() == tensor.nbytes
        return (alone or not tensor.nbytes) and not storage.is_shared()

    def prepare(
        self, names: Iterable[str], dtype: WantedDtype, device: torch.device | None
    ) -> None:
        """Allocate memory of the given dtype and device for tensors that have another."""
        changes = []
        for name in names:
            tensor = self.tensors[name]
            to_dtype, to_device = self.placed(name, dtype, device)
            if to_dtype != tensor.dtype or to_device != tensor.device:
                _check_move(tensor, name, to_device)
                changes.append((name, to_dtype, to_device))
        slots = _slots_of(self._model) if changes else {}
        for name, to_dtype, to_device in changes:
            memory = torch.empty_like(self.tensors[name].detach(), dtype=to_dtype, device=to_device)
            self.changed = True
            self._replace(name, memory, slots)

    def _replace(
        self, name: str, memory: torch.Tensor, slots: Mapping[int, Sequence[Slot]]
    ) -> None:
        """Replace the memory of a tensor under all of its names."""
        tensor = self.tensors[name]
        # optimizers refer to the Parameter object: keep it where possible (not on the meta device)
        same = tensor.dtype == memory.dtype and tensor.device == memory.device
        if not tensor.is_meta and (same or isinstance(tensor, torch.nn.Parameter)):
            tensor.data = memory
            if tensor.grad is not None and not same:
                tensor.grad = None  # its dtype or device differs from that of the parameter now
            return
        fresh: torch.Tensor = memory
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(memory, requires_grad=tensor.requires_grad)
        for owner, key in slots[id(tensor)]:
            owner[key] = fresh
        for other in self.names_of(name):
            self.tensors[other] = fresh


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside wrappers that add a prefix to every name."""
    # Whoever has wrapped a model by torch.compile has imported dynamo.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    compiled: Any = getattr(dynamo, "OptimizedModule", ())
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, compiled):
            model = model._orig_mod
        else:
            return model


def _check_move(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Raise StateMismatchError for a DTensor that would have to change its device."""
    if is_dtensor(tensor) and (tensor.is_meta or device != tensor.device):
        raise StateMismatchError(
            f"{name} is a DTensor on {tensor.device}, which loading cannot move to {device}: "
            "call model.to_empty(device=...) first"
        )


def _slots_of(model: torch.nn.Module) -> dict[int, list[Slot]]:
    """Return, by the id of a tensor, all slots of modules that hold it."""
    slots: dict[int, list[Slot]] = {}
    for module in model.modules():
        for owner in (module._parameters, module._buffers):
            for key, value in owner.items():
                if value is not None:
                    slots.setdefault(id(value), []).append((owner, key))
    return slots


def _without_tied(matched: Matched, targets: ModelTargets) -> Matched:
    """Drop missing names whose tensor is loaded under another one of its names."""
    loaded = {other for name, _ in matched.pairs for other in targets.names_of(name)}
    missing = [name for name in matched.missing if name not in loaded]
    return Matched(matched.pairs, missing, matched.unexpected)


def _once_each(
    pairs: Sequence[tuple[str, str]], source: WeightSource, targets: ModelTargets
) -> list[tuple[str, str]]:
    """Return each tensor of the model once, by its first name, with its stored name."""
    chosen: dict[int, tuple[str, str]] = {}
    for name, saved in pairs:
        stored = source.tied.get(saved, saved)
        chosen.setdefault(id(targets.tensors[name]), (name, stored))
    return list(chosen.values())


def _check(chosen: Sequence[tuple[str, str]], source: WeightSource, targets: ModelTargets) -> None:
    """Raise StateMismatchError for shapes that differ, and dtypes that are not converted."""
    problems = []
    for name, stored in chosen:
        info, tensor = source.infos[stored], targets.tensors[name]
        if not targets.is_own(name):
            problems.append(f"{name} is a copy that the model's state_dict() makes")
        elif info.shape != tuple(tensor.shape):
            problems.append(f"{name} is {list(tensor.shape)}, stored is {list(info.shape)}")
        elif not _convertible(info, tensor):
            problems.append(f"{name} is {tensor.dtype}, stored is {info.dtype}")
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateMismatchError(
            f"{source.where} does not fit the model: {'; '.join(problems[:_SHOWN])}{more}; nothing "
            "was changed. Leave these out with only=, build the model as it was saved, or pass "
            "what load_model_state() returns to its own load_state_dict()"
        )


def _check_ties(
    pairs: Sequence[tuple[str, str]], source: WeightSource, targets: ModelTargets
) -> None:
    """Raise StateMismatchError if different values are stored for the names of one tensor."""
    stored: dict[int, dict[str, str]] = {}
    for name, saved in pairs:
        names_of = stored.setdefault(id(targets.tensors[name]), {})
        names_of.setdefault(source.tied.get(saved, saved), name)
    for names_of in stored.values():
        if len(names_of) > 1 and not _alike(list(names_of), source):
            raise StateMismatchError(
                f"{' and '.join(names_of.values())} are one tensor in the model (tied), and "
                f"{source.where} has different ones; nothing was changed: untie them, or load "
                "only one of them"
            )


def _alike(keys: Sequence[str], source: WeightSource) -> bool:
    """Return whether stored tensors are bitwise equal."""
    infos = [source.infos[key] for key in keys]
    if any(info != infos[0] for info in infos):
        return False
    values = [torch.empty(info.shape, dtype=info.dtype, device="cpu") for info in infos]
    with TransferProgress("comparing", sum(info.nbytes for info in infos), False) as bar:
        source.read(list(zip(keys, values, strict=True)), bar)
    return all(torch.equal(as_bytes(values[0]), as_bytes(value)) for value in values[1:])


def _map(
    chosen: Sequence[tuple[str, str]],
    source: SafetensorsSource,
    targets: ModelTargets,
    dtype: WantedDtype,
    device: torch.device | None,
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str]]]:
    """Return views of the files by the names of the model, and the pairs that must be copied."""
    rounds: list[dict[str, str]] = []
    used: dict[str, int] = {}
    rest, reasons = [], []
    for name, stored in chosen:
        if reason := _unmappable(name, stored, source, targets, dtype, device):
            rest.append((name, stored))
            reasons.append(reason)
            continue
        # two tensors of the model that load the same one must not share its memory: another
        # mapping of the file has pages of its own
        turn = used[stored] = used.get(stored, 0) + 1
        if turn > len(rounds):
            rounds.append({})
        rounds[turn - 1][name] = stored
    shown = "; ".join(reasons[:_SHOWN])
    more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    if reasons and not rounds:
        raise CheckpointError(
            f"mapped=True: no tensor of {source.where} can be mapped: {shown}{more}; nothing was "
            "changed. Build the model with the stored dtypes, on the CPU or the meta device, or "
            "leave mapped out"
        )
    if reasons:
        nbytes = sum(source.infos[stored].nbytes for _, stored in rest)
        warn(
            f"mapped=True: {len(rest)} tensors ({nbytes} bytes) of {source.where} were copied into "
            f"memory, they cannot be mapped: {shown}{more}",
            CheckpointWarning,
        )
    views: dict[str, torch.Tensor] = {}
    for names in rounds:
        mapped_tensors = map_tensors(source, names.values())
        views.update((name, mapped_tensors[stored]) for name, stored in names.items())
    return views, rest


def _unmappable(
    name: str,
    stored: str,
    source: SafetensorsSource,
    targets: ModelTargets,
    dtype: WantedDtype,
    device: torch.device | None,
) -> str:
    """Return why a tensor of the model cannot be a view of a file, "" if it can."""
    to_dtype, to_device = targets.placed(name, dtype, device)
    info = source.infos[stored]
    if to_dtype != info.dtype:
        return f"{name} is {to_dtype}, stored is {info.dtype}"
    if to_device.type != "cpu":
        return f"{name} is on {to_device}"
    if not targets.has_own_memory(name):
        return f"{name} shares its memory, or has another layout than the stored tensor"
    if misaligned(source.slot(stored)[1]):
        return f"{name} starts in the file where its elements may not be in memory"
    return ""


def _convertible(info: WeightInfo, tensor: torch.Tensor) -> bool:
    """Return whether stored values may be converted to a tensor's dtype."""
    both_floating = info.dtype.is_floating_point and tensor.dtype.is_floating_point
    return info.dtype == tensor.dtype or both_floating


@contextmanager
def _mixture_on_failure(location: str, targets: ModelTargets) -> Iterator[None]:
    """Turn an error into TornLoadError if the model has been changed."""
    try:
        yield
    except TornLoadError:
        raise
    except (CheckpointError, OSError, RuntimeError) as error:
        if not targets.changed:
            raise
        raise TornLoadError(
            f"loading {location} failed midway, and the model may hold a mixture: load weights "
            f"again before using it ({type(error).__name__}: {error})"
        ) from error


def _read(
    source: WeightSource, wanted: Sequence[tuple[str, torch.Tensor]], progress: bool | None
) -> None:
    """Read stored tensors into those of the model."""
    size = sum(source.infos[stored].nbytes for stored, _ in wanted)
    with TransferProgress("loading", size, progress) as bar:
        source.read(wanted, bar)
    for _, tensor in wanted:
        if not tensor.is_inference():
            # numpy wrote the bytes: autograd must notice that saved tensors have changed
            torch.autograd.graph.increment_version(tensor)
