"""Options of the engine that trains, from the arguments of an Accelerator and from its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from accel_callbacks import plugins
from accel_callbacks.config import AcceleratorConfig, unread_variables
from accel_callbacks.engines import create_strategy
from accel_callbacks.plugins.base import Handlers, KwargsHandler
from accel_callbacks.plugins.compile import TorchDynamoPlugin
from accel_callbacks.plugins.precision import AORecipeKwargs
from accel_callbacks.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.distributed.topology import Topology
    from accel_callbacks.engines.base import Strategy

__all__ = ["EngineOptions", "resolve_engine"]


@dataclass(frozen=True)
class EngineOptions:
    """What the script and its launch say about the engine.

    Args:
        config: options of the run, with those that an engine's own configuration says.
        handlers: options of components.
        chosen: the plugins that the script or its launch asks for, by group.
    """

    config: AcceleratorConfig
    handlers: Handlers
    chosen: Mapping[str, Any]

    @property
    def dynamo(self) -> TorchDynamoPlugin:
        """How prepared models are compiled."""
        return self.chosen.get("dynamo") or TorchDynamoPlugin()

    def create_strategy(self, topology: Topology) -> Strategy:
        """Return the strategy of these options for the ranks that there are.

        Raises:
            ValueError: the options do not arrange all ranks, or do not go together.
        """
        chosen, handlers = dict(self.chosen), self.handlers
        for plugin in self.chosen.values():
            if others := plugin.arrange(topology.world_size):
                chosen |= others
                handlers = handlers.including(plugin)
        engines = (chosen.get(group) for group in ("parallelism", "fsdp", "deepspeed"))
        return create_strategy(topology, handlers, *engines)

    def warn_of_unread(self, environment: Mapping[str, str], strategy: Strategy) -> None:
        """Warn of variables of another library's launch that have no effect."""
        named = set(self.chosen)
        for plugin in (*self.chosen.values(), *strategy.engine_plugins):
            if isinstance(plugin, KwargsHandler):
                group = plugin.block.group
                given = [
                    one.name for one in fields(plugin) if getattr(plugin, one.name) is not None
                ]
                named |= {group, *(f"{group}.{name}" for name in given)}
        if unread := unread_variables(self.config, environment, named):
            warn(unread)


def resolve_engine(
    config: AcceleratorConfig, handlers: Handlers, **arguments: Any
) -> EngineOptions:
    """Return the engine's options: the arguments of an Accelerator, then those of the launch.

    Args:
        config: options of the run.
        handlers: options of components.
        arguments: of the Accelerator, those for the plugins of ``plugins.LAUNCHED``.

    Raises:
        TypeError: a plugin is of another class.
        ValueError: two arguments contradict each other or the launch.
    """
    chosen: dict[str, Any] = {}
    for group, entry in plugins.LAUNCHED.items():
        given = {name: arguments[name] for name in entry.arguments}
        asked = config.distributed_type == group.upper() or {group, entry.beside} & {
            *config.launched
        }
        if given and (asked or any(value is not None for value in given.values())):
            # Only now: to read the name imports the module of the plugin.
            kind = getattr(plugins, entry.owners[0])
            plugin = kind.from_launch(kind.from_arguments(**given), config)
            if plugin is not None:
                chosen[group] = plugin
    for plugin in chosen.values():
        config = plugin.configure(config, chosen)
    recipe = AORecipeKwargs.from_launch(handlers.get(AORecipeKwargs), config)
    if recipe is not None:
        handlers = handlers.including(recipe)
    return EngineOptions(config, handlers, chosen)
