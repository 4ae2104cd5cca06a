"""Handlers of options: how they are sorted, what they refuse, and what each field changes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from accel_callbacks import (
    Accelerator,
    AORecipeKwargs,
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accel_callbacks.plugins import sort_handlers
from accel_callbacks.plugins.process_group import group_options


def accelerator(*handlers: KwargsHandler, **options) -> Accelerator:
    return Accelerator(cpu=True, kwargs_handlers=list(handlers), **options)


# --- the list ------------------------------------------------------------------------------


def test_the_accelerator_keeps_one_handler_of_a_class():
    scaler = GradScalerKwargs(init_scale=2.0)
    accel = accelerator(AutocastKwargs(), scaler)
    assert accel.handlers.get(GradScalerKwargs) is scaler
    assert accel.handlers.get(InitProcessGroupKwargs) is None
    assert accel.handlers.get(InitProcessGroupKwargs, InitProcessGroupKwargs(timeout=1)).timeout


def test_no_handlers_may_be_said_in_three_ways():
    for nothing in (None, (), []):
        assert sort_handlers(nothing).by_class == {}


def test_two_of_a_class_are_an_error():
    with pytest.raises(ValueError, match="two GradScalerKwargs"):
        accelerator(GradScalerKwargs(), GradScalerKwargs(init_scale=2.0))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (AutocastKwargs, "Did you mean 'AutocastKwargs'"),
        ({"find_unused_parameters": True}, "DistributedDataParallelKwargs"),
        (TorchDynamoPlugin(), "none of AORecipeKwargs"),
    ],
)
def test_what_is_no_handler_is_an_error_that_names_those_there_are(wrong, named):
    with pytest.raises(TypeError, match=named):
        Accelerator(cpu=True, kwargs_handlers=[wrong])


def test_a_handler_of_another_library_is_an_error_that_names_the_import():
    theirs = type("AutocastKwargs", (), {"__module__": "accelerate.utils.dataclasses"})
    with pytest.raises(TypeError, match="from accel_callbacks import AutocastKwargs"):
        accelerator(theirs())


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (DistributedDataParallelKwargs, "find_unused_params", "find_unused_parameters"),
        (GradientAccumulationPlugin, "num_step", "num_steps"),
        (ProfileKwargs, "record_shape", "record_shapes"),
        (TorchDynamoPlugin, "full_graph", "fullgraph"),
    ],
)
def test_an_unknown_option_of_a_handler_is_an_error_with_a_suggestion(kind, wrong, right):
    with pytest.raises(TypeError, match=f"no option '{wrong}'. Did you mean '{right}'"):
        kind(**{wrong: 1})


def test_a_handler_is_copied_and_changed_as_any_dataclass():
    options = DistributedDataParallelKwargs(bucket_cap_mb=50)
    assert copy.deepcopy(options) == options
    assert replace(options, bucket_cap_mb=10).bucket_cap_mb == 10


@pytest.mark.parametrize("steps", ["2", 2.5])
def test_a_window_has_a_whole_number_of_steps(steps):
    with pytest.raises(TypeError, match="whole number"):
        GradientAccumulationPlugin(num_steps=steps)


def test_a_handler_instead_of_a_list_is_an_error():
    with pytest.raises(TypeError, match="list"):
        Accelerator(cpu=True, kwargs_handlers=AutocastKwargs())


@dataclass(frozen=True)
class Mine(KwargsHandler):
    role = "a test"
    size: int = 3


def test_a_class_of_ones_own_is_accepted_if_it_says_what_it_is_for():
    assert accelerator(Mine(4)).handlers.get(Mine).size == 4


def test_only_what_differs_from_the_defaults_is_passed_on():
    assert Mine().to_kwargs() == {}
    assert Mine(5).to_kwargs() == {"size": 5}
    assert DistributedDataParallelKwargs(comm_state_option={}).to_kwargs() == {}


def test_two_accelerators_have_their_own_options():
    one = accelerator(AutocastKwargs(upcast_outputs=False), mixed_precision="bf16")
    two = accelerator(mixed_precision="bf16")
    x = torch.ones(1, 2)
    first, second = one.prepare(torch.nn.Linear(2, 1)), two.prepare(torch.nn.Linear(2, 1))
    assert (first(x).dtype, second(x).dtype) == (torch.bfloat16, torch.float32)


# --- autocast ------------------------------------------------------------------------------


class Products(torch.nn.Module):
    """Notes the type of its product, and whether weights are cast once only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.seen: list = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        self.seen = [hidden.dtype, torch.is_autocast_cache_enabled()]
        return hidden


