"""What a restore reads and finds out before it changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_callbacks.checkpoint.compatibility import (
    RestoreReport,
    chosen_indices,
    doubt_names,
    fitting_weights,
    own_part,
)
from accel_callbacks.checkpoint.selection import Selection, all_keys
from accel_callbacks.errors import ResumeError
from accel_callbacks.filling import Filling, views_in
from accel_callbacks.naming import parameter_names, positional_optimizer_state

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from checkpoint_io import CheckpointReader

__all__ = ["Content", "LoadOptions", "Ready", "make_ready", "read_content"]

_KINDS = ("models", "optimizers", "schedulers", "loaders")
_NEEDED = (*_KINDS, "precision", "run", "callbacks", "trackers")


@dataclass(frozen=True)
class LoadOptions:
    """What is restored, and how; see ``Accelerator.load_state``.

    Example:
        >>> from accel_callbacks.checkpoint.restore import LoadOptions
        >>> LoadOptions().verify
        'parts'
    """

    selection: Selection = field(default_factory=Selection)
    strict: bool = False
    verify: str = "parts"
    progress: bool | None = None
    storage_options: Mapping[str, Any] | None = None


class Content(NamedTuple):
    """A checkpoint whose models and optimizers are still to be read, if ``lazy``."""

    state: dict[str, Any]
    local: dict[str, Any] | None
    lazy: bool


class Ready(NamedTuple):
    """A checkpoint that fits, as far as it is to be restored."""

    state: dict[str, Any]  # the selected part
    weights: dict[int, dict[str, Any]]  # for models that load in their own way
    optimizers: dict[int, dict[str, Any]]  # with tensors that the filling fills
    indices: dict[str, list[int]]
    local: dict[str, Any] | None
    filling: Filling
    report: RestoreReport


def read_content(accel: Accelerator, reader: CheckpointReader, options: LoadOptions) -> Content:
    """Verify what there is to verify first, and read all that is not read in place.

    Raises:
        ResumeError: it is no training state.
        checkpoint_io.CheckpointError: it is damaged.
    """
    state: dict[str, Any] = dict(reader.state)
    if missing := [name for name in _NEEDED if name not in state]:
        raise ResumeError(
            f"{reader.path} holds no {missing[0]!r}: it was not written by save_state(). "
            "checkpoint_io.load reads it."
        )
    part = options.selection.apply(state)
    rest, in_place = dict(state), {}
    lazy = not _hooks_want_tensors(accel)
    if lazy:
        in_place = {name: part[name] for name in ("models", "optimizers")}
        rest = {name: value for name, value in state.items() if name not in in_place}
        rest["registered"] = part["registered"]
    own = reader.local_state
    full = options.verify == "full"
    keys = {view.key for view in views_in([in_place, rest, own])}
    reader.check(full, keys=keys, progress=options.progress if full else False)
    loaded = reader.load_tree({"state": rest, "local": own})
    return Content({**state, **loaded["state"]}, loaded["local"], lazy)


def _hooks_want_tensors(accel: Accelerator) -> bool:
    return accel.pre_hooks.load_some or bool(accel.loop.dispatch.hooks["on_load_checkpoint"])


def make_ready(
    accel: Accelerator, reader: CheckpointReader, content: Content, options: LoadOptions
) -> Ready:
    """Check that all fits, and let those load who may refuse: hooks, and registered objects.

    Raises:
        ResumeError: it does not fit, or the resume is not exact and strict.
    """
    selection, state = options.selection, content.state
    selection.check(all_keys(state))
    part = selection.apply(state)
    indices = {kind: chosen_indices(accel, part, kind, selection) for kind in _KINDS}
    hooked = accel.pre_hooks.load_some and bool(indices["models"])
    if not hooked:
        _weights(accel, part, indices["models"], selection, RestoreReport(reader.path))
    local = own_part(accel, reader.manifest, part, content.local, selection, options.strict)
    _optimizer_states(accel, part, indices["optimizers"])
    if not content.lazy:
        if hooked:
            left = {id(model) for model in accel.pre_hooks.load(accel.models, reader.path)}
            indices["models"] = [i for i in indices["models"] if id(accel.models[i]) in left]
            _weights(accel, part, indices["models"], selection, RestoreReport(reader.path))
        if selection.takes("callbacks"):
            accel.loop.fire("on_load_checkpoint", state)  # which may edit it
        part = selection.apply(state)
    report = RestoreReport(reader.path)
    weights = _weights(accel, part, indices["models"], selection, report)
    doubt_names(report, options.strict)
    optimizers = _optimizer_states(accel, part, indices["optimizers"])
    filling = Filling(reader)
    weights = _place_weights(accel, weights, filling)
    optimizers = _place_states(accel, optimizers, filling)
    registered = part["registered"]
    accel.registered.load_state_dict(
        registered, strict=options.strict, chosen=lambda name: selection.takes(f"registered/{name}")
    )
    return Ready(part, weights, optimizers, indices, local, filling, report)


def _weights(
    accel: Accelerator,
    part: Mapping[str, Any],
    indices: list[int],
    selection: Selection,
    report: RestoreReport,
) -> dict[int, dict[str, Any]]:
    return {i: fitting_weights(accel, part, i, selection, report) for i in indices}


def _optimizer_states(
    accel: Accelerator, part: Mapping[str, Any], indices: list[int]
) -> dict[int, dict[str, Any]]:
    names = parameter_names(accel.bare_models)
    return {
        i: positional_optimizer_state(
            part["optimizers"][str(i)], accel.optimizers[i].optimizer, names
        )
        for i in indices
    }


def _place_weights(
    accel: Accelerator, weights: dict[int, dict[str, Any]], filling: Filling
) -> dict[int, dict[str, Any]]:
    """Say where weights are read into; returns those that their model is given afterwards."""
    given: dict[int, dict[str, Any]] = {}
    for index, saved in weights.items():
        model = accel.models[index]
        plain = accel.strategy.fills_in_place(model)
        if plain and all(filling.reads(value) for value in saved.values()):
            here = accel.strategy.own_state(model)
            for name, view in saved.items():
                filling.into(name, view, here[name])
        else:
            given[index] = filling.replace(saved)
    return given


def _place_states(
    accel: Accelerator, optimizers: dict[int, dict[str, Any]], filling: Filling
) -> dict[int, dict[str, Any]]:
    """The states that the optimizers are given, with tensors to be filled in place of views."""
    given: dict[int, dict[str, Any]] = {}
    for index, saved in optimizers.items():
        optimizer = accel.optimizers[index].optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = {
            place: filling.replace(state, optimizer.state.get(parameters[place]), parameters[place])
            for place, state in saved["state"].items()
        }
        given[index] = {**filling.replace({**saved, "state": {}}), "state": states}
    return given
