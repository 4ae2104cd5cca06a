"""The training state under Lightning's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.utils.prune

from accel_callbacks.integrations.lightning.packages import LightningPackage, bare_optimizers
from accel_callbacks.strategies.optimizer_state import parameter_names

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["CheckpointView", "GrownGroups", "PrunedWeights"]

_ORIG, _MASK = "_orig", "_mask"
_MODEL = "0"  # the module of Lightning's callbacks is the first prepared model


class GrownGroups:
    """Keeps added groups apart in the checkpoint, so that it fits a run that has not added them.

    On a load they are added to the optimizer before it is checked what fits. What was frozen is
    frozen again, and nothing else.

    Args:
        callback: a ``BaseFinetuning``.

    Example:
        >>> from accel_callbacks.integrations.lightning.checkpoint import GrownGroups
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


class PrunedWeights:
    """A pruned ``weight`` is ``weight_orig`` times ``weight_mask`` in the model.

    In the checkpoint it is one pruned ``weight``, which every model can load; what masks need to
    go on is kept apart, and put in place before it is checked what fits.

    Example:
        >>> from accel_callbacks.integrations.lightning.checkpoint import PrunedWeights
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


class CheckpointView:
    """What a callback puts into a checkpoint, kept beside a state from which a resume is exact.

    If the callback replaces ``state_dict`` and keeps the one of the model under another name
    (averaged weights do), the checkpoint's model stays the one that is trained. If it only
    replaces it, the checkpoint has what it says, as in Lightning.

    Args:
        callback: of Lightning.
        base: its package's ``Callback``.
        package: of the callback.
        key: under which the callback's state is saved.

    Example:
        >>> from accel_callbacks.integrations.lightning.checkpoint import CheckpointView
        >>> sorted(name for name in vars(CheckpointView) if not name.startswith("_"))
        ['begin', 'given', 'load', 'needed_by', 'save']
    """

    def __init__(self, callback: Any, base: type, package: LightningPackage, key: str) -> None:
        self._callback = callback
        self._key = key
        self._saves = _has(callback, "on_save_checkpoint", base)
        self._loads = _has(callback, "on_load_checkpoint", base)
        self._version = getattr(package.module, "__version__", "")
        self._shapes: list[GrownGroups | PrunedWeights] = []
        if isinstance(callback, package.get("callbacks.finetuning", "BaseFinetuning")):
            self._shapes.append(GrownGroups(callback))
        if isinstance(callback, package.get("callbacks.pruning", "ModelPruning")):
            self._shapes.append(PrunedWeights())

    @staticmethod
    def needed_by(callback: Any, base: type, package: LightningPackage) -> bool:
        """Whether a callback edits checkpoints, or changes what fits into them."""
        shaping = (
            package.get("callbacks.finetuning", "BaseFinetuning"),
            package.get("callbacks.pruning", "ModelPruning"),
        )
        edits = any(_has(callback, f"on_{do}_checkpoint", base) for do in ("save", "load"))
        return edits or isinstance(callback, shaping)

    def begin(self, run: TrainingRun) -> None:
        """A run begins, before the callback is set up."""
        for shape in self._shapes:
            shape.begin(run)

    def given(self) -> None:
        """The callback has its state back."""
        for shape in self._shapes:
            shape.given()

    def save(self, run: TrainingRun, state: dict[str, Any], call: Callable[[Any], None]) -> None:
        """Let the callback edit the checkpoint; ``call`` calls its hook."""
        kept: dict[str, Any] = {}
        view = self._view_of(state)
        before = dict(view)
        if self._saves:
            call(view)
            kept["entries"] = _changes(before, view)
        for shape in self._shapes:
            kept.update(shape.fold(run, state))
        live = before["state_dict"]
        held = any(value is live for name, value in view.items() if name != "state_dict")
        if not held and view["state_dict"] is not live:
            kept["entries"].pop("state_dict")
            state["models"][_MODEL] = view["state_dict"]
        kept = {name: value for name, value in kept.items() if value}
        if kept:
            state["callbacks"].setdefault(self._key, {})["checkpoint"] = kept

    def load(self, run: TrainingRun, state: dict[str, Any], call: Callable[[Any], None]) -> None:
        """Make room for what does not fit a fresh run, and show the callback the checkpoint."""
        kept = state["callbacks"].get(self._key, {}).get("checkpoint", {})
        for shape in self._shapes:
            shape.unfold(run, state, kept)
        if not self._loads:
            return
        view = self._view_of(state)
        before = dict(view)
        for name, entry in kept.get("entries", {}).items():
            same = entry.get("same_as")
            view[name] = entry["value"] if same is None else before[same]
        call(view)

    def _view_of(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            "epoch": state["run"]["current_epoch"],
            "global_step": state["run"]["global_step"],
            "pytorch-lightning_version": self._version,
            "state_dict": state["models"].get(_MODEL, {}),
            "loops": {},
            "callbacks": {
                name: one.get("callback", one) if isinstance(one, dict) else one
                for name, one in state["callbacks"].items()
            },
            "optimizer_states": list(state["optimizers"].values()),
            "lr_schedulers": list(state["schedulers"].values()),
        }


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The entries that are new or replaced; one that only moved is named, not held twice."""
    changed = {}
    for name, value in after.items():
        if name in before and before[name] is value:
            continue
        moved = [old for old, held in before.items() if held is value and isinstance(held, dict)]
        changed[name] = {"same_as": moved[0]} if moved else {"value": value}
    return changed


def _has(callback: Any, hook: str, base: type) -> bool:
    own = vars(callback).get(hook) or getattr(type(callback), hook)
    return own is not getattr(base, hook)
