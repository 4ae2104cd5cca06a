"""Handles under the names of Accelerate: PartialState, AcceleratorState, GradientState."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accel_callbacks.distributed.process_control import ProcessControl
from accel_callbacks.distributed.topology import (
    Topology,
    destroy_topology,
    is_initialized,
    own_accelerator,
    process_rank,
    resolve_topology,
    select_device,
)
from accel_callbacks.engine_options import find_device
from accel_callbacks.errors import nearest
from accel_callbacks.options import AcceleratorConfig, resolve_config
from accel_callbacks.plugins.distributed_type import DistributedType
from accel_callbacks.plugins.process_group import InitProcessGroupKwargs

if TYPE_CHECKING:
    from accel_callbacks.data.loader import DataLoaderShard
    from accel_callbacks.loop.gradient_window import GradientWindow
    from accel_callbacks.loop.loop import Loop
    from accel_callbacks.plugins import FullyShardedDataParallelPlugin, MegatronLMPlugin
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin, DeepSpeedPlugins
    from accel_callbacks.plugins.parallelism import ParallelismConfig
    from accel_callbacks.strategy import Strategy

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "Topology",
    "destroy_topology",
    "is_initialized",
    "process_rank",
    "resolve_topology",
]

_Plugin = TypeVar("_Plugin")


class GradientState:
    """A view of one Accelerator's gradient window and of the loader being iterated.

    Unlike in Accelerate it is no singleton, but belongs to its Accelerator:
    ``accel.gradient_state``.

    Args:
        window: the gradient window.
        loop: the training loop, for the loaders being iterated.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> loader = accel.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
        >>> state = accel.gradient_state
        >>> for batch in loader:
        ...     with accel.accumulate():
        ...         print(state.sync_gradients, state.end_of_dataloader, state.remainder)
        False False 1
        True True 1
        >>> state.in_dataloader, state.remainder
        (False, -1)
    """

    def __init__(self, window: GradientWindow | None = None, loop: Loop | None = None) -> None:
        if window is None or loop is None:
            raise TypeError(
                "GradientState belongs to an Accelerator: use accel.gradient_state instead."
            )
        self._window = window
        self._loop = loop

    @property
    def sync_gradients(self) -> bool:
        """True if gradients are synchronized and the optimizer steps; may be set."""
        return self._window.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._window.sync = value

    @property
    def num_steps(self) -> int:
        """Micro-batches of a full gradient window."""
        return self._window.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """True if prepared schedulers step once a window, False if with each micro-batch."""
        return self._window.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if a window ends with the loader."""
        return self._window.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options of the window by name."""
        return {**vars(self._window.plugin), "num_steps": self.num_steps}

    @property
    def active_dataloader(self) -> DataLoaderShard | None:
        """The innermost prepared loader that is being iterated."""
        active = self._loop.position.active
        return active[-1] if active else None

    @property
    def dataloader_references(self) -> list[DataLoaderShard | None]:
        """The loaders being iterated, the innermost last, after a ``None``."""
        return [None, *self._loop.position.active]

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being iterated."""
        return self._loop.iterating

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the last one of its loader."""
        loader = self.active_dataloader
        return loader is not None and loader.on_last

    @property
    def remainder(self) -> int:
        """Samples of the last global batch if it is not full; -1 outside of a loader."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder}, "
            f"{self.plugin_kwargs})"
        )


