"""Checks that a checkpoint fits the prepared objects, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from accel_callbacks.checkpoint.part import RestoreReport
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.checkpoint.training_state import (
    TrainingState,
    check_same_model,
    differing_weights,
)
from accel_callbacks.errors import ResumeError, nearest
from accel_callbacks.placeholder import unwritable
from checkpoint_io.warning import warn

__all__ = [
    "check_classes",
    "chosen_indices",
    "compare_frozen",
    "fitting_weights",
    "naming_checkpoint",
    "warn_of_names",
]

_SHOWN = 5
_AFRESH = "start afresh (resume=False, or another project_dir)"
#: Options that older versions and fused variants lack, and that torch adds to a saved state.
_FLAGS = {
    *("amsgrad", "capturable", "decoupled_weight_decay", "differentiable"),
    *("foreach", "fused", "maximize", "nesterov"),
}


@contextmanager
def naming_checkpoint(path: str) -> Iterator[None]:
    """Context manager that adds the path of the checkpoint to a ResumeError."""
    try:
        yield
    except ResumeError as error:
        error.args = (f"{path}: {error}",)
        raise


def chosen_indices(
    state: Mapping[str, Any], kind: str, prepared: int, selection: Selection
) -> list[int]:
    """Return the indices of the prepared objects of a kind that are restored.

    Args:
        state: the selected part of the saved one.
        kind: of the objects, such as ``"models"``.
        prepared: how many there are.
        selection: of the load.

    Raises:
        ResumeError: the numbers of prepared and saved objects differ, or a selected one is not
            prepared.
    """
    saved = len(state[kind])
    if not selection.partial:
        if saved != prepared:
            raise ResumeError(
                f"the checkpoint holds {saved} {kind}, but {prepared} were prepared: prepare the "
                "same objects as the run that saved it, before loading; or load a part of it "
                "with only=."
            )
        return list(range(prepared))
    chosen = sorted(int(key) for key in state[kind])
    if chosen and chosen[-1] >= prepared:
        raise ResumeError(
            f"only= selects {kind}/{chosen[-1]} of the checkpoint, but {prepared} {kind} were "
            "prepared: prepare it before loading, or select less."
        )
    return chosen


def fitting_weights(
    training: TrainingState,
    state: Mapping[str, Any],
    index: int,
    selection: Selection,
    report: RestoreReport,
) -> dict[str, Any]:
    """Return the saved weights of a model by their names here; add mismatches to the report.

    Raises:
        ResumeError: a shape or dtype differs; no weight is left; a name is missing in a load of
            the whole checkpoint; a save hook left the weights out, and no load hook took the model.
    """
    if state["models"][str(index)] is None:
        raise ResumeError(
            f"a save hook left the weights of model {index} out of the checkpoint: register "
            "the load hook that loads them, and takes the model out of its `models`, with "
            "register_load_state_pre_hook."
        )
    current = training.strategy.states.local_state_dict(training.models[index])
    saved = state["models"][str(index)]
    dropped = set(state.get("dropped_weights", {}).get(str(index), ())) & current.keys()
    expected = [
        name
        for name in current
        if name not in dropped and selection.takes(f"models/{index}/{name}")
    ]
    missing = [name for name in expected if name not in saved]
    unexpected = [name for name in saved if name not in current]
    if not selection.partial and (missing or unexpected):
        raise ResumeError(_differences(missing, unexpected, current, saved))
    fitting = {name: value for name, value in saved.items() if name in current}
    if saved and not fitting:
        raise ResumeError(
            f"nothing of what is selected for model {index} has its name there: "
            + _differences(missing, unexpected, current, saved)
        )
    for name, value in fitting.items():
        _check_tensor(name, current[name], value)
    fixed = unwritable(training.bare_models[index]) & fitting.keys()
    for name in sorted(fixed):
        _check_same(name, current[name], fitting.pop(name))
    report.missing += [f"{index}.{name}" for name in missing]
    report.unexpected += [f"{index}.{name}" for name in unexpected]
    report.kept += [f"{index}.{name}" for name in sorted(dropped)]
    return fitting


def _check_tensor(name: str, current: Any, saved: Any) -> None:
    # Only the module itself knows the form of its extra state.
    if name.rpartition(".")[2] == "_extra_state" or not isinstance(current, torch.Tensor):
        return
    shape = getattr(saved, "shape", None)
    if shape is None or tuple(current.shape) != tuple(shape):
        saved_shape = "is no tensor" if shape is None else f"{tuple(shape)}"
        raise ResumeError(
            f"{name!r} has shape {tuple(current.shape)} in the model and {saved_shape} in the "
            f"checkpoint: build the model as the run that saved it did, {_AFRESH}, or load what "
            "fits with load_state(path, only=...)."
        )
    if current.dtype != saved.dtype:
        raise ResumeError(
            f"{name!r} is {current.dtype} in the model and {saved.dtype} in the checkpoint: "
            "convert the model before prepare(), or load the weights with load_checkpoint_in_model."
        )


def _check_same(name: str, current: torch.Tensor, saved: Any) -> None:
    """Refuse another value of a weight that stays in its file, and is not written to."""
    stored = saved if isinstance(saved, torch.Tensor) else saved.read()
    if not torch.equal(current.view(torch.uint8), stored.view(torch.uint8)):
        raise ResumeError(
            f"{name!r} is offloaded to disk, and the checkpoint has another value of it, which "
            "cannot be loaded there: dispatch the model with these weights "
            "(load_checkpoint_and_dispatch takes the checkpoint), or keep it resident."
        )


def check_classes(
    training: TrainingState,
    state: Mapping[str, Any],
    kind: str,
    indices: Iterable[int],
    strict: bool,
) -> None:
    """Compare the classes of optimizers or schedulers with those of the save.

    Where the class is another and its options have the same names, the state fits: a warning.
    Checkpoints from before classes were saved have the names of an optimizer's options alone.

    Raises:
        ResumeError: it is another class, whose options have other names; or any, and ``strict``.
    """
    saved_classes = state.get("classes", {}).get(kind, {})
    names = training.class_names(kind)
    for index in indices:
        class_name, saved = names[index], saved_classes.get(str(index))
        if class_name is None or class_name == saved or (saved is None and kind == "schedulers"):
            continue
        if kind == "optimizers":
            optimizer = training.optimizers[index]
            saved_groups = state[kind][str(index)]["param_groups"]
            missing, unexpected = _other_options(optimizer, saved_groups)
        else:
            before, now = state[kind][str(index)], training.schedulers[index].state_dict()
            missing, unexpected = now.keys() - before.keys(), before.keys() - now.keys()
        _report_class(f"{kind[:-1]} {index}", class_name, saved, missing, unexpected, strict)


def _other_options(
    optimizer: torch.optim.Optimizer, saved_groups: Iterable[Mapping[str, Any]]
) -> tuple[set[str], set[str]]:
    """Return the names of options that the saved groups of an optimizer lack, or have beyond it."""
    missing: set[str] = set()
    unexpected: set[str] = set()
    # Schedulers add options of their own; a wrapper may have no defaults.
    options = set(getattr(optimizer, "defaults", ())) - _FLAGS
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=False):
        missing |= (options & group.keys()) - saved.keys()
        unexpected |= saved.keys() - group.keys() - _FLAGS
    return missing, unexpected


def _report_class(
    label: str,
    class_name: str,
    saved: str | None,
    missing: Collection[str],
    unexpected: Collection[str],
    strict: bool,
) -> None:
    """Raise or warn of an optimizer or scheduler of another class than the saved one."""
    name, saved_name = (path and path.rpartition(".")[2] for path in (class_name, saved))
    unsaved = saved is None  # its options may have been added by a scheduler
    moved = name == saved_name  # to another module, or the script was run as one
    misfit = bool(missing) or (bool(unexpected) and not unsaved and not moved)
    if not misfit and (unsaved or moved):
        return
    kind = label.partition(" ")[0]
    before = "another class" if unsaved else saved if moved else saved_name
    rest = f"load the others with load_state(path, only=...), without {kind}s"
    text = f"{label} is {name}, and the checkpoint's is {before}"
    if misfit:
        sides = {"not saved": missing, "saved in vain": () if unsaved else unexpected}
        names = "; ".join(
            f"{side}: {', '.join(sorted(options))}" for side, options in sides.items() if options
        )
        raise ResumeError(
            f"{text}, whose state does not fit ({names}): make the {kind} as the run that saved "
            f"it did, {_AFRESH}, or {rest}."
        )
    text += ", whose options have the same names: it goes on with the saved state and options. "
    if strict:
        raise ResumeError(f"{text}Pass strict=False to accept that, or {rest}.")
    warn(f"{text}If that is not meant, {rest}.")


def _differences(
    missing: Iterable[str],
    unexpected: Iterable[str],
    current: Collection[str],
    saved: Collection[str],
) -> str:
    """Describe the names that are on one side only, the first few with the nearest on the other."""
    lines = [f"{name!r} is only in the checkpoint.{nearest(name, current)}" for name in unexpected]
    lines += [f"{name!r} is only in the model.{nearest(name, saved)}" for name in missing]
    more = len(lines) - _SHOWN
    return "\n".join(lines[:_SHOWN] + ([f"and {more} more."] if more > 0 else []))


def warn_of_names(report: RestoreReport, strict: bool) -> None:
    """Warn of selected names that were not restored.

    Raises:
        ResumeError: there are some, and ``strict``.
    """
    if not report.missing and not report.unexpected:
        return
    text = "of the weights that only= selects, some are not on both sides:\n" + _differences(
        report.missing, report.unexpected, report.missing, report.unexpected
    )
    if strict:
        raise ResumeError(text + "\nPass strict=False to load the others.")
    warn(text + "\nThe others are loaded.")


def compare_frozen(
    training: TrainingState, state: Mapping[str, Any], indices: Iterable[int], strict: bool
) -> None:
    """Compare frozen weights that the save left out with those of the models.

    Collective if some are sharded.

    Raises:
        ResumeError: it is another model; or the values differ, and ``strict``.
    """
    differing = []
    for index in indices:
        saved = state.get("frozen", {}).get(str(index))
        if not saved:
            continue
        weights = training.strategy.states.local_state_dict(training.models[index])
        check_same_model(saved, weights)
        if text := differing_weights(saved, weights):
            differing.append(f"of model {index}, {text}")
    if not differing:
        return
    problem = (
        "the checkpoint was saved without frozen weights, and those of now are not those of the "
        f"save: {'; '.join(differing)}. What was trained on the one is loaded on the other: load "
        "the weights (and the dtype) that the run was started with before prepare()."
    )
    if strict:
        raise ResumeError(problem + " Pass strict=False to accept that.")
    warn(problem)
