"""XLA devices, such as TPUs: whether this process computes on them, and torch's module for them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from accel_callbacks.distributed.rng import device_seeds

__all__ = ["has_xla", "xla_device"]


def has_xla(env: Mapping[str, str]) -> bool:
    """Return whether this process is to compute through torch_xla.

    It is if torch_xla is installed, and the variables ask for it (``PJRT_DEVICE``, or what ``accel
    launch --tpu`` sets), or the machine has a TPU and no other accelerator.
    """
    if importlib.util.find_spec("torch_xla") is None:
        return False
    asked = env.get("PJRT_DEVICE") or env.get("ACCEL_DISTRIBUTED_TYPE") == "XLA"
    return bool(asked) or (_has_chip() and not torch.accelerator.is_available())


def _has_chip() -> bool:
    try:
        names = os.listdir("/dev")
    except OSError:
        return False
    return any(name.startswith("accel") and name[5:].isdecimal() for name in names)


def xla_device(env: Mapping[str, str]) -> torch.device:
    """Return the XLA device of this process: of several, the virtual one that stands for all.

    Raises:
        RuntimeError: torch_xla cannot be imported or finds no device, or there are several
            processes, which would each need devices of their own.
    """
    try:
        torch_xla = importlib.import_module("torch_xla")
        runtime = importlib.import_module("torch_xla.runtime")
        devices = runtime.global_runtime_device_count()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"this process is to compute through torch_xla (PJRT_DEVICE="
            f"{env.get('PJRT_DEVICE', '')}), which fails: {error}. Install the torch_xla of the "
            "release of torch, or pass cpu=True to the Accelerator."
        ) from error
    processes = max(runtime.process_count(), runtime.world_size(), int(env.get("WORLD_SIZE") or 1))
    if processes > 1:
        raise RuntimeError(
            f"there are {processes} processes, and with XLA one process computes on all devices of "
            "its machine (SPMD): start the script once, with `accel launch --tpu` or plain Python, "
            "not with torchrun, torch_xla.launch or xmp.spawn, and on one machine."
        )
    if devices > 1 and not runtime.is_spmd():
        runtime.use_spmd()
    _register_module(torch_xla)
    if _seed not in device_seeds:
        device_seeds.append(_seed)
    device: torch.device = torch_xla.device()
    return device


def _seed(seed: int) -> None:
    torch.xla.manual_seed(seed)  # type: ignore[attr-defined]


def _register_module(torch_xla: Any) -> None:
    """Give torch the module of this device type, as it has ``torch.cuda``, where there is none."""
    if hasattr(torch, "xla"):
        return
    model = importlib.import_module("torch_xla.core.xla_model")
    module: Any = ModuleType("torch.xla", "The functions of torch_xla under torch's names.")

    def get_rng_state(device: Any = None) -> torch.Tensor:
        seed = int(model.get_rng_state())
        return torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        model.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))

    def manual_seed(seed: int) -> None:
        model.set_rng_state(seed)

    def synchronize(device: Any = None) -> None:
        torch_xla.sync(wait=True)

    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.synchronize, module.manual_seed = synchronize, manual_seed
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    torch._register_device_module("xla", module)  # type: ignore[no-untyped-call]
    manual_seed(torch.initial_seed())  # of a seed that was set before
