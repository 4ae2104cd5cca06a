"""Classes of this library as Accelerate has them: positional arguments, members others reach into.

Each is one of this library's classes, and trains with its parts.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from accel_callbacks import accelerator, collectives, scheduler, state
from accel_callbacks.collectives.metrics import is_joinable
from accel_callbacks.collectives.nested import is_container, is_tensor, leaves, map_leaves
from accel_callbacks.compat import checkpoints
from accel_callbacks.compat.beside import remove_leftovers, save_beside
from accel_callbacks.compat.children import own_variables
from accel_callbacks.compat.environment import parse_flag_from_env, patch_environment, set_debug
from accel_callbacks.compat.helpers import get_sampler
from accel_callbacks.compat.logged_values import split, whole_step
from accel_callbacks.compat.members import (
    AcceleratorMembers,
    LoaderMembers,
    OptimizerMembers,
    SchedulerMembers,
    give_members,
    make_stateful,
)
from accel_callbacks.compat.names import NotProvided
from accel_callbacks.compat.stand_in import StandIn
from accel_callbacks.compat.unprepared import register_unprepared
from accel_callbacks.compat.wrappers import extract_model_from_parallel, recompile
from accel_callbacks.data import config, dispatch, loader
from accel_callbacks.data.config import checked_config, checked_rng_types
from accel_callbacks.data.device import device_feed
from accel_callbacks.data.prepare import prepare_loader
from accel_callbacks.data.sources import Setting
from accel_callbacks.distributed.topology import (
    destroy_topology,
    is_initialized,
    own_accelerator,
    select_device,
)
from accel_callbacks.optimizer import AcceleratedOptimizer as _AcceleratedOptimizer
from accel_callbacks.options import resolve_config
from accel_callbacks.plugins import fsdp
from accel_callbacks.plugins.base import KwargsHandler
from accel_callbacks.plugins.precision import AutocastKwargs, GradScalerKwargs
from accel_callbacks.tracking.media import Keywords
from checkpoint_io.local_files import local_path
from checkpoint_io.warning import warn

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "FullyShardedDataParallelPlugin",
    "GradientState",
    "PartialState",
    "SkipDataLoader",
]

_POSITIONAL = (
    *("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps"),
    *("cpu", "dataloader_config", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin"),
    *("megatron_lm_plugin", "rng_types", "log_with", "project_dir", "project_config"),
    *("gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers"),
    *("dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config"),
)

_LOADER_OPTIONS = tuple(field.name for field in fields(config.DataLoaderConfiguration))

# The Accelerator that was made last, of which the states without arguments are.
_newest: Callable[[], Accelerator | None] = lambda: None  # noqa: E731


def _newest_accelerator(user: str) -> Accelerator:
    newest = _newest()
    if newest is None:
        raise RuntimeError(f"{user} belongs to an Accelerator: make one first, and keep it.")
    return newest


# --- states -----------------------------------------------------------------------------------


class _Shared:
    """The state that all handles share: something once there is a topology."""

    def __get__(self, instance: Any, owner: type[Any]) -> dict[str, Any]:
        return {"initialized": True} if is_initialized() else {}


# What scripts have assigned, which all handles of a class share, by the class.
_assigned: dict[type[Any], dict[str, Any]] = {}
_OWN = frozenset({"_config", "_strategy", "topology"})
# Classes whose state was reset, until a handle or an Accelerator is made: what their handles then
# have no longer, which scripts ask for by `hasattr`.
_ended: set[type[Any]] = set()
_RANKS = ("local_process_index", "num_processes", "process_index")
_UNTIL_RESET = frozenset({"backend", "debug", "device", "distributed_type", *_RANKS})


class PartialState(state.PartialState):
    """The rank and device of this process, as ``accelerate.state`` has it.

    What a script assigns to one handle, all have, until the state is reset.
    """

    _shared_state = _Shared()

    def __init__(self, cpu: bool | None = None, **kwargs: Any) -> None:
        with patch_environment(**own_variables(os.environ)):
            super().__init__(_runs_on_cpu() or cpu, **kwargs)
        _ended.clear()
        if (device := _device_of_variable()) is not None and device.type == "cpu":
            _assigned.setdefault(PartialState, {})["device"] = device

    def __getattribute__(self, name: str) -> Any:
        for kind in type(self).__mro__ if _assigned else ():
            if name in (values := _assigned.get(kind, {})):
                return values[name]
        if name in _UNTIL_RESET and _ended.intersection(type(self).__mro__):
            own = type(self).__name__
            raise AttributeError(
                f"`{own}` object has no attribute `{name}`. This happens if "
                f"`{own}._reset_state()` was called: make a state or an Accelerator after it.",
                name=name,
                obj=self,
            )
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
            return
        _assigned.setdefault(type(self), {})[name] = value
        if name == "debug":
            set_debug(bool(value))

    @property
    def fork_launched(self) -> bool:
        """Whether this process was forked, by a launcher of notebooks."""
        return bool(parse_flag_from_env("FORK_LAUNCHED"))

    @classmethod
    def _reset_state(cls) -> None:
        if any("debug" in values for values in _assigned.values()):
            set_debug(None)
        _assigned.clear()
        destroy_topology()
        _ended.add(PartialState)

    def __reduce__(self) -> tuple[Any, ...]:
        # By what both libraries construct it with: checkpoints of a Trainer have one.
        return PartialState, (True if self.device.type == "cpu" else None,)


def _device_of_variable() -> torch.device | None:
    """Return the device that Accelerate's variable names."""
    name = os.environ.get("ACCELERATE_TORCH_DEVICE")
    return torch.device(name) if name else None


