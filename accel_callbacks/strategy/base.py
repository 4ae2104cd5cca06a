"""The interface of a strategy: everything that differs between one device and many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from accel_callbacks.data.device import Feed, device_feed
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.logging import notice
from accel_callbacks.models.compile import original, regions
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.distributed_type import DistributedType
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.checks import refuse_empty
from accel_callbacks.strategy.data_ranks import DataRanks
from accel_callbacks.strategy.gradients import Gradients
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.plugins.engine_request import EngineRequest
    from accel_callbacks.strategy.state_access import StateAccess

__all__ = ["GatherCast", "Sequences", "SetUp", "Strategy"]

_Plugin = TypeVar("_Plugin")


class SetUp(NamedTuple):
    """The objects that `Strategy.setup` returns in place of those it was given."""

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]


class GatherCast(NamedTuple):
    """A parameter that ranks may gather in another type.

    Args:
        parameter: of the model, sharded or not.
        cast: called with a rank's part and a function that counts the writes to the parameter;
            returns a tensor in the memory of the part, with the methods that FSDP calls.
    """

    parameter: torch.nn.Parameter
    cast: Callable[[torch.Tensor, Callable[[], int]], torch.Tensor]


class Sequences:
    """The sequences of batches: whole on each rank here, in parts where ranks share them.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> Accelerator(cpu=True).strategy.sequences.shared
        False
    """

    #: True if several ranks share each sequence.
    shared = False

    def __init__(self) -> None:
        self._noted = False

    def cut(
        self,
        buffers: Sequence[torch.Tensor] | None,
        seq_dims: Sequence[int] | None,
        no_restore: Collection[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """Return a context in which each rank has its part of the buffers.

        Args:
            buffers: the tensors with a dimension of tokens.
            seq_dims: this dimension in each of them.
            no_restore: those among them that stay cut.
        """
        if not self._noted:
            self._noted = True
            notice("maybe_context_parallel does nothing, because cp_size and sp_size are 1")
        return nullcontext()

    def is_cut(self, tensor: torch.Tensor) -> bool:
        """Return whether each rank has its own part of a tensor for now."""
        return False

    def gather(self, tensor: torch.Tensor, seq_dim: int) -> torch.Tensor:
        """Collective: return sequences as they were before ranks shared them."""
        return tensor

    def adopt(self, model: torch.nn.Module) -> None:
        """Check how a new model is called from now on, also one that is only evaluated."""
        return None

    def checked_call(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return arguments in place of those of a call, ``None`` for the same ones."""
        return None

    def check_backward(self) -> None:
        """Refuse a backward that would be wrong where it is called."""
        return None


