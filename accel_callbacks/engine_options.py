"""Options of the engine that trains, from the arguments of an Accelerator and from its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from accel_callbacks import plugins
from accel_callbacks.config import (
    AcceleratorConfig,
    accumulated,
    launched_deepspeed,
    launched_fsdp,
    launched_handlers,
    launched_megatron,
    launched_parallelism,
    launched_plugin,
    of_deepspeed,
    refuse_beside_megatron,
    unread_variables,
)
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.compile import TorchDynamoPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.plugins.parallelism_handlers import TorchTensorParallelPlugin
from accel_callbacks.strategies import create_strategy
from accel_callbacks.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.distributed.topology import Topology
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin, DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel_callbacks.plugins.megatron import MegatronLMPlugin
    from accel_callbacks.strategies.base import Strategy

__all__ = ["EngineOptions", "resolve_engine"]


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
        plugin = strategy.fsdp_plugin
        sharding: set[str] = set()
        if plugin is not None:
            names = [field.name for field in fields(plugin)]
            given = [name for name in names if getattr(plugin, name) is not None]
            sharding = {"fsdp", *(f"fsdp.{name}" for name in given)}
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
