"""Options of an Accelerator, resolved once from arguments and environment, with their origins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from accel_callbacks import foreign_names
from accel_callbacks.errors import nearest
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.compile import TorchDynamoPlugin, choose_plugin
from accel_callbacks.plugins.parallelism import AXES, ParallelismConfig
from accel_callbacks.plugins.parallelism_handlers import TorchContextParallelConfig
from accel_callbacks.plugins.precision import AORecipeKwargs

if TYPE_CHECKING:
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin, DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel_callbacks.plugins.megatron import MegatronLMPlugin

__all__ = [
    "AcceleratorConfig",
    "accumulated",
    "launched_deepspeed",
    "launched_fsdp",
    "launched_handlers",
    "launched_megatron",
    "launched_parallelism",
    "launched_plugin",
    "of_deepspeed",
    "refuse_beside_megatron",
    "resolve_config",
    "unread_variables",
]

OnConflict = Literal["refuse", "wait", "take_over"]
PRECISIONS = ("no", "fp16", "bf16", "fp8")
BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class AcceleratorConfig:
    """The resolved options of an Accelerator.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        cpu: compute on the CPU even if there is an accelerator.
        debug: compare what the processes hold before each collective.
        on_conflict: what to do if another run that lives has a folder of the project: ``"refuse"``
            to start, ``"wait"`` for its end, or ``"take_over"``.
        dynamo_backend: backend of torch.compile, set by the launcher as are the following.
        dynamo_mode: mode of torch.compile.
        dynamo_use_fullgraph: raise for a model that is not one graph.
        dynamo_use_dynamic: compile for all shapes.
        dynamo_use_regional_compilation: compile the repeated blocks of a model.
        fp8_pad_inner_dim: pad inputs of fp8 layers.
        fp8_enable_fsdp_float8_all_gather: gather the sharded weights of fp8 layers in fp8.
        distributed_type: ``"FSDP"`` shards models, ``"DEEPSPEED"`` trains with DeepSpeed,
            ``"MEGATRON_LM"`` reads ``megatron``; others follow from the processes.
        deepspeed: keywords of :class:`accel_callbacks.DeepSpeedPlugin`.
        fsdp: keywords of :class:`accel_callbacks.FullyShardedDataParallelPlugin`.
        parallelism: sizes of the axes of a :class:`accel_callbacks.ParallelismConfig`, and how
            context travels.
        megatron: keywords of :class:`accel_callbacks.MegatronLMPlugin`.
        origins: the origin of each value, by option, such as ``"fsdp.cpu_offload"``.

    Example:
        >>> from accel_callbacks import AcceleratorConfig
        >>> print(AcceleratorConfig(mixed_precision="bf16").describe())
        mixed_precision=bf16 (default)
        gradient_accumulation_steps=1 (default)
        cpu=False (default)
        debug=False (default)
    """

    mixed_precision: str = "no"
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    debug: bool = False
    on_conflict: OnConflict = "refuse"
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_use_fullgraph: bool | None = None
    dynamo_use_dynamic: bool | None = None
    dynamo_use_regional_compilation: bool | None = None
    fp8_pad_inner_dim: bool | None = None
    fp8_enable_fsdp_float8_all_gather: bool | None = None
    distributed_type: str | None = None
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return one line per option, with its value and its origin."""
        plain = ("mixed_precision", "gradient_accumulation_steps", "cpu", "debug")
        names = (name for name in _FROM_ENVIRONMENT if name in plain or name in self.origins)
        rows = [f"{n}={self._value(n)} ({self.origins.get(n, 'default')})" for n in names]
        return "\n".join(rows)

    def _value(self, option: str) -> Any:
        group, _, name = option.rpartition(".")
        return getattr(self, group)[name] if group else getattr(self, option)


