"""Sizes of a mesh, the options of its axes, and what an Accelerator without several ranks says."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel

from accel_callbacks import (
    Accelerator,
    AcceleratorState,
    DeepSpeedSequenceParallelConfig,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Topology,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_callbacks.engines import create_strategy
from accel_callbacks.strategy.single_device import SingleDevice

SIZES = {"dp_replicate_size": 2, "dp_shard_size": 3, "tp_size": 4, "cp_size": 5}


def test_the_sizes_of_a_mesh():
    config = ParallelismConfig(**SIZES)
    assert config.total_size == 120
    assert (config.dp_size, config.data_parallel_size, config.non_data_parallel_size) == (6, 6, 20)
    assert config.get_mesh() == (("dp_replicate", "dp_shard", "cp", "tp"), (2, 3, 5, 4))
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "cp", "tp"]
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.model_shard_dim_names == ["dp_shard", "tp"]


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"dp_shard_size": 2}, ["dp_shard"]),
        ({"cp_size": 2}, ["cp"]),
        ({"dp_shard_size": 2, "cp_size": 2}, ["dp_shard_cp"]),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, ["dp_replicate", "dp_shard"]),
        (SIZES, ["dp_replicate", "dp_shard_cp"]),
    ],
)
def test_what_fsdp_shards_over_is_joined_only_of_several_axes(sizes, names):
    assert ParallelismConfig(**sizes).fsdp_dim_names == names


def test_an_axis_is_enabled_by_its_second_rank():
    config = ParallelismConfig(dp_shard_size=2)
    enabled = [
        axis
        for axis in ("dp_replicate", "dp_shard", "cp", "sp", "tp")
        if getattr(config, f"{axis}_enabled")
    ]
    assert enabled == ["dp_shard"]


def test_ranks_that_share_a_model_are_neighbors():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    places = [
        tuple(config.coordinate(rank)[axis] for axis in ("dp_replicate", "dp_shard", "tp"))
        for rank in range(8)
    ]
    assert places == [(r, s, t) for r in range(2) for s in range(2) for t in range(2)]


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "sp", "tp"])
def test_sizes_that_are_none(axis, monkeypatch):
    name = f"{axis}_size"
    for wrong, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=name):
            ParallelismConfig(**{name: wrong})
    monkeypatch.setenv(f"ACCEL_PARALLELISM_{axis.upper()}_SIZE", "3")
    assert getattr(ParallelismConfig(), name) == 3
    assert getattr(ParallelismConfig(**{name: 1}), name) == 1
    monkeypatch.setenv(f"ACCEL_PARALLELISM_{axis.upper()}_SIZE", "three")
    with pytest.raises(ValueError, match="ACCEL_PARALLELISM"):
        ParallelismConfig()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cp_backend": "nccl"}, ValueError, "cp_backend='nccl' is unknown"),
        ({"sp_backend": "torch"}, ValueError, "sp_backend='torch' is unknown"),
        ({"cp_size": 2, "sp_size": 2}, ValueError, "both divide sequences"),
        ({"tp_size": 2, "tp_handler": TorchContextParallelConfig()}, TypeError, "must be a TorchT"),
        ({"tp_sizes": 2}, TypeError, "Did you mean 'tp_size'"),
    ],
)
def test_what_goes_wrong_is_an_error(options, error, text):
    with pytest.raises(error, match=text):
        ParallelismConfig(**options)


# --- options of axes --------------------------------------------------------------------------


def test_an_axis_has_default_options():
    config = ParallelismConfig(tp_size=2, cp_size=2)
    assert config.tp_handler == TorchTensorParallelConfig()
    assert config.cp_handler == TorchContextParallelConfig("allgather")
    assert config.sp_handler is None
    assert ParallelismConfig(sp_size=2).sp_handler == DeepSpeedSequenceParallelConfig()


def test_options_of_an_axis_without_ranks_are_warned_of():
    with pytest.warns(UserWarning, match="cp_handler has no effect, because cp_size is 1"):
        ParallelismConfig(cp_size=1, cp_handler=TorchContextParallelConfig())


@pytest.mark.parametrize("size", [1, 2])
def test_options_of_an_axis_whose_size_is_the_launchers_are_kept_where_it_has_ranks(
    monkeypatch, recwarn, size
):
    monkeypatch.setenv("ACCEL_PARALLELISM_TP_SIZE", str(size))
    handler = TorchTensorParallelConfig(plan={"0": "colwise"})
    config = ParallelismConfig(tp_handler=handler)
    assert config.tp_handler is (handler if size > 1 else None)
    config.fitted(4, sharded=False) if size == 1 else None
    assert not recwarn.list


def test_how_keys_and_values_travel_is_what_the_launcher_was_told(monkeypatch):
    monkeypatch.setenv("ACCEL_PARALLELISM_CP_COMM_STRATEGY", "alltoall")
    assert ParallelismConfig(cp_size=2).cp_handler.cp_comm_strategy == "alltoall"
    assert TorchContextParallelConfig("allgather").cp_comm_strategy == "allgather"
    monkeypatch.setenv("ACCEL_PARALLELISM_CP_COMM_STRATEGY", "pigeons")
    with pytest.raises(ValueError, match="Invalid cp_comm_strategy: pigeons; use one of"):
        TorchContextParallelConfig()


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (TorchContextParallelConfig, {"cp_comm_strategy": "ring"}, "use one of .*alltoall"),
        (DeepSpeedSequenceParallelConfig, {"sp_seq_length_is_variable": False}, "sp_seq_length"),
        (DeepSpeedSequenceParallelConfig, {"sp_attn_implementation": "eager"}, "flash_attention_2"),
        (DeepSpeedSequenceParallelConfig, {"sp_attn_implementation": "a/b"}, "flash_attention_2"),
    ],
)
def test_options_that_an_axis_does_not_know(kind, options, text):
    with pytest.raises(ValueError, match=text):
        kind(**options)


def test_options_that_an_axis_knows():
    one = DeepSpeedSequenceParallelConfig(64, False, "kernels-community/flash-attn2")
    assert (one.sp_seq_length, one.sp_seq_length_is_variable) == (64, False)
    assert TorchContextParallelConfig("alltoall").cp_comm_strategy == "alltoall"
    assert TorchTensorParallelConfig(enable_async_tp=True).enable_async_tp


def test_a_config_as_json_is_plain():
    plain = ParallelismConfig(dp_shard_size=2, tp_size=2).to_json()
    assert plain == {
        **{"dp_replicate_size": 1, "dp_shard_size": 2, "cp_size": 1, "sp_size": 1, "tp_size": 2},
        "pp_size": 1,
        **{"cp_backend": "torch", "sp_backend": "deepspeed"},
        **{
            "tp_handler": {"enable_async_tp": False, "plan": None},
            "cp_handler": None,
            "sp_handler": None,
        },
    }


def test_a_plan_as_json_is_plain():
    plan = {"up": ColwiseParallel(), "down": "rowwise"}
    config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    assert config.to_json()["tp_handler"]["plan"] == {"up": "ColwiseParallel", "down": "rowwise"}


def test_a_config_is_copied_without_its_meshes():
    config = ParallelismConfig(dp_shard_size=2)
    config._meshes["cpu"] = types.SimpleNamespace(root=open)  # which cannot be copied deeply
    for one in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert one == config
        assert not one._meshes


# --- the world --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "world", "text"),
    [
        ({"dp_shard_size": 2}, 8, "give dp_shard_size=8 .* or dp_replicate_size=4"),
        ({"dp_shard_size": 2, "tp_size": 2}, 8, "give dp_shard_size=4 .* or dp_replicate_size=2"),
        ({"dp_shard_size": 3}, 8, "must be 8"),
        ({"tp_size": 2, "dp_shard_size": 2}, 2, "accel launch --num_processes 4"),
    ],
)
def test_sizes_that_do_not_fit_the_world(sizes, world, text):
    with pytest.raises(ValueError, match=f"and this run has {world}: .*{text}"):
        ParallelismConfig(**sizes).fitted(world, sharded=False)


def test_without_sizes_all_ranks_are_data_parallel():
    config = ParallelismConfig()
    assert config.fitted(4, sharded=False).get_mesh() == (("dp_replicate",), (4,))
    assert config.fitted(4, sharded=True).get_mesh() == (("dp_shard",), (4,))
    assert config.fitted(1, sharded=True) is config


def test_a_plugin_needs_an_axis_to_shard_over():
    with pytest.raises(ValueError, match="give a dp_shard_size, or leave the plugin out"):
        ParallelismConfig(dp_replicate_size=4).fitted(4, sharded=True)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_data_ranks_are_those_of_the_mesh(copies):
    config = ParallelismConfig(dp_shard_size=8 // copies, tp_size=copies)
    for rank in range(8):
        topology = Topology(torch.device("cpu"), rank=rank, world_size=8)
        strategy = create_strategy(topology, parallelism=config)
        assert strategy.data.copies == copies
        assert (strategy.data.rank, strategy.data.world) == (rank // copies, 8 // copies)
        assert strategy.data.averaged_over == 8 // copies
        assert list(strategy.data.first_of_each) == list(range(0, 8, copies))


def test_what_does_not_synchronize_gradients_averages_over_no_ranks():
    alone = SingleDevice(Topology(torch.device("cpu"), rank=1, world_size=2))
    assert (alone.data.losses, alone.data.averaged_over) == (2, 1)


def test_losses_of_ranks_that_share_a_sequence_are_of_different_tokens():
    for axis in ("cp", "sp"):
        config = ParallelismConfig(dp_shard_size=2, **{f"{axis}_size": 4})
        topology = Topology(torch.device("cpu"), rank=5, world_size=8)
        strategy = create_strategy(topology, parallelism=config)
        assert (strategy.data.rank, strategy.data.world, strategy.data.averaged_over) == (1, 2, 8)
        assert config.fsdp_dim_names == [f"dp_shard_{axis}"]


@pytest.mark.parametrize(
    ("sizes", "sharded", "name"),
    [
        ({"cp_size": 8}, False, "ddp"),
        ({"cp_size": 4, "dp_replicate_size": 2}, False, "ddp"),
        ({"cp_size": 8}, True, "fsdp"),
        ({"cp_size": 4, "dp_shard_size": 2}, False, "fsdp"),
        ({"cp_size": 4, "tp_size": 2}, False, "fsdp"),
    ],
)
def test_losses_are_averaged_over_the_ranks_of_a_sequence_too(sizes, sharded, name):
    topology = Topology(torch.device("cpu"), rank=5, world_size=8)
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    strategy = create_strategy(topology, None, ParallelismConfig(**sizes), plugin)
    assert strategy.name == name
    assert strategy.data.world == 8 // sizes["cp_size"] // sizes.get("tp_size", 1)
    assert strategy.data.averaged_over == strategy.data.losses == 8 // sizes.get("tp_size", 1)


# --- the Accelerator --------------------------------------------------------------------------


def test_an_accelerator_without_a_mesh():
    accel = Accelerator(cpu=True)
    assert (accel.parallelism_config, accel.torch_device_mesh) == (None, None)
    for name in (
        "data_parallel_rank",
        "tensor_parallel_rank",
        "data_parallel_shard_rank",
        "context_parallel_rank",
        "pipeline_parallel_rank",
    ):
        with pytest.raises(RuntimeError, match=r"no mesh.*pass parallelism_config="):
            getattr(accel, name)
    assert accel.should_save_model
    assert not (accel.is_fsdp2)
    assert not (accel.is_composable_parallelism_enabled)
    assert not (accel.multi_device)
    state = accel.state
    assert (state.parallelism_config, state.device_mesh, state.fsdp_plugin) == (None, None, None)
    assert not state.is_fsdp2


def test_an_accelerator_with_a_mesh_of_one_rank():
    config = ParallelismConfig()
    accel = Accelerator(cpu=True, parallelism_config=config)
    assert accel.parallelism_config is accel.state.parallelism_config is config
    assert accel.torch_device_mesh is None
    assert accel.data_parallel_rank == accel.context_parallel_rank == 0


def test_an_accelerator_that_shards():
    plugin = FullyShardedDataParallelPlugin()
    accel = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accel.state.fsdp_plugin is plugin
    assert accel.is_fsdp2
    assert accel.is_composable_parallelism_enabled
    assert accel.state.is_fsdp2
    assert accel.state.distributed_type is accel.distributed_type is DistributedType.FSDP
    assert accel.should_save_model
    assert AcceleratorState(cpu=True).fsdp_plugin is None


def test_a_plugin_of_tensor_parallelism_is_a_config_with_its_size():
    plugin = TorchTensorParallelPlugin(tp_size=2)
    with pytest.raises(ValueError, match=r"ParallelismConfig\(tp_size=2\) arranges 2 ranks"):
        Accelerator(cpu=True, torch_tp_plugin=plugin)
    with pytest.raises(ValueError, match="leave torch_tp_plugin out"):
        Accelerator(cpu=True, torch_tp_plugin=plugin, parallelism_config=ParallelismConfig())
    accel = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin())
    assert accel.parallelism_config == ParallelismConfig()
    with pytest.raises(TypeError, match="has no option 'torch_device_mesh'"):
        TorchTensorParallelPlugin(tp_size=2, torch_device_mesh=None)


@pytest.mark.parametrize("name", ["parallelism_config", "fsdp_plugin", "torch_tp_plugin"])
def test_an_argument_of_another_class_is_an_error(name):
    kind = {
        "parallelism_config": "ParallelismConfig",
        "fsdp_plugin": "FullyShardedDataParallelPlugin",
        "torch_tp_plugin": "TorchTensorParallelPlugin",
    }[name]
    with pytest.raises(TypeError, match=f"{name}={{'tp_size': 2}} must be a {kind}"):
        Accelerator(cpu=True, **{name: {"tp_size": 2}})
    theirs = type(kind, (), {"__module__": "accelerate.utils"})()
    with pytest.raises(TypeError, match=f"of accelerate.utils, another library.*import {kind}"):
        Accelerator(cpu=True, **{name: theirs})
