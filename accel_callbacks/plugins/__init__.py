"""Options of the parts of an Accelerator, as frozen dataclasses.

A script gives them to the Accelerator: handlers (`KwargsHandler`) in ``kwargs_handlers``, plugins
of engines under arguments of their own. ``engine_options.resolve_engine`` adds what the launch says
to them; the part that they are for reads them by ``handlers.get``. ``option.launched`` declares a
field that `accel config` and `accel launch` ask for as well: once, with its flag, variable and
help.

A plugin checks its own values in ``__post_init__``, and what depends on others in ``configure``. It
holds no state, imports no engine, and never changes after its construction.
"""

# ruff: noqa: F403 (each star is a module of the table, for type checkers only)

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from accel_callbacks._lazy import lazy_names

# A run has one engine, and its options are those of that one.
_HOME = {
    "AORecipeKwargs": "precision",
    "AutocastKwargs": "precision",
    "DDPCommunicationHookType": "ddp",
    "DeepSpeedPlugin": "deepspeed",
    "DeepSpeedSequenceParallelConfig": "parallelism_handlers",
    "DistributedDataParallelKwargs": "ddp",
    "DynamoBackend": "compile",
    "FullyShardedDataParallelPlugin": "fsdp",
    "GradScalerKwargs": "precision",
    "GradientAccumulationPlugin": "gradient_accumulation",
    "Handlers": "base",
    "InitProcessGroupKwargs": "process_group",
    "KwargsHandler": "base",
    "MegatronLMPlugin": ".compat.megatron",
    "OptionEnum": "base",
    "ParallelismConfig": "parallelism",
    "TorchContextParallelConfig": "parallelism_handlers",
    "TorchDynamoPlugin": "compile",
    "TorchTensorParallelConfig": "parallelism_handlers",
    "TorchTensorParallelPlugin": "parallelism_handlers",
    "sort_handlers": "base",
}


class Launched(NamedTuple):
    """Plugins whose options a launch may give.

    Args:
        arguments: of an Accelerator, for the first of the classes.
        owners: names of the classes that declare the options.
        beside: another group whose options may ask for the first of the classes.
    """

    arguments: tuple[str, ...]
    owners: tuple[str, ...]
    beside: str = ""


#: By group. Their modules are imported for what a script or its launch asks for only.
LAUNCHED = {
    "parallelism": Launched(
        ("parallelism_config", "torch_tp_plugin"),
        ("ParallelismConfig", "TorchContextParallelConfig"),
    ),
    "fsdp": Launched(("fsdp_plugin",), ("FullyShardedDataParallelPlugin",), beside="parallelism"),
    "megatron_lm": Launched(("megatron_lm_plugin",), ("MegatronLMPlugin",)),
    "deepspeed": Launched(("deepspeed_plugin", "deepspeed_plugins"), ("DeepSpeedPlugin",)),
    "dynamo": Launched(("dynamo_plugin", "dynamo_backend"), ("TorchDynamoPlugin",)),
    "fp8": Launched((), ("AORecipeKwargs",)),
}

# Type checkers see what the modules of the table have, so that no name is listed twice.
if TYPE_CHECKING:
    from accel_callbacks.compat.megatron import *
    from accel_callbacks.plugins.base import *
    from accel_callbacks.plugins.compile import *
    from accel_callbacks.plugins.ddp import *
    from accel_callbacks.plugins.deepspeed import *
    from accel_callbacks.plugins.fsdp import *
    from accel_callbacks.plugins.gradient_accumulation import *
    from accel_callbacks.plugins.parallelism import *
    from accel_callbacks.plugins.parallelism_handlers import *
    from accel_callbacks.plugins.precision import *
    from accel_callbacks.plugins.process_group import *
else:
    __all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
