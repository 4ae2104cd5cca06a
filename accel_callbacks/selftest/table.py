"""Which checks there are, in their order, with what to do where one fails."""

from __future__ import annotations

from collections.abc import Mapping

from accel_callbacks.selftest import checkpoints, data, processes
from accel_callbacks.selftest import checks as training
from accel_callbacks.selftest.check import Check

__all__ = ["CHECKS"]

_ALL = (
    Check(
        "processes",
        processes.topology_is_whole,
        "install the same versions on all machines, and start one process for each GPU; "
        "`accel launch --dry_run` shows what is started",
    ),
    Check(
        "collectives",
        processes.collectives_carry_values,
        "test the network and its driver: --cpu takes gloo in place of the GPUs; NCCL_DEBUG=INFO "
        "shows what NCCL does; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 leave out a broken path; "
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME name the interface",
    ),
    Check(
        "determinism",
        training.repeats,
        "run again: if it varies, look for other work on the device, and at its health (ECC "
        "errors); if only some ranks differ, they have other hardware or versions",
    ),
    Check(
        "data",
        data.every_sample_once,
        "look whether packages that change torch's DataLoader are installed; report it with the "
        "output of `accel env`",
    ),
    Check(
        "workers",
        data.workers_deliver,
        "give the container more shared memory (docker run --shm-size=8g), or train with "
        "num_workers=0",
    ),
    Check(
        "precision",
        training.precision_holds,
        "choose another --mixed_precision: bf16 needs an Ampere GPU or newer, fp8 a Hopper one "
        "and torchao",
    ),
    Check(
        "gradients",
        training.gradients_average,
        "do not train like this: gradients of the processes are not averaged. Update torch and "
        "the driver, then look at the collectives above",
    ),
    Check(
        "accumulation",
        training.accumulation_equals_one_batch,
        "do not accumulate gradients like this; report it with the output of `accel env`",
    ),
    Check(
        "checkpoint",
        checkpoints.resume_is_exact,
        "look for room and for rights to write in the folder; --folder names another, which all "
        "processes must see (a local path or any fsspec URL)",
    ),
)

CHECKS: Mapping[str, Check] = {check.name: check for check in _ALL}