def _boolean(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ValueError(f"{text!r} is neither true nor false")
    return BOOLEANS[text.lower()]


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _switch(text: str) -> bool | int | str:
    """Convert to a boolean or a number where it is one."""
    value = BOOLEANS.get(text.lower(), text)
    return int(text) if isinstance(value, str) and text.isdecimal() else value


_MEGATRON: dict[str, Callable[[str], Any]] = {
    "tp_degree": int,
    "pp_degree": int,
    "context_parallel_size": int,
    "sequence_parallelism": _boolean,
    "num_micro_batches": int,
    "use_distributed_optimizer": _boolean,
    "use_custom_fsdp": _boolean,
    "optimizer_cpu_offload": _boolean,
    "recompute_activations": _boolean,
    "recompute_granularity": str,
    "recompute_method": str,
    "recompute_num_layers": int,
    "gradient_clipping": float,
}
# The launcher passes its options to the processes that it starts in these variables.
_FROM_ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "mixed_precision": ("ACCEL_MIXED_PRECISION", str),
    "gradient_accumulation_steps": ("ACCEL_GRADIENT_ACCUMULATION_STEPS", int),
    "cpu": ("ACCEL_CPU", _boolean),
    "debug": ("ACCEL_DEBUG", _boolean),
    "on_conflict": ("ACCEL_ON_CONFLICT", str),
    "dynamo_backend": ("ACCEL_DYNAMO_BACKEND", str),
    "dynamo_mode": ("ACCEL_DYNAMO_MODE", str),
    "dynamo_use_fullgraph": ("ACCEL_DYNAMO_USE_FULLGRAPH", _boolean),
    "dynamo_use_dynamic": ("ACCEL_DYNAMO_USE_DYNAMIC", _boolean),
    "dynamo_use_regional_compilation": ("ACCEL_DYNAMO_USE_REGIONAL_COMPILATION", _boolean),
    "fp8_pad_inner_dim": ("ACCEL_FP8_PAD_INNER_DIM", _boolean),
    "fp8_enable_fsdp_float8_all_gather": ("ACCEL_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", _boolean),
    "distributed_type": ("ACCEL_DISTRIBUTED_TYPE", str),
    "deepspeed.hf_ds_config": ("ACCEL_DEEPSPEED_CONFIG_FILE", str),
    "deepspeed.zero_stage": ("ACCEL_DEEPSPEED_ZERO_STAGE", int),
    "deepspeed.gradient_accumulation_steps": (
        "ACCEL_DEEPSPEED_GRADIENT_ACCUMULATION_STEPS",
        _count_or_auto,
    ),
    "deepspeed.gradient_clipping": ("ACCEL_DEEPSPEED_GRADIENT_CLIPPING", _number_or_auto),
    "deepspeed.offload_optimizer_device": ("ACCEL_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", str),
    "deepspeed.offload_param_device": ("ACCEL_DEEPSPEED_OFFLOAD_PARAM_DEVICE", str),
    "deepspeed.offload_optimizer_nvme_path": ("ACCEL_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", str),
    "deepspeed.offload_param_nvme_path": ("ACCEL_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", str),
    "deepspeed.zero3_init_flag": ("ACCEL_DEEPSPEED_ZERO3_INIT", _boolean),
    "deepspeed.zero3_save_16bit_model": ("ACCEL_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", _boolean),
    "deepspeed.transformer_moe_cls_names": ("ACCEL_DEEPSPEED_MOE_LAYER_CLS_NAMES", str),
    "fsdp.sharding_strategy": ("ACCEL_FSDP_SHARDING_STRATEGY", str),
    "fsdp.reshard_after_forward": ("ACCEL_FSDP_RESHARD_AFTER_FORWARD", _switch),
    "fsdp.cpu_offload": ("ACCEL_FSDP_OFFLOAD_PARAMS", _boolean),
    "fsdp.auto_wrap_policy": ("ACCEL_FSDP_AUTO_WRAP_POLICY", str),
    "fsdp.transformer_cls_names_to_wrap": ("ACCEL_FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP", str),
    "fsdp.min_num_params": ("ACCEL_FSDP_MIN_NUM_PARAMS", int),
    "fsdp.ignored_modules": ("ACCEL_FSDP_IGNORED_MODULES", str),
    "fsdp.cpu_ram_efficient_loading": ("ACCEL_FSDP_CPU_RAM_EFFICIENT_LOADING", _boolean),
    "fsdp.activation_checkpointing": ("ACCEL_FSDP_ACTIVATION_CHECKPOINTING", _switch),
    "fsdp.activation_checkpointing_offload": (
        "ACCEL_FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        _boolean,
    ),
    "fsdp.sync_module_states": ("ACCEL_FSDP_SYNC_MODULE_STATES", _boolean),
    "fsdp.forward_prefetch": ("ACCEL_FSDP_FORWARD_PREFETCH", _boolean),
    "fsdp.no_sync": ("ACCEL_FSDP_NO_SYNC", _boolean),
    **{
        f"parallelism.{axis}_size": (f"ACCEL_PARALLELISM_{axis.upper()}_SIZE", int) for axis in AXES
    },
    "parallelism.cp_comm_strategy": ("ACCEL_PARALLELISM_CP_COMM_STRATEGY", str),
    **{
        f"megatron.{name}": (f"ACCEL_MEGATRON_LM_{name.upper()}", convert)
        for name, convert in _MEGATRON.items()
    },
}
_GROUPS = ("deepspeed", "fsdp", "parallelism", "megatron")
_SAME = ("sharding_strategy", "reshard_after_forward")


