"""A training state under the names of a Lightning checkpoint, for callbacks that edit those."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.adapters.grown_groups import GrownGroups
from accel_callbacks.callbacks.adapters.pruned_weights import PrunedWeights
from accel_callbacks.integrations.lightning.packages import LightningPackage

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["CheckpointView"]

_MODEL = "0"  # the module of Lightning's callbacks is the first prepared model


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
