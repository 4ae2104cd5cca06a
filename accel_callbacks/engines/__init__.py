"""Engines, a folder each: the ways in which ranks train one model, and when each is taken."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from accel_callbacks._lazy import lazy_names
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.base import EngineRequest, Sequences, Strategy
from accel_callbacks.engines.data_ranks import DataRanks
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from accel_callbacks.engines.ddp.strategy import DDP as DDP
    from accel_callbacks.engines.deepspeed.strategy import DeepSpeed as DeepSpeed
    from accel_callbacks.engines.fsdp.strategy import FSDP as FSDP
    from accel_callbacks.engines.pipeline.strategy import PipelineParallel as PipelineParallel
    from accel_callbacks.engines.single_device import SingleDevice as SingleDevice
    from accel_callbacks.engines.state_access import StateAccess as StateAccess
    from accel_callbacks.engines.tensor.strategy import TensorParallel as TensorParallel
    from accel_callbacks.engines.xla.strategy import XLA as XLA
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

__all__ = [
    "DDP",
    "FSDP",
    "XLA",
    "DataRanks",
    "DeepSpeed",
    "EngineRequest",
    "PipelineParallel",
    "Sequences",
    "SingleDevice",
    "StateAccess",
    "Strategy",
    "TensorParallel",
    "create_strategy",
    "find_device",
    "register_engine",
]

# A run has one engine, and each imports parts of torch of its own.
_HOME = {
    "DDP": "ddp.strategy",
    "DeepSpeed": "deepspeed.strategy",
    "FSDP": "fsdp.strategy",
    "PipelineParallel": "pipeline.strategy",
    "SingleDevice": "single_device",
    "StateAccess": "state_access",
    "TensorParallel": "tensor.strategy",
    "XLA": "xla.strategy",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)

_Condition = Callable[[EngineRequest], bool]


def _shards(run: EngineRequest) -> bool:
    axes = run.axes
    # Where layers and sequences are cut, FSDP shards the former over the ranks of the latter.
    cuts_both = axes.tp_enabled and (axes.cp_enabled or axes.sp_enabled)
    return run.fsdp is not None or axes.dp_shard_enabled or cuts_both


#: The first of these whose condition holds is taken.
_ENGINES: tuple[tuple[str, _Condition], ...] = (
    ("XLA", lambda run: run.topology.device.type == "xla"),
    ("DeepSpeed", lambda run: run.deepspeed is not None),
    ("PipelineParallel", lambda run: run.axes.pp_enabled),
    ("FSDP", _shards),
    ("TensorParallel", lambda run: run.axes.tp_enabled),
    ("DDP", lambda run: run.topology.world_size > 1),
    ("SingleDevice", lambda run: True),
)
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


def _kind_for(run: EngineRequest) -> type[Strategy]:
    """Return the engine whose condition holds."""
    for kind, when in reversed(_registered.values()):
        if when(run):
            return kind
    name = next(name for name, when in _ENGINES if when(run))
    own: type[Strategy] = getattr(sys.modules[__name__], name)
    return own
