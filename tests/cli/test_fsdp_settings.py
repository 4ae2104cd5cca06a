"""Options of FSDP and of the mesh: what FSDP1's become, what is refused, what reaches a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_callbacks import FullyShardedDataParallelPlugin, ParallelismConfig
from accel_callbacks.cli.main import main
from accel_callbacks.compat.foreign_settings import OF_FSDP1, fsdp1_notes, to_fsdp2
from accel_callbacks.launch.config_file import read_config, values_of
from accel_callbacks.launch.resolve import Resolved, refuse_unbuilt, resolve_settings
from accel_callbacks.options import resolve_config
from accel_callbacks.plugins.option import SettingsError, options_of

FREED = {"fsdp_reshard_after_forward": "true"}
KEPT = {"fsdp_reshard_after_forward": "false"}
# For each key of a file for FSDP1: a value, what is left of it for FSDP2, and a word about it.
CONVERTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"fsdp_version": 1}, {}, ""),
    ({"fsdp_sharding_strategy": "FULL_SHARD"}, FREED, "FULL_SHARD is"),
    ({"fsdp_sharding_strategy": 1}, FREED, "FULL_SHARD is"),
    ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, KEPT, "is fsdp_reshard_after_forward: false"),
    ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, FREED, "a replica on each machine"),
    ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, KEPT, "a replica on each machine"),
    ({"fsdp_reshard_after_forward": "FULL_SHARD"}, FREED, "FULL_SHARD is"),
    ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, KEPT, "SHARD_GRAD_OP is"),
    ({"fsdp_reshard_after_forward": False}, KEPT, ""),
    (
        {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "false"},
        KEPT,
        "removed fsdp_sharding_strategy",
    ),
    ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, {}, "early in backward"),
    ({"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}, {}, "early in backward"),
    ({"fsdp_use_orig_params": False}, {}, "own names"),
    (
        {"fsdp_state_dict_type": "LOCAL_STATE_DICT"},
        {"fsdp_state_dict_type": "SHARDED_STATE_DICT"},
        "is SHARDED_STATE_DICT",
    ),
    *(
        (kept, kept, "")
        for kept in (
            {"fsdp_state_dict_type": "FULL_STATE_DICT"},
            {"fsdp_offload_params": True},
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
            {"fsdp_transformer_layer_cls_to_wrap": "BertLayer,T5Block"},
            {"fsdp_min_num_params": 2000},
            {"fsdp_ignored_modules": "head.*"},
            {"fsdp_cpu_ram_efficient_loading": False},
            {"fsdp_forward_prefetch": True},
            {"fsdp_sync_module_states": False},
            {"fsdp_no_sync": True},
            {"fsdp_activation_checkpointing": "selective"},
            {"fsdp_activation_checkpointing": "2"},
            {"fsdp_activation_checkpointing_offload": True},
        )
    ),
]


def resolve(folder: Path, data: dict[str, Any], **cli: Any) -> Resolved:
    path = folder / "accel.yaml"
    path.write_text(yaml.safe_dump(data))
    return resolve_settings(cli, str(path), None, {})


# --- files for FSDP1 -----------------------------------------------------------------------


def test_every_key_is_in_the_table() -> None:
    known = {one.name for one in options_of(FullyShardedDataParallelPlugin)}
    assert {key for before, _, _ in CONVERTED for key in before} - known == {
        "fsdp_backward_prefetch_policy"
    }
    assert known - {key for before, _, _ in CONVERTED for key in before} == set()


@pytest.mark.parametrize(
    ("before", "after", "word"), CONVERTED, ids=[str(before) for before, _, _ in CONVERTED]
)
def test_what_a_key_of_fsdp1_becomes(
    before: dict[str, Any], after: dict[str, Any], word: str
) -> None:
    values, _ = values_of({"fsdp_config": before}, "a file")
    found, lines = to_fsdp2(values)
    expected = {"fsdp_version": 2, **after}
    assert found == {f"fsdp_config.{key}": value for key, value in expected.items()}
    assert len(lines) == bool(word)
    assert word in "".join(lines)
    again, lines = to_fsdp2(found)
    assert again == found
    assert lines == []


@pytest.mark.parametrize(
    ("machines", "mesh"),
    [
        ({"num_machines": 2, "num_processes": 8}, (2, 4)),
        ({"num_machines": 2, "nproc_per_node": 8}, (2, 8)),
        ({"num_machines": 1, "num_processes": 8}, None),
    ],
    ids=["all processes", "those of a machine", "one machine"],
)
def test_hybrid_has_a_replica_on_each_machine(
    machines: dict[str, int], mesh: tuple[int, int] | None
) -> None:
    values = {**machines, "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD"}
    found, _ = to_fsdp2(values)
    start = "parallelism_config.parallelism_config_"
    sizes = tuple(found.get(f"{start}{axis}_size") for axis in ("dp_replicate", "dp_shard"))
    assert sizes == (mesh or (None, None))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"fsdp_config.fsdp_sharding_strategy": "NO_SHARD"}, "is DDP: give distributed_type"),
        ({"fsdp_config.fsdp_reshard_after_forward": "NO_SHARD"}, "is DDP: give distributed_type"),
        (
            {"num_machines": 2, "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD"},
            "give num_processes, a multiple",
        ),
    ],
    ids=["no shard", "no shard in the newer key", "unknown processes"],
)
def test_what_cannot_be_converted(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        to_fsdp2(values)


OLD = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
        "fsdp_activation_checkpointing": False,
    },
}
NEW = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": False,
    "fsdp_activation_checkpointing": False,
}


def test_update_turns_a_file_into_one_for_fsdp2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(OLD))
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert read_config(path) == {**OLD, "fsdp_config": NEW}
    text = capsys.readouterr().out
    assert "removed fsdp_backward_prefetch: FSDP2 always" in text
    assert "fsdp_sharding_strategy: SHARD_GRAD_OP is fsdp_reshard_after_forward: false" in text
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert "removed" not in capsys.readouterr().out
    assert read_config(path) == {**OLD, "fsdp_config": NEW}


def test_to_fsdp2_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    text = yaml.safe_dump({**OLD, "fp16": True})
    old.write_text(text)
    words = ["to-fsdp2", "--config_file", str(old)]
    assert main(words) == 2
    assert "--overwrite to convert the file in place" in capsys.readouterr().err
    assert main([*words, "--output_file", str(new)]) == 0
    assert old.read_text() == text
    # Only the blocks change: other keys are left to `accel config update`.
    assert read_config(new) == {**OLD, "fp16": True, "fsdp_config": NEW}
    assert main([*words, "--output_file", str(new)]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert read_config(old) == read_config(new)


def test_to_fsdp2_adds_the_mesh_of_hybrid_shard(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    machines = {"num_machines": 2, "num_processes": 4, "machine_rank": 0}
    block = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", **machines, "fsdp_config": block}))
    assert main(["to-fsdp2", "--config_file", str(path), "--overwrite"]) == 0
    assert read_config(path)["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
    }


def test_to_fsdp2_without_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("num_processes: 2\n")
    assert main(["to-fsdp2", "--config_file", str(path), "--overwrite"]) == 0
    assert "nothing to convert" in capsys.readouterr().out
    assert read_config(path) == {"num_processes": 2}


# --- a launch ------------------------------------------------------------------------------


def test_each_key_of_fsdp1_is_named_with_its_replacement(tmp_path: Path) -> None:
    first, *rest = fsdp1_notes(resolve(tmp_path, OLD))
    assert f"fsdp_version: 1 (accel.yaml ({tmp_path / 'accel.yaml'})) is trained as 2" in first
    assert [line.split()[0].rstrip(":") for line in rest] == [
        "fsdp_backward_prefetch",
        "fsdp_use_orig_params",
        "fsdp_sharding_strategy",
    ]
    for line in rest[:2]:
        assert line.endswith(f"has no meaning in FSDP2: {OF_FSDP1[line.split()[0]]}")
    assert rest[2].endswith("SHARD_GRAD_OP is fsdp_reshard_after_forward: false")


@pytest.mark.parametrize(
    "data",
    [
        {"distributed_type": "FSDP"},
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}},
        {**OLD, "distributed_type": "MULTI_CPU"},
    ],
    ids=["none", "version 2", "same in both", "not sharded"],
)
def test_nothing_is_said_without_fsdp1(data: dict[str, Any], tmp_path: Path) -> None:
    assert fsdp1_notes(resolve(tmp_path, data)) == []


def test_a_mesh_alone_shards_too(tmp_path: Path) -> None:
    mesh = {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_size": 1}
    data = {"parallelism_config": mesh, "fsdp_config": {"fsdp_offload_params": True}}
    found = resolve(tmp_path, data)
    refuse_unbuilt(found)
    assert found.idle() == {}
    assert found.variables() == {
        "ACCEL_PARALLELISM_DP_SHARD_SIZE": "2",
        "ACCEL_PARALLELISM_CP_SIZE": "1",
        "ACCEL_FSDP_OFFLOAD_PARAMS": "1",
    }


@pytest.mark.parametrize("data", ["dp_shard_size", "dp_replicate_size"])
def test_layers_and_sequences_are_cut(data: str, tmp_path: Path) -> None:
    sizes = {"tp_size": 2, "cp_size": 4, "cp_comm_strategy": "alltoall", data: 2}
    mesh = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    found = resolve(tmp_path, {"parallelism_config": mesh})
    refuse_unbuilt(found)
    assert found.idle() == {}
    assert found.variables() == {
        f"ACCEL_PARALLELISM_{key.upper()}": str(value) for key, value in sizes.items()
    }


@pytest.mark.parametrize(
    ("words", "arranged"),
    [
        (["--parallelism_config_dp_shard_size", "2"], 2),
        (["--parallelism_config_dp_shard_size=4", "--parallelism_config_dp_replicate_size=2"], 8),
    ],
)
def test_a_mesh_that_does_not_fit_starts_nothing(
    words: list[str], arranged: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit('started')")
    script = str(tmp_path / "a.py")
    assert main(["launch", "--cpu", "--num_processes", "4", *words, script]) == 2
    error = capsys.readouterr().err
    assert f"arranges {arranged} processes, and this launch has 4" in error
    assert error.count("\n") == 1
    asked = ["launch", "--dry_run", "--cpu", "--num_processes", str(arranged), *words, script]
    assert main(asked) == 0


@pytest.mark.parametrize("flags", [("--use_fsdp", "--multi_gpu"), ("--multi_gpu", "--use_fsdp")])
def test_two_kinds_of_run_are_an_error(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--dry_run", *flags, "-m", "timeit"]) == 2
    assert "--use_fsdp contradicts distributed_type MULTI_GPU" in capsys.readouterr().err
    assert main(["launch", "--dry_run", flags[0], flags[0], "-m", "timeit"]) == 0


# --- what a process takes ------------------------------------------------------------------


def launched(**variables: Any) -> Any:
    environment = {f"ACCEL_FSDP_{name}": str(value) for name, value in variables.items()}
    return resolve_config({}, {"ACCEL_DISTRIBUTED_TYPE": "FSDP", **environment})


def test_every_option_reaches_its_keyword() -> None:
    config = launched(
        RESHARD_AFTER_FORWARD="false",
        OFFLOAD_PARAMS="1",
        AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        TRANSFORMER_LAYER_CLS_TO_WRAP="BertLayer, T5Block",
        MIN_NUM_PARAMS=7,
        IGNORED_MODULES="head.*",
        CPU_RAM_EFFICIENT_LOADING="0",
        ACTIVATION_CHECKPOINTING="true",
        ACTIVATION_CHECKPOINTING_OFFLOAD="true",
        SYNC_MODULE_STATES="0",
        FORWARD_PREFETCH="1",
        NO_SYNC="1",
    )
    plugin = FullyShardedDataParallelPlugin.from_launch(None, config)
    assert plugin == FullyShardedDataParallelPlugin(
        reshard_after_forward=False,
        cpu_offload=True,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["BertLayer", "T5Block"],
        min_num_params=7,
        ignored_modules="head.*",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
        sync_module_states=False,
        forward_prefetch=True,
        no_sync=True,
    )
    assert "fsdp.min_num_params=7 (environment variable ACCEL_FSDP_MIN_NUM_PARAMS)" in (
        config.describe()
    )


@pytest.mark.parametrize(
    ("variables", "frees", "hybrid"),
    [
        ({"SHARDING_STRATEGY": "FULL_SHARD"}, True, False),
        ({"SHARDING_STRATEGY": "shard_grad_op"}, False, False),
        ({"SHARDING_STRATEGY": "HYBRID_SHARD"}, True, True),
        ({"SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}, False, True),
        ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "false"}, False, False),
        ({"RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, False, False),
        ({"RESHARD_AFTER_FORWARD": "4"}, 4, False),
    ],
    ids=str,
)
def test_strategies_of_fsdp1(variables: dict[str, str], frees: int, hybrid: bool) -> None:
    plugin = FullyShardedDataParallelPlugin.from_launch(None, launched(**variables))
    assert plugin is not None
    assert (plugin.reshard, plugin.is_hybrid) == (frees, hybrid)


def test_the_script_wins_field_by_field() -> None:
    own = FullyShardedDataParallelPlugin(cpu_offload=False, min_num_params=3)
    config = launched(OFFLOAD_PARAMS="1", MIN_NUM_PARAMS=7, ACTIVATION_CHECKPOINTING="1")
    plugin = FullyShardedDataParallelPlugin.from_launch(own, config)
    assert plugin == FullyShardedDataParallelPlugin(
        cpu_offload=False, min_num_params=3, activation_checkpointing=True
    )
    assert (
        FullyShardedDataParallelPlugin.from_launch(
            own, resolve_config({}, {"ACCEL_FSDP_MIN_NUM_PARAMS": "7"})
        )
        is own
    )


def test_two_words_for_one_thing_are_one_field() -> None:
    own = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")
    plugin = FullyShardedDataParallelPlugin.from_launch(own, launched(RESHARD_AFTER_FORWARD="true"))
    assert plugin is not None
    assert plugin.reshard is False


def test_without_a_launch_there_is_no_fsdp() -> None:
    config = resolve_config({}, {"ACCEL_DISTRIBUTED_TYPE": "MULTI_CPU"})
    assert FullyShardedDataParallelPlugin.from_launch(None, config) is None
    assert ParallelismConfig.from_launch(None, config) is None


def test_the_mesh_of_a_launch() -> None:
    sizes = {"ACCEL_PARALLELISM_DP_SHARD_SIZE": "4", "ACCEL_PARALLELISM_DP_REPLICATE_SIZE": "2"}
    config = resolve_config({}, sizes)
    mesh = ParallelismConfig.from_launch(None, config)
    assert mesh is not None
    assert mesh.get_mesh() == (("dp_replicate", "dp_shard"), (2, 4))
    assert (
        FullyShardedDataParallelPlugin.from_launch(None, config) == FullyShardedDataParallelPlugin()
    )
    own = ParallelismConfig(dp_replicate_size=8, dp_shard_size=1)
    assert ParallelismConfig.from_launch(own, config) is own
    ones = resolve_config({}, {"ACCEL_PARALLELISM_DP_SHARD_SIZE": "1"})
    assert ParallelismConfig.from_launch(None, ones) is None


def test_a_wrong_option_of_the_launch_is_said_to_be_one() -> None:
    with pytest.raises(ValueError, match=r"as the launch asks for it .*NO_SHARD"):
        FullyShardedDataParallelPlugin.from_launch(None, launched(SHARDING_STRATEGY="NO_SHARD"))


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ValueError, match="ACCEL_FSDP_MIN_NUM_PARAMS='many'"):
        launched(MIN_NUM_PARAMS="many")
