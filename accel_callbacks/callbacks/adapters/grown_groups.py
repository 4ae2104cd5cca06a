"""Parameter groups that a fine-tuning callback has added, and which parameters it froze."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.adapters.wrapped_parts import bare_optimizers
from accel_callbacks.naming import parameter_names

if TYPE_CHECKING:
    import torch

    from accel_callbacks.run import TrainingRun

__all__ = ["GrownGroups"]


class GrownGroups:
    """Keeps added groups apart in the checkpoint, so that it fits a run that has not added them.

    On a load they are added to the optimizer before it is checked what fits. What was frozen is
    frozen again, and nothing else.

    Args:
        callback: a ``BaseFinetuning``.

    Example:
        >>> from accel_callbacks.callbacks.adapters.grown_groups import GrownGroups
        >>> callable(GrownGroups(object()).fold)
        True
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._first: list[int] = []

    def begin(self, run: TrainingRun) -> None:
        """Note how many groups each optimizer begins with."""
        self._first = [len(one.param_groups) for one in bare_optimizers(run)]

    def given(self) -> None:
        """The groups are there already, with newer values than the callback noted."""
        self._callback._restarting = False

    def fold(self, run: TrainingRun, state: dict[str, Any]) -> dict[str, Any]:
        """Take the added groups out of the optimizers' states."""
        grown: dict[str, Any] = {}
        for index, first in enumerate(self._first):
            saved = state["optimizers"][str(index)]
            groups = saved["param_groups"]
            if len(groups) <= first:
                continue
            names = {name for group in groups[first:] for name in group["params"]}
            grown[str(index)] = {
                "param_groups": groups[first:],
                "state": {n: value for n, value in saved["state"].items() if n in names},
            }
            rest = {n: value for n, value in saved["state"].items() if n not in names}
            state["optimizers"][str(index)] = {
                **saved,
                "param_groups": groups[:first],
                "state": rest,
            }
        modules = dict(_modules(run))
        frozen = [name for name, one in _parameters(run).items() if not one.requires_grad]
        untracked = [name for name, one in modules.items() if _tracks(one) is False]
        return {"groups": grown, "frozen": {"parameters": frozen, "untracked": untracked}}

    def unfold(self, run: TrainingRun, state: dict[str, Any], kept: dict[str, Any]) -> None:
        """Add the groups to the optimizers, and to their states."""
        if "frozen" in kept:
            self._freeze(run, kept["frozen"])
        parameters = _parameters(run)
        for index, grown in kept.get("groups", {}).items():
            optimizer = bare_optimizers(run)[int(index)]
            saved = state["optimizers"][index]
            if len(optimizer.param_groups) == len(saved["param_groups"]):
                for group in grown["param_groups"]:
                    named = {**group, "params": [parameters[name] for name in group["params"]]}
                    optimizer.add_param_group(named)
            state["optimizers"][index] = {
                **saved,
                "param_groups": [*saved["param_groups"], *grown["param_groups"]],
                "state": {**saved["state"], **grown["state"]},
            }

    def _freeze(self, run: TrainingRun, kept: dict[str, Any]) -> None:
        for name, parameter in _parameters(run).items():
            parameter.requires_grad = name not in kept["parameters"]
        for name, module in _modules(run):
            if _tracks(module) is not None:
                module.track_running_stats = name not in kept["untracked"]


def _parameters(run: TrainingRun) -> dict[str, torch.nn.Parameter]:
    names = parameter_names(run.models)
    return {names[id(one)]: one for model in run.models for one in model.parameters()}


def _modules(run: TrainingRun) -> list[tuple[str, Any]]:
    return [
        (f"{i}.{name}", one) for i, m in enumerate(run.models) for name, one in m.named_modules()
    ]


def _tracks(module: Any) -> bool | None:
    """Of a normalisation layer: whether it keeps statistics; None of any other."""
    return getattr(module, "track_running_stats", None)
