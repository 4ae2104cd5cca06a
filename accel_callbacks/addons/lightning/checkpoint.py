"""CheckpointView: the training state under the keys of Lightning's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.utils.prune

from accel_callbacks.addons.lightning.packages import LightningPackage, unwrapped_optimizers
from accel_callbacks.callbacks.dispatch.registration import overrides
from accel_callbacks.strategy.optimizer_state import parameter_names

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["AddedParamGroups", "CheckpointView", "PrunedWeights"]

_ORIG, _MASK = "_orig", "_mask"  # suffixes of torch.nn.utils.prune


class CheckpointView:
    """Lets a callback edit a checkpoint, without affecting the exact resume from it.

    If the callback replaces ``state_dict`` and keeps the model's own under another key (averaged
    weights do), the checkpoint's model remains the one that is trained. If it only replaces it,
    the checkpoint has the replacement, as in Lightning.

    Args:
        callback: a callback of Lightning.
        base: its package's ``Callback``.
        package: its package.
        key: the key of the callback's state.
    """

    def __init__(self, callback: Any, base: type, package: LightningPackage, key: str) -> None:
        self.key = key
        self._saves = overrides(callback, "on_save_checkpoint", base)
        self._loads = overrides(callback, "on_load_checkpoint", base)
        self._version = getattr(package.module, "__version__", "")
        self._edits: list[AddedParamGroups | PrunedWeights] = []
        if isinstance(callback, package.get("callbacks.finetuning", "BaseFinetuning")):
            self._edits.append(AddedParamGroups(callback))
        if isinstance(callback, package.get("callbacks.pruning", "ModelPruning")):
            self._edits.append(PrunedWeights())

    @staticmethod
    def needed_by(callback: Any, base: type, package: LightningPackage) -> bool:
        """Return whether a callback edits checkpoints or changes names and shapes of the state."""
        reshaping = (
            package.get("callbacks.finetuning", "BaseFinetuning"),
            package.get("callbacks.pruning", "ModelPruning"),
        )
        hooks = ("on_save_checkpoint", "on_load_checkpoint")
        edits = any(overrides(callback, hook, base) for hook in hooks)
        return edits or isinstance(callback, reshaping)

    def start_run(self, run: TrainingRun) -> None:
        """Record the state of a fresh run, before the callback's ``setup``."""
        for edit in self._edits:
            edit.start_run(run)

    def state_loaded(self) -> None:
        """Adjust the callback after its ``load_state_dict``."""
        for edit in self._edits:
            edit.state_loaded()

    def save(self, run: TrainingRun, state: dict[str, Any], call: Callable[[Any], None]) -> None:
        """Call the callback's hook through ``call``, and keep its changes in the state."""
        edited: dict[str, Any] = {}
        view = self._view_of(run, state)
        before = dict(view)
        if self._saves:
            call(view)
            edited["entries"] = _changes(before, view)
        for edit in self._edits:
            edited.update(edit.on_save(run, state))
        live = before["state_dict"]
        is_kept = any(value is live for name, value in view.items() if name != "state_dict")
        if not is_kept and view["state_dict"] is not live:
            edited["entries"].pop("state_dict")
            state["models"][_model_key(run)] = view["state_dict"]
        edited = {name: value for name, value in edited.items() if value}
        if edited:
            state["callbacks"].setdefault(self.key, {})["checkpoint"] = edited

    def load(self, run: TrainingRun, state: dict[str, Any], call: Callable[[Any], None]) -> None:
        """Fit the objects to the checkpoint, and call the callback's hook through ``call``."""
        edited = state["callbacks"].get(self.key, {}).get("checkpoint", {})
        for edit in self._edits:
            edit.on_load(run, state, edited)
        if not self._loads:
            return
        view = self._view_of(run, state)
        before = dict(view)
        for name, entry in edited.get("entries", {}).items():
            same = entry.get("same_as")
            view[name] = entry["value"] if same is None else before[same]
        call(view)

    def _view_of(self, run: TrainingRun, state: dict[str, Any]) -> dict[str, Any]:
        return {
            "epoch": state["run"]["current_epoch"],
            "global_step": state["run"]["global_step"],
            "pytorch-lightning_version": self._version,
            "state_dict": state["models"].get(_model_key(run), {}),
            "loops": {},
            "callbacks": {
                name: entry.get("callback", entry) if isinstance(entry, dict) else entry
                for name, entry in state["callbacks"].items()
            },
            "optimizer_states": list(state["optimizers"].values()),
            "lr_schedulers": list(state["schedulers"].values()),
        }