def resolve_config(
    explicit: Mapping[str, Any], environment: Mapping[str, str]
) -> AcceleratorConfig:
    """Merge explicit arguments, the environment and the defaults, in this precedence.

    Args:
        explicit: options as given to the constructor; ``None`` counts as not given.
        environment: usually ``os.environ``.

    Raises:
        ValueError: a value is invalid; the message has its origin and what is allowed.

    Example:
        >>> from accel_callbacks.config import resolve_config
        >>> config = resolve_config({"cpu": None}, {"ACCEL_CPU": "1"})
        >>> config.cpu, config.origins["cpu"]
        (True, 'environment variable ACCEL_CPU')
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option, (variable, convert) in _FROM_ENVIRONMENT.items():
        if explicit.get(option) is not None:
            values[option], origins[option] = explicit[option], "argument"
        elif variable in environment:
            origins[option] = f"environment variable {variable}"
            try:
                values[option] = convert(environment[variable])
            except ValueError as error:
                raise ValueError(f"{variable}={environment[variable]!r}: {error}") from None
    config = AcceleratorConfig(**_grouped(values), origins=origins)
    _check(config)
    return config


# Options by the variable that Accelerate reads. They are not read here: a shell that was set up for
# another tool must not change a run.
_OF_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_USE_CPU": "cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_USE_FSDP": "fsdp",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm",
    **{f"PARALLELISM_CONFIG_{axis.upper()}_SIZE": f"parallelism.{axis}_size" for axis in AXES},
    **{
        f"MEGATRON_LM_{name.upper()}": f"megatron.{name}"
        for name in ("tp_degree", "pp_degree", "num_micro_batches", "use_distributed_optimizer")
    },
    # transformers reads others, such as FSDP_CPU_RAM_EFFICIENT_LOADING.
    "FSDP_SHARDING_STRATEGY": "fsdp.sharding_strategy",
    "FSDP_RESHARD_AFTER_FORWARD": "fsdp.reshard_after_forward",
    "FSDP_OFFLOAD_PARAMS": "fsdp.cpu_offload",
    "FSDP_AUTO_WRAP_POLICY": "fsdp.auto_wrap_policy",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp.transformer_cls_names_to_wrap",
    "FSDP_MIN_NUM_PARAMS": "fsdp.min_num_params",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp.activation_checkpointing",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "fsdp.activation_checkpointing_offload",
}
_IDLE = ("", "no", "none", "false", "0", "no_wrap")  # values that ask for nothing
_DEFAULTS = {
    "gradient_accumulation_steps": "1",
    "fsdp.sharding_strategy": "full_shard",
    "fsdp.reshard_after_forward": "true",
    **{f"parallelism.{axis}_size": "1" for axis in AXES},
    **{f"megatron.{name}": "1" for name in ("tp_degree", "pp_degree", "num_micro_batches")},
}
_SHOWN = 4


def unread_variables(
    config: AcceleratorConfig, environment: Mapping[str, str], given: Collection[str]
) -> str:
    """Describe variables of Accelerate that ask for what this run does not do.

    Args:
        config: the options of the run.
        environment: usually ``os.environ``.
        given: options that the script sets beside those of the config; ``"fsdp"`` if models are
            sharded.

    Returns:
        An empty string if there are none.

    Example:
        >>> from accel_callbacks.config import resolve_config, unread_variables
        >>> config = resolve_config({}, {})
        >>> unread_variables(config, {"ACCELERATE_MIXED_PRECISION": "no"}, ())
        ''
        >>> unread_variables(config, {"ACCELERATE_USE_FSDP": "true"}, ["fsdp"])
        ''
        >>> unread_variables(config, {"ACCELERATE_USE_FSDP": "true"}, ()).partition(":")[0]
        "ACCELERATE_USE_FSDP=true is Accelerate's and not read here, and models are not sharded"
    """
    found = {}
    for variable, option in _OF_ACCELERATE.items():
        value = environment.get(variable, "").lower()
        if value in _IDLE or value == _DEFAULTS.get(option):
            continue
        if option not in config.origins and option not in given:
            found[variable] = f"{variable}={environment[variable]}"
    if not found:
        return ""
    listed = ", ".join([*found.values()][:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    whole = ", and models are not sharded" if "ACCELERATE_USE_FSDP" in found else ""
    return (
        f"{listed}{more} {'is' if len(found) == 1 else 'are'} Accelerate's and not read here"
        f"{whole}: start the script with `accel launch`, which reads the files of `accelerate "
        "config`, or pass the options to the Accelerator."
    )


def _grouped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest ``"fsdp.cpu_offload"`` in ``"fsdp"``."""
    found = {name: value for name, value in values.items() if "." not in name}
    for group in _GROUPS:
        start = f"{group}."
        found[group] = {n[len(start) :]: v for n, v in values.items() if n.startswith(start)}
    return found


