"""Where each name of Accelerate is: here, a twin, a constant, or not provided."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from accel_callbacks.compat.records import LOGGERS, log_warnings
from accel_callbacks.errors.removed import REMOVED

__all__ = ["MODULES", "NOT_PROVIDED", "PROGRAMS", "NotProvided", "reason_against", "resolve"]

#: The subcommand of ``accel`` that each program among the modules of Accelerate is.
PROGRAMS = {
    "accelerate.commands.accelerate_cli": "",
    "accelerate.commands.config": "config",
    "accelerate.commands.config.config": "config",
    "accelerate.commands.env": "env",
    "accelerate.commands.estimate": "estimate-memory",
    "accelerate.commands.launch": "launch",
    "accelerate.commands.merge": "merge-weights",
    "accelerate.commands.test": "test",
}
_SUBMODULES = (
    *("accelerator", "big_modeling", "checkpointing", "commands"),
    *(
        "commands.config.config_args",
        "commands.config.default",
        "commands.to_fsdp2",
        "commands.tpu",
    ),
    *("data_loader", "hooks", "inference", "launchers", "local_sgd", "logging"),
    *("memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "tracking", "utils"),
    *("utils.ao", "utils.bnb", "utils.constants", "utils.dataclasses", "utils.deepspeed"),
    *("utils.environment", "utils.fsdp_utils", "utils.imports", "utils.launch"),
    *("utils.megatron_lm", "utils.memory", "utils.modeling", "utils.offload", "utils.operations"),
    *("utils.other", "utils.random", "utils.rich", "utils.torch_xla", "utils.tqdm"),
    *("utils.transformer_engine", "utils.versions"),
)
#: The modules of Accelerate that can be imported.
MODULES = frozenset({"accelerate", *PROGRAMS, *(f"accelerate.{name}" for name in _SUBMODULES)})

_ROOM = "accel_callbacks.compat"
#: The module of classes with Accelerate's arguments.
TWINS = f"{_ROOM}.twins"
# In this order: what others reach into, what is the same, what is in terms of it.
_HOMES = (
    *(TWINS, f"{_ROOM}.handlers", f"{_ROOM}.loggers", f"{_ROOM}.device_maps"),
    *(f"{_ROOM}.offloaded", "accel_callbacks", "accel_callbacks.utils"),
    *(f"{_ROOM}.{name}" for name in ("helpers", "environment", "constants", "models", "commands")),
)
_CLOSED = frozenset(home for home in _HOMES if home.startswith(_ROOM))
#: Names that are another one here, or in a module of their own.
_OTHER_NAMES = {
    "DataLoaderAdapter": "accel_callbacks.data.loader:DataLoaderShard",
    "DataLoaderStateMixin": "accel_callbacks.data.loader:DataLoaderShard",
    "is_compiled_module": f"{_ROOM}.wrappers:has_original",
    **{
        name: f"{_ROOM}.tpu_commands:{name}"
        for name in ("tpu_command_launcher", "tpu_command_parser")
    },
    "on_main_process": "accel_callbacks.tracking.general_tracker:on_main_process",
    # Not among the homes: they import `loggers`, which few scripts need.
    **{
        name: f"{_ROOM}.trackers:{name}"
        for name in (
            *("LOGGER_TYPE_TO_CLASS", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker"),
            *("MLflowTracker", "SwanLabTracker", "TensorBoardTracker", "TrackioTracker"),
            *("WandBTracker", "filter_trackers", "get_available_trackers"),
            "register_tracker_class",
        )
    },
}

_SAGEMAKER = (
    "SageMaker's own launcher is not here: start the script on its machines by accel launch."
)
_MEGATRON = (
    "Megatron-LM's own models and steps are not here: MegatronLMPlugin arranges the engines of "
    "this library, which train models as they are."
)
_DEEPSPEED = (
    "a schedule of DeepSpeed's own is prepared as any other, and is an AcceleratedScheduler here."
)
_AIM = "Aim has no tracker here: write one as a GeneralTracker, or log with another tool."
_DEEPSPEED_ENGINE = (
    "a DeepSpeed engine is a strategy here, and is not wrapped by a class of its own."
)
_STATE_PARTS = (
    "parts of a state are not written or read alone: call save_state() and load_state() of the "
    "Accelerator."
)
_REGISTERED = (
    "objects are saved with the state: pass them to register_for_checkpointing() of the "
    "Accelerator."
)
_PIPPY = "stages are cut by prepare_pippy(), or by prepare_pipeline() of the Accelerator."
_LAUNCH = (
    "processes are started by `accel launch`, notebook_launcher() and launch_command(), which make "
    "their variables and commands themselves."
)
_SHARED_STATE = "what processes share is held by the process group here, and not by a dict."
_XLA_INSTALL = "nothing is installed by a function here: pip install torch_xla"
_STEP_PATCH = "prepared optimizers know of their steps: read step_was_skipped of the optimizer."
_NUMA = "processes are bound to cores by `accel launch --numa_binding node`."
_FP8 = (
    "fp8 is that of torchao here, AORecipeKwargs: the kernels of Transformer Engine and MS-AMP are "
    "not used."
)
_STEP_OF_PREPARE = (
    "it is a step of Accelerate's own prepare(): pass models and optimizers to prepare() of the "
    "Accelerator, which shards, ties and checkpoints as its plugins say."
)
_PRECISION = (
    "losses are scaled and forwards are cast by the Accelerator: give it mixed_precision=, and use "
    "its autocast() and its scaler."
)
#: Names that can be imported and not used, with the reason.
NOT_PROVIDED: dict[str, str] = {
    "AimTracker": _AIM,
    "DeepSpeedSchedulerWrapper": _DEEPSPEED,
    "ThreadLocalSharedDict": _SHARED_STATE,
    "install_xla": _XLA_INSTALL,
    "patch_optimizer_step": _STEP_PATCH,
    **dict.fromkeys(("DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper"), _DEEPSPEED_ENGINE),
    **dict.fromkeys(("load_accelerator_state", "save_accelerator_state"), _STATE_PARTS),
    **dict.fromkeys(("load_custom_state", "save_custom_state"), _REGISTERED),
    **dict.fromkeys(
        ("build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward"),
        _PIPPY,
    ),
    **dict.fromkeys(
        (
            *("PrepareForLaunch", "prepare_deepspeed_cmd_env", "prepare_multi_gpu_env"),
            *("prepare_simple_launcher_cmd_env", "prepare_tpu"),
        ),
        _LAUNCH,
    ),
    **dict.fromkeys(
        (
            *("ensure_weights_retied", "fsdp2_apply_ac", "fsdp2_load_full_state_dict"),
            "fsdp2_switch_optimizer_parameters",
        ),
        _STEP_OF_PREPARE,
    ),
    **dict.fromkeys(
        ("get_fsdp2_grad_scaler", "get_grad_scaler", "get_mixed_precision_context_manager"),
        _PRECISION,
    ),
    "_convert_nargs_to_dict": _SAGEMAKER,
    "_validate_launch_command": _LAUNCH,
    "gather_data": "`accel estimate-memory` prints what a model takes.",
    **dict.fromkeys(("override_numa_affinity", "set_numa_affinity"), _NUMA),
    **dict.fromkeys(
        ("SageMakerDistributedType", "prepare_sagemager_args_inputs"),
        _SAGEMAKER,
    ),
    **dict.fromkeys(
        (
            *("AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "T5TrainStep"),
            *("MegatronLMDummyDataLoader", "MegatronLMDummyScheduler"),
            *("avg_losses_across_data_parallel_group", "add_model_config_to_megatron_parser"),
        ),
        _MEGATRON,
    ),
    **dict.fromkeys(
        (
            *("FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs", "apply_fp8_autowrap"),
            *("contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers"),
        ),
        _FP8,
    ),
}


class NotProvided(NotImplementedError):
    """A name of Accelerate was used that this library does not provide; the text says why.

    Example:
        >>> from accel_callbacks.compat.names import NotProvided, resolve
        >>> try:
        ...     resolve("accelerate.utils", "TERecipeKwargs")()
        ... except NotProvided as error:
        ...     print(str(error).partition(":")[0])
        accelerate.utils.TERecipeKwargs
    """


def resolve(module: str, name: str) -> Any:
    """Return what a name of a module of Accelerate stands for.

    Raises:
        AttributeError: there is no such name.
    """
    if name == "main" and module in PROGRAMS:
        return importlib.import_module(f"{_ROOM}.commands").main_of(PROGRAMS[module])
    if name in _OTHER_NAMES:
        module_name, _, other = _OTHER_NAMES[name].partition(":")
        return getattr(importlib.import_module(module_name), other)
    home = home_of(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        return log_warnings(value, LOGGERS[name]) if name in LOGGERS else value
    if reason := reason_against(name):
        return _placeholder(f"{module}.{name}", reason)
    raise AttributeError(
        f"{module}.{name}: this library, which stands in for accelerate, has no such name."
    )


def reason_against(name: str) -> str:
    """Return why a name of Accelerate is not provided, an empty string if nothing is known."""
    return NOT_PROVIDED.get(name) or REMOVED.get(name, "")


def home_of(name: str, homes: Sequence[str] = _HOMES) -> str | None:
    """Return the first of the modules that has a name of Accelerate, None if none has."""
    for home in homes:
        module = importlib.import_module(home)
        try:
            value = getattr(module, name)
        except (AttributeError, ImportError):
            continue
        # What a module of this room imports is not what it stands for.
        is_public = home not in _CLOSED or name in getattr(module, "__all__", (name,))
        if is_public and not isinstance(value, ModuleType):
            return home
    return None


def _placeholder(name: str, reason: str) -> type[Any]:
    """Return a class that raises when it is used; it can be imported, and compared with."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotProvided(f"{name}: {reason}")

    short = name.rpartition(".")[2]
    placeholder = type(short, (), {"__new__": refuse, "__doc__": inspect.cleandoc(reason)})
    placeholder.__module__ = name.rpartition(".")[0]
    return placeholder