def _runs_on_cpu() -> bool:
    """Return whether Accelerate's variable names the CPU; make another device the current one.

    A process alone computes on the current device; of several, each has that of its rank.
    """
    device = _device_of_variable()
    if device is None or is_initialized():
        return False
    if device.type != "cpu":
        select_device(device)
    return device.type == "cpu"


class AcceleratorState(state.AcceleratorState, PartialState):
    """A :class:`PartialState` with the options of the newest Accelerator, else of the launcher.

    Args:
        mixed_precision: that of the Accelerator, if there is one.
        cpu: as for :class:`PartialState`.
        *plugins: without effect; in Accelerate an Accelerator passes them.
        **kwargs: as for :class:`PartialState`.

    Raises:
        ValueError: the Accelerator has another precision.
    """

    def __init__(
        self, mixed_precision: str | None = None, cpu: bool = False, *plugins: Any, **kwargs: Any
    ) -> None:
        newest = _newest()
        known = None if newest is None else newest.mixed_precision
        if mixed_precision is not None and known not in (None, mixed_precision):
            raise ValueError(
                f"mixed_precision={mixed_precision!r}, and the Accelerator has {known!r}: leave it "
                "out, or make an Accelerator with it."
            )
        options = {key: value for key, value in kwargs.items() if not key.endswith("_plugin")}
        options = {k: v for k, v in options.items() if k != "parallelism_config"}
        with patch_environment(**own_variables(os.environ)):
            super().__init__(mixed_precision or known, cpu or None, **options)
        if newest is not None:
            self._config, self._strategy = newest.config, newest.strategy

    downcast_bfloat = False  # an option of TPUs that have no bf16

    @property
    def dynamo_plugin(self) -> Any:
        """How the newest Accelerator compiles models, None without one."""
        return getattr(_newest(), "dynamo_plugin", None)

    @property
    def torch_tp_plugin(self) -> Any:
        """The option of that name, None without one."""
        return getattr(_newest(), "torch_tp_plugin", None)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        _forget()
        _assigned.pop(AcceleratorState, None)
        _ended.add(AcceleratorState)
        if reset_partial_state:
            PartialState._reset_state()

    def __reduce__(self) -> tuple[Any, ...]:
        on_cpu = True if self.device.type == "cpu" else None
        return AcceleratorState, (self.mixed_precision, on_cpu)


class _SharedOfNewest:
    """The state that handles share: something as long as there is an Accelerator."""

    def __get__(self, instance: Any, owner: type[Any]) -> dict[str, Any]:
        return {} if _newest() is None else {"initialized": True}


class GradientState(state.GradientState):
    """The live view of the gradient window, without arguments that of the newest Accelerator.

    Raises:
        RuntimeError: there is no Accelerator.
    """

    _shared_state = _SharedOfNewest()

    def __init__(self, window: Any = None, loop: Any = None) -> None:
        if loop is None:
            newest = _newest_accelerator("GradientState()")
            window, loop = newest.window, newest.loop
        super().__init__(window, loop)

    is_xla_gradients_synced = True

    @property
    def initialized(self) -> bool:
        """Whether there is an Accelerator."""
        return _newest() is not None

    @classmethod
    def _reset_state(cls) -> None:
        _forget()

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients


