"""Gradients of shards, each rank with those of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.engines.replica_agreement import ReplicaAgreement
from accel_callbacks.gradients import clip_norm, clip_value, parameters_of
from accel_callbacks.strategy.data_ranks import DataRanks
from accel_callbacks.strategy.gradients import Gradients

__all__ = ["ShardedGradients"]


class ShardedGradients(Gradients):
    """Gradients of models with shards in place of the parameters that the user built.

    Args:
        models: returns the sharded models, in the same order on all ranks.
        shard_of: returns the shard of a parameter of the user; other objects as they are.
        data: how the ranks are arranged.
        plainer: what to do to train without shards, for the texts of errors.
    """

    def __init__(
        self,
        models: Callable[[], list[torch.nn.Module]],
        shard_of: Callable[[Any], Any],
        data: DataRanks,
        plainer: str,
    ) -> None:
        self._models = models
        self._shard_of = shard_of
        self._data = data
        self._plainer = plainer
        self._agreement: ReplicaAgreement | None = None

    @property
    def _is_alone(self) -> bool:
        return self._data.world * self._data.copies == 1

    @property
    def trains_together(self) -> bool:
        """True once a model is sharded."""
        return not self._is_alone and bool(self._models())

    def join(
        self, models: Sequence[Any], follow: Callable[[Callable[[Any], Any]], None]
    ) -> AbstractContextManager[None]:
        """Refuse uneven inputs on several ranks.

        Raises:
            ValueError: a rank without a batch could not do its part of the forward.
        """
        if self._is_alone:
            return super().join(models, follow)
        raise ValueError(
            "join_uneven_inputs does not work with sharded models, of which each forward needs the "
            f"parts of all ranks: let prepare() split the data evenly, or {self._plainer}."
        )

    def mark_unsynced(self, model: torch.nn.Module) -> None:
        """Refuse to train ranks apart: each holds another part of the weights.

        Raises:
            ValueError: on several ranks.
        """
        if not self._is_alone:
            raise ValueError(
                "LocalSGD does not work with sharded models, of which each rank trains another "
                "part: use gradient_accumulation_steps to communicate less, or "
                f"{self._plainer}."
            )

    # --- agreement of the ranks of tensor parallelism -----------------------------------------

    @property
    def _agrees(self) -> ReplicaAgreement | None:
        """Compares the ranks of tensor parallelism at the first steps; None without it."""
        parallelism = self._data.parallelism
        if self._agreement is None and parallelism is not None and parallelism.tp_enabled:
            self._agreement = ReplicaAgreement(self._data.mesh["tp"])
        return self._agreement

    def watch_inputs(self, model: torch.nn.Module) -> None:
        """Compare the inputs of evaluation over the ranks of tensor parallelism."""
        agreement = self._agrees
        if agreement is None:
            return

        # A function, which a copy of the model shares; a method would be copied with its mesh.
        def compare(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            agreement.check_inputs(module, args, kwargs)

        model.register_forward_pre_hook(compare, with_kwargs=True)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, in the first steps after ranks have compared their losses."""
        agreement = self._agrees
        if agreement is not None and not agreement.done:
            agreement.check_loss(loss)
        super().backward(loss, **kwargs)

    # --- before a step ------------------------------------------------------------------------

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer holds none of the sharded parameters, and no gradient.

        Raises:
            RuntimeError: the step would train nothing.
        """
        # Collective, and first: what follows may end on one rank alone.
        models = self._models()
        if models and self._agrees is not None:
            self._agrees.check_gradients(models)
        if not models or self.has_gradients(optimizer):
            return
        if any(map(collectives.is_sharded, parameters_of([optimizer]))):
            return
        raise RuntimeError(
            f"step: {type(optimizer).__name__} holds no parameter of a sharded model, and would "
            "train nothing: make it of model.parameters() of the same object that is passed to "
            "prepare(), and pass it to prepare() too."
        )

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm over all shards, and return it as a plain tensor."""
        return clip_norm(map(self._shard_of, parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clip each gradient element to ``[-value, value]``."""
        clip_value(map(self._shard_of, parameters), value)
