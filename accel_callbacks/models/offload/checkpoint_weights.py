"""Load a checkpoint into a model that is spread over devices and the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.models.offload.assignment import (
    Assignment,
    Place,
    Weight,
    WeightPlacement,
    assign,
)
from accel_callbacks.models.offload.origins import detach, note
from accel_callbacks.models.offload.placeholder import ON_DISK, AbsentWeight, on_meta, placeholder
from accel_callbacks.models.offload.source import Stored, StoredWeights
from accel_callbacks.models.offload.spill import Spill
from accel_callbacks.models.offload.units import blocks_of, cut_units
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = ["load_spread"]

DtypeOf = Callable[[str], "torch.dtype | None"]


def load_spread(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Place],
    dtype_of: DtypeOf = lambda name: None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    strict: bool = False,
    mapped: bool = False,
) -> None:
    """Load a checkpoint into a model by a device map; weights on disk stay in its files.

    Names, shapes and dtypes are checked before anything changes. In place of weights on disk the
    model has placeholders, and :func:`dispatch_model` knows where they are.

    Args:
        model: the model, on the meta device or not.
        checkpoint: what ``load_checkpoint_in_model`` takes.
        device_map: names of modules or tensors to places.
        dtype_of: the dtype of a weight by its name; None leaves that of the model.
        offload_folder: where weights on disk are written that are not whole in a local file of
            safetensors.
        offload_buffers: buffers of modules on disk are there, too.
        strict: raise for missing and unexpected names.
        mapped: weights on the CPU are views of the mapped files.

    Raises:
        ValueError: the map does not cover the model, or a folder is needed.
        checkpoint_io.CheckpointError: weights are missing, damaged, or do not fit the model.
    """
    import checkpoint_io
    from checkpoint_io.weights import open_weights

    assignment = assign(model, device_map, offload_buffers=offload_buffers)
    source = open_weights(checkpoint, 0, None)
    stored_names = _match(assignment, source, strict)
    _refuse_lost_buffers(assignment)
    on_disk = {
        assigned.weight.name: (assigned, stored_names[assigned.weight.name])
        for assigned in assignment.on_disk
        if assigned.weight.name in stored_names
    }
    stored = _locate(model, source, on_disk, dtype_of, offload_folder)

    detach(model)
    by_device: dict[torch.device, set[str]] = {}
    for assigned in (*assignment.resident, *assignment.held):
        weight = assigned.weight
        device = assigned.device if assigned.place == "resident" else torch.device("cpu")
        if weight.name not in stored_names:
            _mark_missing(assigned, checkpoint)
            continue
        if isinstance(weight.tensor, AbsentWeight):
            weight.put(on_meta(weight.tensor))
        by_device.setdefault(device, set()).update(weight.names)
    for device, names in by_device.items():
        checkpoint_io.load_model(
            model,
            checkpoint,
            only=names.__contains__,
            strict=False,
            dtype=dtype_of,
            device=device,
            mapped=mapped and device.type == "cpu",
        )
    for assigned in assignment.on_disk:
        if assigned.weight.name in stored:
            weight, dtype = assigned.weight, _dtype(assigned.weight, dtype_of)
            like = on_meta(weight.tensor, dtype)
            weight.put(placeholder(like, weight.name, ON_DISK, assigned.device))
        else:
            _mark_missing(assigned, checkpoint)
    known = {
        name: stored[assigned.weight.name]
        for assigned, _ in on_disk.values()
        for name in assigned.weight.names
    }
    note(model, StoredWeights.of(known))


def _dtype(weight: Weight, dtype_of: DtypeOf) -> torch.dtype:
    """Return the dtype of a weight after loading."""
    wanted = dtype_of(weight.name) if weight.tensor.is_floating_point() else None
    return weight.tensor.dtype if wanted is None else wanted


def _mark_missing(assigned: WeightPlacement, checkpoint: str | os.PathLike[str]) -> None:
    """Put a placeholder for a weight that has no values, neither here nor in the checkpoint."""
    weight, place = assigned.weight, f"not in {os.fspath(checkpoint)}"
    if weight.persistent and (isinstance(weight.tensor, AbsentWeight) or weight.tensor.is_meta):
        weight.put(placeholder(weight.tensor, weight.name, place, assigned.device))


def _match(assignment: Assignment, source: Any, strict: bool) -> dict[str, str]:
    """Return the stored name of each weight that is stored, by the first of its names.

    Raises:
        StateMismatchError: they do not fit the model.
    """
    from checkpoint_io import StateMismatchError
    from checkpoint_io.loader.selection import Matched

    stored = {**{name: name for name in source.infos}, **source.tied}
    wanted = [assigned.weight for assigned in assignment.weights if assigned.weight.persistent]
    stored_names, missing, problems = {}, [], []
    for weight in wanted:
        names = list(dict.fromkeys(stored[name] for name in weight.names if name in stored))
        if not names:
            missing.append(weight.name)
            continue
        stored_names[weight.name] = names[0]
        info, tensor = source.infos[names[0]], weight.tensor
        floating = info.dtype.is_floating_point and tensor.dtype.is_floating_point
        if tuple(info.shape) != tuple(tensor.shape):
            problems.append(f"{weight.name} is {list(tensor.shape)}, stored is {list(info.shape)}")
        elif info.dtype != tensor.dtype and not floating:
            problems.append(f"{weight.name} is {tensor.dtype}, stored is {info.dtype}")
        elif len(names) > 1 and not _alike(names, source):
            problems.append(f"{' and '.join(weight.names)} are tied, and stored are different ones")
    if problems:
        raise StateMismatchError(
            f"{source.where} does not fit the model: {listed(problems, between='; ')}; nothing was "
            "changed. Build the model as it was saved."
        )
    known = {name for weight in wanted for name in weight.names}
    unexpected = [name for name in stored if name not in known]
    if strict:
        Matched(list(stored_names.items()), missing, unexpected).require(source.where)
    if missing and not stored_names:
        raise ValueError(
            f"{source.where} has none of the names of the model, such as {missing[0]!r}: nothing "
            "was loaded."
        )
    for problem, names in (("did not have", missing), ("has unused", unexpected)):
        if names:
            warn(f"{source.where} {problem} {listed(names)}")
    return stored_names


def _alike(names: Sequence[str], source: Any) -> bool:
    """Return whether stored tensors are bitwise equal."""
    from checkpoint_io.progress import TransferProgress

    infos = [source.infos[name] for name in names]
    if any(info != infos[0] for info in infos):
        return False
    values = [torch.empty(info.shape, dtype=info.dtype, device="cpu") for info in infos]
    with TransferProgress("comparing", sum(info.nbytes for info in infos), False) as bar:
        source.read(list(zip(names, values, strict=True)), bar)
    first = values[0].reshape(-1).view(torch.uint8)
    return all(torch.equal(first, value.reshape(-1).view(torch.uint8)) for value in values[1:])


def _refuse_lost_buffers(assignment: Assignment) -> None:
    lost = [
        assigned.weight.name
        for assigned in assignment.weights
        if not assigned.weight.persistent
        and assigned.weight.tensor.is_meta
        and assigned.device.type != "meta"
    ]
    if lost:
        raise ValueError(
            f"no checkpoint has {listed(lost)} (non-persistent buffers on the meta device): build "
            "the model in init_empty_weights(), which leaves buffers their values, and not in "
            'torch.device("meta") or with include_buffers=True.'
        )


def _locate(
    model: torch.nn.Module,
    source: Any,
    wanted: Mapping[str, tuple[WeightPlacement, str]],
    dtype_of: DtypeOf,
    folder: str | os.PathLike[str] | None,
) -> dict[str, Stored]:
    """Return where weights are in local files; write those that are not.

    Args:
        model: the model.
        source: the checkpoint.
        wanted: assigned weights with their stored names, by name.
        dtype_of: the dtype of weights that are written.
        folder: where they are written.
    """
    keys = {name: key for name, (_, key) in wanted.items()}
    local = StoredWeights.of_source(source, set(keys.values())) or StoredWeights({})
    located = {name: local.at(key) for name, key in keys.items() if key in local.tensors}
    rest = [name for name in wanted if name not in located]
    if not rest:
        return located
    if folder is None:
        raise ValueError(
            f"{listed(rest)} cannot be streamed from {source.where}, since that is not in local "
            "files of safetensors: give an offload_folder=, into which they are written once, or "
            "convert the checkpoint with `accel merge-weights`."
        )
    located.update(_convert(model, source, {n: wanted[n] for n in rest}, dtype_of, folder))
    return located


def _convert(
    model: torch.nn.Module,
    source: Any,
    wanted: Mapping[str, tuple[WeightPlacement, str]],
    dtype_of: DtypeOf,
    folder: str | os.PathLike[str],
) -> dict[str, Stored]:
    """Write weights as safetensors, one unit after the other; return where they are."""
    from checkpoint_io.progress import TransferProgress

    names = {
        other: name for name, (assigned, _) in wanted.items() for other in assigned.weight.names
    }
    units = cut_units(model, names.__contains__, blocks_of(model))
    written = Spill(folder)
    done: set[str] = set()
    size = sum(source.infos[key].nbytes for _, key in wanted.values())
    try:
        with TransferProgress("converting", size, None) as bar:
            for unit in units:
                group = dict.fromkeys(names[name] for name in unit.slots)
                values = {
                    name: torch.empty(
                        tuple(wanted[name][0].weight.tensor.shape),
                        dtype=_dtype(wanted[name][0].weight, dtype_of),
                        device="cpu",
                    )
                    for name in group
                    if name not in done
                }
                source.read([(wanted[name][1], value) for name, value in values.items()], bar)
                written.write(values)
                done.update(values)
        stored = written.finish()
    except BaseException:
        written.discard()
        raise
    return {name: stored.at(name) for name in wanted}
