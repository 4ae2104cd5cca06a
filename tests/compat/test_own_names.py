"""Handlers, states, loggers and variables, as scripts for Accelerate define, set and read them."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from accel_callbacks import GradScalerKwargs
from accel_callbacks.compat.names import resolve
from accel_callbacks.compat.trackers import with_project_folder
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.utils import is_compiled_module


def name(key: str, module: str = "accelerate"):
    return resolve(module, key)


@pytest.fixture
def state():
    name("PartialState")._reset_state()
    yield name("PartialState")(cpu=True)
    name("PartialState")._reset_state()


# --- handlers ---------------------------------------------------------------------------------


def test_a_script_declares_options_of_its_own_and_changes_them():
    @dataclass
    class Schedule(name("KwargsHandler", "accelerate.utils")):
        warmup: int = 10
        shape: str = "cosine"

    schedule = Schedule(shape="linear")
    schedule.warmup = 20
    assert schedule.to_kwargs() == {"warmup": 20, "shape": "linear"}
    assert schedule.to_dict() == {"warmup": 20, "shape": "linear"}
    assert isinstance(GradScalerKwargs(), name("KwargsHandler", "accelerate.utils"))


# --- the mesh ---------------------------------------------------------------------------------


def test_sizes_of_a_mesh_are_those_of_the_variables_of_accelerate(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = name("ParallelismConfig")(tp_size=3)
    assert (config.dp_shard_size, config.cp_size, config.tp_size) == (2, 4, 3)
    assert config.cp_handler.cp_comm_strategy == "alltoall"
    handler = name("TorchContextParallelConfig", "accelerate.utils")
    assert handler().cp_comm_strategy == "alltoall"
    assert ParallelismConfig().cp_size == 1  # of this library, which has variables of its own
    assert "ACCEL_PARALLELISM_CP_SIZE" not in os.environ


def test_an_own_variable_counts_before_one_of_accelerate(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("ACCEL_PARALLELISM_TP_SIZE", "4")
    assert name("ParallelismConfig")().tp_size == 4


def sizes_of_joined_dimensions():
    config = name("ParallelismConfig")(dp_shard_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch is about to rename how flat dimensions are asked for
        mesh = config.build_device_mesh("cpu")
        return [mesh[joined].size() for joined in ("dp", "dp_shard_cp", "dp_cp")]


@pytest.mark.distributed
def test_a_joined_dimension_of_one_axis_is_there_too(pool):
    assert pool.run(sizes_of_joined_dimensions) == [[2, 2, 2]] * 2


# --- states -----------------------------------------------------------------------------------


def test_what_a_script_sets_on_a_state_all_handles_have(state):
    PartialState, Accelerator = name("PartialState"), name("Accelerator")
    state.experiment = "first"
    assert PartialState().experiment == "first"
    accelerator = Accelerator(cpu=True)
    accelerator.state.note = {"a": 1}
    assert accelerator.state.note == {"a": 1}
    assert name("AcceleratorState")().experiment == "first"
    assert not hasattr(PartialState(), "note")
    name("AcceleratorState")._reset_state()
    assert not hasattr(name("AcceleratorState")(), "note")
    PartialState._reset_state()
    assert not hasattr(PartialState(cpu=True), "experiment")


def test_a_property_of_a_state_may_be_set(state, monkeypatch):
    monkeypatch.delenv("ACCEL_DEBUG", raising=False)
    accelerator = name("Accelerator")(cpu=True)
    assert (state.debug, accelerator.debug) == (False, False)
    state.debug = True
    assert (name("PartialState")().debug, accelerator.debug) == (True, True)
    name("PartialState")._reset_state()
    assert not name("PartialState")(cpu=True).debug
    assert "ACCEL_DEBUG" not in os.environ


def compare_sizes_in_debug_mode():
    state = name("PartialState")(cpu=True)
    state.debug = True
    different = torch.zeros(1, 2 + state.process_index)
    try:
        with pytest.raises(name("DistributedOperationException", "accelerate.utils.operations")):
            name("reduce", "accelerate.utils")(different)
    finally:
        state.debug = False
    return name("reduce", "accelerate.utils")(torch.ones(1), "sum").item()


@pytest.mark.distributed
def test_debug_of_a_state_is_that_of_the_collectives(pool):
    assert pool.run(compare_sizes_in_debug_mode) == [2.0, 2.0]


def test_a_handle_knows_nothing_once_its_state_is_reset(state):
    with pytest.raises(AttributeError, match=r"'PartialState' object has no attribute 'other'"):
        _ = state.other
    name("PartialState")._reset_state()
    with pytest.raises(
        AttributeError, match=r"`num_processes`\. .*`PartialState\._reset_state\(\)`"
    ):
        _ = state.num_processes
    assert not hasattr(state, "device")
    assert not hasattr(state, "is_main_process")
    state.note = "kept"
    assert state.note == "kept"
    assert name("PartialState")(cpu=True).num_processes == state.num_processes == 1


def test_an_accelerator_has_no_ranks_once_its_state_is_reset(state):
    accelerator = name("Accelerator")(cpu=True)
    accelerator.state._reset_state()
    for holder in (accelerator, accelerator.state):
        with pytest.raises(AttributeError, match=r"`AcceleratorState\._reset_state\(\)`"):
            _ = holder.num_processes
    assert state.num_processes == 1  # that of the process is not reset
    accelerator.state.note = "kept"
    assert accelerator.state.note == "kept"
    assert name("Accelerator")(cpu=True).num_processes == accelerator.num_processes == 1


# --- variables --------------------------------------------------------------------------------


def test_options_of_an_accelerator_are_those_of_the_variables_of_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left unread
        accelerator = name("Accelerator")(cpu=True)
        given = name("Accelerator")(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 4
    assert given.gradient_accumulation_steps == 2
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    assert is_compiled_module(model)  # in place, so that it has no _orig_mod


def test_the_cpu_is_the_device_that_a_variable_names(monkeypatch):
    from accel_callbacks.compat import twins

    chosen = []
    monkeypatch.setattr(twins, "select_device", chosen.append)
    name("PartialState")._reset_state()
    for device, on_cpu in (("cuda:3", False), ("cpu", True), ("", False)):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
        assert twins._runs_on_cpu() is on_cpu
    assert chosen == [torch.device("cuda:3")]
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:1")
    assert str(name("Accelerator")().state.device) == "cpu:1"
    name("PartialState")._reset_state()


# --- loggers ----------------------------------------------------------------------------------


class Prefixed(logging.LoggerAdapter):
    """A logger of the script's around that of Accelerate, which names the line of its caller."""

    def log(self, level, msg, *args, **kwargs):
        self.logger.log(level, f"run: {msg}", *args, stacklevel=3, **kwargs)


