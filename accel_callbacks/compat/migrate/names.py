"""Table of Accelerate's names: the package that has each here, or advice for a missing one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import accel_callbacks
from accel_callbacks import utils
from accel_callbacks.compat.migrate.source import Finding
from accel_callbacks.compat.packages import available_check

OLD = "accelerate"
TOP = "accel_callbacks"
UTILS = "accel_callbacks.utils"

# Public names of these modules are looked up by their last component.
_UTILS_MODULES = (
    *("dataclasses", "environment", "imports", "launch", "memory", "modeling", "offload"),
    *("operations", "other", "random", "tqdm", "versions", "constants", "deepspeed", "fsdp_utils"),
    *("megatron_lm", "bnb", "ao", "rich", "torch_xla", "transformer_engine"),
)
MODULES = {
    *("accelerator", "big_modeling", "checkpointing", "commands", "data_loader", "hooks"),
    *("inference", "launchers", "local_sgd", "logging", "memory_utils", "optimizer"),
    *("parallelism_config", "scheduler", "state", "test_utils", "tracking", "utils"),
    *(f"utils.{name}" for name in _UTILS_MODULES),
}
# `accelerate.utils.tqdm` is the function, which hides the module of that name.
_NAMES_FIRST = {"utils.tqdm"}
_NOT_LIKE_OURS = {"__version__"}
_BEYOND = ("commands", "test_utils")

_FOR_TESTS = "left as it is: only tests import it, and accelerate has to be installed for them"
_NO_FSDP = "a part of its FSDP: Accelerator(fsdp_plugin=...) does this in prepare, or not at all"
_NO_MEGATRON = (
    "a part of the loop of Megatron-LM, which is not run here: write the loop of a plain script; "
    "MegatronLMPlugin arranges the processes"
)
_NO_ENGINE = "this engine is not there yet: keep this script with Accelerate"
ADVICE: Mapping[str, str] = {
    "__version__": "the version of Accelerate is irrelevant here: remove the check",
    "*fsdp*": _NO_FSDP,
    "*FSDP*": _NO_FSDP,
    "*eep?peed*": _NO_ENGINE,
    "*egatron*": _NO_MEGATRON,
    "*TrainStep": _NO_MEGATRON,
    "avg_losses_across_data_parallel_group": _NO_MEGATRON,
    "gather_across_data_parallel_groups": _NO_MEGATRON,
    "GatheredParameters": _NO_ENGINE,
    "TERecipeKwargs": "fp8 is torchao here: AORecipeKwargs",
    "MSAMPRecipeKwargs": "fp8 is torchao here: AORecipeKwargs",
    "FP8RecipeKwargs": "fp8 is torchao here: AORecipeKwargs",
    "prepare_pippy": "pipelines stay with Accelerate: this import can stand beside ours",
    "*bnb*": "load_and_quantize_model does this",
    "save": "accelerator.save(obj, f) writes safetensors: flat dicts of tensors",
    "load": "safetensors.torch.load_file reads what accelerator.save writes",
    "load_state_dict": "safetensors.torch.load_file reads what accelerator.save writes",
    "write_basic_config": "accel config --default",
    "*_launcher": "accel launch starts scripts",
    "*Tracker": 'ask by name, log_with="tensorboard"; the classes are in the package loggers, '
    "with other arguments",
    "on_main_process": "only the main process calls a tracker here: leave the decorator out",
    "register_tracker_class": "loggers.register_tracker",
    "get_available_trackers": "loggers.available_trackers",
    "filter_trackers": "Accelerator(log_with=...) does it",
    "convert_model": "models are not changed for fp8 by hand here",
    "patch_environment": "unittest.mock.patch.dict(os.environ, ...)",
    "clear_environment": "unittest.mock.patch.dict(os.environ, clear=True)",
    "*": "unchanged: write it without this name, or keep Accelerate for it",
}


def home_of(path: Sequence[str]) -> str | None:
    """Return the package that has a name, given by its path below accelerate; None if none has.

    Example:
        >>> from accel_callbacks.compat.migrate.names import home_of
        >>> (
        ...     home_of(["utils", "set_seed"]),
        ...     home_of(["utils", "listify"]),
        ...     home_of(["prepare_pippy"]),
        ... )
        ('accel_callbacks', 'accel_callbacks.utils', None)
    """
    name = path[-1]
    if path[0] in _BEYOND or name in _NOT_LIKE_OURS:
        return None
    if name in accel_callbacks.__all__:
        return TOP
    if name in utils.__all__:
        return UTILS
    try:
        available_check(name)
    except AttributeError:
        return None
    return UTILS


def is_module(path: Sequence[str]) -> bool:
    """Return whether a path below accelerate is a module, as the empty path is."""
    dotted = ".".join(path)
    return not dotted or (dotted in MODULES and dotted not in _NAMES_FIRST)


def finding_for(line: int, path: Sequence[str], text: str = "") -> Finding:
    """Return the finding for a missing name, given by its path below accelerate.

    Example:
        >>> from accel_callbacks.compat.migrate.names import finding_for
        >>> finding_for(1, ["test_utils", "execute_subprocess_async"]).kind
        'note'
    """
    if path[0] == "test_utils":
        return Finding(line, path[-1], _FOR_TESTS, "note")
    return Finding(line, path[-1], text or advice_for(path[-1]), "left")


def advice_for(name: str) -> str:
    """Return advice for a name that is missing here."""
    return next(text for pattern, text in ADVICE.items() if fnmatchcase(name, pattern))
