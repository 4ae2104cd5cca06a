"""Table of the differences from Accelerate, by method, function, argument and attribute.

The page docs/reference/accelerate-differences.md explains them at length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from accel_callbacks.compat.migrate.source import Kind

Rules = Mapping[str, tuple[Kind, str]]
ANY: Final = object()

# Arguments of Accelerate's Accelerator in their order; ours takes keywords only.
POSITIONAL = (
    *("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps"),
    *("cpu", "dataloader_config", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin"),
    *("megatron_lm_plugin", "rng_types", "log_with", "project_dir", "project_config"),
    *("gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers"),
    *("dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config"),
)

METHODS: Rules = {
    "accumulate": (
        "note",
        "the last window of an epoch is divided by the micro-batches that it has",
    ),
    "gather_for_metrics": (
        "note",
        "values without an entry per sample (a mean) are gathered unchanged",
    ),
    "save_state": (
        "differs",
        "writes safetensors and JSON, complete or not at all; Accelerate cannot read them. Without "
        "a path: <project_dir>/checkpoints/step-<global step>",
    ),
    "load_state": (
        "differs",
        "reads checkpoints of this package only (load_checkpoint_in_model takes the weights of "
        "Accelerate's); the loaders go on at the exact sample, so no skip_first_batches is needed",
    ),
    "register_for_checkpointing": (
        "differs",
        "objects are found again by name, not by order: register_for_checkpointing(name=obj) where "
        "two have one class; their state must be tensors and plain values",
    ),
    "skip_first_batches": (
        "differs",
        "counts from the start of the epoch, after load_state too; after load_state it is not "
        "needed",
    ),
    "save": (
        "differs",
        "nothing is pickled: takes a flat dict of tensors and writes safetensors",
    ),
    "maybe_context_parallel": (
        "differs",
        "positions, and shift_labels beside labels, belong to the buffers: a model of "
        "transformers that would count or shift them on each process is an error. A loss is of the "
        "tokens of one process: backward(loss_sum, normalizer=tokens) averages over all of them",
    ),
    "save_model": ("note", "max_shard_size is 5 GB by default, not 10"),
    "free_memory": ("note", "also forgets registered objects"),
    "get_tracker": ("note", "off the main process the tracker does nothing, with unwrap too"),
}

_MADE: tuple[Kind, str] = ("left", "takes other arguments here: accelerator.prepare makes it")

FUNCTIONS: Rules = {
    "gather_object": (
        "differs",
        "lists and tuples are joined; dicts, texts and other objects stay whole, one a process",
    ),
    "find_executable_batch_size": ("note", "all processes try the same size"),
    "skip_first_batches": METHODS["skip_first_batches"],
    "AcceleratorState": (
        "differs",
        "has what the launcher set; the options of an Accelerator are in accelerator.state",
    ),
    "GradientState": ("differs", "belongs to its Accelerator: accelerator.gradient_state"),
    "AcceleratedOptimizer": _MADE,
    "AcceleratedScheduler": _MADE,
    "DataLoaderShard": _MADE,
    "DataLoaderDispatcher": _MADE,
}

_NOT_YET = "not there yet: a TypeError; keep this script with Accelerate, or leave it out"
# (what is called, argument, value or ANY)
ARGUMENTS: Mapping[tuple[str, str, object], tuple[Kind, str]] = {
    ("Accelerator", "split_batches", ANY): (
        "left",
        "a TypeError: dataloader_config=DataLoaderConfiguration(split_batches=...)",
    ),
    ("TorchTensorParallelPlugin", "torch_device_mesh", ANY): (
        "left",
        "a TypeError: the Accelerator builds the mesh; leave it out",
    ),
    ("Accelerator", "megatron_lm_plugin", ANY): (
        "differs",
        "its options choose engines of this library, for the script's own loop and model: see the "
        "page on configs of Megatron-LM; what does nothing by itself, clipping too, is a warning",
    ),
    ("get_logger", "log_level", ANY): ("note", "sets the level of this logger, not of the root"),
    ("Accelerator", "log_with", "aim"): ("left", "there is no tracker for aim"),
    ("Accelerator", "mixed_precision", "fp8"): (
        "differs",
        "fp8 is torchao; a device that cannot is an error, not fp16",
    ),
    ("Accelerator", "rng_types", ANY): ("note", "none by default; the order needs none"),
    ("DataLoaderConfiguration", "even_batches", False): (
        "differs",
        "all processes take the same number of steps: the last batch is split",
    ),
    ("GradientAccumulationPlugin", "adjust_scheduler", ANY): (
        "differs",
        "has an effect here: with False each call of a prepared scheduler's step counts",
    ),
    ("save_model", "safe_serialization", False): (
        "left",
        "a ValueError: nothing is pickled; leave it out",
    ),
    ("save", "safe_serialization", False): (
        "left",
        "a ValueError: nothing is pickled; leave it out",
    ),
    ("save_state", "safe_serialization", False): (
        "left",
        "a ValueError: nothing is pickled; leave it out",
    ),
    ("load_state", "map_location", ANY): (
        "left",
        "a TypeError: tensors are read to where they are prepared; leave it out",
    ),
    ("load_state", "load_kwargs", ANY): ("left", "a TypeError: leave it out"),
    ("ProjectConfiguration", "save_on_each_node", True): (
        "differs",
        "for save and save_model; save_state needs a place that all machines see",
    ),
}

TF32 = (
    "with dynamo and mixed_precision='no' Accelerate turns TF32 on for matrix products on a GPU; "
    "it stays off here: torch.backends.cuda.matmul.allow_tf32 = True does as there"
)

_NO_METHOD = "not there: an AttributeError"
# Attributes that only Accelerate's Accelerator has.
ATTRIBUTES: Mapping[str, str] = {
    "deepspeed_ulysses_dl_adapter": _NO_METHOD,
    "fp8_backend": _NO_METHOD,
    "lomo_backward": _NO_METHOD,
    "verify_device_map": _NO_METHOD,
}

# Attributes that only its AcceleratorState has.
STATE_ATTRIBUTES: Mapping[str, str] = {
    "dynamo_plugin": _NO_METHOD,
    "torch_tp_plugin": _NO_METHOD,
}

NAMELESS = "a TypeError: arguments are keywords here, write their names"

SCHEDULER = (
    "a prepared scheduler steps once an optimizer step, on any number of processes; Accelerate "
    "steps it once a process too (scheduler_steps_per_process=True does as there)"
)
SCHEDULER_LENGTH = (
    "a length that was multiplied by the number of processes for a scheduler is too long here: "
    "divide it, or give scheduler_steps_per_process=True"
)

VARIABLES: Mapping[str, str] = {
    "ACCELERATE_LOG_LEVEL": "ACCEL_LOG_LEVEL",
    "ACCELERATE_DEBUG_MODE": "ACCEL_DEBUG",
    "ACCELERATE_MIXED_PRECISION": "ACCEL_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "ACCEL_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_USE_CPU": "ACCEL_CPU",
}
