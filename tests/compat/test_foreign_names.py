"""Names that people bring from Lightning, Fabric and Accelerate are answered with ours."""

import builtins
import inspect
import re

import pytest

import accel_callbacks
from accel_callbacks import Accelerator, callbacks, utils
from accel_callbacks.addons import tuning
from accel_callbacks.callbacks import Callback
from accel_callbacks.compat import foreign_names
from accel_callbacks.errors.removed import REMOVED
from checkpoint_io import save

TABLES = {name: getattr(foreign_names, name) for name in foreign_names.__all__}
TABLES["REMOVED"] = REMOVED
OURS = {
    *dir(accel_callbacks),
    *dir(callbacks),
    *dir(tuning),
    *dir(utils),
    *dir(builtins),
    *dir(Accelerator),
    *inspect.signature(Accelerator).parameters,
}
OF_TORCH = {"DataLoaders", "Module", "SyncBatchNorm", "DDP", "CPU", "IP", "NUM", "N", "R"}


@pytest.mark.parametrize("table", TABLES)
def test_every_name_of_ours_in_a_table_exists(table):
    for text in TABLES[table].values():
        classes = re.findall(r"\b([A-Z][a-z]+(?:[A-Z]\w+)?)\(", text)
        methods = re.findall(r"\b(?:accel|accel_callbacks|utils|tuning)\.([a-z_]+)", text)
        assert {*classes, *methods} <= OURS | {"utils", "tuning", "current_run"}, text


def test_no_table_hides_a_name_of_ours():
    accel = Accelerator(cpu=True)
    assert not foreign_names.OPTIONS.keys() & inspect.signature(Accelerator).parameters.keys()
    assert not [name for name in foreign_names.ATTRIBUTES if hasattr(accel, name)]
    assert not foreign_names.IMPORTS.keys() & {*dir(accel_callbacks), *dir(callbacks)}
    assert not foreign_names.HOOKS.keys() & {*callbacks.base.HOOKS}


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("devices", 2, "accel launch --num_processes N"),
        ("accumulate_grad_batches", 4, "gradient_accumulation_steps=N"),
        ("logger", "wandb", "log_with="),
        ("strategy", "fsdp", "fsdp_plugin=FullyShardedDataParallelPlugin()"),
        ("precision", "bf16-mixed", 'mixed_precision="bf16"'),
        ("logging_dir", "x", r"ProjectConfiguration\(logging_dir"),
    ],
)
def test_an_option_of_a_trainer_is_answered(option, value, text):
    with pytest.raises(TypeError, match=text):
        Accelerator(cpu=True, **{option: value})


@pytest.mark.parametrize(("value", "ours"), [("bf16-mixed", "bf16"), ("16-mixed", "fp16")])
def test_a_precision_of_lightning_is_answered(value, ours):
    with pytest.raises(ValueError, match=f"Did you mean '{ours}'"):
        Accelerator(cpu=True, mixed_precision=value)


@pytest.mark.parametrize("package", ["accel_callbacks", "accel_callbacks.callbacks"])
def test_an_import_of_lightning_is_answered(package):
    with pytest.raises(ImportError, match="ModelCheckpoint is Checkpoint here"):
        exec(f"from {package} import ModelCheckpoint", {})
    with pytest.raises(ImportError, match="cannot import name 'Chekpoint'"):
        exec(f"from {package} import Chekpoint", {})


def test_an_attribute_of_fabric_is_answered_and_others_are_as_usual():
    accel = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=r"Call accel\.wait_for_everyone"):
        accel.barrier()
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'bariere'"):
        accel.bariere()


def test_an_error_of_a_property_is_its_own():
    class Own(Accelerator):
        @property
        def rate(self):
            return self.device.rate

    with pytest.raises(AttributeError, match=r"'torch\.device' object has no attribute 'rate'"):
        _ = Own(cpu=True).rate


def test_a_hook_that_takes_other_arguments_is_refused_before_the_run():
    class Old(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, loader_idx):
            """As Lightning 1.6 has it."""

    class Current(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, loader_idx=0):
            """As Lightning 2 has it."""

        def on_train_start(self, *args):
            """Takes anything."""

    text = r"Old.on_train_batch_end\(trainer, .*\) is called with \(run, model, outputs, batch, b"
    with pytest.raises(TypeError, match=text):
        Accelerator(cpu=True, callbacks=[Old()])
    Accelerator(cpu=True, callbacks=[Current()])


def test_a_hook_of_another_trainer_is_answered():
    class Steps(Callback):
        def on_step_end(self, run, model):
            """Of transformers."""

    with pytest.raises(TypeError, match=r"is no hook\. It is on_train_batch_end"):
        Accelerator(cpu=True, callbacks=[Steps()])


def test_a_protocol_that_does_not_exist_is_answered():
    with pytest.raises(ValueError, match=r"the protocol s4://. Did you mean s3://\?"):
        save("s4://bucket/checkpoint", {})
