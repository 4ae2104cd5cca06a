"""Options of replicas, and what replicas refuse before they train."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from accel_callbacks import Accelerator, Topology, TorchFTKwargs
from accel_callbacks.plugins import Handlers, ParallelismConfig
from accel_callbacks.strategies import create_strategy

PLACE = "127.0.0.1:1"
needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="scripts/test_torchft has torchft"
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("ACCEL_REPLICA_TOKEN", raising=False)


def test_what_is_not_given_is_read_from_the_variables(monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", PLACE)
    monkeypatch.setenv("REPLICA_GROUP_ID", "4")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "5")
    monkeypatch.setenv("ACCEL_REPLICA_TOKEN", "secret")
    options = TorchFTKwargs()
    assert (options.lighthouse, options.replica, options.replicas) == (PLACE, "4", 5)
    assert options.token == "secret"
    assert TorchFTKwargs(replicas=2, replica="b").replicas == 2


def test_a_missing_lighthouse_and_numbers_out_of_range_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="torchft_lighthouse"):
        TorchFTKwargs()
    for option in ("replicas", "min_replicas", "timeout", "wait"):
        with pytest.raises(ValueError, match=option):
            TorchFTKwargs(lighthouse=PLACE, **{option: 0})
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "many")
    with pytest.raises(ValueError, match="NUM_REPLICA_GROUPS"):
        TorchFTKwargs(lighthouse=PLACE)


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is there")
def test_without_torchft_the_error_says_how_to_install_it():
    with pytest.raises(ImportError, match=r"accel-callbacks\[torchft\]"):
        Accelerator(cpu=True, kwargs_handlers=[TorchFTKwargs(lighthouse=PLACE)])


def handlers() -> Handlers:
    return Handlers({TorchFTKwargs: TorchFTKwargs(lighthouse=PLACE)})


def test_a_launch_of_several_processes_is_refused():
    with pytest.raises(ValueError, match="--num_processes 1"):
        create_strategy(Topology(torch.device("cpu"), world_size=2), handlers())
    with pytest.raises(ValueError, match="parallelism_config"):
        create_strategy(Topology(torch.device("cpu")), handlers(), ParallelismConfig())


def replica(**options) -> Accelerator:
    options = TorchFTKwargs(lighthouse=PLACE, **options)
    return Accelerator(cpu=True, kwargs_handlers=[options])


@needs_torchft
def test_running_statistics_are_refused():
    accel = replica()
    with pytest.raises(ValueError, match="1 is a BatchNorm1d"):
        accel.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        accel.prepare(torch.nn.SyncBatchNorm(2))
    accel.prepare(torch.nn.BatchNorm1d(2, track_running_stats=False))


@needs_torchft
def test_several_optimizers_are_refused():
    accel = replica()
    model = torch.nn.Linear(2, 2)
    accel.prepare(model, *(torch.optim.SGD([p], lr=0.1) for p in model.parameters()))
    with pytest.raises(ValueError, match="one optimizer, and 2"), accel.run("demo"):
        pass


@needs_torchft
def test_another_machine_may_not_read_the_state_without_a_secret():
    accel = replica(address="10.1.2.3")
    model = torch.nn.Linear(2, 2)
    accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="ACCEL_REPLICA_TOKEN"), accel.run("demo"):
        pass


@needs_torchft
def test_a_loop_outside_of_a_run_is_refused():
    accel = replica()
    model = torch.nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), 2)
    _, _, loader = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with pytest.raises(RuntimeError, match=r"accel\.run"):
        next(iter(loader))


@needs_torchft
def test_local_sgd_and_uneven_inputs_are_refused():
    accel = replica()
    model = accel.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="LocalSGD"):
        accel.strategy.mark_unsynced(model)
    with pytest.raises(ValueError, match="join_uneven_inputs"), accel.join_uneven_inputs([model]):
        pass
