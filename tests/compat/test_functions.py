"""Functions and classes of Accelerate that do something: files, trackers, variables, models."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loggers
from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin
from accel_callbacks.compat.names import NOT_PROVIDED, resolve
from accel_callbacks.compat.public_names import public_names
from checkpoint_io import CorruptCheckpointError


def name(key: str, module: str = "accelerate.utils"):
    return resolve(module, key)


extract = name("extract_model_from_parallel")


# --- names ------------------------------------------------------------------------------------


def test_each_public_name_of_accelerate_is_there_or_says_why_not():
    accelerate = pytest.importorskip("accelerate", reason="scripts/test_adapters has it")
    if not accelerate.__version__.startswith("1.15."):
        pytest.skip("the names are those of Accelerate 1.15")
    modules = ("", ".utils", ".state", ".data_loader", ".tracking", ".checkpointing", ".inference")
    lacking = []
    for suffix in modules:
        module = __import__(f"accelerate{suffix}", fromlist=["_"])
        for key, value in vars(module).items():
            home = getattr(value, "__module__", "") or ""
            if key.startswith("_") or not callable(value) or not home.startswith("accelerate"):
                continue
            try:
                resolve(module.__name__, key)
            except AttributeError:
                lacking.append(f"{module.__name__}.{key}")
            own = suffix in ("", ".utils") or home == module.__name__
            if own and key not in public_names(module.__name__):
                lacking.append(f"{module.__name__}.{key} in a star")
    assert lacking == []


def test_a_module_of_the_room_that_imports_a_name_does_not_provide_it():
    with pytest.raises(AttributeError, match=r"has no such name"):
        resolve("accelerate.utils", "changed_environment")


# --- variables --------------------------------------------------------------------------------


def test_variables_are_patched_cleared_and_purged(monkeypatch):
    monkeypatch.setenv("ACCELERATE_A", "before")
    monkeypatch.delenv("ACCELERATE_B", raising=False)
    with name("patch_environment")(accelerate_a=1, accelerate_b="x"):
        assert (os.environ["ACCELERATE_A"], os.environ["ACCELERATE_B"]) == ("1", "x")
    assert os.environ["ACCELERATE_A"] == "before"
    assert "ACCELERATE_B" not in os.environ
    with name("clear_environment")():
        assert dict(os.environ) == {}
    assert os.environ["ACCELERATE_A"] == "before"

    @name("purge_accelerate_environment")
    class Cases:
        def test_one(self):
            os.environ["ACCELERATE_B"] = "left"

    class More(Cases):
        def test_two(self):
            del os.environ["ACCELERATE_A"]

    Cases().test_one()
    More().test_two()
    assert os.environ["ACCELERATE_A"] == "before"
    assert "ACCELERATE_B" not in os.environ


def test_ranks_that_mpi_gives(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    information = name("get_cpu_distributed_information")()
    assert vars(information) == {
        **{"rank": 3, "world_size": 4, "local_rank": 0, "local_world_size": 1},
    }


# --- trackers ---------------------------------------------------------------------------------


def test_a_tracker_by_class_is_what_log_with_makes_by_name(tmp_path):
    kind = name("TensorBoardTracker", "accelerate.tracking")
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    assert isinstance(accelerator.trackers[0], kind)
    assert not isinstance(accelerator.trackers[0], name("WandBTracker", "accelerate.tracking"))
    accelerator.end_training()


def test_a_tracker_by_class_logs_alone_and_in_an_accelerator(tmp_path):
    pytest.importorskip("tensorboard")
    kind = name("TensorBoardTracker", "accelerate.tracking")
    alone = kind("alone", tmp_path)
    assert isinstance(alone, name("GeneralTracker", "accelerate.tracking"))
    alone.start()
    alone.store_init_configuration({"lr": 0.1})
    alone.log({"loss": torch.tensor(0.5)}, step=1)
    assert alone.writer is alone.tracker is not None
    alone.finish()
    accelerator = name("Accelerator", "accelerate")(cpu=True, log_with=kind("inside", tmp_path))
    accelerator.init_trackers("run")
    accelerator.log({"loss": 0.25}, step=2)
    accelerator.end_training()
    for run in ("alone", "inside"):
        assert any(path.stat().st_size for path in (tmp_path / run).glob("events*")), run


def test_a_registered_class_is_known_by_its_name(tmp_path):
    class Lines(name("GeneralTracker", "accelerate.tracking")):
        name = "lines"
        requires_logging_directory = True

        def __init__(self, run_name: str, logging_dir: str) -> None:
            super().__init__()
            self.path = Path(logging_dir, run_name)

        @property
        def tracker(self):
            return self.path

        def log(self, values, step=None, **kwargs):
            self.path.write_text(json.dumps([step, values]))

    tracking = "accelerate.tracking"
    name("register_tracker_class", tracking)(Lines)
    try:
        with pytest.raises(ValueError, match="logging_dir"):
            name("filter_trackers", tracking)("lines")
        accelerator = name("Accelerator", "accelerate")(
            cpu=True, log_with="lines", project_dir=str(tmp_path)
        )
        accelerator.init_trackers("run")
        accelerator.log({"loss": 1.5}, step=3)
        accelerator.end_training()
    finally:
        del name("LOGGER_TYPE_TO_CLASS", tracking)["lines"]
    assert json.loads((tmp_path / "run").read_text()) == [3, {"loss": 1.5}]
    with pytest.raises(ValueError, match="must be a subclass of GeneralTracker"):
        name("register_tracker_class", tracking)(dict)


def test_trackers_that_there_are():
    available = name("get_available_trackers", "accelerate.tracking")()
    installed = loggers.installed_trackers()
    assert ("tensorboard" in available) == ("tensorboard" in installed)
    assert "jsonl" not in available


# --- files ------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "weights.bin"
    name("save")({"a": torch.arange(3)}, path)
    assert name("load")(path)["a"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="flat dicts of tensors"):
        name("save")([1], path)


def test_pickles_are_read_without_running_them(tmp_path):
    states = {"step": 3, "numpy": np.random.get_state(), "python": random.getstate()}
    path = tmp_path / "states.pkl"
    torch.save(states, path)
    for source in (path, path.open("rb")):
        read = name("load")(source)
        assert read["step"] == 3
        assert read["python"] == states["python"]
        assert np.array_equal(read["numpy"][1], states["numpy"][1])
    torch.save({"of a class": Path("x")}, path)
    with pytest.raises(CorruptCheckpointError, match="only full unpickling can create"):
        name("load")(path)


def test_weights_of_a_file_by_a_device_map(tmp_path):
    name("save")({"a.w": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    weights = name("load_state_dict")(str(tmp_path / "model.safetensors"), {"a": "meta"})
    assert {key: tensor.device.type for key, tensor in weights.items()} == {
        **{"a.w": "meta", "b": "cpu"}
    }


def test_weights_that_share_memory_are_written_once(caplog):
    shared = torch.ones(2, 3)
    weights = {"a": shared, "b": shared, "c": torch.ones(2, 3).T, "d": "text"}
    cleaned = name("clean_state_dict_for_safetensors")(weights)
    assert "another one: 'b' (that of 'a'). Tie them again" in caplog.text
    assert list(cleaned) == ["a", "c", "d"]
    assert cleaned["c"].is_contiguous()


def test_a_basic_config_is_written_once(tmp_path):
    write = name("write_basic_config")
    path = tmp_path / "config.yaml"
    assert write("bf16", str(path)) == path
    assert name("load_config_from_file")(str(path)).to_dict()["mixed_precision"] == "bf16"
    assert write("no", str(path)) is False


def test_the_parser_of_a_launch_reads_options_of_accelerate(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import accelerate; print(accelerate.__version__)")
    words = ["--num_processes", "1", "--cpu", str(script), "--flag"]
    args = name("launch_command_parser", "accelerate.commands.launch")().parse_args(words)
    assert args.program == [str(script), "--flag"]


def test_a_config_file_is_looked_for_where_accelerate_names_it():
    module = "accelerate.commands.config.config_args"
    path = name("default_yaml_config_file", module)
    assert path == name("default_config_file", module)
    assert Path(path).suffix == ".yaml"


# --- models -----------------------------------------------------------------------------------


def block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())


def test_the_policy_of_a_plugin_names_the_modules_that_are_sharded():
    policy_of = name("fsdp2_prepare_auto_wrap_policy", "accelerate.utils.fsdp_utils")
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Sequential"])
    model = torch.nn.Sequential(block(), torch.nn.Linear(2, 1), block())
    policy = policy_of(plugin, model)
    assert [policy(part) for part in model] == [True, False, True]
    assert policy(SimpleNamespace(_checkpoint_wrapped_module=model[0]))
    assert policy_of(FullyShardedDataParallelPlugin(), torch.nn.Linear(1, 1)) is None


def test_blocks_are_compiled_in_place():
    model = torch.nn.Sequential(block(), block())
    assert name("compile_regions")(model, backend="eager") is model
    assert all(part._compiled_call_impl is not None for part in model)
    assert name("has_repeated_blocks")(model)


def test_a_pipeline_on_one_process_is_the_model():
    model = torch.nn.Sequential(block(), block())
    assert name("prepare_pippy", "accelerate.inference")(model, split_points=["1"]) is model
    assert model.hf_split_points == ["1"]


def test_each_reason_says_what_to_do_instead():
    assert all(len(reason) > 40 for reason in NOT_PROVIDED.values())


def test_a_nested_tensor_stays_without_padding():
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    with pytest.warns(name("CannotPadNestedTensorWarning"), match="to_padded_tensor"):
        padded = name("pad_across_processes")({"ragged": ragged, "even": torch.ones(1)})
    assert padded["ragged"] is ragged


class Model(torch.nn.Linear):
    """A class that can be pickled."""


def test_a_forward_that_a_script_wrapped_is_restored():
    model = Model(1, 1)
    model._original_forward = model.forward
    model.forward = name("convert_outputs_to_fp32")(model.forward)
    assert extract(model) is model
    assert vars(model).keys() >= {"forward", "_original_forward"}
    assert extract(model, keep_fp32_wrapper=False) is model
    assert vars(model).keys().isdisjoint({"forward", "_original_forward"})
    assert torch.equal(pickle.loads(pickle.dumps(model)).weight, model.weight)


def test_a_forward_of_the_instance_is_restored_too():
    model = Model(1, 1)
    of_instance = lambda inputs: inputs + 1  # noqa: E731
    model._original_forward = of_instance
    model.forward = name("convert_outputs_to_fp32")(of_instance)
    assert extract(model, keep_fp32_wrapper=False).forward is of_instance


def test_what_is_compiled_stays_so_without_its_parallel_wrappers():
    torch.compiler.reset()  # other tests may have compiled the code of this class to its limit
    calls = []

    def backend(graph, inputs):
        calls.append(len(inputs))
        return graph.forward

    model = Model(1, 1)
    compiled = torch.compile(model, backend=backend)
    assert extract(compiled) is compiled
    assert extract(torch.nn.DataParallel(compiled)) is compiled
    outside = extract(torch.compile(torch.nn.DataParallel(model), backend=backend))
    assert type(outside) is type(compiled)
    assert outside._orig_mod is model
    assert torch.equal(outside(torch.ones(1)), model(torch.ones(1)))
    assert calls
    both = torch.compile(torch.nn.DataParallel(compiled), backend=backend)
    assert extract(both) is compiled
    assert extract(both, keep_torch_compile=False) is model


def test_what_is_inside_of_a_compiled_model_is_found_by_its_name_there():
    is_compiled = name("is_compiled_module")

    def inside(model):
        return model._orig_mod if is_compiled(model) else model

    layer = Model(1, 1)
    assert inside(torch.compile(layer, backend="eager")) is layer
    prepared = Accelerator(cpu=True, dynamo_backend="eager").prepare(layer)
    assert inside(prepared) is layer
    assert layer._compiled_call_impl is not None
