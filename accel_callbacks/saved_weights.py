"""Which weights go into a checkpoint, who may write them, and what save hooks put beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks.local_path import local_path, writable_folder

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = ["ExtraFiles", "alike_on_all", "choose_weights"]


def choose_weights(
    accel: Accelerator, shared: dict[str, Any], url: str, *, trainable_only: bool = False
) -> None:
    """Leave weights out of a captured state, and note there which ones.

    What is left out: frozen parameters, if ``trainable_only``; the models that a save hook saves
    itself, and what it drops of others.

    Args:
        accel: whose state it is.
        shared: what :func:`accel_callbacks.checkpoint.training_state.capture` gave; changed in place.
        url: where the checkpoint will be.
        trainable_only: without frozen parameters.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint.training_state import capture
        >>> from accel_callbacks.saved_weights import choose_weights
        >>> accel, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        >>> _ = model.bias.requires_grad_(False)
        >>> model = accel.prepare(model)
        >>> shared, _ = capture(accel)
        >>> choose_weights(accel, shared, "memory://doc-weights", trainable_only=True)
        >>> list(shared["models"]["0"]), shared["dropped_weights"]
        (['weight'], {'0': ['bias']})
    """
    full: list[Any] = list(shared["models"].values())
    chosen = full
    if trainable_only:
        chosen = [
            _without(weights, _frozen(model))
            for weights, model in zip(full, accel.bare_models, strict=True)
        ]
    names = [set(weights) for weights in full]  # a hook may edit them in place
    if accel.pre_hooks.save_some:
        with writable_folder(url) as folder:
            chosen = accel.pre_hooks.save(accel.models, chosen, folder)
    elif not trainable_only:
        return
    shared["models"] = {str(index): weights for index, weights in enumerate(chosen)}
    shared["dropped_weights"] = {
        str(index): sorted(before - weights.keys())
        for index, (before, weights) in enumerate(zip(names, chosen, strict=True))
        if weights is not None and before - weights.keys()
    }


def _without(weights: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: weight for name, weight in weights.items() if name not in names}


def _frozen(model: Any) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def alike_on_all(accel: Accelerator) -> Callable[[str], bool] | bool:
    """Collective: which keys of a checkpoint hold tensors that any process may write.

    These are the parameters that the strategy keeps alike, and the states of their optimizers.
    Where hooks may have put other tensors in their place, it is none: the main process's count.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.saved_weights import alike_on_all
        >>> alike_on_all(Accelerator(cpu=True))("models/0/weight")
        False
    """
    edited = accel.pre_hooks.save_some or accel.loop.dispatch.edits_saves
    if collectives.any_process(edited):
        return False
    names = {
        str(index): accel.strategy.alike_on_all(model) for index, model in enumerate(accel.models)
    }

    def alike(key: str) -> bool:
        section, *path = (part.replace("~1", "/").replace("~0", "~") for part in key.split("/"))
        if section == "models" and len(path) == 2:
            return path[1] in names.get(path[0], ())
        if section == "optimizers" and len(path) == 4 and path[1] == "state":
            model, _, name = path[2].partition(".")
            return name in names.get(model, ())
        return False

    return alike


class ExtraFiles:
    """The files that save hooks write beside a checkpoint, to be removed with it.

    Only what is new or changed since this object was made counts, and only on this machine's disks.

    Args:
        url: where the checkpoint will be.

    Example:
        >>> import pathlib, tempfile
        >>> from accel_callbacks.saved_weights import ExtraFiles
        >>> folder = tempfile.mkdtemp()
        >>> extra = ExtraFiles(folder)
        >>> _ = pathlib.Path(folder, "adapter.json").write_text("{}")
        >>> extra.labels()
        {'extra_files': ['adapter.json']}
    """

    def __init__(self, url: str) -> None:
        self._path = local_path(url)
        self._before = self._files()

    def labels(self) -> dict[str, Any]:
        """Metadata that name the files, if there are any."""
        files = self._files()
        found = sorted(name for name in files if files[name] != self._before.get(name))
        return {"extra_files": found} if found else {}

    def _files(self) -> dict[str, tuple[int, ...]]:
        if self._path is None or not os.path.isdir(self._path):
            return {}
        with os.scandir(self._path) as entries:
            stats = {e.name: e.stat() for e in entries if e.is_file(follow_symlinks=False)}
        return {name: (s.st_mtime_ns, s.st_size, s.st_ino) for name, s in stats.items()}
