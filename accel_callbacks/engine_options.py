"""Which engine trains, in which precision: by the options of the Accelerator and of its launch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from accel_callbacks import plugins
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.options import AcceleratorConfig, unread_variables
from accel_callbacks.plugins.base import Handlers, KwargsHandler
from accel_callbacks.plugins.compile import TorchDynamoPlugin
from accel_callbacks.plugins.engine_request import EngineRequest
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.plugins.precision import AORecipeKwargs
from accel_callbacks.strategy import Strategy
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel_callbacks.precision.base import Precision

__all__ = [
    "EngineOptions",
    "create_precision",
    "create_strategy",
    "find_device",
    "register_engine",
    "resolve_engine",
]


_Condition = Callable[[EngineRequest], bool]


def _shards(run: EngineRequest) -> bool:
    axes = run.axes
    # Where layers and sequences are cut, FSDP shards the former over the ranks of the latter.
    cuts_both = axes.tp_enabled and (axes.cp_enabled or axes.sp_enabled)
    return run.fsdp is not None or axes.dp_shard_enabled or cuts_both


#: Modules of this package and their engines. The first whose condition holds is imported and taken.
_ENGINES: tuple[tuple[str, str, _Condition], ...] = (
    ("engines.xla.strategy", "XLA", lambda run: run.topology.device.type == "xla"),
    ("engines.deepspeed.strategy", "DeepSpeed", lambda run: run.deepspeed is not None),
    ("engines.pipeline.strategy", "PipelineParallel", lambda run: run.axes.pp_enabled),
    ("engines.fsdp.strategy", "FSDP", _shards),
    ("engines.tensor.strategy", "TensorParallel", lambda run: run.axes.tp_enabled),
    ("engines.ddp.strategy", "DDP", lambda run: run.topology.world_size > 1),
    ("strategy.single_device", "SingleDevice", lambda run: True),
)
#: Modules of this package and their precisions, by the value of ``mixed_precision``.
_PRECISIONS = {
    "no": ("precision.base", "Precision"),
    "bf16": ("precision.amp", "BF16"),
    "fp16": ("precision.fp16", "FP16"),
    "fp8": ("models.fp8", "FP8"),
}
_registered: OrderedDict[int, tuple[type[Strategy], _Condition]] = OrderedDict()


def register_engine(kind: type[Strategy], *, when: _Condition) -> RemovableHandle:
    """Let Accelerators train by an engine of your own where a condition holds.

    It is asked before the engines of this library, the one that was registered last first.

    Args:
        kind: the engine; :meth:`Strategy.for_run` makes one.
        when: called with what a run asks of its engine; True takes it.

    Returns:
        A handle, whose ``remove()`` takes the engine out again.

    Raises:
        TypeError: it is no class of engines.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.engines import SingleDevice, register_engine
        >>> class Named(SingleDevice):
        ...     name = "named"
        >>> handle = register_engine(Named, when=lambda run: run.topology.world_size == 1)
        >>> Accelerator(cpu=True).strategy.name
        'named'
        >>> handle.remove()
    """
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise TypeError(
            f"register_engine({kind!r}): an engine is a subclass of accel_callbacks.engines."
            "Strategy; pass the class."
        )
    handle = RemovableHandle(_registered)
    _registered[handle.id] = kind, when
    return handle


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


def find_device(env: Mapping[str, str]) -> torch.device | None:
    """Return the device of a process that computes on all devices of its machine by itself.

    Args:
        env: the environment of the process.

    Returns:
        ``None`` where each rank has one of torch's devices.

    Raises:
        RuntimeError: it is to compute through torch_xla, which fails.

    Example:
        >>> from accel_callbacks.engines import find_device
        >>> find_device({}) is None
        True
    """
    if find_spec("torch_xla") is None:
        return None
    from accel_callbacks.engines.xla.device import has_xla, xla_device

    return xla_device(env) if has_xla(env) else None


def create_strategy(
    topology: Topology,
    handlers: Handlers | None = None,
    parallelism: ParallelismConfig | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    deepspeed: DeepSpeedPlugins | None = None,
) -> Strategy:
    """Return the strategy for this topology, with these options.

    Args:
        topology: the rank and device of this process.
        handlers: the options; the defaults if ``None``.
        parallelism: how the ranks are arranged; data parallelism over all if ``None``.
        fsdp: how models are sharded; the default options if ``None``.
        deepspeed: how DeepSpeed trains models; it does not if ``None``.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: two engines are asked for, the axes do not arrange all ranks, or do not go
            together.

    Example:
        >>> import torch
        >>> from accel_callbacks import Topology
        >>> from accel_callbacks.engines import create_strategy
        >>> create_strategy(Topology(torch.device("cpu"), world_size=2)).name
        'ddp'
    """
    run = EngineRequest(topology, handlers or Handlers(), parallelism, fsdp, deepspeed)
    strategy = _kind_for(run).for_run(run)
    arranged = strategy.parallelism
    if arranged is not None and (arranged.cp_enabled or arranged.sp_enabled):
        # Imported here, because few runs share sequences.
        from accel_callbacks.engines.context.head_exchange import sequence_parallelism

        strategy.sequences = sequence_parallelism(arranged, strategy.data)
    return strategy


def create_precision(
    name: str,
    device: torch.device,
    handlers: Handlers | None = None,
    *,
    engine: bool = False,
) -> Precision:
    """Return the precision of this name for a device.

    Args:
        name: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.
        device: the device that the model computes on.
        handlers: its options; the defaults if ``None``.
        engine: an engine brings the precision about, and scales losses itself.

    Raises:
        ValueError: the device does not support it, or there is an fp8 recipe without fp8.
        ImportError: fp8 without torchao.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import create_precision
        >>> create_precision("bf16", torch.device("cpu")).name
        'bf16'
    """
    handlers = handlers or Handlers()
    if name != "fp8" and handlers.get(AORecipeKwargs) is not None:
        raise ValueError(f"AORecipeKwargs needs mixed_precision='fp8', and it is {name!r}.")
    if engine and name != "fp8":
        from accel_callbacks.precision.base import EnginePrecision

        return EnginePrecision(name, device, handlers)
    module, kind = _PRECISIONS[name]
    own: Precision = getattr(import_module(f"accel_callbacks.{module}"), kind)(device, handlers)
    return own


def _kind_for(run: EngineRequest) -> type[Strategy]:
    """Return the engine whose condition holds."""
    for kind, when in reversed(_registered.values()):
        if when(run):
            return kind
    module, name = next((module, name) for module, name, when in _ENGINES if when(run))
    own: type[Strategy] = getattr(import_module(f"accel_callbacks.{module}"), name)
    return own