def _check(config: AcceleratorConfig) -> None:
    """Raise for invalid values, with their origin."""
    origins = config.origins
    for option, kind in (("gradient_accumulation_steps", int), ("cpu", bool), ("debug", bool)):
        value = getattr(config, option)
        if not isinstance(value, kind):
            raise TypeError(f"{option}={value!r} must be of type {kind.__name__}.")
    if config.mixed_precision not in PRECISIONS:
        raise ValueError(
            f"mixed_precision={config.mixed_precision!r} "
            f"({origins.get('mixed_precision', 'default')}) is unknown; use one of {PRECISIONS}."
            + nearest(
                foreign_names.PRECISIONS.get(config.mixed_precision, str(config.mixed_precision)),
                PRECISIONS,
            )
        )
    if config.on_conflict not in (known := get_args(OnConflict)):
        hint = nearest(str(config.on_conflict), known)
        raise ValueError(
            f"on_conflict={config.on_conflict!r} ({origins.get('on_conflict', 'default')}) is "
            f"unknown: use 'refuse', 'wait' or 'take_over'.{hint}"
        )
    if config.gradient_accumulation_steps < 1:
        raise ValueError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} "
            f"({origins.get('gradient_accumulation_steps', 'default')}) must be at least 1."
        )


def launched_plugin(
    backend: Any, plugin: TorchDynamoPlugin | None, config: AcceleratorConfig
) -> TorchDynamoPlugin:
    """Return the plugin of torch.compile; arguments of the script override the launcher.

    Raises:
        ValueError: the backend or the mode does not exist; the message has its origin.

    Example:
        >>> from accel_callbacks import AcceleratorConfig
        >>> from accel_callbacks.config import launched_plugin
        >>> config = AcceleratorConfig(dynamo_backend="eager", dynamo_use_fullgraph=True)
        >>> launched_plugin(None, None, config).fullgraph
        True
        >>> launched_plugin("no", None, config).compiles
        False
    """
    given = backend is not None or plugin is not None
    launched = config.dynamo_backend
    if given or launched is None or launched.lower() == "no":
        return choose_plugin(backend, plugin)
    options = {
        "mode": config.dynamo_mode,
        "fullgraph": config.dynamo_use_fullgraph,
        "dynamic": config.dynamo_use_dynamic,
        "use_regional_compilation": config.dynamo_use_regional_compilation,
    }
    kept: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        return TorchDynamoPlugin(backend=launched, **kept)
    except ValueError as error:
        origin = config.origins.get("dynamo_backend", "config")
        raise ValueError(f"torch.compile as the launch asks for it ({origin}): {error}") from None


