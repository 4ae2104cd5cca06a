"""One replica among others that come and go: gradients are averaged over those of each window."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from accel_callbacks.distributed.topology import Topology
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategies.base import Strategy

if TYPE_CHECKING:
    from accel_callbacks.replicas.interface import ReplicaRounds

__all__ = ["TorchFT"]


class _Window(Protocol):
    sync: bool
    normalizer: Any


class TorchFT(Strategy):
    """A strategy for one process of several replicas, which torchft's lighthouse brings together.

    Collectives are those of one process, so a replica that is lost holds none of them up. Only
    gradients, votes on steps and the state of newcomers go between replicas.

    Args:
        topology: of one process.
        handlers: for their :class:`accel_callbacks.TorchFTKwargs`.
        parallelism: None; each replica has a whole model.

    Raises:
        ValueError: the launch has several processes, or cuts the model.

    Example:
        >>> from accel_callbacks.strategies import TorchFT
        >>> TorchFT.votes_on_steps
        True
    """

    name = "torchft"
    votes_on_steps = True

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(topology, handlers, parallelism)
        if topology.world_size != 1 or parallelism is not None:
            raise ValueError(
                "TorchFTKwargs: each replica is one process with a whole model. Start each by a "
                "launch of its own with --num_processes 1, and leave parallelism_config out."
            )
        if importlib.util.find_spec("torchft") is None:
            raise ImportError(
                "TorchFTKwargs needs torchft: `pip install 'accel-callbacks[torchft]'`."
            )
        self._rounds: ReplicaRounds | None = None
        self._window: _Window | None = None
        self._models: list[torch.nn.Module] = []

    def connect(self, rounds: ReplicaRounds, window: _Window) -> None:
        """Set what averages and votes, and the window at whose end it does.

        Args:
            rounds: of this replica.
            window: an `accel_callbacks.loop.gradient_window.GradientWindow`.
        """
        self._rounds, self._window = rounds, window

    @property
    def writes(self) -> bool:
        """True on the replica that saves and logs for all."""
        return self._rounds is not None and self._rounds.writes

    def may_step(self) -> bool:
        """Return whether the replicas have agreed on the gradients of this window."""
        return self._rounds is None or not self._rounds.refused

    def check(self, model: torch.nn.Module) -> None:
        """Refuse models whose statistics would differ between replicas.

        Raises:
            ValueError: the model has batch normalization with running statistics.
        """
        super().check(model)
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                raise ValueError(
                    f"{name or type(model).__name__} is a {type(module).__name__}, whose running "
                    "statistics would differ between the replicas: nothing synchronizes them "
                    "here. Use GroupNorm or LayerNorm, or track_running_stats=False."
                )

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model itself, whose gradients are averaged from now on."""
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._models.append(model)
        return model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients; at the end of a window average them, and vote on it.

        Raises:
            ValueError: the loss has a ``normalizer``.
        """
        super().backward(loss, **kwargs)
        if self._rounds is None or self._window is None or not self._window.sync:
            return
        if self._window.normalizer.active:
            raise ValueError(
                "backward(normalizer=) does not go with replicas, whose counts are not summed: "
                "divide the loss by its number of tokens."
            )
        self._rounds.settle(p for model in self._models for p in model.parameters())

    def join(
        self, models: Sequence[Any], follow: Callable[[int], None]
    ) -> AbstractContextManager[None]:
        """Refuse: replicas have equal numbers of batches."""
        raise ValueError("join_uneven_inputs has no use for replicas: leave it out.")

    def mark_unsynced(self, model: torch.nn.Module) -> None:
        """Refuse: each step is one of all replicas."""
        raise ValueError("LocalSGD does not go with TorchFTKwargs: use one of them.")
