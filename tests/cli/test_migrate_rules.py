"""The tables of `accel migrate` agree with the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import accel_callbacks
from accel_callbacks import Accelerator, AcceleratorState, utils
from accel_callbacks.compat.migrate import migrate_script
from accel_callbacks.compat.migrate.names import ADVICE, home_of
from accel_callbacks.compat.migrate.rules import (
    ANY,
    ARGUMENTS,
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    NAMELESS,
    POSITIONAL,
    SCHEDULER,
    SCHEDULER_LENGTH,
    STATE_ATTRIBUTES,
    TF32,
    VARIABLES,
)
from accel_callbacks.compat.migrate.source import Finding

ROOT = Path(accel_callbacks.__file__).parent
PARAMETERS = {
    name
    for name, one in inspect.signature(Accelerator).parameters.items()
    if one.kind is not one.VAR_KEYWORD
}


def test_arguments_that_are_left_are_not_there() -> None:
    said = {
        arg
        for (callee, arg, value), (kind, _) in ARGUMENTS.items()
        if callee == "Accelerator" and value is ANY and kind == "left"
    }
    assert set(POSITIONAL) - PARAMETERS == said


def test_attributes_that_are_left_are_not_there() -> None:
    assert [name for name in ATTRIBUTES if hasattr(Accelerator, name)] == []
    state = AcceleratorState(cpu=True)
    assert [name for name in STATE_ATTRIBUTES if hasattr(state, name)] == []


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_differ_are_there(name: str) -> None:
    assert callable(getattr(Accelerator, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_differ_are_there(name: str) -> None:
    assert hasattr(utils, name)


def test_names_are_in_the_named_package() -> None:
    assert {home_of([name]) for name in accel_callbacks.__all__} == {"accel_callbacks", None}
    for name in utils.__all__:
        home = home_of(["utils", name])
        assert home is not None
        assert hasattr(__import__(home, fromlist=["x"]), name)
    assert home_of(["utils", "is_wandb_available"]) == "accel_callbacks.utils"
    assert home_of(["utils", "is_nothing_available"]) is None
    assert home_of(["test_utils", "set_seed"]) is None


@pytest.mark.parametrize("name", VARIABLES.values())
def test_variables_are_read(name: str) -> None:
    assert any(name in path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))


@pytest.mark.parametrize("rule", ARGUMENTS, ids=lambda rule: ".".join(map(str, rule[:2])))
def test_every_argument_is_found(rule: tuple[str, str, object]) -> None:
    callee, argument, value = rule
    owner = "" if callee[0].isupper() or callee == "get_logger" else "accelerator."
    literal = "x" if value is ANY else repr(value)
    script = f"from accelerate import {callee}\n{owner}{callee}({argument}={literal})"
    names = [finding.name for finding in migrate_script(script).findings]
    assert any(re.search(rf"\b{callee}\({argument}=", name) for name in names)


# --- every rule has a script in which it is found, on its line and with its text ----------------


def found(*lines: str) -> list[Finding]:
    return list(migrate_script("\n".join(lines)).findings)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_found(name: str) -> None:
    kind, text = METHODS[name]
    script = ("from accelerate import Accelerator", "mine = Accelerator()", f"mine.{name}(x)")
    assert found(*script) == [Finding(3, f"accelerator.{name}", text, kind)]
    assert found("from accelerate import Accelerator", f"other.{name}(x)") == []


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "start", ["from accelerate.utils import {0}\n{0}", "import accelerate as a\na.{0}"]
)
def test_every_function_is_found(name: str, start: str) -> None:
    kind, text = FUNCTIONS[name]
    assert Finding(2, name, text, kind) in found(f"{start.format(name)}(x)")
    assert found(f"from another import {name}", f"{name}(x)") == []


@pytest.mark.parametrize("rule", ARGUMENTS, ids=lambda rule: ".".join(map(str, rule[:2])))
def test_every_argument_has_its_text_and_only_with_its_value(rule: tuple[str, str, object]) -> None:
    callee, argument, value = rule
    kind, text = ARGUMENTS[rule]
    start = "from accelerate import " + callee
    owner = "" if callee[0].isupper() or callee == "get_logger" else "accelerator."
    literal = "x" if value is ANY else repr(value)
    said = [(one.kind, one.text) for one in found(start, f"{owner}{callee}({argument}={literal})")]
    assert (kind, text) in said
    if value is not ANY:
        said = [(one.kind, one.text) for one in found(start, f"{owner}{callee}({argument}='z')")]
        assert (kind, text) not in said


# The arguments of Accelerate 1.15, in the order in which its scripts may give them.
ORDER = [
    *("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu"),
    *("dataloader_config", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin"),
    *("megatron_lm_plugin", "rng_types", "log_with", "project_dir", "project_config"),
    *("gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers"),
    *("dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config"),
]


def test_every_positional_argument_gets_the_name_that_it_has_in_accelerate() -> None:
    values = [f"given_{name}" for name in ORDER]
    script = f"from accelerate import Accelerator\nAccelerator({', '.join(values)})"
    named = ", ".join(f"{name}=given_{name}" for name in ORDER)
    after = f"from accel_callbacks import Accelerator\nAccelerator({named})"
    assert migrate_script(script).after == after
    assert list(POSITIONAL) == ORDER


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_attribute_is_found(name: str) -> None:
    script = ("from accelerate import Accelerator", "mine = Accelerator()", f"mine.{name}")
    assert found(*script) == [Finding(3, f"accelerator.{name}", ATTRIBUTES[name], "left")]


@pytest.mark.parametrize("owner", ["accelerator.state", "AcceleratorState()"])
@pytest.mark.parametrize("name", STATE_ATTRIBUTES)
def test_every_attribute_of_the_state_is_found(name: str, owner: str) -> None:
    script = ("from accelerate.state import AcceleratorState", f"{owner}.{name}")
    assert Finding(2, f"state.{name}", STATE_ATTRIBUTES[name], "left") in found(*script)


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_is_found(name: str) -> None:
    said = Finding(1, name, f"is not read here: {VARIABLES[name]}")
    assert found(f"os.environ['{name}'] = '1'") == [said]


SCRIPTS = {
    NAMELESS: ("Accelerator(*options)", "Accelerator(*...)", "left"),
    SCHEDULER: (
        "decay = StepLR(optimizer, 1); decay = accelerator.prepare(decay); decay.step()",
        "decay.step",
        None,
    ),
    SCHEDULER_LENGTH: (
        "decay = StepLR(optimizer, 9 * accelerator.num_processes)",
        "* num_processes",
        None,
    ),
}


@pytest.mark.parametrize("text", SCRIPTS, ids=["nameless", "scheduler", "length"])
def test_every_rule_of_its_own_is_found(text: str) -> None:
    line, name, kind = SCRIPTS[text]
    said = [one for one in found("from accelerate import Accelerator", line) if one.text == text]
    assert said == [Finding(2, name, text, kind) if kind else Finding(2, name, text)]


# A name of Accelerate for each pattern, which no pattern before it matches.
MISSING = {
    "__version__": "__version__",
    "*fsdp*": "fsdp2_load_full_state_dict",
    "*FSDP*": "TorchFSDPPlugin",
    "*eep?peed*": "DeepSpeedEngineWrapper",
    "*egatron*": "MegatronLMDummyScheduler",
    "*TrainStep": "GPTTrainStep",
    "avg_losses_across_data_parallel_group": "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups": "gather_across_data_parallel_groups",
    "GatheredParameters": "GatheredParameters",
    "TERecipeKwargs": "TERecipeKwargs",
    "MSAMPRecipeKwargs": "MSAMPRecipeKwargs",
    "FP8RecipeKwargs": "FP8RecipeKwargs",
    "prepare_pippy": "prepare_pippy",
    "*bnb*": "replace_with_bnb_layers",
    "save": "save",
    "load": "load",
    "load_state_dict": "load_state_dict",
    "write_basic_config": "write_basic_config",
    "*_launcher": "simple_launcher",
    "*Tracker": "TensorBoardTracker",
    "on_main_process": "on_main_process",
    "register_tracker_class": "register_tracker_class",
    "get_available_trackers": "get_available_trackers",
    "filter_trackers": "filter_trackers",
    "convert_model": "convert_model",
    "patch_environment": "patch_environment",
    "clear_environment": "clear_environment",
    "*": "SageMakerDistributedType",
}


@pytest.mark.parametrize("pattern", ADVICE)
def test_every_missing_name_has_the_advice_of_its_pattern(pattern: str) -> None:
    name = MISSING[pattern]
    module = "commands.launch" if name.endswith("_launcher") else "utils"
    assert found(f"from accelerate.{module} import {name}") == [
        Finding(1, name, ADVICE[pattern], "left")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("dynamo_backend='inductor'", True),
        ("dynamo_backend=backend", True),
        ("dynamo_plugin=plugin, mixed_precision='no'", True),
        ("dynamo_plugin=plugin, mixed_precision=args.precision", True),
        ("dynamo_backend='inductor', mixed_precision='bf16'", False),
        ("dynamo_backend='no'", False),
        ("dynamo_plugin=None", False),
        ("mixed_precision='no'", False),
    ],
)
def test_tf32_is_spoken_of_where_accelerate_turned_it_on(arguments: str, said: bool) -> None:
    script = f"from accelerate import Accelerator\naccelerator = Accelerator({arguments})\n"
    texts = [one.text for one in migrate_script(script).findings]
    assert (TF32 in texts) is said
    assert "allow_tf32" in TF32