def launched_handlers(handlers: Handlers, config: AcceleratorConfig) -> Handlers:
    """Return the script's handlers, with the launcher's options of fp8 that the script leaves out.

    A recipe with a config leaves out none.

    Example:
        >>> from accel_callbacks import AcceleratorConfig, AORecipeKwargs
        >>> from accel_callbacks.config import launched_handlers
        >>> from accel_callbacks.plugins import sort_handlers
        >>> config = AcceleratorConfig(mixed_precision="fp8", fp8_pad_inner_dim=False)
        >>> launched_handlers(sort_handlers(()), config).get(AORecipeKwargs).pad_inner_dim
        False
    """
    launched = {
        "pad_inner_dim": config.fp8_pad_inner_dim,
        "enable_fsdp_float8_all_gather": config.fp8_enable_fsdp_float8_all_gather,
    }
    own = handlers.get(AORecipeKwargs, AORecipeKwargs())
    left: dict[str, Any] = {
        name: value
        for name, value in launched.items()
        if value is not None and getattr(own, name) is None
    }
    if not left or own.config is not None or config.mixed_precision != "fp8":
        return handlers
    return Handlers({**handlers.by_class, type(own): replace(own, **left)})


def launched_parallelism(
    given: ParallelismConfig | None, config: AcceleratorConfig
) -> ParallelismConfig | None:
    """Return the script's arrangement of ranks, or else the launcher's; None without one.

    Raises:
        ValueError: a size of the launcher is not positive, or axes do not go together.

    Example:
        >>> from accel_callbacks import AcceleratorConfig
        >>> from accel_callbacks.config import launched_parallelism
        >>> config = AcceleratorConfig(parallelism={"dp_replicate_size": 1, "dp_shard_size": 2})
        >>> launched_parallelism(None, config).get_mesh()
        (('dp_shard',), (2,))
        >>> launched_parallelism(None, AcceleratorConfig()) is None
        True
    """
    # The sizes that the launch leaves out are 1.
    names = [f"{axis}_size" for axis in AXES]
    sizes: dict[str, Any] = {name: config.parallelism.get(name, 1) for name in names}
    if given is not None or all(size == 1 for size in sizes.values()):
        return given
    travels = config.parallelism.get("cp_comm_strategy")
    if travels is not None and sizes["cp_size"] > 1:
        sizes["cp_handler"] = TorchContextParallelConfig(travels)
    return ParallelismConfig(**sizes)