class Strategy(ABC):
    """Place and wrap models for one way of distributing the work.

    Args:
        topology: the rank and device of this process.
        handlers: the options; the defaults if ``None``.
        parallelism: how the ranks are arranged; all of them read different data if ``None``.

    Attributes:
        data: which ranks read the same data.
        sequences: whether ranks share sequences, and how.

    Example:
        >>> import torch
        >>> from accel_callbacks import Topology
        >>> from accel_callbacks.strategy import SingleDevice
        >>> SingleDevice(Topology(torch.device("cpu"))).name
        'single'
    """

    name: str
    #: True if backward averages gradients over the ranks; without it no_sync is left out.
    has_gradient_sync = False
    #: True for an engine that scales losses, steps and skips steps by itself, with another class of
    #: optimizer than the user's, and must know at each backward whether it is the last of a window.
    owns_step = False
    #: The options of the engine, besides the handlers.
    engine_plugins: tuple[Any, ...] = ()

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        self.topology = topology
        self.handlers = handlers or Handlers()
        self.parallelism = parallelism
        self.data = DataRanks.of(topology, parallelism, averages=self.has_gradient_sync)
        #: Set by `create_strategy`, where ranks share sequences.
        self.sequences = Sequences()

    @classmethod
    def for_run(cls, run: EngineRequest) -> Strategy:
        """Return the strategy of a run that has asked for it.

        Args:
            run: what it asks of its engine.

        Raises:
            ValueError: options do not go together, or do not arrange all ranks.
        """
        return cls(run.topology, run.handlers, run.arranged)

    @cached_property
    def gradients(self) -> Gradients:
        """The gradients of models: backward, averages over ranks, clipping."""
        return Gradients()

    @cached_property
    def states(self) -> StateAccess:
        """The states of models and optimizers, for checkpoints."""
        # Imported here, because a loop that saves nothing has no use for it.
        from accel_callbacks.strategy.state_access import StateAccess

        return StateAccess(self.unwrap, self.topology.rank)

    def check(self, model: torch.nn.Module, num_steps: int = 1) -> None:
        """Refuse a model that cannot be wrapped, or trained so, before it is changed.

        Args:
            model: as the user built it.
            num_steps: the micro-batches of a window, of whose backward passes the last averages.

        Raises:
            ValueError: the model cannot be wrapped; the message says what to do instead.
        """
        refuse_empty(model)

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run, as ``Accelerator.distributed_type`` has it."""
        return self.topology.distributed_type

    def plugin(self, kind: type[_Plugin]) -> _Plugin | None:
        """Return the options of this class that the engine trains by, None without any."""
        options = (*self.engine_plugins, *self.handlers.by_class.values())
        return next((plugin for plugin in options if isinstance(plugin, kind)), None)

    def casts_to(self, precision: str) -> bool:
        """Return whether this strategy computes in a precision by itself, without autocast.

        Called once, before any :meth:`setup`.

        Args:
            precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.
        """
        return False

    def init_context(self, *, pretrained: bool = False) -> AbstractContextManager[None]:
        """Return a context to build models in, on all ranks, as is best for this strategy.

        Args:
            pretrained: they are loaded by ``from_pretrained``.
        """
        return nullcontext()

    def place(self, model: torch.nn.Module, *, trained: bool = True) -> torch.nn.Module:
        """Move a new model to the device, before it is compiled.

        Args:
            model: as the user built it.
            trained: it is to be wrapped; else it is used as it is, on the device.
        """
        return model.to(self.topology.device)

    def feed(self, non_blocking: bool) -> Feed | None:
        """Return what moves the batches of a loader to the device, ``None`` if nothing is moved.

        Args:
            non_blocking: do not wait for copies where the device allows it.
        """
        return device_feed(self.topology.device, non_blocking)

    def checkpoint_activations(self, model: torch.nn.Module) -> None:
        """Compute blocks again in backward if the options say so; before the model is compiled."""
        handlers = self.handlers.by_class.values()
        handler = next((each for each in handlers if each.activation_checkpointing), None)
        if handler is None:
            return
        if not any(True for _ in regions(model)):
            # On by default in the files of Accelerate, whatever models there are besides.
            warn(
                f"{type(model).__name__} repeats no blocks, and so none are computed again: the "
                f"options of {type(handler).__name__} to recompute have no effect on it."
            )
            return
        from accel_callbacks.models.activation_checkpointing import checkpoint_with

        checkpoint_with(handler.activation_checkpointing, model)

    @abstractmethod
    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model for training on this topology; it is on the device already."""

    def setup(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
    ) -> SetUp:
        """Set up the new objects of one ``prepare`` call, for training together.

        The default wraps each model by itself. An engine overrides it that replaces the parameters
        of optimizers, or that owns the step.

        Args:
            models: new models, on the device, wrapped for the precision.
            optimizers: the optimizers as the user made them, new or prepared before.
            schedulers: the schedulers as the user made them, likewise.

        Returns:
            The objects to be used in their place, in the same order.
        """
        return SetUp([self.wrap(model) for model in models], list(optimizers), list(schedulers))

    def gather_through(
        self, model: torch.nn.Module, casts: Sequence[GatherCast]
    ) -> list[torch.nn.Parameter] | None:
        """Let ranks gather weights of a model that was set up through casts, in fewer bytes.

        Args:
            model: the model inside of what :meth:`setup` returned, before its first forward.
            casts: its parameters that have one.

        Returns:
            The parameters that are gathered so; None if no weights are gathered.
        """
        return None

    def cut(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Cut a model into stages, before it is prepared; see ``Accelerator.prepare_pipeline``.

        Args:
            model: as the user built it; one that is cut already is returned as it is.
            **options: those of ``prepare_pipeline``.

        Raises:
            ValueError: this run has no pipeline, or the model cannot be cut.
        """
        raise ValueError(
            "prepare_pipeline needs several ranks to put the stages on: pass parallelism_config="
            "ParallelismConfig(pp_size=...), or use prepare(model)."
        )

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as the user built it, with no more of its weights than this rank has.

        An evaluation may have left those of other ranks gathered.
        """
        return original(model)

    def mark_forward_methods(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Make gradients synchronize after these methods of a wrapped model, as after its forward.

        Args:
            model: what :meth:`setup` returned.
            names: methods of the model as the user built it.
        """
        return None
