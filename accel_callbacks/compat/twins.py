"""Classes of this library as Accelerate has them: positional arguments, members others reach into.

Each is one of this library's classes, and trains with its parts.
"""

from __future__ import annotations

from typing import Any, cast

from accel_callbacks import accelerator, state
from accel_callbacks.data import config
from accel_callbacks.distributed.topology import destroy_topology, is_initialized

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "GradientState",
    "PartialState",
]

_POSITIONAL = (
    *("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps"),
    *("cpu", "dataloader_config", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin"),
    *("megatron_lm_plugin", "rng_types", "log_with", "project_dir", "project_config"),
    *("gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers"),
    *("dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config"),
)


class _Shared:
    """The state that all handles share: something once there is a topology."""

    def __get__(self, instance: Any, owner: type[Any]) -> dict[str, Any]:
        return {"initialized": True} if is_initialized() else {}


class PartialState(state.PartialState):
    """The rank and device of this process, as ``accelerate.state`` has it."""

    _shared_state = _Shared()

    @classmethod
    def _reset_state(cls) -> None:
        destroy_topology()

    def __reduce__(self) -> tuple[Any, ...]:
        # By what both libraries construct it with: checkpoints of a Trainer have one.
        return PartialState, (True if self.device.type == "cpu" else None,)


class AcceleratorState(state.AcceleratorState, PartialState):
    """A :class:`PartialState` with the options of the launcher."""

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        if reset_partial_state:
            destroy_topology()

    def __reduce__(self) -> tuple[Any, ...]:
        on_cpu = True if self.device.type == "cpu" else None
        return AcceleratorState, (self.mixed_precision, on_cpu)


class GradientState(state.GradientState):
    """The live view of the gradient window."""

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients


class DataLoaderConfiguration(config.DataLoaderConfiguration):
    """Options of prepared loaders, which may be assigned until an Accelerator gets them."""

    __setattr__ = object.__setattr__


class Accelerator(accelerator.Accelerator):
    """The Accelerator, constructed as that of Accelerate, with the numbers of its schedules.

    Args:
        *positional: options in Accelerate's order.
        split_batches: as in :class:`DataLoaderConfiguration`.
        **options: those of :class:`accel_callbacks.Accelerator`.
    """

    def __init__(self, *positional: Any, split_batches: bool | None = None, **options: Any) -> None:
        if len(positional) > len(_POSITIONAL):
            raise TypeError(f"Accelerator() takes {len(_POSITIONAL)} arguments by position.")
        for name, value in zip(_POSITIONAL, positional, strict=False):
            if name in options:
                raise TypeError(f"Accelerator() got multiple values for argument {name!r}")
            options[name] = value
        split_batches = options.pop("split_batches", split_batches)
        loaders = options.get("dataloader_config")
        if split_batches:
            if loaders is not None:
                raise ValueError(
                    "give split_batches=, or a dataloader_config with it: "
                    "DataLoaderConfiguration(split_batches=True)."
                )
            options["dataloader_config"] = loaders = DataLoaderConfiguration(split_batches=True)
        if options.get("log_with") is not None:
            # Imported here, because it imports `loggers`, which a file beside the script may hide.
            from accel_callbacks.compat.trackers import registered

            options["log_with"] = registered(options["log_with"])
        # Schedules are written for Accelerate's, which take a step for each process.
        splits = loaders is not None and loaders.split_batches
        options.setdefault("scheduler_steps_per_process", not splits)
        super().__init__(**options)

    @property
    def gradient_state(self) -> GradientState:
        """A live view of the gradient window and of the loader being iterated."""
        return GradientState(self.window, self.loop)

    @property
    def state(self) -> AcceleratorState:
        """The topology as this process sees it, with the options of this Accelerator."""
        return cast(AcceleratorState, AcceleratorState.of(self.config, self.strategy))

    @property
    def _models(self) -> list[Any]:
        return self.models

    @property
    def _optimizers(self) -> list[Any]:
        return self.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.loaders


for _twin, _home in (
    (PartialState, "state"),
    (AcceleratorState, "state"),
    (GradientState, "state"),
    (DataLoaderConfiguration, "utils.dataclasses"),
    (Accelerator, "accelerator"),
):
    _twin.__module__ = f"accelerate.{_home}"  # by which it is pickled, and read there