def launched_megatron(
    plugin: MegatronLMPlugin | None, config: AcceleratorConfig
) -> MegatronLMPlugin | None:
    """Return the options of Megatron-LM; those that the script leaves None are the launcher's.

    Returns:
        ``None`` if neither the script nor the launch has any.

    Raises:
        ValueError: an option of the launcher is invalid.

    Example:
        >>> from accel_callbacks import AcceleratorConfig, MegatronLMPlugin
        >>> from accel_callbacks.config import launched_megatron
        >>> config = AcceleratorConfig(distributed_type="MEGATRON_LM", megatron={"tp_degree": 2})
        >>> launched_megatron(None, config).tp_degree
        2
        >>> launched_megatron(MegatronLMPlugin(tp_degree=1), config).tp_degree
        1
        >>> launched_megatron(None, AcceleratorConfig()) is None
        True
    """
    if config.distributed_type != "MEGATRON_LM":
        return plugin
    from accel_callbacks.plugins.megatron import MegatronLMPlugin

    given = plugin or MegatronLMPlugin()
    left = {name: v for name, v in config.megatron.items() if getattr(given, name) is None}
    try:
        return replace(given, **left) if left else given
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Megatron-LM as the launch asks for it (ACCEL_MEGATRON_LM_*): {error}"
        ) from None


def refuse_beside_megatron(
    parallelism: ParallelismConfig | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    deepspeed: DeepSpeedPlugins | None = None,
) -> None:
    """Raise for options that arrange the ranks too, beside those of Megatron-LM.

    Raises:
        ValueError: there is one; the message names it.

    Example:
        >>> from accel_callbacks.config import refuse_beside_megatron
        >>> refuse_beside_megatron(None, None)
    """
    for name, given, instead in (
        ("parallelism_config", parallelism, "tp_degree and context_parallel_size"),
        ("fsdp_plugin", fsdp, "use_distributed_optimizer or use_custom_fsdp"),
        ("deepspeed_plugin", deepspeed, "use_distributed_optimizer or use_custom_fsdp"),
    ):
        if given is not None:
            raise ValueError(
                f"{name} (an argument, or from the launch) and the options of Megatron-LM both "
                f"arrange the ranks: leave it out, and give {instead}; or leave those of "
                "Megatron-LM out."
            )


def accumulated(config: AcceleratorConfig, plugin: MegatronLMPlugin | None) -> AcceleratorConfig:
    """Return the options with ``num_micro_batches`` as the micro-batches of one optimizer step.

    Raises:
        ValueError: ``gradient_accumulation_steps`` is given too, as another number above 1.

    Example:
        >>> from accel_callbacks import AcceleratorConfig, MegatronLMPlugin
        >>> from accel_callbacks.config import accumulated
        >>> config = accumulated(AcceleratorConfig(), MegatronLMPlugin(num_micro_batches=4))
        >>> config.gradient_accumulation_steps
        4
    """
    steps = None if plugin is None else plugin.num_micro_batches
    given = config.gradient_accumulation_steps
    if steps is None or steps in (1, given):
        return config
    name = "gradient_accumulation_steps"
    if given > 1:
        raise ValueError(
            f"{name}={given} ({config.origins.get(name, 'default')}) and num_micro_batches={steps} "
            "of Megatron-LM both say how many batches make one optimizer step: give one of them."
        )
    origins = {**config.origins, name: "num_micro_batches of Megatron-LM"}
    return replace(config, gradient_accumulation_steps=steps, origins=origins)