def test_a_record_names_the_line_that_logged(caplog):
    logger = name("get_logger", "accelerate.logging")("tests.lines", "INFO")
    here = inspect.currentframe()
    logger.info("plain")
    first = here.f_lineno - 1
    logger.warning_once("once")
    Prefixed(logger, {}).info("wrapped")
    logger.info("counted", stacklevel=2)
    lines = [(Path(record.pathname).name, record.lineno) for record in caplog.records]
    assert lines == [(Path(__file__).name, first + step) for step in (0, 2, 3, 4)]


# --- trackers ---------------------------------------------------------------------------------


def test_a_tracker_in_place_of_another_of_its_name_is_told(monkeypatch):
    tracking = "accelerate.tracking"
    GeneralTracker = name("GeneralTracker", tracking)
    monkeypatch.setattr(
        "accel_callbacks.compat.trackers.LOGGER_TYPE_TO_CLASS",
        dict(name("LOGGER_TYPE_TO_CLASS", tracking)),
    )
    kinds = [
        type(kind, (GeneralTracker,), {"name": label, "requires_logging_directory": False})
        for kind, label in (("First", "rows"), ("Second", "rows"), ("Unnamed", ""))
    ]
    register = name("register_tracker_class", tracking)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register(kinds[0])
        register(kinds[0])  # a cell that is run again
    with pytest.warns(UserWarning, match=r"log_with='rows' is Second from now on, and was First"):
        register(kinds[1])
    with pytest.raises(ValueError, match="cannot be registered"):
        register(kinds[2])


