"""Where each name of Accelerate is: here, a twin, a constant, or not provided."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["MODULES", "NOT_PROVIDED", "NotProvided", "resolve"]

_SUBMODULES = (
    *("accelerator", "big_modeling", "checkpointing", "commands", "commands.config"),
    *("commands.launch", "data_loader", "hooks", "inference", "launchers", "local_sgd", "logging"),
    *("memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "tracking", "utils"),
    *("utils.ao", "utils.bnb", "utils.constants", "utils.dataclasses", "utils.deepspeed"),
    *("utils.environment", "utils.fsdp_utils", "utils.imports", "utils.launch"),
    *("utils.megatron_lm", "utils.memory", "utils.modeling", "utils.offload", "utils.operations"),
    *("utils.other", "utils.random", "utils.rich", "utils.torch_xla", "utils.tqdm"),
    *("utils.transformer_engine", "utils.versions"),
)
#: The modules of Accelerate that can be imported.
MODULES = frozenset({"accelerate", *(f"accelerate.{name}" for name in _SUBMODULES)})

_TWINS = "accel_callbacks.compat.twins"
_HELPERS = "accel_callbacks.compat.helpers"
_CONSTANTS = "accel_callbacks.compat.constants"
# In this order: what others reach into, then what is the same.
_HOMES = (_TWINS, "accel_callbacks", "accel_callbacks.utils", _HELPERS, _CONSTANTS)

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
_FP8 = (
    "fp8 is that of torchao here, AORecipeKwargs: the kernels of Transformer Engine and MS-AMP are "
    "not used."
)
#: Names that can be imported and not used, with the reason.
NOT_PROVIDED: dict[str, str] = {
    "DeepSpeedSchedulerWrapper": _DEEPSPEED,
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
    for home in _HOMES:
        try:
            value = getattr(importlib.import_module(home), name)
        except (AttributeError, ImportError):
            continue
        if not isinstance(value, ModuleType):
            return value
    if name in NOT_PROVIDED:
        return _placeholder(f"{module}.{name}", NOT_PROVIDED[name])
    raise AttributeError(
        f"{module}.{name}: this library, which stands in for accelerate, has no such name."
    )


def _placeholder(name: str, reason: str) -> type[Any]:
    """Return a class that raises when it is used; it can be imported, and compared with."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotProvided(f"{name}: {reason}")

    short = name.rpartition(".")[2]
    placeholder = type(short, (), {"__new__": refuse, "__doc__": inspect.cleandoc(reason)})
    placeholder.__module__ = name.rpartition(".")[0]
    return placeholder