def launched_fsdp(
    plugin: FullyShardedDataParallelPlugin | None, config: AcceleratorConfig
) -> FullyShardedDataParallelPlugin | None:
    """Return the options of FSDP; those that the script leaves None are the launcher's.

    Returns:
        ``None`` if neither the script nor the launch asks for FSDP.

    Raises:
        ValueError: an option of the launcher is invalid.

    Example:
        >>> from accel_callbacks import AcceleratorConfig, FullyShardedDataParallelPlugin
        >>> from accel_callbacks.config import launched_fsdp
        >>> config = AcceleratorConfig(distributed_type="FSDP", fsdp={"cpu_offload": True})
        >>> launched_fsdp(None, config).cpu_offload
        True
        >>> launched_fsdp(FullyShardedDataParallelPlugin(cpu_offload=False), config).cpu_offload
        False
        >>> launched_fsdp(None, AcceleratorConfig()) is None
        True
    """
    shards = config.parallelism.get("dp_shard_size", 1) > 1
    if config.distributed_type != "FSDP" and not shards:
        return plugin
    # Imported here, because the launcher reads this module and no torch.
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

    options = dict(config.fsdp)
    try:
        if plugin is None:
            return FullyShardedDataParallelPlugin(**options)
        # A script that gives one of these has said what the other one would.
        if any(getattr(plugin, name) is not None for name in _SAME):
            options = {name: value for name, value in options.items() if name not in _SAME}
        left = {name: v for name, v in options.items() if getattr(plugin, name) is None}
        return replace(plugin, **left) if left else plugin
    except (TypeError, ValueError) as error:
        raise ValueError(f"FSDP as the launch asks for it (ACCEL_FSDP_*): {error}") from None


def launched_deepspeed(
    plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None, config: AcceleratorConfig
) -> DeepSpeedPlugins | None:
    """Return the options of DeepSpeed; those that the script leaves out are the launcher's.

    Returns:
        ``None`` if neither the script nor the launch asks for DeepSpeed.

    Raises:
        ValueError: an option of the launcher is invalid, or contradicts the script's configuration.

    Example:
        >>> from accel_callbacks import AcceleratorConfig
        >>> from accel_callbacks.config import launched_deepspeed
        >>> config = AcceleratorConfig(distributed_type="DEEPSPEED", deepspeed={"zero_stage": 3})
        >>> launched_deepspeed(None, config).active.zero_stage
        3
        >>> launched_deepspeed(None, AcceleratorConfig()) is None
        True
    """
    launched = config.distributed_type == "DEEPSPEED"
    if plugin is None and not launched:
        return None
    # Imported here, because the launcher reads this module and no torch.
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin, DeepSpeedPlugins

    options = dict(config.deepspeed) if launched else {}
    if plugin is None:
        try:
            return DeepSpeedPlugins(DeepSpeedPlugin(**options))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"DeepSpeed as the launch asks for it (ACCEL_DEEPSPEED_*): {error}"
            ) from None
    if isinstance(plugin, DeepSpeedPlugin) and options:
        # In place: the script may keep and ask the plugin that it gave.
        plugin.take_launched(options)
    return DeepSpeedPlugins(plugin)


def of_deepspeed(config: AcceleratorConfig, plugin: DeepSpeedPlugin) -> AcceleratorConfig:
    """Return options of the run with those that only DeepSpeed's configuration says.

    Raises:
        ValueError: an option contradicts the configuration.

    Example:
        >>> from accel_callbacks import AcceleratorConfig, DeepSpeedPlugin
        >>> from accel_callbacks.config import of_deepspeed
        >>> plugin = DeepSpeedPlugin(gradient_accumulation_steps=4)
        >>> of_deepspeed(AcceleratorConfig(), plugin).gradient_accumulation_steps
        4
    """
    found: dict[str, Any] = {}
    steps = plugin.get_value("gradient_accumulation_steps")
    if isinstance(steps, int):
        found["gradient_accumulation_steps"] = steps
    for name in ("bf16", "fp16"):
        if plugin.get_value(f"{name}.enabled") is True:
            found["mixed_precision"] = name
    for option, value in found.items():
        mine, origin = getattr(config, option), config.origins.get(option)
        if origin is not None and mine != value:
            key = option if option != "mixed_precision" else f"{value}.enabled"
            raise ValueError(
                f"{option}={mine!r} ({origin}) contradicts {key}={plugin.get_value(key)} of "
                "DeepSpeed's configuration: leave one of them out, or make it 'auto' there."
            )
    origins = {**config.origins, **dict.fromkeys(found, "DeepSpeed's configuration")}
    return replace(config, **found, origins=origins) if found else config