@pytest.mark.parametrize(
    ("options", "seen", "output"),
    [
        (AutocastKwargs(), [torch.bfloat16, True], torch.float32),
        (AutocastKwargs(enabled=False), [torch.float32, True], torch.float32),
        (AutocastKwargs(cache_enabled=False), [torch.bfloat16, False], torch.float32),
        (AutocastKwargs(upcast_outputs=False), [torch.bfloat16, True], torch.bfloat16),
    ],
)
def test_each_option_of_autocast_changes_the_forward(options, seen, output):
    model = accelerator(options, mixed_precision="bf16").prepare(Products())
    assert model(torch.ones(1, 2)).dtype is output
    assert model.seen == seen


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_autocast_takes_options_for_one_block():
    accel = accelerator(mixed_precision="bf16")
    with accel.autocast():
        assert product() is torch.bfloat16
        with accel.autocast(AutocastKwargs(enabled=False)):
            assert product() is torch.float32
        assert product() is torch.bfloat16


def test_a_block_may_turn_on_what_the_accelerator_has_turned_off():
    accel = accelerator(AutocastKwargs(enabled=False), mixed_precision="bf16")
    with accel.autocast():
        assert product() is torch.float32
    with accel.autocast(AutocastKwargs(enabled=True)):
        assert product() is torch.bfloat16


def test_full_precision_ends_the_autocast_of_the_script_where_it_is_told_to():
    accel = accelerator()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with accel.autocast():
            assert product() is torch.bfloat16
        with accel.autocast(AutocastKwargs(enabled=False)):
            assert product() is torch.float32


def test_autocast_without_its_cache_works_with_recomputation():
    accel = accelerator(AutocastKwargs(cache_enabled=False), mixed_precision="bf16")
    layer = torch.nn.Linear(2, 2)
    with accel.autocast():
        loss = checkpoint(layer, torch.ones(1, 2), use_reentrant=False).sum()
    accel.backward(loss)
    assert layer.weight.grad.dtype is torch.float32


# --- the loss scaler -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reader", "value"),
    [
        ({"init_scale": 8.0}, "get_scale", 8.0),
        ({"growth_factor": 3.0}, "get_growth_factor", 3.0),
        ({"backoff_factor": 0.25}, "get_backoff_factor", 0.25),
        ({"growth_interval": 7}, "get_growth_interval", 7),
        ({"enabled": False}, "is_enabled", False),
    ],
)
def test_each_option_of_the_scaler_reaches_it(options, reader, value):
    plain = accelerator(mixed_precision="fp16").scaler
    given = accelerator(GradScalerKwargs(**options), mixed_precision="fp16").scaler
    assert getattr(given, reader)() == value != getattr(plain, reader)()


def scale_after_two_steps(factor: float, **options) -> float:
    accel = accelerator(GradScalerKwargs(init_scale=16.0, **options), mixed_precision="fp16")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.5))
    for _ in range(2):
        accel.backward((weight * factor).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accel.precision.state_dict().get("scale", 0.0)


def test_the_scale_grows_and_shrinks_as_the_options_say():
    assert scale_after_two_steps(1.0, growth_interval=1, growth_factor=4.0) == 256.0
    assert scale_after_two_steps(1.0, growth_interval=2, growth_factor=4.0) == 64.0
    assert scale_after_two_steps(float("inf"), backoff_factor=0.25) == 1.0


def test_without_a_scaler_fp16_steps_with_what_there_is():
    accel = accelerator(GradScalerKwargs(enabled=False), mixed_precision="fp16")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.5))
    accel.backward((weight * 3).sum())
    assert weight.grad.tolist() == [3.0, 3.0]
    assert accel.clip_grad_norm_([weight], 1e9) == pytest.approx(18**0.5)
    optimizer.step()
    assert weight.tolist() == [-0.5, -0.5]
    assert not accel.optimizer_step_was_skipped


def test_only_fp16_has_a_scaler():
    assert accelerator(mixed_precision="bf16").scaler is None
    assert accelerator(GradScalerKwargs(init_scale=2.0)).scaler is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
    ],
)
def test_a_scale_that_cannot_move_is_an_error(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GradScalerKwargs(**wrong)


# --- data parallelism, as far as one process sees it ---------------------------------------


def test_hooks_have_a_name_a_value_and_a_member():
    for given in ("fp16", "FP16", DDPCommunicationHookType.FP16):
        options = DistributedDataParallelKwargs(comm_hook=given)
        assert options.comm_hook is DDPCommunicationHookType.FP16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"comm_hook": "powersgd"}, "Did you mean 'power_sgd'"),
        ({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "wraps no hook"),
        ({"comm_wrapper": "bf16"}, "comm_hook='bf16'"),
        ({"comm_state_option": {"matrix_approximation_rank": 2}}, "PowerSGD"),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"matrix_rank": 2}},
            "Did you mean 'matrix_approximation_rank'",
        ),
    ],
)
def test_what_ddp_would_not_understand_is_an_error(options, text):
    with pytest.raises(ValueError, match=text):
        DistributedDataParallelKwargs(**options)