class DataLoaderConfiguration(config.DataLoaderConfiguration):
    """Options of prepared loaders, which may be assigned until an Accelerator gets them.

    Args:
        *positional: options in Accelerate's order.
        **options: those of :class:`accel_callbacks.DataLoaderConfiguration`.

    Attributes:
        continues: ``use_stateful_dataloader`` was asked for, so that a resumed epoch goes on where
            it was.
    """

    continues = False

    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        given = {**dict(zip(_LOADER_OPTIONS, positional, strict=False)), **options}
        self.continues = bool(given.get("use_stateful_dataloader"))

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "use_stateful_dataloader":
            self.continues = bool(value)

    @property
    def seeds_orders(self) -> bool:
        """True if that was asked for; a ``data_seed`` is that of the seedable sampler alone."""
        return bool(self.seeded_order)


class FullyShardedDataParallelPlugin(fsdp.FullyShardedDataParallelPlugin):
    """Options of FSDP, which may be assigned until a model is prepared."""

    __setattr__ = object.__setattr__

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Have no effect: a model is prepared with the units that the options name."""

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Note a type of checkpoints: those of this library are whole, and read by any layout."""
        if state_dict_type is not None:
            vars(self)["state_dict_type"] = getattr(state_dict_type, "name", state_dict_type)

    def set_cpu_offload(self) -> None:
        """Have no effect: ``cpu_offload`` is read when a model is prepared."""

    def validate_cpu_offload(self) -> None:
        """Have no effect: options are checked when they are given."""

    validate_mixed_precision_policy = validate_cpu_offload

    def set_mixed_precision(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise NotProvided: the precision is known when the Accelerator is made."""
        raise NotProvided(
            "FullyShardedDataParallelPlugin.set_mixed_precision: the precision of a sharded model "
            "is that of the Accelerator; give the plugin a mixed_precision_policy before."
        )


def _without_fp16(handlers: Iterable[KwargsHandler]) -> list[KwargsHandler]:
    """Return the handlers with which fp16 neither casts nor scales."""
    kinds = (AutocastKwargs, GradScalerKwargs)
    others = [handler for handler in handlers if not isinstance(handler, kinds)]
    return [*others, AutocastKwargs(enabled=False), GradScalerKwargs(enabled=False)]


class Accelerator(AcceleratorMembers, accelerator.Accelerator):
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
            # Imported here, because it imports `loggers`, which few runs need.
            from accel_callbacks.compat.trackers import check_folder, registered

            options["log_with"] = registered(options["log_with"])
            project = options.get("project_config")
            if options.get("project_dir") is None and getattr(project, "logging_dir", None) is None:
                check_folder(options["log_with"])
        self._rereads = not getattr(loaders, "continues", False)
        plugin = options.get("gradient_accumulation_plugin")
        if plugin is not None and not plugin.adjust_scheduler:
            # Where this library counts each micro-batch, and Accelerate each window all the same.
            options["gradient_accumulation_plugin"] = replace(plugin, adjust_scheduler=True)
        if _runs_on_cpu():
            options["cpu"] = True
        is_arranged = parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")
        variables = own_variables(os.environ, *(["parallelism"] if is_arranged else []))
        arguments = {name: options.get(name) for name in ("mixed_precision", "cpu")}
        resolved = resolve_config(arguments, {**os.environ, **variables})
        if resolved.mixed_precision == "fp16" and (resolved.cpu or own_accelerator() is None):
            warn("fp16 has no effect on a CPU, as with Accelerate: use bf16, which computes there.")
            options["kwargs_handlers"] = _without_fp16(options.get("kwargs_handlers") or ())
        # Schedules are written for Accelerate's, which take a step for each process where they
        # follow the optimizer.
        follows = options.get("step_scheduler_with_optimizer", True)
        splits = loaders is not None and loaders.split_batches
        options.setdefault("scheduler_steps_per_process", follows and not splits)
        self.step_scheduler_with_optimizer = follows
        self.torch_tp_plugin = options.get("torch_tp_plugin")
        _ended.clear()
        with patch_environment(**variables):
            super().__init__(**options)
        plugin = self.strategy.plugin(fsdp.FullyShardedDataParallelPlugin)
        if plugin is not None:  # that of `accel launch` may be assigned to as well
            object.__setattr__(plugin, "__class__", FullyShardedDataParallelPlugin)
        self._named: dict[str, tuple[Any, Any]] = {}  # trackers, each with the hub that has it
        self._tracker_options: Keywords = {}
        global _newest
        _newest = weakref.ref(self)
        if self.is_main_process:
            # Where scripts list what there is to resume from.
            places = (".", self.project_configuration.root)
            remove_leftovers(filter(None, map(local_path, places)))

    @property
    def debug(self) -> bool:
        """True if ranks compare what they hold before each collective; a state may set it."""
        return PartialState().debug

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; ``None`` with another precision, and on a CPU."""
        return None if self.device.type == "cpu" else super().scaler

    @property
    def dataloader_config(self) -> config.DataLoaderConfiguration:
        """The options of loaders; may be assigned, for those that are prepared from then on.

        Raises:
            TypeError: what is assigned is no ``DataLoaderConfiguration``.
        """
        return super().dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, options: config.DataLoaderConfiguration) -> None:
        self._loaders.config = checked_config(options)
        self._rereads = not getattr(options, "continues", False)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any] | loader.SkipDataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare a loader, with the order that Accelerate gives it on several processes."""
        sampler = get_sampler(data_loader)
        options = self.dataloader_config
        shares = self.num_processes > 1 and not options.dispatch_batches
        if shares and not options.use_seedable_sampler and _lacks_generator(sampler):
            # Accelerate draws the seed of a generator when it prepares, and not at each pass.
            sampler.generator = torch.Generator("cpu")
            sampler.generator.manual_seed(
                int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            )
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        # Scripts for Accelerate count from the first batch of the epoch that a checkpoint has cut.
        inner = prepared.loader if isinstance(prepared, loader.SkipDataLoader) else prepared
        inner.rereads = self._rereads
        give_members(inner, LoaderMembers, self)
        if not self._rereads:
            for loader_or_view in (inner, prepared):
                make_stateful(loader_or_view)
        return prepared

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return a model without what prepare, or the script itself, has put around it.

        Args:
            model: prepared, or in a ``DataParallel`` of the script's.
            keep_fp32_wrapper: keep the autocast around its forward.
            keep_torch_compile: keep it compiled: what ``torch.compile`` returned for a wrapper
                is one for the model inside.
        """
        inner = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        inner = extract_model_from_parallel(inner, keep_fp32_wrapper, keep_torch_compile)
        return recompile(model, inner) if keep_torch_compile else inner

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers, and mark these.

        Args:
            *args: as of :meth:`accel_callbacks.Accelerator.prepare`.
            **options: the same.
        """
        prepared = self._add_members(super().prepare(*args, **options))
        known = (self.models, self.optimizers, self.schedulers, self.loaders)
        for item in prepared if isinstance(prepared, (list, tuple)) else [prepared]:
            inner = item.loader if isinstance(item, loader.SkipDataLoader) else item
            if any(inner is other for others in known for other in others):
                item._is_accelerate_prepared = True
        return prepared

    def prepare_optimizer(self, *args: Any, **options: Any) -> Any:
        """Prepare an optimizer.

        Args:
            *args: as of :meth:`accel_callbacks.Accelerator.prepare_optimizer`.
            **options: the same.
        """
        return self._add_members(super().prepare_optimizer(*args, **options))

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler."""
        return self._add_members(super().prepare_scheduler(scheduler))

    def _add_members(self, prepared: Any) -> Any:
        for optimizer in self.optimizers:
            give_members(optimizer, OptimizerMembers, self)
        for each in self.schedulers:
            if isinstance(each, scheduler.AcceleratedScheduler):
                give_members(each, SchedulerMembers, self)
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather each sample once, of a tensor with an entry for each of a full batch too.

        A Trainer repeats its loss for each sample of a full batch, and the last may be smaller.
        What Accelerate gathers as objects, one process returns as it is.
        """
        if self.num_processes == 1 and (use_gather_object or _has_objects(input_data)):
            return input_data
        if self.loop.position.active and not use_gather_object:
            loader = self.loop.position.active[-1]
            input_data = _of_last_batch(
                input_data, loader, self.strategy.data.rank, self.strategy.data.world
            )
        return super().gather_for_metrics(input_data, use_gather_object)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **options: Any,
    ) -> str:
        """Save the whole training state; a new folder gets its name when it is whole.

        Trained parameters of no prepared model are saved too, with a warning.

        Args:
            output_dir: folder of the state, or a URL; numbered in the project if None.
            safe_serialization: always on, with a warning where a script has it off.
            **options: as of :meth:`accel_callbacks.Accelerator.save_state`.
        """
        _warn_of_pickles(safe_serialization)
        register_unprepared(self.training_state)

        def save(place: str) -> str:
            return super(Accelerator, self).save_state(place, **options)

        # Callbacks are told of a place, and a save in the background returns before its end.
        if output_dir is None or options.get("async_save") or self.callbacks:
            return super().save_state(output_dir, **options)
        return save_beside(output_dir, save)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        **options: Any,
    ) -> None:
        """Write the weights of a model.

        Args:
            model: prepared or not.
            save_directory: the folder.
            max_shard_size: largest file.
            safe_serialization: always on, with a warning where a script has it off.
            **options: as of :meth:`accel_callbacks.Accelerator.save_model`.
        """
        _warn_of_pickles(safe_serialization)
        super().save_model(model, save_directory, max_shard_size, **options)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write a flat dict of tensors as safetensors, which ``accelerate.utils.load`` reads.

        Args:
            obj: names to tensors.
            f: path of the file.
            safe_serialization: always on.
        """
        super().save(obj, f)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Restore a state, one that Accelerate itself has saved too.

        Args:
            input_dir: folder of the state; the newest of the project if None, by the numbers of the
                folders where both libraries wrote some.
            load_kwargs: without effect on a state of Accelerate.
            **options: as of :meth:`accel_callbacks.Accelerator.load_state`.
        """
        place = checkpoints.place_of_accelerate(self, input_dir)
        if place is not None:
            checkpoints.restore(self, place)
            return place
        register_unprepared(self.training_state)
        return super().load_state(input_dir, load_kwargs, **options)

    @property
    def trackers(self) -> list[Any]:
        """The trackers in use on this rank, as Accelerate's classes have them."""
        hub = self.tracking.hub
        return [] if hub is None else [self.get_tracker(each.name) for each in hub.trackers]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker with the methods that Accelerate's have, or the tool's own object.

        Args:
            name: such as ``"wandb"``.
            unwrap: return the tool's own object.

        Raises:
            ValueError: ``log_with`` has no tracker of this name.
        """
        # Imported here, because it imports `loggers`, which few runs need.
        from accel_callbacks.compat.trackers import named_tracker

        hub, _ = self._media(None)
        self.tracking.hand_out()
        known = self._named.get(name)
        if known is None or known[0] is not hub:
            options = self._tracker_options.get(name, {})
            known = (hub, named_tracker(hub, name, options, lambda: self.loop.run.global_step))
            self._named[name] = known
        return known[1].tracker if unwrap else known[1]

    def init_trackers(
        self, project_name: str, config: Any = None, init_kwargs: Keywords | None = None
    ) -> None:
        """Start the trackers of a loop, before the first ``log``.

        The files of TensorBoard's are in a folder of the project's name.

        Args:
            project_name: name of the run.
            config: hyperparameters: a dict, a dataclass or a namespace.
            init_kwargs: arguments of the trackers, by name, as Accelerate's have them.
        """
        options = dict(init_kwargs or {})
        if self.tracking.log_with:
            # Imported here, as where the trackers are chosen.
            from accel_callbacks.compat.trackers import mlflow_options, with_project_folder

            options = dict(with_project_folder(self.tracking.log_with, project_name, options))
            if "mlflow" in options:
                options["mlflow"] = mlflow_options(options["mlflow"])
        self._tracker_options = options
        super().init_trackers(project_name, config, options)

    def log(
        self,
        values: Mapping[str, Any],
        step: Any = None,
        log_kwargs: Keywords | None = None,
    ) -> None:
        """Log values to callbacks and trackers; what only a tool takes, to the trackers of it.

        Args:
            values: by name; nested dicts are flattened with ``/``.
            step: optimizer steps so far.
            log_kwargs: further keywords for a tracker's ``log``, by tracker name.
        """
        scalars, objects = split(values) if isinstance(values, Mapping) else (values, {})
        step = whole_step(step)
        if scalars or not objects:
            super().log(scalars, step, log_kwargs)
        if objects:
            hub, step = self._media(step)
            if hub is not None:
                hub.log_objects(objects, step, log_kwargs)

    @functools.cached_property
    def gradient_state(self) -> GradientState:
        """A live view of the gradient window and of the loader being iterated."""
        return GradientState(self.window, self.loop)

    @property
    def state(self) -> AcceleratorState:
        """The topology as this process sees it, with the options of this Accelerator."""
        if _ended:  # one that is made would begin the state anew
            return AcceleratorState.__new__(AcceleratorState)
        state = AcceleratorState()
        state._config, state._strategy = self.config, self.strategy
        return state

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


def _warn_of_pickles(safe_serialization: bool) -> None:
    if not safe_serialization:
        warn(
            "safe_serialization=False has no effect: nothing is pickled. safetensors are written, "
            "which load_state, load_checkpoint_in_model and from_pretrained read; a script that "
            "opens pytorch_model.bin itself reads model.safetensors instead, by safetensors."
        )


def _has_objects(data: Any) -> bool:
    """Return True for a structure in which anything is no tensor."""
    return bool(leaves(data, lambda leaf: not is_tensor(leaf) and not is_container(leaf)))


def _of_last_batch(data: Any, loader: loader.DataLoaderShard, rank: int, world: int) -> Any:
    """Cut tensors with an entry for each sample of a full batch to those of a smaller one."""
    full = loader.total_batch_size
    if full is None or loader.padded >= full:
        return data
    rows = loader.padded // world if loader.kept is None else loader.kept[rank]

    def cut(leaf: Any) -> Any:
        # The boxes of one sample may be as many as the samples of a full batch.
        whole = is_tensor(leaf) and leaf.shape[:1] == (full // world,)
        return leaf[:rows] if whole else leaf

    return map_leaves(data, cut, lambda leaf: is_tensor(leaf) or is_joinable(leaf))


def _lacks_generator(sampler: Any) -> bool:
    return hasattr(sampler, "generator") and sampler.generator is None


# --- what prepare returns ---------------------------------------------------------------------


class DataLoaderShard(metaclass=StandIn):
    """A loader that moves its batches to a device, and that the newest Accelerator counts.

    Its dataset and samplers are those of this process already.

    Args:
        dataset: the dataset.
        device: of the batches.
        rng_types: random generators that each pass synchronizes.
        synchronized_generator: without effect; it is that of the sampler.
        skip_batches: batches to leave out at the start.
        use_stateful_dataloader: resume a stream from its own state.
        _drop_last: without effect.
        _non_blocking: do not wait for copies.
        torch_device_mesh: without effect.
        iteration: the epoch to begin with.
        **options: of torch's DataLoader.
    """

    stands_for = loader.DataLoaderShard

    def __new__(  # type: ignore[misc]
        cls,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **options: Any,
    ) -> loader.DataLoaderShard | loader.SkipDataLoader:
        """Return the loader, a view of it that leaves batches out."""
        chosen = config.DataLoaderConfiguration(use_stateful_dataloader=use_stateful_dataloader)
        feed = None if device is None else device_feed(torch.device(device), _non_blocking)
        setting = Setting(0, 1, chosen, None)
        return _prepare_alone(dataset, options, setting, feed, rng_types, skip_batches, iteration)


class DataLoaderDispatcher(metaclass=StandIn):
    """A loader whose dataset the main process reads for all; collective.

    Args:
        dataset: the dataset.
        split_batches: the batch size is that of all processes together.
        skip_batches: batches to leave out at the start.
        use_stateful_dataloader: resume a stream from its own state.
        _drop_last: without effect.
        _non_blocking: do not wait for copies.
        slice_fn: slices the part of one process from a batch.
        torch_device_mesh: without effect.
        iteration: the epoch to begin with.
        **options: of torch's DataLoader.
    """

    stands_for = dispatch.DataLoaderDispatcher

    def __new__(  # type: ignore[misc]
        cls,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **options: Any,
    ) -> loader.DataLoaderShard | loader.SkipDataLoader:
        """Return the loader, a view of it that leaves batches out."""
        chosen = config.DataLoaderConfiguration(
            split_batches=split_batches,
            dispatch_batches=True,
            use_stateful_dataloader=use_stateful_dataloader,
        )
        setting = Setting(collectives.rank(), collectives.world_size(), chosen, slice_fn)
        feed = device_feed(state.PartialState().device, _non_blocking)
        return _prepare_alone(dataset, options, setting, feed, None, skip_batches, iteration)


def _prepare_alone(
    dataset: Any,
    options: dict[str, Any],
    setting: Setting,
    feed: Any,
    rng_types: Sequence[Any] | None,
    skip_batches: int,
    iteration: int,
) -> loader.DataLoaderShard | loader.SkipDataLoader:
    newest = _newest()
    prepared = prepare_loader(
        DataLoader(dataset, **options),
        setting,
        events=loader.NoEvents() if newest is None else newest.passes,
        feed=feed,
        seed=torch.initial_seed(),
        rng_types=checked_rng_types(rng_types),
        shards_itself=True,
    )
    give_members(prepared, LoaderMembers, newest)
    if setting.config.use_stateful_dataloader:
        make_stateful(prepared)
    if iteration:
        prepared.set_epoch(iteration)
    return loader.skip_first_batches(prepared, skip_batches) if skip_batches else prepared


class SkipDataLoader(metaclass=StandIn):
    """A loader that leaves out the first batches of each pass.

    Args:
        dataset: the dataset.
        skip_batches: how many to leave out.
        use_stateful_dataloader: it is one of torchdata's too, if there is a torchdata.
        **options: of torch's DataLoader.
    """

    stands_for = loader.SkipDataLoader

    def __new__(  # type: ignore[misc]
        cls,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **options: Any,
    ) -> loader.SkipDataLoader:
        """Return the view of a loader."""
        chosen = config.DataLoaderConfiguration(use_stateful_dataloader=use_stateful_dataloader)
        setting = Setting(0, 1, chosen, None)
        view = loader.SkipDataLoader(
            _prepare_alone(dataset, options, setting, None, None, 0, 0), skip_batches
        )
        if use_stateful_dataloader:
            make_stateful(view)
        return view


class AcceleratedOptimizer(metaclass=StandIn):
    """An optimizer as the newest Accelerator prepares it.

    Args:
        optimizer: the optimizer.
        device_placement: move its state to where the parameters are.
        scaler: without effect; the Accelerator has one.

    Raises:
        RuntimeError: there is no Accelerator.
    """

    stands_for = _AcceleratedOptimizer

    def __new__(  # type: ignore[misc]
        cls, optimizer: torch.optim.Optimizer, device_placement: bool = True, scaler: Any = None
    ) -> _AcceleratedOptimizer:
        """Return the prepared optimizer."""
        newest = _newest_accelerator("AcceleratedOptimizer")
        prepared: _AcceleratedOptimizer = newest.prepare_optimizer(optimizer, device_placement)
        return prepared


class AcceleratedScheduler(metaclass=StandIn):
    """A scheduler that takes a step for each process where its optimizers have taken one.

    Args:
        scheduler: the scheduler.
        optimizers: prepared optimizers, or one.
        step_with_optimizer: step only where they have.
        split_batches: take one step, since a batch is that of all processes.

    Raises:
        RuntimeError: there is no Accelerator.
    """

    stands_for = scheduler.AcceleratedScheduler

    def __new__(
        cls,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> Any:
        """Return the prepared scheduler."""
        newest = _newest_accelerator("AcceleratedScheduler")
        prepared = cls.stands_for(
            scheduler,
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers],
            newest.loop,
            step_with_optimizer=step_with_optimizer,
            steps_at_once=1 if split_batches or not step_with_optimizer else newest.num_processes,
            holds_at_end=True,
        )
        give_members(prepared, SchedulerMembers, newest)
        return prepared


def _forget() -> None:
    global _newest
    _newest = lambda: None  # noqa: E731


def _until_reset(name: str) -> property:
    """Return a property of the Accelerator's base, which its state ends."""
    plain = getattr(accelerator.Accelerator, name)

    def read(self: Accelerator) -> Any:
        return getattr(self.state, name) if _ended else plain.__get__(self)

    return property(read, doc=plain.__doc__)


for _name in _RANKS:
    setattr(Accelerator, _name, _until_reset(_name))

for _twin, _home in (
    (PartialState, "state"),
    (AcceleratorState, "state"),
    (GradientState, "state"),
    (DataLoaderConfiguration, "utils.dataclasses"),
    (FullyShardedDataParallelPlugin, "utils.dataclasses"),
    (Accelerator, "accelerator"),
):
    _twin.__module__ = f"accelerate.{_home}"  # by which it is pickled, and read there
