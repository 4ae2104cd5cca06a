"""EnergyMonitor on two processes: one of each machine measures, and the machines add up."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock


def measured(machines: int) -> tuple[float, int]:
    import torch

    from accel_callbacks import Accelerator
    from accel_callbacks.callbacks import EnergyMonitor
    from tests.support.energy import modules

    stand_ins, trackers = modules()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, stand_ins))
        monitor = EnergyMonitor()
        accel = Accelerator(cpu=True, callbacks=[monitor])
        if machines == 2:  # each process is the first one of its machine
            stack.enter_context(mock.patch.object(Accelerator, "is_local_main_process", True))
        data = accel.prepare(torch.utils.data.DataLoader(torch.zeros(4, 1)))
        with accel.run("energy") as run:
            for _ in run.epochs(1):
                for _ in data:
                    pass
    return monitor.kwh, len(trackers)


def test_one_process_of_a_machine_measures(pool: Any) -> None:
    assert pool.run(measured, 1) == [(2.0, 1), (2.0, 0)]


def test_machines_add_up(pool: Any) -> None:
    assert pool.run(measured, 2) == [(4.0, 1), (4.0, 1)]
