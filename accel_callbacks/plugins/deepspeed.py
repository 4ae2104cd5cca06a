"""Options of DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from accel_callbacks.errors import nearest
from accel_callbacks.plugins.base import EnginePlugin, KwargsHandler, Launch
from accel_callbacks.plugins.deepspeed_config import (
    AUTO,
    FilledConfig,
    HfDeepSpeedConfig,
    Known,
    fill,
)
from accel_callbacks.plugins.option import Block, launched
from checkpoint_io.warning import warn

__all__ = [
    "DeepSpeedPlugin",
    "DeepSpeedPlugins",
    "get_active_deepspeed_plugin",
]

#: The key of DeepSpeed's configuration for each option that has one.
KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_DEVICES = ("none", "cpu", "nvme")
_STAGES = (0, 1, 2, 3)
_DEFAULTS = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
}
_DEFAULT_STAGE = 2


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


def _number_or_auto(text: str) -> float | str:
    return text if text == AUTO else float(text)


@dataclass(frozen=True)
class DeepSpeedPlugin(KwargsHandler):
    """How DeepSpeed trains models: ``Accelerator(deepspeed_plugin=...)``.

    The options are those of Accelerate. One that is None comes from ``accel launch``, else from
    ``hf_ds_config``, else it has its default; an option that contradicts the configuration is an
    error.

    Args:
        hf_ds_config: DeepSpeed's own configuration: the path of a JSON file, a dict, or a
            :class:`HfDeepSpeedConfig`. Its values may be ``"auto"``.
        gradient_accumulation_steps: micro-batches of one optimizer step; the Accelerator's by
            default.
        gradient_clipping: the norm to clip to at each step. By default what the loop gives to
            ``clip_grad_norm_``.
        zero_stage: what is sharded: 0 nothing, 1 optimizer states, 2 (default) also gradients, 3
            also parameters.
        is_train_batch_min: has no effect: DeepSpeed uses the size of a batch only to count samples.
        offload_optimizer_device: where optimizer states are kept: ``"none"`` (default, the device),
            ``"cpu"``, or ``"nvme"`` in stage 3.
        offload_param_device: where parameters are kept in stage 3, likewise.
        offload_optimizer_nvme_path: folder on the disk for optimizer states.
        offload_param_nvme_path: folder on the disk for parameters.
        zero3_init_flag: build models sharded in ``init_module()``; on by default in stage 3.
        zero3_save_16bit_model: has no effect on ``save_model``, which gathers weights itself.
        transformer_moe_cls_names: classes of expert layers, separated by commas, that stage 3
            gathers as a whole.
        enable_msamp: refused; MS-AMP is not supported.
        msamp_opt_level: of MS-AMP.

    Raises:
        ValueError: an option has an unknown value, or contradicts ``hf_ds_config``.

    Example:
        >>> from accel_callbacks import DeepSpeedPlugin
        >>> plugin = DeepSpeedPlugin(zero_stage=3)
        >>> plugin.deepspeed_config["zero_optimization"]["stage"], plugin.zero3_init_flag
        (3, True)
        >>> DeepSpeedPlugin({"zero_optimization": {"stage": 2}}, zero_stage=3)
        Traceback (most recent call last):
        ValueError: zero_stage=3 of the DeepSpeedPlugin contradicts zero_optimization.stage=2 of ...
    """

    block: ClassVar = Block(
        "deepspeed_config", "DeepSpeed", variables="ACCEL_DEEPSPEED_", valued=True
    )

    hf_ds_config: Any = launched(
        None,
        "DeepSpeed's own JSON file",
        key="deepspeed_config_file",
        kind="str",
        variable="ACCEL_DEEPSPEED_CONFIG_FILE",
        question="Path of a configuration file of DeepSpeed, if there is one?",
    )
    gradient_accumulation_steps: int | str | None = launched(
        None,
        "micro-batches of a step, or auto",
        kind="str",
        flag="",
        convert=_count_or_auto,
    )
    gradient_clipping: float | str | None = launched(
        None,
        "largest norm of the gradients, or auto",
        kind="str",
        convert=_number_or_auto,
        question="Clip gradients to which norm, if not as the script does?",
    )
    zero_stage: int | None = launched(
        _DEFAULT_STAGE,
        "stage of ZeRO",
        least=0,
        most=3,
        question="Stage of ZeRO: 1 shards the optimizer's states, 2 gradients too, 3 weights too, "
        "0 nothing?",
    )
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = launched(
        "none",
        "where the optimizer's states are",
        choices=_DEVICES,
        question="Where are the optimizer's states between steps?",
    )
    offload_param_device: str | None = launched(
        "none",
        "where the weights are",
        choices=_DEVICES,
        question="Where are the weights between steps?",
    )
    offload_optimizer_nvme_path: str | None = launched(
        None, "folder for the optimizer's states", question="A folder on it?"
    )
    offload_param_nvme_path: str | None = launched(
        None, "folder for the weights", question="A folder on it?"
    )
    zero3_init_flag: bool | None = launched(
        False,
        "shard weights while a model is built",
        variable="ACCEL_DEEPSPEED_ZERO3_INIT",
        question="Shard models while they are built, so that no process holds a whole one?",
    )
    zero3_save_16bit_model: bool | None = launched(False, "gather weights to save them")
    transformer_moe_cls_names: str | None = launched(
        None,
        "classes of expert layers",
        key="deepspeed_moe_layer_cls_names",
        variable="ACCEL_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    )
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        options = [option.name for option in fields(self) if option.init]
        given = {n: getattr(self, n) for n in options if getattr(self, n) is not None}
        self._set(_given=given, _origins={}, _selected=False)
        self._check()
        read = self.hf_ds_config
        if read is None or read == "none":
            held, origin = HfDeepSpeedConfig({}), ""
        else:
            held = HfDeepSpeedConfig(getattr(read, "config", read))
            source = getattr(read, "source", held.source)
            origin = source if isinstance(read, HfDeepSpeedConfig) else held.source
            if "zero_optimization" not in held.config and self.zero_stage is None:
                raise ValueError(
                    f"hf_ds_config: {origin} has no 'zero_optimization': add it with its 'stage', "
                    "which is 0 to shard nothing."
                )
        self._merge(held, origin)
        self._set(hf_ds_config=held)
        flag = self.zero3_init_flag
        if flag and not held.is_zero3():
            warn(f"zero3_init_flag has no effect in stage {self.zero_stage}.")
        self._set(zero3_init_flag=held.is_zero3() and flag is not False)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        if self.zero_stage is not None and self.zero_stage not in _STAGES:
            raise ValueError(f"zero_stage={self.zero_stage!r} must be one of {_STAGES}.")
        for name in ("offload_optimizer_device", "offload_param_device"):
            value = getattr(self, name)
            if value not in (None, *_DEVICES):
                raise ValueError(f"{name}={value!r} must be one of {_DEVICES}.")
        if self.enable_msamp:
            raise ValueError(
                "enable_msamp: MS-AMP is not supported: leave it out, and train with "
                "mixed_precision='bf16'."
            )

    def _merge(self, held: HfDeepSpeedConfig, origin: str) -> None:
        """Bring options and configuration together: each has in the end what the other says."""
        for name, key in KEYS.items():
            value, read = getattr(self, name), held.get_value(key)
            asks = value is not None and value != AUTO and not (value == "none" and read is None)
            if asks and read not in (None, AUTO) and read != value:
                raise ValueError(
                    f"{name}={value!r} of the DeepSpeedPlugin contradicts {key}={read!r} of "
                    f"{origin}: leave one of them out, or make it 'auto' in the configuration."
                )
            if asks:
                held.set_value(key, value)
                self.origins[key] = f"option {name}"
            elif read not in (None, AUTO):
                self._set(**{name: read})
        if held.get_value("zero_optimization.stage") in (None, AUTO):
            held.set_value("zero_optimization.stage", _DEFAULT_STAGE)
            self.origins["zero_optimization.stage"] = "default"
            self._set(zero_stage=_DEFAULT_STAGE)
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                self._set(**{name: default})
        if "steps_per_print" not in held.config:
            held.config["steps_per_print"] = None  # DeepSpeed's own lines, beside the trackers'
            self.origins["steps_per_print"] = "default"

    @property
    def given(self) -> Mapping[str, Any]:
        """The options as they were given."""
        options: Mapping[str, Any] = vars(self)["_given"]
        return options

    @property
    def origins(self) -> dict[str, str]:
        """Where the values of ``deepspeed_config`` are from, by long key."""
        origins: dict[str, str] = vars(self)["_origins"]
        return origins

    @property
    def selected(self) -> bool:
        """True if this is the one of several plugins that the next ``prepare`` goes by."""
        return bool(vars(self)["_selected"])

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration; its values may be changed before ``prepare``."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @classmethod
    def from_arguments(cls, **given: Any) -> Any:
        """Return the plugin or the plugins that arguments of an Accelerator ask for.

        Raises:
            TypeError: one is of another class.
            ValueError: both arguments are given.
        """
        asked = [value for value in given.values() if value is not None]
        if len(asked) > 1:
            raise ValueError("give deepspeed_plugin or deepspeed_plugins, not both.")
        for value in asked:
            for plugin in value.values() if isinstance(value, Mapping) else [value]:
                super().from_arguments(deepspeed_plugin=plugin)
        return asked[0] if asked else None

    @classmethod
    def from_launch(cls, given: Any, launch: Launch) -> Any:
        """Return the :class:`DeepSpeedPlugins` of a run; None if nothing asks for DeepSpeed.

        Raises:
            ValueError: an option of the launcher is invalid, or contradicts the script's
                configuration.
        """
        if isinstance(given, Mapping):  # of several models, each of which says all
            return DeepSpeedPlugins(given)
        if given is not None and cls.is_asked_by(launch):
            return DeepSpeedPlugins(given.with_launch(launch.launched.get(cls.block.group, {})))
        plugin = super().from_launch(given, launch)
        return None if plugin is None else DeepSpeedPlugins(plugin)

    def with_launch(self, options: Mapping[str, Any]) -> DeepSpeedPlugin:
        """Return this plugin, with options of the launch set where the script gave none.

        In place: the script may keep and ask the plugin that it gave.

        Raises:
            ValueError: an option contradicts the configuration.
        """
        if options:
            self._set(**vars(DeepSpeedPlugin(**{**options, **self.given})))
        return self

    def configure(self, config: Any, beside: Mapping[str, Any]) -> Any:
        """Return the options of the run with those that only DeepSpeed's configuration says.

        Raises:
            ValueError: an option contradicts the configuration.
        """
        configured: dict[str, Any] = {}
        steps = self.get_value("gradient_accumulation_steps")
        if isinstance(steps, int):
            configured["gradient_accumulation_steps"] = steps
        for name in ("bf16", "fp16"):
            if self.get_value(f"{name}.enabled") is True:
                configured["mixed_precision"] = name
        for option, value in configured.items():
            mine, origin = getattr(config, option), config.origins.get(option)
            if origin is not None and mine != value:
                key = option if option != "mixed_precision" else f"{value}.enabled"
                raise ValueError(
                    f"{option}={mine!r} ({origin}) contradicts {key}={self.get_value(key)} of "
                    "DeepSpeed's configuration: leave one of them out, or make it 'auto' there."
                )
        origins = {**config.origins, **dict.fromkeys(configured, "DeepSpeed's configuration")}
        return replace(config, **configured, origins=origins) if configured else config

    def filled(self, known: Mapping[str, Known], unread: Collection[str] = ()) -> FilledConfig:
        """Return the configuration with known values in place of ``"auto"``.

        Args:
            known: values by long key.
            unread: long keys that are left out.

        Raises:
            ValueError: another value is ``"auto"`` and not known.
        """
        held = HfDeepSpeedConfig(self.deepspeed_config)
        for key in unread:
            held.del_config_sub_tree(key)
        return fill(held.config, known, self.origins)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a key of the configuration is ``"auto"``."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key of the configuration, ``default`` if it is not set."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def select(self) -> None:
        """Not to be called: ``AcceleratorState.select_deepspeed_plugin`` knows all plugins.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "select a plugin by its name: accel.state.select_deepspeed_plugin(name)."
        )

    def is_zero3_init_enabled(self) -> bool:
        """Return whether ``init_module()`` builds models sharded."""
        return bool(self.zero3_init_flag)

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Context manager: switch ``zero3_init_flag`` off, or on in stage 3."""
        before = self.zero3_init_flag
        self._set(zero3_init_flag=enable and self.hf_ds_config.is_zero3())
        try:
            yield
        finally:
            self._set(zero3_init_flag=before)


class DeepSpeedPlugins(EnginePlugin):
    """The plugins of one Accelerator by name; one of them is selected.

    Args:
        plugins: the plugins, the first of which is selected, or a single one.

    Attributes:
        filled: what DeepSpeed was given for each model, with the origin of each value.
    """

    def __init__(self, plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin]) -> None:
        self.single = isinstance(plugins, DeepSpeedPlugin)
        self.by_name = (
            {"default": plugins} if isinstance(plugins, DeepSpeedPlugin) else dict(plugins)
        )
        if not self.by_name:
            raise ValueError("deepspeed_plugins is empty: give at least one DeepSpeedPlugin.")
        self.filled: WeakKeyDictionary[Any, FilledConfig] = WeakKeyDictionary()
        self.select(next(iter(self.by_name)))

    def configure(self, config: Any, beside: Mapping[str, Any]) -> Any:
        """Return the options of the run with those that the selected plugin sets."""
        return self.active.configure(config, beside)

    def get(self, name: str) -> DeepSpeedPlugin:
        """Return a plugin by its name.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self.by_name:
            raise ValueError(
                f"there is no DeepSpeedPlugin {name!r}; there are {sorted(self.by_name)}."
                + nearest(name, self.by_name)
            )
        return self.by_name[name]

    def select(self, name: str) -> None:
        """Set up the models of the next ``prepare`` by the plugin of this name."""
        self.active = self.get(name)
        for plugin in self.by_name.values():
            object.__setattr__(plugin, "_selected", plugin is self.active)


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the selected plugin of an ``AcceleratorState``.

    Raises:
        ValueError: the run does not use DeepSpeed.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.utils import get_active_deepspeed_plugin
        >>> get_active_deepspeed_plugin(Accelerator(cpu=True).state)
        Traceback (most recent call last):
        ValueError: this run does not use DeepSpeed: pass deepspeed_plugin= to the Accelerator.
    """
    plugin: DeepSpeedPlugin | None = getattr(state, "deepspeed_plugin", None)
    if plugin is None:
        raise ValueError(
            "this run does not use DeepSpeed: pass deepspeed_plugin= to the Accelerator."
        )
    return plugin
