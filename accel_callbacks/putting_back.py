"""Handing the parts of a checkpoint to the prepared objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks.checkpoint.restore import Ready
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.data.stream import with_own
from accel_callbacks.distributed.rng import restore_rng

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = ["put_back"]


def put_back(accel: Accelerator, ready: Ready, selection: Selection) -> None:
    """Restore what was selected; tensors that are read in place have been filled before."""
    state, indices = ready.state, ready.indices
    for index, weights in ready.weights.items():
        kept = accel.strategy.own_state(accel.models[index])
        accel.strategy.load_model_state_dict(accel.models[index], {**kept, **weights})
    for index, saved in ready.optimizers.items():
        accel.optimizers[index].load_state_dict(saved)
    for index in indices["schedulers"]:
        scheduler = accel.schedulers[index]
        scheduler.load_state_dict(_same_types(scheduler, state["schedulers"][str(index)]))
    if selection.takes("precision"):
        accel.precision.load_state_dict(state["precision"])
    _restore_place(accel, ready, selection)
    if selection.takes("callbacks"):
        accel.loop.dispatch.load_state_dict(state["callbacks"])
    if selection.takes("trackers"):
        accel.tracking.take_over(state["trackers"], accel.loop.run)
    local = ready.local or {}
    if selection.takes("window"):
        _restore_window(accel, local.get("window"), selection)
    if "rng" in local and selection.takes("rng"):
        restore_rng(local["rng"], accel.device)


def _restore_place(accel: Accelerator, ready: Ready, selection: Selection) -> None:
    """Where the run stands, and its loaders."""
    state, run = ready.state, accel.loop.run
    if selection.takes("run"):
        run.load_state_dict(state["run"])
        run.resumed_from = ready.report.path
    for index in ready.indices["loaders"]:
        loader = accel.loaders[index]
        loader.load_state_dict(with_own(state["loaders"], ready.local, str(index)))
        if not state["run"]["epoch_open"]:
            loader.end_pass()
        elif loader.done:
            loader.skip_next_pass()  # the open epoch has read it to its end


def _restore_window(
    accel: Accelerator, saved: Mapping[str, Any] | None, selection: Selection
) -> None:
    window = accel.loop.window
    window.close()
    window.normalizer.forget()
    window.dirty = False
    found = {} if saved is None else saved["gradients"]
    gradients = {selection.weight(name): gradient for name, gradient in found.items()}
    for index, model in enumerate(accel.bare_models):
        for name, parameter in model.named_parameters():
            gradient = gradients.get(f"{index}.{name}")
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    if saved is not None:
        window.position, window.divisor = saved["position"], saved["divisor"]
        window.sync, window.touched = False, True
        window.normalizer.load_state_dict(saved["normalizer"])


def _same_types(scheduler: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Counters (MultiStepLR's milestones) travel as plain dicts and come back as counters."""
    inner = getattr(scheduler, "_schedulers", [])
    restored: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            value = [_same_types(one, own) for one, own in zip(inner, value, strict=True)]
        elif isinstance(getattr(scheduler, key, None), Counter):
            value = Counter(value)
        restored[key] = value
    return restored
