"""`import accelerate` that gets this library: names, version, pickles, a Trainer, a launch."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import accel_callbacks.utils
from accel_callbacks.compat.check import name_uses, status_of
from accel_callbacks.compat.names import NOT_PROVIDED, NotProvided, resolve

ROOT = Path(__file__).resolve().parents[2]
#: Packages that import accelerate, as far as they are installed.
USERS = ("transformers", "peft", "trl", "diffusers", "sentence_transformers")


def run(folder: Path, source: str, *start: str, expected: int = 0) -> str:
    """Run a script in a new process, which has imported nothing, and return what it prints."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    start = start or ("-m", "accel_callbacks.as_accelerate")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *start, str(script)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout if expected == 0 else done.stderr


@pytest.mark.parametrize("package", USERS)
def test_what_packages_use_of_accelerate_is_there(package):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    lacking = []
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        for use in name_uses(path.read_text(errors="replace")):
            status, reason = status_of(use.module, use.name)
            if status == "unknown":
                lacking.append(f"{path}:{use.line}: {use.dotted}: {reason}")
    assert lacking == []


def test_modules_have_a_file_that_shows_which_library_it_is(tmp_path):
    said = run(
        tmp_path,
        """
        import importlib.util, inspect, os
        import accelerate, accelerate.utils.operations

        for module in (accelerate, accelerate.utils.operations):
            assert inspect.getfile(module) == module.__file__
            assert importlib.util.find_spec(module.__name__).origin == module.__file__
            print(os.path.isfile(module.__file__), "accel_callbacks" in module.__file__)
        """,
    )
    assert said == "True True\n" * 2


@pytest.mark.parametrize("name", sorted(NOT_PROVIDED))
def test_what_is_not_provided_is_imported_and_says_why_on_use(name):
    placeholder = resolve("accelerate.utils", name)
    assert isinstance(placeholder, type)
    with pytest.raises(NotProvided, match=rf"^accelerate.utils.{name}: .{{40}}"):
        placeholder(1)


@pytest.mark.parametrize(
    "name", ["BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"]
)
def test_what_was_removed_says_what_serves_instead(name):
    text = (
        "It was removed in 0.2.0. transformers loads such a model itself: "
        "give from_pretrained a BitsAndBytesConfig as quantization_config."
    )
    with pytest.raises(NotProvided) as caught:
        resolve("accelerate.utils", name)()
    assert str(caught.value) == f"accelerate.utils.{name}: {text}"
    assert status_of("accelerate.utils.bnb", name) == ("not provided", text)
    with pytest.raises(ImportError) as raised:
        getattr(accel_callbacks.utils, name)
    assert str(raised.value) == f"accel_callbacks.utils has no {name!r}. {text}"


def test_checks_for_a_package_are_there_and_a_name_that_nobody_has_is_not(tmp_path):
    said = run(
        tmp_path,
        """
        import accelerate.utils.bnb
        from accelerate.utils import is_4bit_bnb_available, is_8bit_bnb_available, is_bnb_available
        from accelerate.utils.bnb import has_4bit_bnb_layers
        from accelerate.utils.imports import is_bitsandbytes_multi_backend_available

        checks = is_4bit_bnb_available, is_8bit_bnb_available, is_bnb_available
        assert all(type(check()) is bool for check in checks)
        assert type(is_bitsandbytes_multi_backend_available()) is bool
        try:
            from accelerate.utils import no_such_name
        except ImportError as error:
            print(error)
        """,
    )
    assert "cannot import name 'no_such_name' from 'accelerate.utils'" in said


def test_a_star_gives_the_names_of_accelerate_and_so_do_dir_and_getmembers(tmp_path):
    said = run(
        tmp_path,
        """
        import sys
        assert "torch" not in sys.modules
        from accelerate import *
        from accelerate.utils import *
        from accelerate.tracking import *

        assert Accelerator and skip_first_batches and init_empty_weights and PartialState
        assert set_seed and ProjectConfiguration and gather_object and is_wandb_available
        assert TensorBoardTracker and filter_trackers
        try:
            TERecipeKwargs()
        except NotImplementedError as error:
            print(str(error)[:31])
        import importlib, inspect
        from accel_callbacks.compat.names import MODULES

        for name in sorted(MODULES):
            module = importlib.import_module(name)
            members = dict(inspect.getmembers(module))
            assert {*module.__all__} <= {*dir(module)} and {*module.__all__} <= {*members}, name
        print(len(importlib.import_module("accelerate.utils").__all__) > 200)
        """,
    )
    assert said == "accelerate.utils.TERecipeKwargs\nTrue\n"