class PartialState(ProcessControl):
    """The rank and device of this process without an Accelerator; for inference and data tools.

    Any number of handles may be made: all of them share one topology.

    Args:
        cpu: compute on the CPU even if there is an accelerator; set by ``accel launch`` if
            ``None``.
        **kwargs: ``backend``, ``init_method`` and ``timeout`` of the process group, as for
            :class:`InitProcessGroupKwargs`. They take effect in the first handle or Accelerator of
            the process.

    Raises:
        TypeError: an unknown option.
        ValueError: the backend or the ``init_method`` is unknown or cannot serve the device.
        RuntimeError: this process already uses another device or backend, or the variables of the
            launcher are incomplete.

    Example:
        >>> from accel_callbacks import PartialState
        >>> state = PartialState(cpu=True)
        >>> state.num_processes, state.is_main_process
        (1, True)
        >>> with state.split_between_processes(["a", "b", "c"]) as prompts:
        ...     len(prompts)
        3
    """

    def __init__(self, cpu: bool | None = None, **kwargs: Any) -> None:
        self._config = resolve_config({"cpu": cpu}, os.environ)
        group = _group_options(kwargs, type(self))
        self.topology = resolve_topology(
            cpu=self._config.cpu,
            timeout=group.timeout,
            backend=group.backend,
            init_method=group.init_method,
            find_device=find_device,
        )

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.topology.device

    @property
    def default_device(self) -> torch.device:
        """The accelerator of this machine, the CPU without one, whatever this process uses."""
        return own_accelerator() or torch.device("cpu")

    @property
    def backend(self) -> str | None:
        """The torch.distributed backend, ``None`` for one process."""
        return self.topology.backend

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return self.topology.distributed_type

    @property
    def initialized(self) -> bool:
        """True until :meth:`destroy_process_group`."""
        return is_initialized()

    @property
    def debug(self) -> bool:
        """True if ranks compare what they hold before each collective (``ACCEL_DEBUG``)."""
        return self._config.debug

    def set_device(self) -> None:
        """Make the device of this process torch's current one, for example in a new thread."""
        select_device(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group, the default one if ``None``.

        A default group that the script itself has made is left to the script.

        Args:
            group: as returned by ``torch.distributed.new_group``.
        """
        if group is None:
            destroy_topology()
        else:
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        topology = self.topology
        rank = f"{topology.rank}/{topology.world_size}"
        return f"{type(self).__name__}(rank={rank}, device={topology.device})"


def _group_options(keywords: dict[str, Any], owner: type[Any]) -> InitProcessGroupKwargs:
    options = [field.name for field in fields(InitProcessGroupKwargs)]
    known = [name for name in inspect.signature(owner).parameters if name != "kwargs"] + options
    for name in keywords:
        if name not in options:
            text = f"{owner.__name__}() has no option {name!r}; use some of {known}."
            raise TypeError(text + nearest(name, known))
    return InitProcessGroupKwargs(**keywords)


class AcceleratorState(PartialState):
    """A :class:`PartialState` with the options given by the launcher.

    ``Accelerator.state`` also has the mesh and the options of that Accelerator.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; the launcher's if ``None``.
        cpu: as for :class:`PartialState`.
        **kwargs: as for :class:`PartialState`.

    Example:
        >>> from accel_callbacks import AcceleratorState
        >>> AcceleratorState("bf16", cpu=True).mixed_precision
        'bf16'
    """

    def __init__(
        self, mixed_precision: str | None = None, cpu: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(cpu, **kwargs)
        explicit = {"mixed_precision": mixed_precision, "cpu": cpu}
        self._config = resolve_config(explicit, os.environ)
        self._strategy: Strategy | None = None

    @classmethod
    def of(cls, config: AcceleratorConfig, strategy: Strategy | None = None) -> AcceleratorState:
        """Return the state of an Accelerator with these options.

        Args:
            config: the resolved options.
            strategy: how the Accelerator distributes the work; of one without a mesh if None.

        Example:
            >>> from accel_callbacks import AcceleratorConfig, AcceleratorState
            >>> AcceleratorState.of(AcceleratorConfig(cpu=True, debug=True)).debug
            True
        """
        state = cls(config.mixed_precision, cpu=config.cpu)
        state._config = config
        state._strategy = strategy
        return state

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return (
            super().distributed_type if self._strategy is None else self._strategy.distributed_type
        )

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How the ranks are arranged, None if nothing was said about it."""
        return None if self._strategy is None else self._strategy.data.parallelism

    @property
    def device_mesh(self) -> Any:
        """The named mesh of the ranks (a ``DeviceMesh``), None without one."""
        return None if self._strategy is None else self._strategy.data.mesh

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How models are sharded, None if they are not."""
        from accel_callbacks.plugins import FullyShardedDataParallelPlugin

        return self._plugin(FullyShardedDataParallelPlugin)

    @property
    def megatron_lm_plugin(self) -> MegatronLMPlugin | None:
        """The options of Megatron-LM with their defaults, None if there are none."""
        from accel_callbacks.plugins import MegatronLMPlugin

        plugin = self._plugin(MegatronLMPlugin)
        return None if plugin is None else plugin.filled()

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """How DeepSpeed trains models; of several plugins the selected one; None without it."""
        plugins = self._find_deepspeed()
        return None if plugins is None else plugins.active

    @property
    def deepspeed_plugins(self) -> DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None:
        """The plugins by name, or the single one; None without DeepSpeed."""
        plugins = self._find_deepspeed()
        if plugins is None:
            return None
        return plugins.active if plugins.single else plugins.by_name

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return the plugin of this name.

        Raises:
            ValueError: there is none.
        """
        return self._plugins_of_deepspeed().get(name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Set up the models of the next ``prepare`` by the plugin of this name.

        Raises:
            ValueError: there is none.
        """
        self._plugins_of_deepspeed().select(name)

    def _plugin(self, kind: type[_Plugin]) -> _Plugin | None:
        """Return the options of this class that the Accelerator's engine trains by."""
        return None if self._strategy is None else self._strategy.plugin(kind)

    def _find_deepspeed(self) -> DeepSpeedPlugins | None:
        from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins

        return self._plugin(DeepSpeedPlugins)

    def _plugins_of_deepspeed(self) -> DeepSpeedPlugins:
        plugins = self._find_deepspeed()
        if plugins is None:
            raise ValueError(
                "this run does not use DeepSpeed: pass deepspeed_plugins= to the Accelerator, and "
                "ask its state, accel.state."
            )
        return plugins

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self.distributed_type is DistributedType.FSDP

    @property
    def config(self) -> AcceleratorConfig:
        """The resolved options."""
        return self._config

    @property
    def mixed_precision(self) -> str:
        """The requested precision."""
        return self._config.mixed_precision
