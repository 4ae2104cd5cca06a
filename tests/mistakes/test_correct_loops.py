"""Nothing is said of a loop that is right: loops of all kinds, each without a warning."""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import Any

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
    set_seed,
)
from accel_callbacks.callbacks import Checkpoint, GradientNorm
from tests.mistakes.loops import LOOPS, WINDOWED
from tests.support.bound import BOUND

# What a loop runs under; a run has a folder, checkpoints and callbacks.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "run": {"log_with": ["jsonl"]},
    "bf16": {"mixed_precision": "bf16"},
    "window": {"gradient_accumulation_steps": 2},
}
# The settings take turns: what is said of one kind of loop is not said under one setting alone.
TURNS = itertools.cycle(setting for setting in SETTINGS if setting != "window")
TABLE = [(name, next(TURNS)) for name in LOOPS if name not in WINDOWED]
TABLE += [(name, setting) for name in sorted(WINDOWED) for setting in SETTINGS]


@pytest.mark.parametrize(("name", "setting"), TABLE)
def test_a_correct_loop_is_not_warned_of(name, setting, tmp_path, caplog):
    options = dict(SETTINGS[setting])
    if setting == "run":
        options |= {
            "project_dir": tmp_path,
            "callbacks": [Checkpoint(every_n_steps=2), GradientNorm()],
        }
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        accel = Accelerator(cpu=True, **options)
        steps = LOOPS[name](accel)
        accel.end_training()
    assert [str(warning.message) for warning in caught] == []
    assert caplog.messages == []
    assert accel.current_run.global_step == steps


# --- on two ranks -------------------------------------------------------------------------------

# Not on several ranks, where they are mistakes: nothing averages what they do beside the model.
ALONE = {
    "an_optimizer_that_steps_within_backward",
    "unfrozen_at_the_second_epoch",  # an error under DDP, which has no bucket for it
    "model_agnostic_meta_learning",  # calls the module that was wrapped by functional_call
}
# What this library refuses to shard, with an error, or torch cannot: it wants whole parameters.
NOT_SHARDED = {
    "lbfgs_with_a_closure",
    "a_gradient_penalty",
    "a_gan_whose_critic_trains_more",
    "a_recurrent_network_cut_in_time",
    "a_group_added_while_training",
    "a_best_model_kept_by_hand",
    "a_teacher_that_is_an_average",
    "weights_averaged_by_torch",
    "sharpness_aware",
    "deep_q_learning",
    "weights_only_saved_at_the_end",
}
# Under tensor parallelism, each for another way to step, to read data, to evaluate or to save.
CUT = {
    "plain",
    "accumulated",
    "clipped_and_scheduled",
    "validated_by_hand",
    "zero_grad_first",
    "a_frozen_backbone",
    "groups_of_parameters",
    "its_own_autocast",
    "a_gan",
    "one_optimizer_for_two_models",
    "sharpness_aware",
    "policy_gradients",
    "a_stream",
    "two_loaders_zipped",
    "a_break_in_each_epoch",
    "saved_and_loaded_in_between",
    "a_step_left_out_for_a_bad_loss",
    "only_inference",
}
# What torch says of its own, of models that are right.
OF_TORCH = (
    "Grad strides do not match bucket view strides",
    "DTensor random operators may not have complete support",
    "FSDP2-wrapped module",
)


def trained(name: str, layout: str) -> tuple[list[str], int]:
    """Run a loop on this rank; return its warnings and its number of optimizer steps."""
    options: dict[str, Any] = {}
    if layout == "fsdp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    elif layout == "tp":
        handler = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
        options["parallelism_config"] = ParallelismConfig(tp_size=2, tp_handler=handler)
    set_seed(0, device_specific=True)  # some draw their data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accel = Accelerator(cpu=True, timeout=BOUND, **options)
        LOOPS[name](accel)
        accel.end_training()
    texts = [str(warning.message) for warning in caught]
    ours = [text for text in texts if not text.startswith(OF_TORCH)]
    return ours, accel.current_run.global_step


# One layout a loop, but for those to which windows matter: of what is not cut, every second of
# those that may be is sharded.
OTHERS = [name for name in LOOPS if name not in ALONE | CUT]
SHARDED = [name for name in OTHERS if name not in NOT_SHARDED][::2]
LAYOUTS = {
    "tp": sorted(CUT),
    "fsdp": ["accumulated", *SHARDED],
    "ddp": ["accumulated", *(name for name in OTHERS if name not in SHARDED)],
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for layout, names in LAYOUTS.items() for name in names]
)
def test_nor_is_it_on_two_ranks(pool, name, layout):
    (first, steps), (second, others) = pool.run(trained, name, layout)
    assert first == second == []
    assert steps == others > 0 or name == "only_inference"
