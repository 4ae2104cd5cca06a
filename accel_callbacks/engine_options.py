"""Options of the engine that trains, from the arguments of an Accelerator and from its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from accel_callbacks import plugins
from accel_callbacks.config import AcceleratorConfig, unread_variables
from accel_callbacks.engines import create_strategy
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.compile import TorchDynamoPlugin, choose_plugin
from accel_callbacks.plugins.parallelism import AXES, ParallelismConfig
from accel_callbacks.plugins.parallelism_handlers import (
    TorchContextParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_callbacks.plugins.precision import AORecipeKwargs
from accel_callbacks.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.distributed.topology import Topology
    from accel_callbacks.engines.base import Strategy
    from accel_callbacks.plugins import MegatronLMPlugin
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin, DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

__all__ = [
    "EngineOptions",
    "accumulated",
    "launched_deepspeed",
    "launched_fsdp",
    "launched_handlers",
    "launched_megatron",
    "launched_parallelism",
    "launched_plugin",
    "of_deepspeed",
    "refuse_beside_megatron",
    "resolve_engine",
]

# Of these a script that gives one has said what the other one would.
_SAME = ("sharding_strategy", "reshard_after_forward")


@dataclass(frozen=True)
class EngineOptions:
    """What the script and its launch say about the engine.

    Args:
        config: options of the run, with those that an engine's own configuration says.
        handlers: options of components.
        dynamo: how prepared models are compiled.
        parallelism: how the ranks are arranged, None for data parallelism over all.
        fsdp: how models are sharded, None if they are not.
        deepspeed: how DeepSpeed trains, None if it does not.
        megatron: options of Megatron-LM, which arrange the ranks in place of the three before.
        set_by_script: names of the launch's options that arguments of the script override.
    """

    config: AcceleratorConfig
    handlers: Handlers
    dynamo: TorchDynamoPlugin
    parallelism: ParallelismConfig | None
    fsdp: FullyShardedDataParallelPlugin | None
    deepspeed: DeepSpeedPlugins | None
    megatron: MegatronLMPlugin | None
    set_by_script: frozenset[str]

    def create_strategy(self, topology: Topology) -> Strategy:
        """Return the strategy of these options for the ranks that there are.

        Raises:
            ValueError: the options do not arrange all ranks, or do not go together.
        """
        parallelism, fsdp = self.parallelism, self.fsdp
        if self.megatron is not None:
            parallelism, fsdp = self.megatron.arranged(topology.world_size)
        return create_strategy(topology, self.handlers, parallelism, fsdp, self.deepspeed)

    def warn_of_unread(self, environment: Mapping[str, str], strategy: Strategy) -> None:
        """Warn of options of Megatron-LM, and of variables of the launch, that have no effect."""
        if self.megatron is not None and (notes := self.megatron.notes()):
            warn(notes)
        sharding: set[str] = set()
        plugin = None
        if strategy.engine_plugins:  # a run without an engine does not import their options
            plugin = strategy.plugin(plugins.FullyShardedDataParallelPlugin)
        if plugin is not None:
            names = [field.name for field in fields(plugin)]
            chosen = [name for name in names if getattr(plugin, name) is not None]
            sharding = {"fsdp", *(f"fsdp.{name}" for name in chosen)}
        if unread := unread_variables(self.config, environment, self.set_by_script | sharding):
            warn(unread)


def resolve_engine(
    config: AcceleratorConfig,
    *,
    handlers: Handlers,
    parallelism_config: ParallelismConfig | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    torch_tp_plugin: TorchTensorParallelPlugin | None,
    megatron_lm_plugin: MegatronLMPlugin | None,
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
    deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
    dynamo_backend: Any,
    dynamo_plugin: TorchDynamoPlugin | None,
) -> EngineOptions:
    """Return the engine's options: the arguments of an Accelerator, then those of the launch.

    Raises:
        TypeError: a plugin is of another class.
        ValueError: two arguments contradict each other or the launch.
    """
    _check_plugin("parallelism_config", parallelism_config, "ParallelismConfig")
    _check_plugin("fsdp_plugin", fsdp_plugin, "FullyShardedDataParallelPlugin")
    _check_plugin("torch_tp_plugin", torch_tp_plugin, "TorchTensorParallelPlugin")
    _check_plugin("megatron_lm_plugin", megatron_lm_plugin, "MegatronLMPlugin")
    if torch_tp_plugin is not None:
        parallelism_config = _tensor_parallel(torch_tp_plugin, parallelism_config)
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise ValueError("give deepspeed_plugin or deepspeed_plugins, not both.")
    named = deepspeed_plugins if deepspeed_plugin is None else deepspeed_plugin
    for plugin in named.values() if isinstance(named, Mapping) else [named]:
        _check_plugin("deepspeed_plugin", plugin, "DeepSpeedPlugin")
    deepspeed = launched_deepspeed(named, config)
    if deepspeed is not None:
        config = of_deepspeed(config, deepspeed.active)
    handlers = launched_handlers(handlers, config)
    parallelism = launched_parallelism(parallelism_config, config)
    fsdp = launched_fsdp(fsdp_plugin, config)
    megatron = launched_megatron(megatron_lm_plugin, config)
    set_by_script: set[str] = set()
    if parallelism_config is not None:
        set_by_script |= {f"parallelism.{field.name}" for field in fields(parallelism_config)}
    if dynamo_backend or dynamo_plugin is not None:
        set_by_script.add("dynamo_backend")
    if megatron is not None:
        refuse_beside_megatron(parallelism, fsdp, deepspeed)
        config = accumulated(config, megatron)
        handlers = Handlers({**handlers.by_class, plugins.MegatronLMPlugin: megatron})
        set_by_script |= {"megatron_lm", *(f"megatron.{field.name}" for field in fields(megatron))}
    dynamo = launched_plugin(dynamo_backend, dynamo_plugin, config)
    return EngineOptions(
        config, handlers, dynamo, parallelism, fsdp, deepspeed, megatron, frozenset(set_by_script)
    )


def _tensor_parallel(
    plugin: TorchTensorParallelPlugin, config: ParallelismConfig | None
) -> ParallelismConfig:
    if config is not None:
        raise ValueError(
            f"torch_tp_plugin is a parallelism_config with tp_size={plugin.tp_size}, and both were "
            "given: leave torch_tp_plugin out, and give tp_size to the parallelism_config."
        )
    return ParallelismConfig(tp_size=plugin.tp_size)


def _check_plugin(name: str, value: Any, kind: str) -> None:
    """Raise TypeError for an argument of another class than the plugin of this name."""
    if value is None or isinstance(value, getattr(plugins, kind)):
        return
    origin = ""
    if type(value).__name__ == kind:  # imported from another library by the same name
        origin = f" of {type(value).__module__}, another library"
        value = kind
    raise TypeError(
        f"{name}={value}{origin} must be a {kind}: `from accel_callbacks import {kind}`."
    )


def launched_plugin(
    backend: Any, plugin: TorchDynamoPlugin | None, config: AcceleratorConfig
) -> TorchDynamoPlugin:
    """Return the plugin of torch.compile; arguments of the script override the launcher.

    Raises:
        ValueError: the backend or the mode does not exist; the message has its origin.
    """
    chosen = backend is not None or plugin is not None
    launched = config.dynamo_backend
    if chosen or launched is None or launched.lower() == "no":
        return choose_plugin(backend, plugin)
    options = {
        "mode": config.dynamo_mode,
        "fullgraph": config.dynamo_use_fullgraph,
        "dynamic": config.dynamo_use_dynamic,
        "use_regional_compilation": config.dynamo_use_regional_compilation,
    }
    keywords: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        return TorchDynamoPlugin(backend=launched, **keywords)
    except ValueError as error:
        origin = config.origins.get("dynamo_backend", "config")
        raise ValueError(f"torch.compile as the launch asks for it ({origin}): {error}") from None


def launched_handlers(handlers: Handlers, config: AcceleratorConfig) -> Handlers:
    """Return the script's handlers, with the launcher's options of fp8 that the script leaves out.

    A recipe with a config leaves out none.
    """
    launched = {
        "pad_inner_dim": config.fp8_pad_inner_dim,
        "enable_fsdp_float8_all_gather": config.fp8_enable_fsdp_float8_all_gather,
    }
    recipe = handlers.get(AORecipeKwargs, AORecipeKwargs())
    left: dict[str, Any] = {
        name: value
        for name, value in launched.items()
        if value is not None and getattr(recipe, name) is None
    }
    if not left or recipe.config is not None or config.mixed_precision != "fp8":
        return handlers
    return Handlers({**handlers.by_class, type(recipe): replace(recipe, **left)})


def launched_parallelism(
    arrangement: ParallelismConfig | None, config: AcceleratorConfig
) -> ParallelismConfig | None:
    """Return the script's arrangement of ranks, or else the launcher's; None without one.

    Raises:
        ValueError: a size of the launcher is not positive, or axes do not go together.
    """
    # The sizes that the launch leaves out are 1.
    names = [f"{axis}_size" for axis in AXES]
    sizes: dict[str, Any] = {name: config.parallelism.get(name, 1) for name in names}
    if arrangement is not None or all(size == 1 for size in sizes.values()):
        return arrangement
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
    """
    if config.distributed_type != "MEGATRON_LM":
        return plugin
    options = plugin or plugins.MegatronLMPlugin()
    left = {name: v for name, v in config.megatron.items() if getattr(options, name) is None}
    try:
        return replace(options, **left) if left else options
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
    """
    for name, engine, instead in (
        ("parallelism_config", parallelism, "tp_degree and context_parallel_size"),
        ("fsdp_plugin", fsdp, "use_distributed_optimizer or use_custom_fsdp"),
        ("deepspeed_plugin", deepspeed, "use_distributed_optimizer or use_custom_fsdp"),
    ):
        if engine is not None:
            raise ValueError(
                f"{name} (an argument, or from the launch) and the options of Megatron-LM both "
                f"arrange the ranks: leave it out, and give {instead}; or leave those of "
                "Megatron-LM out."
            )


def accumulated(config: AcceleratorConfig, plugin: MegatronLMPlugin | None) -> AcceleratorConfig:
    """Return the options with ``num_micro_batches`` as the micro-batches of one optimizer step.

    Raises:
        ValueError: ``gradient_accumulation_steps`` is given too, as another number above 1.
    """
    steps = None if plugin is None else plugin.num_micro_batches
    chosen = config.gradient_accumulation_steps
    if steps is None or steps in (1, chosen):
        return config
    name = "gradient_accumulation_steps"
    if chosen > 1:
        raise ValueError(
            f"{name}={chosen} ({config.origins.get(name, 'default')}) and num_micro_batches={steps}"
            " of Megatron-LM both say how many batches make one optimizer step: give one of them."
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
    """
    shards = config.parallelism.get("dp_shard_size", 1) > 1
    if config.distributed_type != "FSDP" and not shards:
        return plugin
    options = dict(config.fsdp)
    try:
        if plugin is None:
            return plugins.FullyShardedDataParallelPlugin(**options)
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
    """
    launched = config.distributed_type == "DEEPSPEED"
    if plugin is None and not launched:
        return None
    # Imported here, because a run has one engine.
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
    """
    configured: dict[str, Any] = {}
    steps = plugin.get_value("gradient_accumulation_steps")
    if isinstance(steps, int):
        configured["gradient_accumulation_steps"] = steps
    for name in ("bf16", "fp16"):
        if plugin.get_value(f"{name}.enabled") is True:
            configured["mixed_precision"] = name
    for option, value in configured.items():
        mine, origin = getattr(config, option), config.origins.get(option)
        if origin is not None and mine != value:
            key = option if option != "mixed_precision" else f"{value}.enabled"
            raise ValueError(
                f"{option}={mine!r} ({origin}) contradicts {key}={plugin.get_value(key)} of "
                "DeepSpeed's configuration: leave one of them out, or make it 'auto' there."
            )
    origins = {**config.origins, **dict.fromkeys(configured, "DeepSpeed's configuration")}
    return replace(config, **configured, origins=origins) if configured else config