@pytest.mark.first
def test_a_script_for_accelerate_runs_as_it_is(tmp_path):
    said = run(
        tmp_path,
        """
        import importlib.metadata, pickle, sys
        import accelerate, torch
        from accelerate import Accelerator, DistributedType, PartialState
        from accelerate.state import AcceleratorState
        from accelerate.utils import DataLoaderConfiguration, set_seed
        from accelerate.utils.constants import SAFE_WEIGHTS_NAME

        assert accelerate.__version__.startswith("1.15.0")
        assert importlib.metadata.version("accelerate") == accelerate.__version__
        assert "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"]
        assert sys.argv[1:] == [] and __name__ == "__main__"
        assert PartialState._shared_state == {}
        loaders = DataLoaderConfiguration()
        loaders.non_blocking = False
        set_seed(3)
        accelerator = Accelerator(True, cpu=True, dataloader_config=loaders)
        assert PartialState._shared_state != {}
        assert isinstance(accelerator.state, AcceleratorState)
        assert accelerator.distributed_type == DistributedType.NO
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert accelerator._models == [model] and len(accelerator._dataloaders) == 1
        for batch in loader:
            accelerator.backward(model(batch).mean())
            accelerator.gradient_state._set_sync_gradients(True)
            optimizer.step()
            optimizer.zero_grad()
        written = pickle.dumps(PartialState())
        assert b"accel_callbacks" not in written
        assert pickle.loads(written).device == accelerator.device
        AcceleratorState._reset_state(reset_partial_state=True)
        assert PartialState._shared_state == {}
        print("trained", SAFE_WEIGHTS_NAME)
        """,
    )
    assert said == "trained model.safetensors\n"


def test_too_late_names_the_module_that_was_first(tmp_path):
    (tmp_path / "peft.py").touch()
    said = run(
        tmp_path,
        """
        import peft
        from accel_callbacks import compat

        assert not compat.is_installed()
        compat.install()
        """,
        "-c",
        "import runpy, sys; sys.path.insert(0, sys.argv[1].rpartition('/')[0]); "
        "runpy.run_path(sys.argv[1])",
        expected=1,
    )
    assert "peft is imported already" in said
    assert "python -m accel_callbacks.as_accelerate" in said


def test_without_it_there_is_no_accelerate_of_ours():
    spec = importlib.util.find_spec("accelerate")
    assert spec is None or "compat" not in type(spec.loader).__module__


@pytest.mark.first
@pytest.mark.distributed
def test_a_launch_stands_in_on_all_processes(tmp_path):
    said = run(
        tmp_path,
        """
        import os, torch
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.print(os.environ["ACCELERATE_MIXED_PRECISION"], accelerator.mixed_precision)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        optimizer.step()
        schedule.step()
        # A schedule takes a step for each process, as in Accelerate.
        accelerator.print(accelerator.num_processes, schedule.get_last_lr())
        """,
        *("-m", "accel_callbacks.cli", "launch", "--as_accelerate", "--cpu"),
        *("--num_processes", "2", "--mixed_precision", "bf16"),
    )
    assert said == "bf16 bf16\n2 [0.25]\n"


TRAINER = """
    import sys, torch, transformers
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    def trained(steps, resume=None):
        set_seed(0)
        sizes = dict(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=16)
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        rows = torch.randint(0, 16, (12, 8), generator=torch.Generator().manual_seed(1))
        options = TrainingArguments(
            output_dir=sys.argv[0] + ".out", use_cpu=True, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, max_steps=6, save_steps=2, report_to=[],
            disable_tqdm=True, logging_strategy="no", eval_strategy="steps", eval_steps=3,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model, args=options, train_dataset=data, eval_dataset=data[:3])
        if steps < 6:
            class Stop(transformers.TrainerCallback):
                def on_step_end(self, args, state, control, **kwargs):
                    control.should_training_stop = state.global_step >= steps
            trainer.add_callback(Stop())
        trainer.train(resume_from_checkpoint=resume)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    whole = trained(6)
    trained(4)
    assert torch.equal(trained(6, sys.argv[0] + ".out/checkpoint-4"), whole)
    print("equal")
"""


def test_a_trainer_trains_and_goes_on_where_it_stopped(tmp_path):
    pytest.importorskip("transformers")
    assert run(tmp_path, TRAINER).endswith("equal\n")


def test_classes_that_are_pickled_are_found_under_the_name_of_accelerate():
    twins = resolve("accelerate.state", "PartialState"), resolve("accelerate", "Accelerator")
    assert [twin.__module__ for twin in twins] == ["accelerate.state", "accelerate.accelerator"]
    with pytest.raises(pickle.PicklingError):  # there is no accelerate in this process
        pickle.dumps(twins[0])


def test_a_weight_that_a_hook_of_the_script_offloads_is_on_the_meta_device(tmp_path):
    said = run(
        tmp_path,
        """
        import torch
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module
        from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules

        model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1)).eval()
        expected = model(torch.ones(1, 2))
        attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
        tensors = [model[0].weight, model[1].weight, model[1].running_mean]
        print([tensor.device.type for tensor in tensors], tensors[0].is_meta)
        print(torch.equal(model(torch.ones(1, 2)), expected))
        try:
            model[0].weight @ torch.ones(2)
        except RuntimeError as error:
            print(type(error).__name__)
        remove_hook_from_submodules(model)
        print(model[0].weight.device, torch.equal(model(torch.ones(1, 2)), expected))
        """,
    )
    assert said.splitlines() == [
        "['meta', 'meta', 'meta'] True",
        "True",
        "AbsentWeightError",
        "cpu True",
    ]