def _model_key(run: TrainingRun) -> str:
    """Return the name in a checkpoint of the model that is the LightningModule."""
    return next((str(n) for n, model in enumerate(run.models) if model is run.model), "0")


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the new and replaced entries; one that only moved is a reference to its old key."""
    changed = {}
    for name, value in after.items():
        if name in before and before[name] is value:
            continue
        moved = [old for old, held in before.items() if held is value and isinstance(held, dict)]
        changed[name] = {"same_as": moved[0]} if moved else {"value": value}
    return changed


class AddedParamGroups:
    """Saves parameter groups that a finetuning has added apart from those of a fresh optimizer.

    So the checkpoint fits a run that has not added them yet. On a load they are added to the
    optimizer before the shapes are checked, and exactly the saved parameters are frozen.

    Args:
        callback: a ``BaseFinetuning``.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._initial: list[int] = []  # number of groups of each optimizer

    def start_run(self, run: TrainingRun) -> None:
        """Record how many groups each optimizer starts with."""
        self._initial = [len(optimizer.param_groups) for optimizer in unwrapped_optimizers(run)]

    def state_loaded(self) -> None:
        """Keep the callback from adding its groups again: they were added by ``on_load``."""
        self._callback._restarting = False

    def on_save(self, run: TrainingRun, state: dict[str, Any]) -> dict[str, Any]:
        """Move the added groups out of the optimizers' states, and return them."""
        grown: dict[str, Any] = {}
        for index, first in enumerate(self._initial):
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
        frozen = [n for n, parameter in _parameters(run).items() if not parameter.requires_grad]
        untracked = [n for n, module in modules.items() if _tracks_statistics(module) is False]
        return {"groups": grown, "frozen": {"parameters": frozen, "untracked": untracked}}

    def on_load(self, run: TrainingRun, state: dict[str, Any], edited: dict[str, Any]) -> None:
        """Add the groups to the optimizers and to their states."""
        if "frozen" in edited:
            self._freeze(run, edited["frozen"])
        parameters = _parameters(run)
        for index, grown in edited.get("groups", {}).items():
            optimizer = unwrapped_optimizers(run)[int(index)]
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

    def _freeze(self, run: TrainingRun, edited: dict[str, Any]) -> None:
        for name, parameter in _parameters(run).items():
            parameter.requires_grad = name not in edited["parameters"]
        for name, module in _modules(run):
            if _tracks_statistics(module) is not None:
                module.track_running_stats = name not in edited["untracked"]


def _parameters(run: TrainingRun) -> dict[str, torch.nn.Parameter]:
    names = parameter_names(run.models)
    parameters = (parameter for model in run.models for parameter in model.parameters())
    return {names[id(parameter)]: parameter for parameter in parameters}


def _modules(run: TrainingRun) -> list[tuple[str, Any]]:
    return [
        (f"{index}.{name}", module)
        for index, model in enumerate(run.models)
        for name, module in model.named_modules()
    ]


def _tracks_statistics(module: Any) -> bool | None:
    """Return whether a normalization layer tracks running statistics, None for other modules."""
    return getattr(module, "track_running_stats", None)


class PrunedWeights:
    """Saves a pruned weight as one tensor, with its mask and original apart.

    In the model a pruned ``weight`` is ``weight_orig`` times ``weight_mask``. In the checkpoint it
    is one ``weight``, which every model can load. On a load the masks are applied before the
    shapes are checked.
    """

    def start_run(self, run: TrainingRun) -> None:
        """Do nothing."""

    def state_loaded(self) -> None:
        """Do nothing."""

    def on_save(self, run: TrainingRun, state: dict[str, Any]) -> dict[str, Any]:
        """Merge mask and original in the states of model and optimizers, and return them."""
        key = _model_key(run)
        weights = dict(state["models"].get(key, {}))
        names = [n.removesuffix(_MASK) for n in weights if n.endswith(_MASK)]
        names = [n for n in names if n + _ORIG in weights]
        pruned = {}
        for name in names:
            mask, orig = weights.pop(name + _MASK), weights.pop(name + _ORIG)
            pruned[name] = {"mask": mask, "orig": orig}
            weights[name] = mask.to(dtype=orig.dtype) * orig
        if pruned:
            state["models"][key] = weights
            _rename(state, {f"{key}.{name}{_ORIG}": f"{key}.{name}" for name in pruned})
        return {"pruned": pruned}

    def on_load(self, run: TrainingRun, state: dict[str, Any], edited: dict[str, Any]) -> None:
        """Prune the model if it is not yet, and restore both tensors in the states."""
        pruned = edited.get("pruned", {})
        if not pruned:
            return
        key, model = _model_key(run), run.model
        assert model is not None
        weights = dict(state["models"][key])
        for name, parts in pruned.items():
            _prune(model, name, parts["mask"])
            del weights[name]
            weights[name + _MASK], weights[name + _ORIG] = parts["mask"], parts["orig"]
        state["models"][key] = weights
        _rename(state, {f"{key}.{name}": f"{key}.{name}{_ORIG}" for name in pruned})


def _prune(model: torch.nn.Module, name: str, mask: torch.Tensor) -> None:
    """Apply a mask to a parameter that has none."""
    prune: Any = torch.nn.utils.prune
    path, _, parameter = name.rpartition(".")
    module = model.get_submodule(path)
    if not hasattr(module, parameter + _MASK):
        device = getattr(module, parameter).device
        prune.custom_from_mask(module, parameter, mask.to(device))


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
