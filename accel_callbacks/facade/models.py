"""Preparing models, as a method."""

from __future__ import annotations

import torch

from accel_callbacks.facade.parts import Parts
from accel_callbacks.modeling.compile import adopt, compile_model
from accel_callbacks.plugins.compile import TorchDynamoPlugin
from accel_callbacks.strategies.checks import is_spread

__all__ = ["ModelMethods"]


class ModelMethods(Parts):
    """What makes models ready."""

    device_placement: bool
    dynamo_plugin: TorchDynamoPlugin

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare one model, as ``prepare`` does with each.

        Args:
            model: what to prepare.
            device_placement: move it to the device; as the Accelerator does if ``None``.
            evaluation_mode: it is not trained, so processes have no gradients of it to average.

        Raises:
            ValueError: the model is spread over devices or processes, or has no weights yet.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel, teacher = Accelerator(cpu=True), torch.nn.Linear(1, 1)
            >>> accel.prepare_model(teacher, evaluation_mode=True) is teacher
            True
        """
        inner = self.strategy.unwrap(model)
        for known in self.models:
            if inner is self.strategy.unwrap(known):
                return known
        self.strategy.check(inner)
        place = self.device_placement if device_placement is None else device_placement
        model = adopt(model)
        if place and not is_spread(inner):
            model = model.to(self.device)
        # The precision is the model's own; a strategy's wrapper that is there already stays.
        ready = self.precision.wrap(inner)
        compile_model(ready, self.dynamo_plugin)
        own = model is not inner or evaluation_mode
        wrapped = model if own else self.strategy.wrap(ready)
        self.models.append(wrapped)
        if self.loop.model is None:
            self.loop.model = inner
        return wrapped