def test_a_tracker_of_files_needs_a_folder(tmp_path):
    make, project = name("Accelerator"), name("ProjectConfiguration", "accelerate.utils")
    choose = name("filter_trackers", "accelerate.tracking")

    class Rows(name("GeneralTracker", "accelerate.tracking")):
        name, requires_logging_directory = "rows", True

    for kind in ("tensorboard", Rows):
        with pytest.raises(ValueError, match=r"requires a `logging_dir`.* project_dir="):
            make(cpu=True, log_with=kind)
    if importlib.util.find_spec("tensorboard"):
        with pytest.raises(ValueError, match="Logging with `tensorboard` requires"):
            choose("tensorboard")
        make(cpu=True, log_with="tensorboard", project_dir=tmp_path)
        make(cpu=True, log_with="tensorboard", project_config=project(logging_dir=tmp_path))
    make(cpu=True, log_with=["all", "jsonl"])


@pytest.mark.parametrize("options", [{}, {"subdir": "curves"}])
def test_files_of_tensorboard_are_in_a_folder_of_the_projects_name(tmp_path, options):
    pytest.importorskip("tensorboard")
    accelerator = name("Accelerator")(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("digits", init_kwargs={"tensorboard": options})
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert folder.name == options.get("subdir", "digits")
    assert [path.name.split(".")[2] for path in folder.iterdir()] == ["tfevents"]


def test_a_folder_of_tensorboards_is_one_of_all_trackers_too():
    pytest.importorskip("tensorboard")
    folder = with_project_folder(["all"], "digits", {"wandb": {"mode": "offline"}})
    assert folder == {"tensorboard": {"subdir": "digits"}, "wandb": {"mode": "offline"}}
    assert with_project_folder(["jsonl"], "digits", {}) == {}


# --- loaders ----------------------------------------------------------------------------------


def batches_of_configurations():
    accelerator = name("Accelerator")(cpu=True)
    kind, before, sizes = name("DataLoaderConfiguration"), accelerator.dataloader_config, []
    for options in (kind(split_batches=True), before):
        accelerator.dataloader_config = options
        loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(8)), batch_size=4))
        sizes.append([len(batch) for batch in loader])
    return sizes, accelerator.split_batches


@pytest.mark.distributed
def test_loaders_follow_the_configuration_that_was_assigned_before_them(pool):
    assert pool.run(batches_of_configurations) == [([[2, 2], [4]], False)] * 2


def test_a_configuration_of_another_kind_is_refused_where_it_is_assigned():
    accelerator = name("Accelerator")(cpu=True)
    with pytest.raises(TypeError, match=r"dataloader_config=.* must be a DataLoader"):
        accelerator.dataloader_config = {}
    assert not accelerator.split_batches


# --- what is saved ----------------------------------------------------------------------------


def test_nothing_is_pickled_where_a_script_turns_safetensors_off(tmp_path):
    accelerator = name("Accelerator")(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    before = model.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"safe_serialization=False has no effect"):
        accelerator.save_state(tmp_path / "state", safe_serialization=False)
    with pytest.warns(UserWarning, match=r"pytorch_model\.bin itself reads model\.safetensors"):
        accelerator.save_model(model, tmp_path / "model", safe_serialization=False)
    accelerator.save({"a": torch.ones(1)}, tmp_path / "tensors", safe_serialization=False)
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, before)
    name("load_checkpoint_in_model", "accelerate.utils")(model, tmp_path / "model")
    assert torch.equal(model.weight, before)
    assert name("load", "accelerate.utils")(tmp_path / "tensors")["a"].item() == 1


# --- schedules --------------------------------------------------------------------------------


def rate_after_a_step(follows):
    accelerator = name("Accelerator")(cpu=True, step_scheduler_with_optimizer=follows)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    optimizer.step()
    schedule.step()
    return schedule.get_last_lr()[0]


@pytest.mark.distributed
def test_a_schedule_that_does_not_follow_the_optimizer_takes_one_step_a_call(pool):
    assert pool.run(rate_after_a_step, True) == [0.25, 0.25]
    assert pool.run(rate_after_a_step, False) == [0.5, 0.5]


# --- models -----------------------------------------------------------------------------------


def test_a_model_is_unwrapped_from_what_the_script_has_put_around_it():
    accelerator = name("Accelerator")(cpu=True)
    model = torch.nn.Linear(1, 1)
    parallel = torch.nn.DataParallel(model)
    assert accelerator.unwrap_model(parallel) is model
    compiled = torch.compile(parallel, backend="eager")
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
    inner = accelerator.unwrap_model(compiled)
    assert (type(inner), inner._orig_mod) == (type(compiled), model)
    assert compiled._orig_mod is parallel  # which trains on
    assert accelerator.unwrap_model(accelerator.prepare(model)) is model
