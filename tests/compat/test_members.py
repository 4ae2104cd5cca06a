"""Members of the objects of Accelerate that scripts read and call: what each of them does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import accel_callbacks
from accel_callbacks import AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs
from accel_callbacks.compat.names import resolve
from accel_callbacks.data.loader import DataLoaderShard
from tests.support.bound import BOUND


def name(key: str, module: str = "accelerate"):
    return resolve(module, key)


def accelerator(**options):
    return name("Accelerator")(cpu=True, **options)


def parts(scheduler_kind=torch.optim.lr_scheduler.ConstantLR):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(torch.ones(8, 2), batch_size=2), scheduler_kind(optimizer)


# --- the Accelerator --------------------------------------------------------------------------


def test_handlers_of_an_accelerator_are_those_that_it_was_given():
    autocast, group = AutocastKwargs(enabled=False), InitProcessGroupKwargs(timeout=BOUND)
    accel = accelerator(kwargs_handlers=[autocast, group])
    assert accel.autocast_handler is autocast
    assert accel.init_handler is group
    empty = ("scaler", "ddp", "profile", "ao_recipe", "fp8_recipe", "te_recipe", "msamp_recipe")
    assert [getattr(accel, f"{part}_handler") for part in empty] == [None] * 7
    scaler = GradScalerKwargs(growth_interval=3)
    assert accelerator(kwargs_handlers=[scaler]).scaler_handler is scaler
    assert scaler.to_dict()["growth_interval"] == 3
    assert scaler.to_dict().keys() > scaler.to_kwargs().keys()


def test_the_step_of_an_accelerator_counts_the_micro_batches_of_a_window():
    accel = accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, _ = parts()
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        with accel.accumulate(model):
            accel.backward(model(batch).mean())
            seen.append((accel.step, accel.sync_gradients))
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [(1, False), (2, True)] * 2
    assert accel.step == 0


def test_precision_of_an_accelerator_by_the_names_of_accelerate():
    backend = name("FP8BackendType", "accelerate.utils")
    plain, half = accelerator(), accelerator(mixed_precision="bf16")
    assert (plain.native_amp, half.native_amp) == (False, True)
    assert not plain.fp8_enabled
    assert not plain.has_fp8_handler
    assert plain.fp8_backend == backend.NO == "NO"
    assert not plain.delayed_fp8_autocast


def test_a_trigger_is_a_flag_tensor_until_it_is_checked():
    accel = accelerator()
    assert accel.flag_tensor is None
    accel.set_trigger()
    assert accel.flag_tensor.item() == 1
    assert accel.check_trigger()
    assert accel.flag_tensor is None


def test_a_model_on_several_devices_is_known_by_its_device_map():
    accel, model = accelerator(), torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert not accel.verify_device_map(model)
    model[0].hf_device_map = {"": "cpu"}
    assert not accel.verify_device_map(model)
    model[0].hf_device_map = {"a": 0, "b": "cpu"}
    assert accel.verify_device_map(model)


def test_lomo_updates_in_its_backward():
    calls = []

    class Lomo(torch.optim.SGD):
        __module__ = "lomo_optim.lomo"

        def fused_backward(self, loss, learning_rate):
            calls.append((loss, learning_rate))

    accel = accelerator()
    model = torch.nn.Linear(1, 1)
    assert not accel.has_lomo_optimizer
    with pytest.raises(ValueError, match="pass one to prepare"):
        accel.lomo_backward(torch.ones(()), 0.1)
    accel.prepare(model, Lomo(model.parameters(), lr=1.0))
    assert accel.has_lomo_optimizer
    accel.lomo_backward(torch.ones(()), 0.1)
    with pytest.raises(ValueError, match="needs learning_rate="):
        accel.lomo_backward(torch.ones(()), None)
    assert calls == [(torch.ones(()), 0.1)]


def test_an_engine_and_an_adapter_that_are_not_there():
    accel = accelerator(step_scheduler_with_optimizer=False)
    assert accel.deepspeed_engine_wrapped is None
    assert accel.step_scheduler_with_optimizer is False
    with pytest.raises(NotImplementedError, match="prepare\\(\\) shares the tokens"):
        accel.deepspeed_ulysses_dl_adapter(None, None)


# --- states -----------------------------------------------------------------------------------


def test_states_say_how_processes_were_started_and_models_are_compiled(monkeypatch):
    accel = accelerator(dynamo_backend="eager")
    state = name("AcceleratorState", "accelerate.state")()
    assert state.dynamo_plugin is accel.dynamo_plugin
    assert state.torch_tp_plugin is None
    assert state.downcast_bfloat is False
    assert not state.fork_launched
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    assert name("PartialState", "accelerate.state")().fork_launched
    gradients = name("GradientState", "accelerate.state")()
    assert gradients.initialized
    assert gradients.is_xla_gradients_synced


# --- what prepare returns ---------------------------------------------------------------------


def test_a_prepared_optimizer_knows_its_scaler_and_states():
    accel = accelerator()
    model, optimizer, _, _ = parts()
    _, optimizer = accel.prepare(model, optimizer)
    assert isinstance(optimizer, name("AcceleratedOptimizer", "accelerate.optimizer"))
    assert optimizer.scaler is None
    assert optimizer.device_placement is True
    assert optimizer.gradient_state is accel.gradient_state
    assert optimizer.accelerator_state.device == accel.device
    again = accel.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert again.gradient_state is accel.gradient_state


def test_a_script_with_a_scaler_of_its_own_says_that_a_step_was_skipped():
    accel = accelerator()
    model, optimizer, _, scheduler = parts(torch.optim.lr_scheduler.ConstantLR)
    _, optimizer, scheduler = accel.prepare(model, optimizer, scheduler)
    for skipped, epoch in ((True, 0), (False, 1)):
        optimizer._is_overflow = skipped
        scheduler.step()
        assert optimizer._is_overflow is optimizer.step_was_skipped is skipped
        assert scheduler.last_epoch == epoch


def test_a_prepared_scheduler_knows_its_optimizers_and_prints_rates(capsys):
    accel = accelerator(split_batches=True)
    model, optimizer, _, scheduler = parts()
    _, optimizer, scheduler = accel.prepare(model, optimizer, scheduler)
    assert scheduler.optimizers == [optimizer]
    assert (scheduler.split_batches, scheduler.step_with_optimizer) == (True, True)
    assert scheduler.gradient_state is accel.gradient_state
    scheduler.print_lr(True, 0, 0.05)
    scheduler.print_lr(False, 0, 0.05)
    assert capsys.readouterr().out.endswith("learning rate of group 0 to 5.0000e-02.\n")
    made = name("AcceleratedScheduler", "accelerate.scheduler")(
        torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1), optimizer, split_batches=True
    )
    assert made.optimizers == [optimizer]


def test_a_prepared_loader_knows_its_state_and_the_pass():
    accel = accelerator()
    loader = accel.prepare(DataLoader(torch.arange(6), batch_size=2, shuffle=True))
    plain = loader.origin
    assert loader.gradient_state is accel.gradient_state
    assert loader.base_dataloader is plain
    assert loader.device == accel.device
    assert loader.state.device == accel.device
    assert (loader.skip_batches, loader.split_batches, loader.slice_fn) == (0, False, None)
    assert (loader.torch_device_mesh, loader.use_stateful_dataloader) == (None, False)
    assert loader.synchronized_generator is getattr(plain.sampler, "generator", None)
    passes = [loader.iteration]
    for _ in loader:
        passes.append(loader.iteration)
    passes.append(loader.iteration)
    assert passes == [0, 0, 0, 0, 1]
    loader.set_epoch(4)
    assert loader.iteration == 4
    assert loader.dl_state_dict.keys() == loader.state_dict().keys()
    loader.adjust_state_dict_for_prefetch()
    view = name("skip_first_batches")(loader, 1)
    assert (view.skip_batches, view.gradient_state) == (1, accel.gradient_state)


def test_a_loop_over_another_object_begins_and_ends_the_pass_of_a_loader():
    accel = accelerator()
    loader = accel.prepare(DataLoader(torch.arange(6), batch_size=2))
    loader.reset()
    loader.begin()
    loader.begin()
    assert accel.gradient_state.active_dataloader is loader
    assert accel.gradient_state.dataloader_references == [None, loader]
    loader.end()
    assert not accel.gradient_state.in_dataloader


class OwnLoader(DataLoader):
    """A loader of the user's, with names that Accelerate's have too."""

    device = "mine"

    def __iter__(self):
        return iter([torch.zeros(2), torch.ones(2)])

    def reset(self):
        return "reset"


def test_what_a_loader_of_the_user_has_stays_its_own():
    accel = accelerator()
    loader = accel.prepare(OwnLoader(torch.arange(4), batch_size=2))
    assert (loader.device, loader.reset()) == ("mine", "reset")
    assert loader.gradient_state is accel.gradient_state
    loader.iteration = "set"
    assert loader.iteration == "set"


def test_copies_of_prepared_objects_are_those_of_this_library():
    accel = accelerator()
    model, optimizer, loader, scheduler = parts()
    prepared = accel.prepare(model, optimizer, loader, scheduler)
    loader = prepared[2]
    again = pickle.loads(pickle.dumps(loader))
    assert type(again) is DataLoaderShard
    assert [batch.shape for batch in again] == [(2, 2)] * 4
    assert loader.gradient_state is accel.gradient_state
    assert type(copy.copy(loader)) is DataLoaderShard


def test_a_skipping_loader_by_class_has_the_members_of_a_prepared_one():
    accel = accelerator()
    kind = name("SkipDataLoader", "accelerate.data_loader")
    loader = kind(torch.arange(6), skip_batches=1, batch_size=2)
    assert isinstance(loader, kind)
    assert loader.gradient_state is accel.gradient_state
    ends = [loader.end_of_dataloader for _ in loader]
    assert ends == [False, True]
    assert loader.state_dict()
    sampler = name("SkipBatchSampler", "accelerate.data_loader")([[0], [1], [2]], 2)
    assert (sampler.total_length, len(sampler)) == (3, 1)


def test_loaders_of_this_library_alone_have_no_foreign_members():
    loader = accel_callbacks.Accelerator(cpu=True).prepare(DataLoader(torch.arange(4)))
    assert type(loader) is DataLoaderShard
    assert not hasattr(loader, "gradient_state")


# --- options ----------------------------------------------------------------------------------


def test_values_of_options_are_listed():
    utils = "accelerate.utils"
    assert name("PrecisionType", utils).list() == ["no", "fp8", "fp16", "bf16"]
    assert "fp16" in name("PrecisionType", utils)
    assert "fp4" not in name("PrecisionType", utils)
    assert "wandb" in name("LoggerType", utils).list()
    assert "torch" in name("RNGType", utils).list()
    assert "fp16" in name("DDPCommunicationHookType", utils).list()
    assert "inductor" in [each.lower() for each in name("DynamoBackend", utils).list()]


def test_a_plugin_of_fsdp_takes_the_type_of_its_checkpoints():
    plugin = name("FullyShardedDataParallelPlugin", "accelerate.utils")(fsdp_version=2)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    from torch.distributed.fsdp import StateDictType

    plugin.set_state_dict_type(StateDictType.SHARDED_STATE_DICT)
    plugin.set_state_dict_type()
    assert plugin.state_dict_type == "SHARDED_STATE_DICT"
    plugin.set_cpu_offload()
    plugin.validate_cpu_offload()
    plugin.validate_mixed_precision_policy()


# --- two processes ----------------------------------------------------------------------------


def read_members():
    accel = accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=BOUND)])
    model, optimizer, loader, scheduler = accel.prepare(*parts())
    seen = []
    for batch in loader:
        accel.backward(model(batch).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(loader.gradient_state.end_of_dataloader)
    return seen, loader.iteration, scheduler.split_batches, scheduler.scheduler.last_epoch


@pytest.mark.distributed
def test_members_are_those_of_each_process(pool):
    assert pool.run(read_members) == [([False, True], 1, False, 4)] * 2
