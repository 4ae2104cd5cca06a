"""Weights under torch's pruning masks: saved as they count, and masked again on a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.utils.prune

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["PrunedWeights"]

_ORIG, _MASK = "_orig", "_mask"


class PrunedWeights:
    """A pruned ``weight`` is ``weight_orig`` times ``weight_mask`` in the model.

    In the checkpoint it is one pruned ``weight``, which every model can load; what masks need to
    go on is kept apart, and put in place before it is checked what fits.

    Example:
        >>> from accel_callbacks.callbacks.adapters.pruned_weights import PrunedWeights
        >>> callable(PrunedWeights().fold)
        True
    """

    def begin(self, run: TrainingRun) -> None:
        """Nothing to note."""

    def given(self) -> None:
        """Nothing to do."""

    def fold(self, run: TrainingRun, state: dict[str, Any]) -> dict[str, Any]:
        """One tensor for the two, in the model's and the optimizers' states."""
        weights = dict(state["models"].get("0", {}))
        names = [n.removesuffix(_MASK) for n in weights if n.endswith(_MASK)]
        names = [n for n in names if n + _ORIG in weights]
        pruned = {}
        for name in names:
            mask, orig = weights.pop(name + _MASK), weights.pop(name + _ORIG)
            pruned[name] = {"mask": mask, "orig": orig}
            weights[name] = mask.to(dtype=orig.dtype) * orig
        if pruned:
            state["models"]["0"] = weights
            _rename(state, {f"0.{name}{_ORIG}": f"0.{name}" for name in pruned})
        return {"pruned": pruned}

    def unfold(self, run: TrainingRun, state: dict[str, Any], kept: dict[str, Any]) -> None:
        """Mask the model, if it is not yet, and give both tensors back."""
        pruned = kept.get("pruned", {})
        if not pruned:
            return
        weights = dict(state["models"]["0"])
        for name, parts in pruned.items():
            _mask(run.models[0], name, parts["mask"])
            del weights[name]
            weights[name + _MASK], weights[name + _ORIG] = parts["mask"], parts["orig"]
        state["models"]["0"] = weights
        _rename(state, {f"0.{name}": f"0.{name}{_ORIG}" for name in pruned})


def _mask(model: torch.nn.Module, name: str, mask: torch.Tensor) -> None:
    prune: Any = torch.nn.utils.prune
    path, _, parameter = name.rpartition(".")
    module = model.get_submodule(path)
    if not hasattr(module, parameter + _MASK):
        there = getattr(module, parameter)
        prune.custom_from_mask(module, parameter, mask.to(there.device))


def _rename(state: dict[str, Any], names: dict[str, str]) -> None:
    """Rename parameters in the optimizers' states."""
    for index, saved in state["optimizers"].items():
        state["optimizers"][index] = {
            **saved,
            "state": {names.get(n, n): value for n, value in saved["state"].items()},
            "param_groups": [
                {**group, "params": [names.get(n, n) for n in group["params"]]}
                for group in saved["param_groups"]
            ],
        }
