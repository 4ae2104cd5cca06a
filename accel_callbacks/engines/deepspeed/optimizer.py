"""The optimizer of an engine of DeepSpeed, with the groups of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.engines.deepspeed.zero_agreement import ZeroAgreement
from accel_callbacks.engines.deepspeed.zero_state import gradient_parts, is_zero, protect_from_step

__all__ = ["EngineOptimizer", "carry", "engine_norm"]


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine: groups with the model's own parameters, and the engine's step.

    DeepSpeed replaces the parameters of the user's optimizer by flat pieces. The groups here keep
    the parameters; the other options of a group are carried over to the engine's at each step.

    Args:
        engine: DeepSpeed's, around the model.
        groups: the groups of the user's optimizer, before DeepSpeed had it.
        defaults: the defaults of the user's optimizer.
        agreement: knows which parameters no rank has used.

    Attributes:
        stepped: False if the engine skipped the last step.
        micro_batches: backward passes since the last step.
        closed: the last of them was the last one of a window.
    """

    def __init__(
        self,
        engine: Any,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        agreement: ZeroAgreement,
    ) -> None:
        # Without Optimizer.__init__, because the state is the engine's.
        self.engine = engine
        self.param_groups = groups
        self.defaults = defaults
        self.stepped = True
        self.micro_batches = 0
        self.closed = False
        self.clipping = float(engine.gradient_clipping() or 0.0)
        self._agreement = agreement
        self._opt_called = False  # torch's schedulers ask

    @property
    def inner(self) -> Any:
        """The optimizer that steps with the engine's pieces."""
        outer = self.engine.optimizer
        return outer.optimizer if is_zero(self.engine) else outer

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state by parameter in stage 0; empty under ZeRO, whose states are of flat pieces."""
        return {} if is_zero(self.engine) else self.inner.state

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer of DeepSpeed cannot be copied: save_state() saves it.")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the engine, with the options of the groups here.

        Raises:
            ValueError: there is a closure, which DeepSpeed does not call.
        """
        if closure is not None:
            raise ValueError("DeepSpeed takes no closure: call backward() and then step().")
        self._opt_called = True
        # The user, a scheduler or a callback has set options of the groups here, and the optimizer
        # that steps may change its own, as one does that lowers its learning rate.
        carry(self.param_groups, self.inner.param_groups)
        with protect_from_step(self.engine, self._agreement.take_unused(self.engine)):
            self.engine.step()
        carry(self.inner.param_groups, self.param_groups)
        self.stepped = bool(self.engine.was_step_applied())
        # clip_grad_norm_ is for one step; then that of the configuration counts again.
        self.set_clipping(self.clipping)
        self.micro_batches, self.closed = 0, False

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def set_clipping(self, max_norm: float) -> None:
        """Let the next step clip to this norm; 0 does not clip."""
        if is_zero(self.engine):
            self.engine.optimizer.clip_grad = max_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of an open window; a step has dropped its own already."""
        if not is_zero(self.engine):
            self.engine.zero_grad()
        if self.micro_batches == 0:
            return
        self.micro_batches, self.closed = 0, False
        if not is_zero(self.engine):
            return
        self._agreement.take_unused(self.engine)
        outer = self.engine.optimizer
        outer.zero_grad()
        # Sums of the window, which DeepSpeed itself drops in a step alone.
        for tensors in (outer.averaged_gradients, getattr(outer, "all_grad_tensors", {})):
            for key in tensors:
                tensors[key] = None
        if hasattr(outer, "fp32_partitioned_groups_flat"):
            outer.averaged_gradients = {}
        elif hasattr(outer, "_release_preflattened_grad_buffers"):
            outer._release_preflattened_grad_buffers()
            outer.micro_step_id = -1
        if getattr(outer, "cpu_offload", False):
            outer.reset_cpu_buffers()

    def gradient_norm(self, norm_type: float = 2.0) -> torch.Tensor | None:
        """Collective: return the norm of the reduced gradients; None in stage 0.

        Raises:
            ValueError: the norm is not the 2-norm.
        """
        if not is_zero(self.engine):
            return None
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type}: ZeRO knows the 2-norm of gradients alone.")
        return engine_norm(self.engine)

    def multiply_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients of a window, before its step."""
        for part in gradient_parts(self.engine):
            if isinstance(factor, torch.Tensor):
                part.mul_(factor.to(part.device, part.dtype))
            else:
                part.mul_(factor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group: DeepSpeed has laid out its pieces.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "add_param_group after prepare() does not work with DeepSpeed, which has laid out its "
            "pieces: add the group before, frozen as long as it is not to be trained."
        )

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the state is spread over the ranks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the state of a DeepSpeed optimizer is spread over the ranks: accel.save_state() saves "
            "it by parameter, for any number of ranks and any engine."
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse, as :meth:`state_dict` does.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the state of a DeepSpeed optimizer is spread over the ranks: accel.load_state() loads "
            "what save_state() saved, with any engine."
        )


def carry(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy the options of groups, such as the learning rate, but not their parameters."""
    for source_group, target_group in zip(source, target, strict=True):
        target_group.update(
            {name: value for name, value in source_group.items() if name != "params"}
        )


def engine_norm(engine: Any) -> torch.Tensor:
    """Collective: return the norm of the reduced gradients, before the step."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    outer = engine.optimizer
    if hasattr(outer, "scaled_global_norm"):
        norm = outer.scaled_global_norm()
    else:
        norm = combine_grad_norm_groups(outer._get_norm_groups())
    # DeepSpeed marks one that is not finite by a negative number.
    norm = torch.as_tensor(norm, device=engine.device).float() / float(outer.loss_scale)
    return torch.where(norm < 0, torch.full_like(norm, float("inf")), norm)
