"""Options of Megatron-LM: each has a rule, and comes to the engine that the rule names."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from accel_callbacks import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    apply_activation_checkpointing,
)
from accel_callbacks.compat.megatron import IDLE, REFUSAL, REFUSED
from accel_callbacks.options import resolve_config
from accel_callbacks.plugins.option import options_of

# The fields of MegatronLMPlugin in Accelerate 1.15, and the flags `--megatron_lm_*` of its launch.
PLUGIN_OF_ACCELERATE = """
tp_degree pp_degree use_custom_fsdp overlap_cpu_optimizer_d2h_h2d no_load_optim eod_mask_loss
no_save_optim optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers
recompute_granularity recompute_method recompute_num_layers attention_backend
expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout
attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss
use_rotary_position_embeddings num_micro_batches gradient_clipping sequence_parallelism
recompute_activations use_distributed_optimizer pipeline_model_parallel_split_rank
num_layers_per_virtual_pipeline_stage is_train_batch_min train_iters train_samples
weight_decay_incr_style start_weight_decay end_weight_decay lr_decay_style lr_decay_iters
lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr consumed_samples
no_wd_decay_cond scale_lr_cond lr_mult megatron_dataset_flag seq_length encoder_seq_length
decoder_seq_length tensorboard_dir set_all_logging_options eval_iters eval_interval return_logits
custom_train_step_class custom_train_step_kwargs custom_model_provider_function
custom_prepare_model_function custom_megatron_datasets_provider_function custom_get_batch_function
custom_loss_function other_megatron_args
"""
CONFIG_OF_ACCELERATE = """
tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim
optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree
num_micro_batches sequence_parallelism recompute_activations use_distributed_optimizer
gradient_clipping recompute_granularity recompute_method recompute_num_layers attention_backend
expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout
attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss
use_rotary_position_embeddings
"""
# What each option that asks for something may be, where it is no number.
VALUES: dict[str, Any] = {
    "attention_backend": "flash",
    "consumed_samples": [8],
    "no_wd_decay_cond": print,
    "scale_lr_cond": print,
    "weight_decay_incr_style": "cosine",
    "lr_decay_style": "cosine",
    "other_megatron_args": {"finetune": True},
    "recompute_granularity": "full",
    "recompute_method": "block",
}
FLAGS = {one.name for one in fields(MegatronLMPlugin) if str(one.type).startswith("bool")}


#: Values of refused options that ask for nothing.
UNASKED: dict[str, tuple[Any, ...]] = {
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (1,),
    "megatron_dataset_flag": (False,),
}


def value_for(name: str) -> Any:
    return VALUES.get(name, True if name in FLAGS else 7)


def kinds() -> dict[str, str]:
    mapped = {one.attribute for one in options_of(MegatronLMPlugin) if not one.idle}
    found = {one.name: "idle" for one in fields(MegatronLMPlugin)}
    found |= dict.fromkeys(mapped, "mapped") | dict.fromkeys(REFUSED, "refused")
    return found | {"gradient_clipping": "passed on"}


def of_kind(kind: str) -> list[str]:
    return sorted(name for name, found in kinds().items() if found == kind)


def test_every_option_of_accelerate_is_there() -> None:
    ours = [one.name for one in fields(MegatronLMPlugin)]
    assert sorted(ours) == sorted(PLUGIN_OF_ACCELERATE.split())


def test_positions_are_those_of_accelerate_or_refused() -> None:
    plugin = MegatronLMPlugin(1, 2, True)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.use_custom_fsdp) == (1, 2, True)
    with pytest.raises(TypeError, match="positional"):
        MegatronLMPlugin(1, 2, True, True)  # type: ignore[misc]


def test_every_key_of_the_config_of_accelerate_is_there_and_is_an_option() -> None:
    keys = [option.attribute for option in options_of(MegatronLMPlugin)]
    assert sorted(keys) == sorted(CONFIG_OF_ACCELERATE.split())


def test_the_plugin_of_accelerate_itself_has_these_fields() -> None:
    theirs = pytest.importorskip("accelerate.utils", reason="scripts/test_adapters has accelerate")
    assert [one.name for one in fields(theirs.MegatronLMPlugin)] == PLUGIN_OF_ACCELERATE.split()


def test_the_page_has_a_row_for_every_option() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "move-from-megatron-config.md"
    found: dict[str, str] = {}
    for row in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if row.startswith("| `"):
            found.update(dict.fromkeys(cells[0].replace("`", "").split(", "), cells[1]))
    assert found == kinds()


def test_nothing_is_said_of_an_empty_plugin_and_its_defaults() -> None:
    assert MegatronLMPlugin().notes() == ""
    assert MegatronLMPlugin(no_load_optim=False, gradient_clipping=0).notes() == ""


def test_what_does_nothing_here_is_named_one_by_one() -> None:
    names = of_kind("idle")
    options = {name: value_for(name) for name in [*names, "gradient_clipping"]}
    text = MegatronLMPlugin(**options).notes()
    for name in names:
        assert text.count(f" {name}={value_for(name)!r},") == 1, name
    assert " gradient_clipping=7.0 (the loop clips: accel.clip_grad_norm_(" in text
    assert text.endswith(f": {IDLE}.")
    assert "\n" not in text


def test_what_is_mapped_is_not_named() -> None:
    options = {name: value_for(name) for name in of_kind("mapped")}
    assert MegatronLMPlugin(**options).notes() == ""


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("sequence_parallelism", "tp_degree"),
        ("optimizer_cpu_offload", "use_distributed_optimizer"),
        ("recompute_method", "recompute_granularity"),
    ],
)
def test_what_is_mapped_in_vain_is_named(name: str, needed: str) -> None:
    options = {name: value_for(name)}
    assert f" {name}={value_for(name)!r}: " in MegatronLMPlugin(**options).notes()
    assert MegatronLMPlugin(**options, **{needed: value_for(needed)}).notes() == ""


@pytest.mark.parametrize("name", of_kind("refused"))
def test_what_is_refused_is_named_with_its_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^MegatronLMPlugin\({name}=") as caught:
        MegatronLMPlugin(**{name: value_for(name)})
    assert str(caught.value).endswith(f"{REFUSAL}.")
    for unasked in (None, *UNASKED.get(name, ())):
        MegatronLMPlugin(**{name: unasked})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tp_degree": 0}, ValueError, "tp_degree=0 must be an integer of at least 1"),
        ({"tp_degree": "two"}, ValueError, "tp_degree='two' must be an integer"),
        ({"use_distributed_optimizer": 1}, ValueError, "must be true or false"),
        ({"recompute_granularity": "half"}, ValueError, "must be one of full, selective"),
        ({"tp_degre": 2}, TypeError, "Did you mean 'tp_degree'"),
    ],
)
def test_wrong_values_are_refused(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        MegatronLMPlugin(**options)


@pytest.mark.parametrize(
    ("options", "world", "mesh", "reshard"),
    [
        ({}, 2, {"dp_replicate": 2}, None),
        ({"tp_degree": 2}, 2, {"tp": 2}, None),
        ({"tp_degree": 2, "use_distributed_optimizer": True}, 2, {"tp": 2}, None),
        ({"tp_degree": 2}, 8, {"dp_shard": 4, "tp": 2}, False),
        ({"use_distributed_optimizer": True}, 2, {"dp_shard": 2}, False),
        ({"use_custom_fsdp": True}, 2, {"dp_shard": 2}, True),
        ({"use_distributed_optimizer": True}, 1, {}, None),
        ({"context_parallel_size": 2}, 4, {"dp_replicate": 2, "cp": 2}, None),
        ({"context_parallel_size": 2, "tp_degree": 2}, 4, {"cp": 2, "tp": 2}, False),
        (
            {"context_parallel_size": 2, "tp_degree": 2, "use_custom_fsdp": True},
            8,
            {"dp_shard": 2, "cp": 2, "tp": 2},
            True,
        ),
    ],
)
def test_degrees_are_axes(options: Any, world: int, mesh: Any, reshard: bool | None) -> None:
    found = MegatronLMPlugin(**options).arrange(world)
    parallelism, fsdp = found["parallelism"], found.get("fsdp")
    assert dict(zip(*parallelism.get_mesh(), strict=True)) == mesh
    assert (None if fsdp is None else fsdp.reshard) is reshard
    parallelism.fitted(world, sharded=fsdp is not None)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, False),
        ({"recompute_activations": True}, "selective"),
        ({"recompute_granularity": "selective"}, "selective"),
        ({"recompute_granularity": "full", "recompute_activations": True}, True),
        ({"recompute_granularity": "full", "recompute_method": "block"}, True),
        ({"recompute_num_layers": 4}, False),
    ],
)
def test_recomputation_is_activation_checkpointing(options: Any, policy: Any) -> None:
    assert MegatronLMPlugin(**options).activation_checkpointing == policy


def test_an_offloaded_optimizer_is_offloaded_shards() -> None:
    plugin = MegatronLMPlugin(use_distributed_optimizer=True, optimizer_cpu_offload=True)
    assert plugin.arrange(2)["fsdp"].offloads


def test_blocks_are_computed_again_on_one_process_too() -> None:
    import torch

    def made(plugin: MegatronLMPlugin | None) -> Any:
        block = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())  # noqa: E731
        model = torch.nn.Sequential(block(), block())
        return Accelerator(cpu=True, megatron_lm_plugin=plugin).prepare(model)

    twice = made(MegatronLMPlugin(recompute_granularity="full"))
    assert ["forward" in vars(one) for one in twice] == [True, True]
    plain = made(MegatronLMPlugin())
    assert ["forward" in vars(one) for one in plain] == [False, False]
    assert apply_activation_checkpointing(plain) == ["0", "1"]


def test_a_model_without_blocks_is_trained_with_a_warning() -> None:
    import torch

    accel = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(recompute_activations=True))
    with pytest.warns(UserWarning, match="Linear repeats no blocks"):
        model = accel.prepare(torch.nn.Linear(1, 1))
    assert "forward" not in vars(model)


def accelerator(plugin: MegatronLMPlugin | None, **options: Any) -> Accelerator:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Accelerator(cpu=True, megatron_lm_plugin=plugin, **options)


def test_micro_batches_are_a_window() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=4)
    accel = accelerator(plugin)
    assert accel.gradient_accumulation_steps == 4
    origin = "gradient_accumulation_steps=4 (num_micro_batches of Megatron-LM)"
    assert origin in accel.config.describe()
    # Scripts pass the default of their own argument.
    assert accelerator(plugin, gradient_accumulation_steps=1).gradient_accumulation_steps == 4
    assert accelerator(plugin, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    window = GradientAccumulationPlugin(sync_with_dataloader=False)
    carried = accelerator(plugin, gradient_accumulation_plugin=window)
    assert carried.gradient_accumulation_steps == 4
    assert not carried.gradient_state.sync_with_dataloader
    with pytest.raises(ValueError, match=r"=2 \(argument\) and num_micro_batches=4 .* give one"):
        accelerator(plugin, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parallelism_config", ParallelismConfig(dp_shard_size=1)),
        ("fsdp_plugin", FullyShardedDataParallelPlugin()),
        ("deepspeed_plugin", DeepSpeedPlugin(zero_stage=1)),
    ],
)
def test_two_arrangements_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} .* both arrange the ranks: leave it out"):
        accelerator(MegatronLMPlugin(), **{name: value})


def test_another_class_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a MegatronLMPlugin"):
        accelerator("megatron")  # type: ignore[arg-type]


def test_the_state_has_the_options_with_their_defaults() -> None:
    accel = accelerator(MegatronLMPlugin(num_micro_batches=2))
    plugin = accel.state.megatron_lm_plugin
    assert plugin is not None
    assert (plugin.tp_degree, plugin.gradient_clipping, plugin.num_micro_batches) == (1, 1.0, 2)
    # The kind is that of the engine, so that branches for Megatron-LM's own loop are not taken.
    assert accel.distributed_type == accel.state.distributed_type == "NO"
    assert accelerator(None).state.megatron_lm_plugin is None


def test_one_warning_names_what_is_left_to_the_script() -> None:
    with pytest.warns(UserWarning, match="do nothing by themselves") as caught:
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(seq_length=8, train_iters=3))
    (text,) = (str(one.message) for one in caught)
    assert "seq_length=8" in text
    assert "train_iters=3" in text


LAUNCHED = {
    "ACCEL_DISTRIBUTED_TYPE": "MEGATRON_LM",
    "ACCEL_MEGATRON_LM_TP_DEGREE": "2",
    "ACCEL_MEGATRON_LM_NUM_MICRO_BATCHES": "4",
    "ACCEL_MEGATRON_LM_RECOMPUTE_ACTIVATIONS": "1",
    "ACCEL_MEGATRON_LM_GRADIENT_CLIPPING": "0.5",
}


def test_the_launch_fills_what_the_script_leaves_out() -> None:
    found = MegatronLMPlugin.from_launch(
        MegatronLMPlugin(tp_degree=1), resolve_config({}, LAUNCHED)
    )
    assert found is not None
    assert (found.tp_degree, found.num_micro_batches, found.gradient_clipping) == (1, 4, 0.5)
    assert found.activation_checkpointing == "selective"
    other = {**LAUNCHED, "ACCEL_DISTRIBUTED_TYPE": "MULTI_CPU"}
    assert MegatronLMPlugin.from_launch(None, resolve_config({}, other)) is None


def test_a_wrong_variable_is_named() -> None:
    wrong = {**LAUNCHED, "ACCEL_MEGATRON_LM_TP_DEGREE": "two"}
    with pytest.raises(ValueError, match="ACCEL_MEGATRON_LM_TP_DEGREE='two'"):
        resolve_config({}, wrong)
    wrong = {**LAUNCHED, "ACCEL_MEGATRON_LM_TP_DEGREE": "0"}
    with pytest.raises(ValueError, match=r"\(ACCEL_MEGATRON_LM_\*\): tp_degree=0 must be"):
        MegatronLMPlugin.from_launch(None, resolve_config({}, wrong))


def test_ranks_that_share_a_model_have_one_seed_before_any_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accel_callbacks.distributed import topology

    monkeypatch.setattr(topology, "_copies", None)
    monkeypatch.setattr(topology, "process_rank", lambda: (3, 4, 3, 4))
    monkeypatch.setenv("ACCEL_MEGATRON_LM_TP_DEGREE", "2")
    assert topology.process_data_rank() == 3  # of a block that another kind of run has no use for
    monkeypatch.setenv("ACCEL_DISTRIBUTED_TYPE", "MEGATRON_LM")
    assert topology.process_data_rank() == 1


def test_a_pipeline_of_shards_and_cut_layers() -> None:
    found = MegatronLMPlugin(pp_degree=2, tp_degree=2).arrange(8)
    assert found["parallelism"].get_mesh() == (("dp_shard", "pp", "tp"), (2, 2, 2))
    assert "fsdp" in found  # data ranks of a pipeline are shards
    with pytest.raises(ValueError, match=r"pp_degree=3, .* groups of 3 ranks, and there are 4"):
        MegatronLMPlugin(pp_degree=3).arrange(4)
