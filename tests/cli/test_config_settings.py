"""The table of settings, their checks, and where a launch takes each value from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_callbacks.cli.parser import CommandParser
from accel_callbacks.errors import text as error_text
from accel_callbacks.launch.resolve import (
    Resolved,
    refuse_absent_gpus,
    refuse_unbuilt,
    resolve_settings,
)
from accel_callbacks.launch.settings import LaunchSettings, all_options, find
from accel_callbacks.launch.unsupported import IDLE, UNBUILT
from accel_callbacks.options import launched_options, resolve_config
from accel_callbacks.plugins.option import SettingsError

# The flags of `accelerate launch` that set something of a launch, from its reference.
THEIRS = """
cpu multi_gpu tpu mixed_precision num_processes num_machines num_cpu_threads_per_process
enable_cpu_affinity dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic
dynamo_use_regional_compilation use_deepspeed use_fsdp use_megatron_lm gpu_ids same_network
machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts
monitor_interval tpu_cluster no_tpu_cluster tpu_use_sudo vm env main_training_function
downcast_bf16 deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping
zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter
deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names fsdp_version
fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy fsdp_reshard_after_forward
fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch
fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload
megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_num_micro_batches
megatron_lm_sequence_parallelism megatron_lm_recompute_activations
megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping fp8_backend
fp8_use_autocast_during_eval fp8_margin fp8_interval fp8_format fp8_amax_history_len
fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level
fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim debug mpirun_hostfile
parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size
parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy
parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length
parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation
"""


def resolve(
    folder: Path, text: str = "", environment: Mapping[str, str] | None = None, **cli: Any
) -> Resolved:
    path = folder / "accel.yaml"
    path.write_text(text)
    return resolve_settings(cli, str(path), None, environment or {})


# --- the table -----------------------------------------------------------------------------


def test_no_flag_and_no_name_stands_twice() -> None:
    flags = [f for o in all_options() for f in (o.flag, *o.flags, *o.shorthands) if f]
    assert [flag for flag, times in Counter(flags).items() if times > 1] == []
    paths = [one.path for one in all_options()]
    assert len(paths) == len(set(paths)) > 100


def test_every_option_has_help_and_a_kind_that_can_be_read() -> None:
    kinds = {"bool", "int", "float", "str", "list", "block"}
    assert [o.path for o in all_options() if not o.help or o.kind not in kinds] == []


def test_every_default_passes_its_own_check() -> None:
    for one in all_options():
        if one.kind != "block" and one.default not in (None, ()):
            assert one.read(one.default) == one.default, one.path


def test_what_accelerate_launch_takes_is_taken() -> None:
    known = {f for o in all_options() for f in (o.flag, *o.flags, *o.shorthands)}
    assert [name for name in THEIRS.split() if f"--{name}" not in known] == []


def test_every_variable_of_the_processes_is_read_by_the_accelerator() -> None:
    ours = {one.variable for one in all_options() if one.variable}
    read = {option.variable for option in launched_options().values()}
    assert ours == read | {error_text.VARIABLE, "ACCEL_AS_ACCELERATE"}


def test_rules_name_settings_that_exist() -> None:
    paths = {one.path for one in all_options()}
    assert {one.path for one in UNBUILT} <= paths
    assert set(IDLE) <= paths


def test_every_flag_parses_and_reaches_its_setting(tmp_path: Path) -> None:
    parser = CommandParser("accel launch", "test")
    for one in all_options():
        if one.flag:
            flags, keywords = one.argument()
            parser.option(*flags, **keywords)
    words = {"bool": "true", "int": "1", "float": "0.5", "list": "a,b", "str": "x"}
    for one in all_options():
        if not one.flag or one.name == "compute_environment":
            continue
        value = one.choices[0] if one.choices else words[one.kind]
        switch = one.kind == "bool" and not one.valued
        parsed = vars(parser.parse([one.flag] if switch else [one.flag, value]))
        found = resolve(tmp_path, **parsed)
        assert found.origins[one.path] == "command line", one.path
        expected = True if one.kind == "bool" else one.parse(value)
        assert found.value(one.path) == expected, one.path


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("num_processes", "2", "must be an integer of at least 1 and at most 1000000, not '2'"),
        ("num_processes", True, "must be an integer"),
        ("num_processes", 0, "at least 1"),
        ("num_processes", 10**400, "an integer of more than 64 bits"),
        ("main_process_port", 65536, "at most 65535"),
        ("monitor_interval", float("nan"), "must be a number"),
        ("use_cpu", "true", "must be true or false, without quotes, not 'true'"),
        ("use_cpu", 1, "must be true or false, not 1"),
        ("mixed_precision", "bf17", "not 'bf17'. Did you mean 'bf16'?"),
        ("mixed_precision", True, "must be one of no, fp16"),
        ("main_process_ip", ["a"], "must be text, not a list of 1"),
        ("main_process_ip", "a\nb", "printable text on one line"),
        ("tpu_env", {"A": 1}, "must be a list of texts, not a dict of 1"),
        ("fsdp_config.fsdp_version", 3, "at most 2"),
        ("fsdp_config.fsdp_offload_params", "maybe", "must be true or false, not 'maybe'"),
    ],
)
def test_the_error_of_a_wrong_value_has_the_requirement(path: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        find(path).read(value)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("mixed_precision", False, "no"),  # a bare `no` in YAML
        ("distributed_type", "NO", "NO"),
        ("distributed_type", "TPU", "XLA"),
        ("dynamo_config.dynamo_backend", False, "no"),
        ("num_processes", -1, None),
        ("gpu_ids", "all", None),
        ("gpu_ids", 0, "0"),
        ("downcast_bf16", "no", False),
        ("fsdp_config.fsdp_offload_params", "true", True),
        ("fsdp_config.fsdp_version", "2", 2),
        ("fsdp_config.fsdp_sharding_strategy", 1, "FULL_SHARD"),
        ("fsdp_config.fsdp_reshard_after_forward", True, "true"),
        ("fp8_config.backend", "te", "TE"),
        ("fp8_config.override_linear_precision", [False, True], ("false", "true")),
        ("fp8_config.override_linear_precision", "(false, true)", ("false", "true")),
        ("deepspeed_config.gradient_clipping", 1.0, "1.0"),
        ("tpu_vm", [], ()),
    ],
)
def test_what_accelerate_writes_is_read(path: str, value: Any, read: Any) -> None:
    assert find(path).read(value) == read


def test_a_bare_no_is_the_kind_of_run_too(tmp_path: Path) -> None:
    assert resolve(tmp_path, "distributed_type: NO").settings.distributed_type == "NO"


# --- where values come from ----------------------------------------------------------------


def test_the_command_line_wins_then_the_file_then_the_environment(tmp_path: Path) -> None:
    text = "num_processes: 2\nmixed_precision: bf16\n"
    variables = {"ACCEL_MIXED_PRECISION": "fp16", "ACCEL_DEBUG": "yes"}
    found = resolve(tmp_path, text, variables, num_processes=3)
    origins = [found.origins[n] for n in ("num_processes", "mixed_precision", "debug", "role")]
    origin = f"accel.yaml ({tmp_path / 'accel.yaml'})"
    assert origins == ["command line", origin, "environment variable ACCEL_DEBUG", "default"]
    assert found.settings == LaunchSettings(num_processes=3, mixed_precision="bf16", debug=True)


def test_every_setting_has_an_origin(tmp_path: Path) -> None:
    assert set(resolve(tmp_path).origins) == {one.path for one in all_options()}


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="environment variable ACCEL_DEBUG must be true or"):
        resolve(tmp_path, "", {"ACCEL_DEBUG": "perhaps"})


def test_processes_get_variables_of_given_settings_only(tmp_path: Path) -> None:
    text = "use_cpu: true\ndynamo_config: {dynamo_backend: EAGER}\nnum_processes: 1\n"
    found = resolve(tmp_path, text, mixed_precision="bf16", on_conflict="wait")
    assert found.variables() == {
        "ACCEL_CPU": "1",
        "ACCEL_ON_CONFLICT": "wait",
        "ACCEL_MIXED_PRECISION": "bf16",
        "ACCEL_DYNAMO_BACKEND": "EAGER",
    }
    assert resolve(tmp_path).variables() == {}


@pytest.mark.parametrize(
    ("text", "cli", "expected"),
    [
        ("num_processes: 4", {"nproc_per_node": 2}, {"num_processes": None, "nproc_per_node": 2}),
        ("num_machines: 2", {"nnodes": "1:2"}, {"num_machines": 1, "nnodes": "1:2"}),
        ("distributed_type: NO", {"num_processes": 2}, {"distributed_type": None}),
        ("distributed_type: MULTI_GPU", {"use_cpu": True}, {"distributed_type": None}),
        ("distributed_type: MULTI_CPU", {}, {"use_cpu": True}),
        ("distributed_type: MULTI_CPU", {"use_cpu": False}, {"distributed_type": None}),
        ("use_cpu: true", {"distributed_type": "MULTI_GPU"}, {"use_cpu": False}),
        ("rdzv_backend: static", {"nnodes": "1:2"}, {"rdzv_backend": None}),
    ],
)
def test_of_two_that_contradict_the_nearer_one_stays(
    tmp_path: Path, text: str, cli: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = resolve(tmp_path, text, **cli)
    assert {name: found.value(name) for name in expected} == expected


def test_a_variable_that_is_overruled_is_off_in_the_processes(tmp_path: Path) -> None:
    found = resolve(tmp_path, "distributed_type: MULTI_GPU", {"ACCEL_CPU": "1"})
    assert found.variables()["ACCEL_CPU"] == "0"


@pytest.mark.parametrize(
    "text",
    [
        "num_processes: 4\nnproc_per_node: 2",
        "distributed_type: 'NO'\nnum_processes: 2",
        "distributed_type: MULTI_GPU\nuse_cpu: true",
    ],
)
def test_one_place_that_contradicts_itself_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"contradicts .*give one of them"):
        resolve(tmp_path, text)


# --- what is not done here -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}",
            "fsdp_config.fsdp_sharding_strategy: NO_SHARD",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: NO_SHARD}",
            "fsdp_config.fsdp_reshard_after_forward: NO_SHARD",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_inclusion_filter: worker-0}",
            "deepspeed_config.deepspeed_inclusion_filter: worker-0",
        ),
        (
            "distributed_type: MEGATRON_LM\n"
            "megatron_lm_config: {megatron_lm_expert_model_parallel_size: 2}",
            "megatron_lm_config.megatron_lm_expert_model_parallel_size: 2",
        ),
        ("mixed_precision: fp8\nfp8_config: {backend: TE}", "fp8_config.backend: TE"),
        ("mpirun_config: {mpirun_hostfile: hosts}", "mpirun_hostfile: hosts"),
        ("tpu_use_cluster: true", "tpu_use_cluster"),
        ("distributed_type: XLA\nnum_machines: 2", "num_machines: 2"),
    ],
)
def test_what_is_not_built_stops_with_the_key_and_the_file(
    tmp_path: Path, text: str, named: str
) -> None:
    found = resolve(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        refuse_unbuilt(found)
    message = str(caught.value)
    assert named in message
    assert str(tmp_path / "accel.yaml") in message
    assert "\n" not in message


def test_the_way_out_that_the_message_names_works(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}"
    found = resolve(tmp_path, text, distributed_type="MULTI_GPU")
    refuse_unbuilt(found)
    assert found.idle() == {
        "fsdp_config.fsdp_sharding_strategy": "distributed_type is not FSDP",
    }


def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    found = resolve(tmp_path, "distributed_type: MULTI_GPU")
    (tmp_path / "dev").mkdir()
    with pytest.raises(SettingsError, match=r"MULTI_GPU .*shows no GPU; --use_cpu"):
        refuse_absent_gpus(found, tmp_path)
    refuse_absent_gpus(resolve(tmp_path, "distributed_type: MULTI_GPU", use_cpu=True), tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    refuse_absent_gpus(found, tmp_path)
    other = resolve(tmp_path, "distributed_type: MULTI_HPU")
    with pytest.raises(SettingsError, match=r"MULTI_HPU .*shows no HPU; --use_cpu"):
        refuse_absent_gpus(other, tmp_path)
    (tmp_path / "dev" / "hl0").touch()
    refuse_absent_gpus(other, tmp_path)


def test_keys_of_fp8_that_no_backend_here_takes_are_named(tmp_path: Path) -> None:
    found = resolve(tmp_path, "mixed_precision: fp8\nfp8_config: {backend: AO, margin: 3}")
    assert set(found.idle()) == {"fp8_config.margin"}


def test_nothing_given_has_no_idle_key_and_is_not_refused(tmp_path: Path) -> None:
    found = resolve(tmp_path)
    assert found.idle() == {}
    refuse_unbuilt(found)


def test_every_key_of_a_block_is_in_the_reference() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
    text = page.read_text(encoding="utf-8")
    keys = [option.name for option in all_options() if option.block or option.kind == "block"]
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_an_empty_value_of_a_number_is_one_that_is_not_given(tmp_path: Path) -> None:
    keys = ("main_process_port", "machine_rank", "main_process_ip", "num_processes")
    environment = {"ACCEL_GRADIENT_ACCUMULATION_STEPS": "", "ACCEL_PARALLELISM_TP_SIZE": " "}
    found = resolve(tmp_path, "".join(f"{key}: ''\n" for key in keys), environment)
    for path in (*keys, "gradient_accumulation_steps"):
        assert found.origins[path] == "default", path
        assert found.value(path) == find(path).default
    assert resolve_config({}, environment).gradient_accumulation_steps == 1
