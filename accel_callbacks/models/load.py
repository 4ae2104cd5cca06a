"""Load weights into a model, under Accelerate's name: ``load_checkpoint_in_model``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.engines.deepspeed.zero_state import (
    RowsOfModel,
    is_under_zero,
    without_engine,
)
from accel_callbacks.models.absent_weights import absent_weights
from accel_callbacks.models.compile import original
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = ["load_checkpoint_in_model"]

Device = int | str | torch.device
DtypeOf = Callable[[str], torch.dtype | None]


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    mapped: bool = False,
) -> None:
    """Load a checkpoint's weights into a model's own parameters and buffers.

    ``checkpoint_io.load_model`` under Accelerate's name: names and shapes are checked before
    anything changes, no second copy of the weights is made, tied parameters stay tied. Of a sharded
    model each rank reads its part, and all must call; what a model that was built without weights
    does not find here is initialized, see ``initialize_weights``.

    Args:
        model: the module; parameters on the meta device get memory.
        checkpoint: a path or fsspec URL of a ``.safetensors`` file, a ``.bin`` or ``.pt`` file of
            plain tensors, an ``.index.json``, a folder with one of these, or a checkpoint of
            ``save_state`` (its first model).
        device_map: names of modules or tensors to devices, ``"cpu"`` or ``"disk"``. Several need
            ``dispatch_model`` before the model runs: what is on disk stays in the checkpoint, and
            the model has placeholders for it.
        offload_folder: where weights on disk are written that are not whole in a local file of
            safetensors; else not needed.
        dtype: a floating-point dtype, or its name, for the loaded weights; the model's own if
            ``None``.
        offload_state_dict: accepted for Accelerate: there is no state dict in memory.
        offload_buffers: buffers of modules on disk are there too.
        keep_in_fp32_modules: names of modules that stay in float32 whatever ``dtype`` is.
        offload_8bit_bnb: not supported.
        strict: raise for missing or unexpected names instead of warning.
        full_state_dict: accepted for Accelerate; sharded parameters always read their own part of
            a full stored tensor.
        broadcast_from_rank0: only rank 0 reads, and sends to the others; all processes must call.
        mapped: make the weights views of the mapped safetensors files, on the CPU, as Accelerate
            does for ``{"": "cpu"}``: see ``checkpoint_io.load_model``. By default they are read
            into memory of their own, and the files may change afterwards.

    Raises:
        ValueError: an argument is invalid, or the map does not cover the model.
        checkpoint_io.CheckpointError: the weights are missing, damaged, hold more than tensors, or
            do not fit the model.
        RemoteError: with ``broadcast_from_rank0``, another process failed.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator, load_checkpoint_in_model
        >>> trained, fresh = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> folder = tempfile.mkdtemp()
        >>> Accelerator(cpu=True).save_model(trained, folder)
        >>> load_checkpoint_in_model(fresh, folder)
        >>> torch.equal(fresh.weight, trained.weight)
        True
    """
    if offload_8bit_bnb:
        raise ValueError(
            "offload_8bit_bnb=True is not supported: transformers loads such a model itself, by "
            "from_pretrained(name, quantization_config=BitsAndBytesConfig(...))."
        )
    spread = device_map is not None and _is_spread(device_map)
    dtype_of = dtype_rule(dtype, keep_in_fp32_modules)
    if device_map is not None and spread:
        from accel_callbacks.models.offload.checkpoint_weights import load_spread

        if broadcast_from_rank0 and collectives.world_size() > 1:
            raise ValueError(
                "broadcast_from_rank0=True goes with one device for all of the model: with "
                f"device_map={device_map!r} each process reads its own weights; leave it out."
            )
        load_spread(
            original(model),
            checkpoint,
            device_map,
            dtype_of,
            offload_folder,
            offload_buffers,
            strict,
            mapped,
        )
        return
    device = _one_device(device_map)
    model = without_engine(model)
    if is_under_zero(model):
        for name, option in (
            ("dtype", dtype), ("device_map", device), ("mapped", mapped),
            ("broadcast_from_rank0", broadcast_from_rank0),
        ):  # fmt: skip
            if option:
                raise ValueError(
                    f"{name} does not go with a model that DeepSpeed trains: each process reads "
                    "its own part of the weights, and the engine decides where and how they are "
                    "kept. Leave it out."
                )
        _load_rows(original(model), checkpoint, strict)
        return
    if mapped and broadcast_from_rank0:
        raise ValueError(
            "mapped=True does not go with broadcast_from_rank0=True, whose other processes have "
            "no file to map: leave one of them out."
        )
    if broadcast_from_rank0 and collectives.world_size() > 1:
        _load_and_send(model, checkpoint, dtype_of, device, strict)
    else:
        _load(model, checkpoint, dtype_of, device, strict, mapped)


def _is_spread(device_map: Mapping[str, Device]) -> bool:
    """Return whether a map has several devices, or the disk."""
    if not isinstance(device_map, Mapping):
        raise ValueError(
            f'device_map={device_map!r} is no mapping of names to devices such as {{"": "cpu"}}; '
            'load_checkpoint_and_dispatch takes "auto" and the like.'
        )
    places = {str(place) for place in device_map.values()}
    return len(places) > 1 or "disk" in places


def _one_device(device_map: Mapping[str, Device] | None) -> torch.device | None:
    if device_map is None:
        return None
    if not device_map:
        raise ValueError('device_map={} has no device: give one for all as {"": "cpu"}.')
    from accel_callbacks.models.offload.assignment import as_device

    return as_device(next(iter(device_map.values())))


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(parsed, torch.dtype) and parsed.is_floating_point):
        raise ValueError(f'dtype={dtype!r} is no floating-point dtype, such as "bfloat16".')
    return parsed


def dtype_rule(dtype: str | torch.dtype | None, kept: Sequence[str] | None = None) -> DtypeOf:
    """Return a function from the name of a parameter to its dtype after loading.

    Args:
        dtype: a floating-point dtype, or its name; None leaves the model's own.
        kept: names of modules that stay in float32.

    Raises:
        ValueError: it is none.
    """
    wanted = _dtype(dtype)

    def rule(name: str) -> torch.dtype | None:
        in_kept = any(name == module or f"{module}." in name for module in kept or ())
        return torch.float32 if wanted is not None and in_kept else wanted

    return rule


def _load(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    dtype_of: DtypeOf,
    device: torch.device | None,
    strict: bool,
    mapped: bool = False,
) -> list[str]:
    """Load on this rank; return the names of the model that the checkpoint does not have."""
    import checkpoint_io

    missing, unexpected = checkpoint_io.load_model(
        model, checkpoint, strict=strict, dtype=dtype_of, device=device, mapped=mapped
    )
    for problem, names in (("did not have", missing), ("has unused", unexpected)):
        if names:
            warn(f"{os.fspath(checkpoint)} {problem} {listed(names)}")
    _initialize_missing(model, checkpoint, missing)
    return missing


def _load_rows(model: torch.nn.Module, checkpoint: str | os.PathLike[str], strict: bool) -> None:
    """Read the rows of this rank, then gather one parameter after the other for ZeRO."""
    with shared_failure("load_checkpoint_in_model"):
        stand_in = RowsOfModel(model)
        missing = _load(stand_in, checkpoint, dtype_rule(None), None, strict)
    stand_in.put(missing)


def _initialize_missing(
    model: torch.nn.Module, checkpoint: str | os.PathLike[str], missing: Sequence[str]
) -> None:
    """Initialize the weights that the checkpoint lacks, of a model built without weights."""
    guard = absent_weights(model)
    if guard is None:
        return
    if missing and len(missing) == len(original(model).state_dict()):
        raise ValueError(
            f"{os.fspath(checkpoint)} has none of the names of {type(original(model)).__name__}, "
            f"such as {missing[0]!r}: nothing was loaded. checkpoint_io.load_model(rename=...) "
            "translates names."
        )
    if names := guard.initialize(guard.names(), partly=True):
        warn(f"initialized what {os.fspath(checkpoint)} did not have: {listed(names)}")


def _load_and_send(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    dtype_of: DtypeOf,
    device: torch.device | None,
    strict: bool,
) -> None:
    """Load on rank 0, then broadcast every loaded tensor to the other ranks."""
    from checkpoint_io.sharding import is_dtensor
    from checkpoint_io.weights import ModelTargets

    operation = "load_checkpoint_in_model"
    with shared_failure(operation):
        if any(is_dtensor(tensor) for tensor in ModelTargets(model).tensors.values()):
            raise ValueError(
                "broadcast_from_rank0=True does not go with sharded parameters (DTensors): leave "
                "it out, each process then reads its own part."
            )
    first = collectives.rank() == 0
    with shared_failure(operation):
        report = _load(model, checkpoint, dtype_of, device, strict) if first else []
    missing: list[str] = collectives.broadcast_object(report)
    targets = ModelTargets(model)
    loaded = [name for name in targets.tensors if name not in missing]
    with torch.no_grad():
        with shared_failure(
            operation
        ):  # rank 0 would wait in its broadcasts if this failed elsewhere
            if not first:
                targets.prepare(loaded, dtype_of, device)
        for name in loaded:
            if targets.names_of(name)[0] == name:
                tensor = targets.tensors[name].detach()
                tensor.copy_(collectives.broadcast(tensor))