def test_ddp_is_given_what_differs_and_not_the_hook():
    options = DistributedDataParallelKwargs(static_graph=True, comm_hook="power_sgd")
    assert options.to_kwargs() == {"static_graph": True}


def test_on_one_process_the_options_of_ddp_do_nothing():
    model = torch.nn.Linear(1, 1)
    options = DistributedDataParallelKwargs(comm_hook="fp16")
    assert accelerator(options).prepare(model) is model


# --- the process group ---------------------------------------------------------------------


def test_a_timeout_is_a_timedelta_or_seconds():
    assert InitProcessGroupKwargs(timeout=1.5).timeout == timedelta(seconds=1.5)
    assert InitProcessGroupKwargs(timeout=timedelta(minutes=1)).timeout == timedelta(minutes=1)
    with pytest.raises(TypeError, match="seconds"):
        InitProcessGroupKwargs(timeout="90")
    with pytest.raises(ValueError, match="above 0"):
        InitProcessGroupKwargs(timeout=0)


def test_the_timeout_of_the_accelerator_is_checked_alike():
    wait = group_options(sort_handlers(None), 90)["timeout"]
    assert wait == timedelta(seconds=90)
    for wrong, error in (("90", TypeError), (0, ValueError)):
        with pytest.raises(error, match="timeout="):
            accelerator(timeout=wrong)


def test_a_timeout_is_given_once():
    with pytest.raises(ValueError, match="not both"):
        accelerator(InitProcessGroupKwargs(timeout=5), timeout=timedelta(seconds=5))


@pytest.mark.parametrize("name", ["backend", "init_method"])
def test_the_process_group_refuses_what_it_does_not_know(name):
    with pytest.raises((ValueError, RuntimeError), match="nonsense"):
        accelerator(InitProcessGroupKwargs(**{name: "nonsense"}))


# --- fp8 and compilation: what is refused --------------------------------------------------


def test_a_recipe_without_fp8_is_an_error():
    with pytest.raises(ValueError, match="fp8"):
        accelerator(AORecipeKwargs(), mixed_precision="bf16")
    with pytest.raises(TypeError, match="module_filter_func"):
        AORecipeKwargs(module_filter_func="head")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "inductr"}, "Did you mean 'inductor'"),
        ({"backend": "eager", "mode": "max-autotun"}, "Did you mean 'max-autotune'"),
        ({"backend": "inductor", "mode": "max-autotune", "options": {}}, "not both"),
        ({"fullgraph": True}, "needs a backend"),
        ({"use_regional_compilation": True}, "needs a backend"),
    ],
)
def test_what_torch_compile_would_not_understand_is_an_error(options, text):
    with pytest.raises(ValueError, match=text):
        TorchDynamoPlugin(**options)


def test_a_backend_has_a_name_a_value_and_a_member():
    for given in ("eager", "EAGER", DynamoBackend.EAGER):
        assert TorchDynamoPlugin(backend=given).backend is DynamoBackend.EAGER
    assert TorchDynamoPlugin(backend="aot_eager_decomp_partition").compiles
    assert not TorchDynamoPlugin(backend="no").compiles
    assert not TorchDynamoPlugin(backend="eager", disable=True).compiles


def test_backend_and_plugin_exclude_each_other():
    with pytest.raises(ValueError, match="not both"):
        accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    with pytest.raises(TypeError, match="dynamo_backend="):
        accelerator(dynamo_plugin="eager")


# --- models that cannot be prepared --------------------------------------------------------


def test_a_model_without_weights_is_refused_before_anything_is_done_to_it():
    model = torch.nn.Linear(2, 1, device="meta")
    accel = accelerator(mixed_precision="bf16")
    with pytest.raises(ValueError, match="to_empty"):
        accel.prepare(model)
    assert "forward" not in vars(model)
    assert accel.models == []


def test_a_model_that_is_spread_over_devices_stays_where_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, device="meta"))
    model.hf_device_map = {"0": "cpu", "1": "disk"}
    prepared = accelerator().prepare(model)
    assert prepared[1].weight.is_meta


def test_evaluation_mode_and_placement_may_be_given_by_position():
    model = torch.nn.Linear(2, 1)
    assert accelerator().prepare_model(model, False, True) is model
