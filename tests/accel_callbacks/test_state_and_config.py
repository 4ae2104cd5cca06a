"""What the process finds out about itself, and what it takes from arguments and environment."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    AcceleratorState,
    DistributedType,
    GradientState,
    PartialState,
    ProjectConfiguration,
    Topology,
    is_main_process,
    state,
)
from accel_callbacks.distributed.process_group import GroupOptions, backend_for, join_group
from accel_callbacks.distributed.topology import is_initialized
from accel_callbacks.options import resolve_config
from tests.support import warm

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return warm.run(
        [sys.executable, "-c", code],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_argument_wins_over_the_environment_and_that_over_the_default(monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCEL_GRADIENT_ACCUMULATION_STEPS", "4")
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accel.mixed_precision == "bf16"
    assert accel.gradient_accumulation_steps == 2
    assert accel.config.describe().splitlines() == [
        "mixed_precision=bf16 (environment variable ACCEL_MIXED_PRECISION)",
        "gradient_accumulation_steps=2 (argument)",
        "cpu=True (argument)",
        "debug=False (default)",
    ]


def test_false_is_an_argument_that_was_given(monkeypatch):
    monkeypatch.setenv("ACCEL_CPU", "yes")
    config = resolve_config({"cpu": False}, os.environ)
    assert config.cpu is False
    assert config.origins["cpu"] == "argument"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCEL_GRADIENT_ACCUMULATION_STEPS", "four"),
        ("ACCEL_CPU", "perhaps"),
        ("ACCEL_DEBUG", "maybe"),
        ("ACCEL_MIXED_PRECISION", "bf32"),
        ("ACCEL_ON_CONFLICT", "takeover"),
    ],
)
def test_a_bad_value_in_the_environment_is_named_with_its_origin(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    explicit = {} if name == "ACCEL_CPU" else {"cpu": True}
    with pytest.raises(ValueError, match=value) as caught:
        Accelerator(**explicit)
    assert name in str(caught.value)


def test_a_window_of_nothing_in_the_environment_is_named_with_its_origin(monkeypatch):
    monkeypatch.setenv("ACCEL_GRADIENT_ACCUMULATION_STEPS", "0")
    with pytest.raises(ValueError, match="ACCEL_GRADIENT_ACCUMULATION_STEPS"):
        Accelerator(cpu=True)


def test_an_unknown_precision_brings_a_suggestion():
    with pytest.raises(ValueError, match=r"'bf61' \(argument\).*Did you mean 'bf16'"):
        Accelerator(cpu=True, mixed_precision="bf61")


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Accelerator(cpu=True).config.cpu = False
    with pytest.raises(FrozenInstanceError):
        Accelerator(cpu=True).topology.rank = 3


def test_project_folders(tmp_path):
    assert Accelerator(cpu=True).project_dir == os.getcwd()
    assert Accelerator(cpu=True, project_dir=tmp_path).project_dir == str(tmp_path)
    config = ProjectConfiguration("runs", logging_dir="logs")
    assert Accelerator(cpu=True, project_config=config).logging_dir == os.path.abspath("logs")
    with pytest.raises(ValueError, match="not both"):
        Accelerator(cpu=True, project_dir="a", project_config=config)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="gradient_acumulation_steps"):
        Accelerator(gradient_acumulation_steps=2)


def test_all_handles_see_the_same_facts():
    partial = PartialState(cpu=True)
    accel = Accelerator(cpu=True)
    state = AcceleratorState("fp16", cpu=True)
    assert partial.topology is accel.topology is state.topology
    assert state.mixed_precision == "fp16"
    assert state.config.origins["mixed_precision"] == "argument"
    assert partial.distributed_type is DistributedType.NO
    assert (partial.backend, partial.device) == (None, torch.device("cpu"))
    assert not partial.use_distributed
    assert "rank=0/1" in repr(partial)


def test_the_state_knows_what_the_launcher_said(monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCEL_CPU", "1")
    assert AcceleratorState().mixed_precision == "bf16"
    assert PartialState().device.type == "cpu"


def test_a_topology_tells_its_place():
    device = torch.device("cpu")
    last = Topology(device, rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert last.distributed_type is DistributedType.MULTI_CPU
    assert Topology(torch.device("cuda:1"), world_size=2).distributed_type == "MULTI_GPU"


def test_debug_is_an_option_like_the_others(monkeypatch):
    assert not PartialState(cpu=True).debug
    assert Accelerator(cpu=True, debug=True).debug
    monkeypatch.setenv("ACCEL_DEBUG", "1")
    assert PartialState(cpu=True).debug
    assert AcceleratorState(cpu=True).debug
    assert Accelerator(cpu=True).debug
    assert not Accelerator(cpu=True, debug=False).debug


def test_a_state_alone_knows_its_devices():
    state = PartialState(cpu=True)
    assert state.device.type == "cpu"
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert state.default_device == (best or torch.device("cpu"))
    state.set_device()
    assert state.initialized
    state.destroy_process_group()
    assert not state.initialized
    assert not is_initialized()


@pytest.mark.parametrize("make", [PartialState, AcceleratorState])
def test_options_of_the_process_group_are_checked(make):
    make(cpu=True, backend="gloo", init_method="env://", timeout=timedelta(seconds=9))
    with pytest.raises(TypeError, match=r"has no option 'time_out'.*Did you mean 'timeout'"):
        make(cpu=True, time_out=3)
    with pytest.raises(ValueError, match=r"'glo' is unknown.*Did you mean 'gloo'"):
        make(cpu=True, backend="glo")
    with pytest.raises(ValueError, match=r"'cpu:gloo,cuda:ncl' is unknown.*Did you mean 'nccl'"):
        make(cpu=True, backend="cpu:gloo,cuda:ncl")
    for method in ("tpc://host:1", "host:1"):
        with pytest.raises(ValueError, match=f"init_method='{method}' is unknown"):
            make(cpu=True, init_method=method)


def test_a_backend_must_serve_the_device():
    options = GroupOptions(backend="cpu:gloo", init_method="tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="does not serve cuda tensors"):
        join_group(torch.device("cuda"), 0, 2, options, {})
    assert backend_for(torch.device("cuda"), "cpu:gloo,cuda:nccl") == "nccl"
    assert backend_for(torch.device("cpu"), "nccl") is None
    assert backend_for(torch.device("cpu"), "gloo") == "gloo"


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has nccl")
def test_a_backend_that_torch_lacks_is_named():
    with pytest.raises(ValueError, match="built without nccl"):
        PartialState(cpu=True, backend="nccl")


def test_two_accelerators_side_by_side_keep_their_own_state():
    one = Accelerator(cpu=True, gradient_accumulation_steps=2)
    two = Accelerator(cpu=True, mixed_precision="bf16")
    with one.accumulate():
        assert not one.sync_gradients
        assert two.sync_gradients
    assert (one.mixed_precision, two.mixed_precision) == ("no", "bf16")
    one.end_training()
    assert two.num_processes == 1
    assert Accelerator(cpu=True).device.type == "cpu"


def test_the_environment_stays_as_it_is():
    before = dict(os.environ)
    accel = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    PartialState()
    accel.end_training()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x"}, "MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "WORLD_SIZE is set but RANK is not"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": ""},
            "MASTER_PORT not",
        ),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK"),
    ],
    ids=[
        "no rank",
        "no address",
        "no port",
        "empty rank",
        "empty port",
        "no number",
        "rank beyond the world",
    ],
)
def test_a_broken_launch_says_what_is_missing(environment, says):
    code = "from accel_callbacks import Accelerator; Accelerator(cpu=True)"
    result = in_new_process(code, **environment)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert says in last
    assert "launch" in last


def test_a_world_of_one_needs_no_launcher():
    code = "from accel_callbacks import Accelerator; print(Accelerator(cpu=True).num_processes)"
    assert in_new_process(code, WORLD_SIZE="1", RANK="0").stdout == "1\n"
    empty = dict.fromkeys(LAUNCHER, "")
    assert in_new_process(code, **empty).stdout == "1\n"


def test_a_rank_is_known_before_any_accelerator_exists(monkeypatch):
    assert is_main_process()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_main_process()


def test_the_state_of_an_accelerator_has_its_options():
    accel = Accelerator(cpu=True, debug=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    assert accel.state.debug
    assert accel.state.mixed_precision == "bf16"
    assert accel.state.config.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    "option",
    [{"cpu": "no"}, {"gradient_accumulation_steps": 2.5}, {"gradient_accumulation_steps": "2"}],
)
def test_options_of_another_type_are_errors(option):
    with pytest.raises(TypeError, match=f"{next(iter(option))}=.* must be of type"):
        Accelerator(**{"cpu": True, **option})


def test_the_state_module_has_the_topology_and_the_handles():
    assert state.PartialState is PartialState
    assert state.AcceleratorState is AcceleratorState
    assert state.GradientState is GradientState
    assert state.DistributedType is DistributedType
    assert state.Topology is Topology
    assert state.is_initialized is is_initialized
    names = ("destroy_topology", "process_rank", "resolve_topology")
    assert all(callable(getattr(state, name)) for name in names)


def test_scripts_can_compare_with_run_types_that_are_not_there():
    assert Accelerator(cpu=True).distributed_type not in (DistributedType.XLA, DistributedType.FSDP)


def test_each_object_may_have_a_placement_of_its_own():
    class Moves(torch.nn.Linear):
        moved = False

        def to(self, *args, **kwargs):
            self.moved = True
            return super().to(*args, **kwargs)

    first, second = Moves(1, 1), Moves(1, 1)
    accel = Accelerator(cpu=True)
    accel.prepare(first, "anything", second, device_placement=[True, None, False])
    assert [first.moved, second.moved] == [True, False]
    with pytest.raises(ValueError, match=r"1 entries for 2 objects"):
        accel.prepare(Moves(1, 1), "anything", device_placement=[True])
