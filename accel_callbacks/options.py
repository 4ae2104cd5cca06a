"""Options of an Accelerator, resolved once from arguments and environment, with their origins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from accel_callbacks import plugins
from accel_callbacks._lazy import foreign_name
from accel_callbacks.errors import nearest
from accel_callbacks.plugins.option import Option, option, options_of
from accel_callbacks.terminal_text import listed

__all__ = ["AcceleratorConfig", "launched_options", "resolve_config", "unread_variables"]

OnConflict = Literal["refuse", "wait", "take_over"]
PRECISIONS = ("no", "fp16", "bf16", "fp8")
_KINDS = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA"),
    *("MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "FSDP", "DEEPSPEED", "MEGATRON_LM"),
)


@dataclass(frozen=True)
class AcceleratorConfig:
    """The resolved options of an Accelerator.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        cpu: compute on the CPU even if there is an accelerator.
        debug: compare what the processes hold before each collective.
        on_conflict: what to do if another run that lives has a folder of the project: ``"refuse"``
            to start, ``"wait"`` for its end, or ``"take_over"``.
        journal: note each optimizer step of ``Accelerator.run`` in the project's folder.
        distributed_type: ``"FSDP"`` shards models, ``"DEEPSPEED"`` trains with DeepSpeed,
            ``"MEGATRON_LM"`` reads options of Megatron-LM; others follow from the processes.
        launched: options of plugins that the launcher has set, by group and name, such as
            ``{"fsdp": {"cpu_offload": True}}``.
        origins: the origin of each value, by option, such as ``"fsdp.cpu_offload"``.

    Example:
        >>> from accel_callbacks import AcceleratorConfig
        >>> print(AcceleratorConfig(mixed_precision="bf16").describe())
        mixed_precision=bf16 (default)
        gradient_accumulation_steps=1 (default)
        cpu=False (default)
        debug=False (default)
    """

    mixed_precision: str = option(
        "no",
        "type to compute in",
        choices=PRECISIONS,
        variable="ACCEL_MIXED_PRECISION",
        foreign="ACCELERATE_MIXED_PRECISION",
        question="Mixed precision?",
    )
    gradient_accumulation_steps: int = option(
        1,
        "micro-batches of one optimizer step",
        least=1,
        most=1_000_000,
        variable="ACCEL_GRADIENT_ACCUMULATION_STEPS",
        foreign="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )
    cpu: bool = option(
        False,
        "do not use GPUs",
        flags=("--cpu",),
        variable="ACCEL_CPU",
        foreign="ACCELERATE_USE_CPU",
    )
    debug: bool = option(
        False,
        "compare the operands on all ranks before each collective, and show which differ",
        variable="ACCEL_DEBUG",
        foreign="ACCELERATE_DEBUG_MODE",
    )
    on_conflict: OnConflict = option(
        "refuse",
        "what to do if a run that lives has the project's folder",
        kind="str",
        choices=get_args(OnConflict),
        variable="ACCEL_ON_CONFLICT",
    )
    journal: bool = option(
        True,
        "note each optimizer step of a run in the project's folder",
        variable="ACCEL_JOURNAL",
    )
    distributed_type: str | None = option(
        None,
        "kind of run; follows from the rest where it is not given",
        choices=_KINDS,
        renamed={"TPU": "XLA"},
        shorthands={
            "--multi_gpu": "MULTI_GPU",
            "--tpu": "XLA",
            "--use_fsdp": "FSDP",
            "--use_deepspeed": "DEEPSPEED",
            "--use_megatron_lm": "MEGATRON_LM",
        },
        variable="ACCEL_DISTRIBUTED_TYPE",
    )
    launched: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return one line per option, with its value and its origin."""
        plain = ("mixed_precision", "gradient_accumulation_steps", "cpu", "debug")
        names = dict.fromkeys((*plain, *self.origins))
        rows = [f"{n}={self._value(n)} ({self.origins.get(n, 'default')})" for n in names]
        return "\n".join(rows)

    def _value(self, option: str) -> Any:
        group, _, name = option.rpartition(".")
        return self.launched[group][name] if group else getattr(self, option)


def launched_options(environment: Mapping[str, str] | None = None) -> Mapping[str, Option]:
    """Return the options that the launcher passes to its processes, by their names here.

    Args:
        environment: leaves out groups of which it has no variable, ours or Accelerate's.
    """
    options = dict(_options_of_group(""))
    for group in plugins.LAUNCHED:
        starts = tuple(f"{prefix}{group.upper()}_" for prefix in ("ACCEL_", "", "ACCELERATE_"))
        if environment is None or any(name.startswith(starts) for name in environment):
            options |= _options_of_group(group)
    return options


@cache
def _options_of_group(group: str) -> Mapping[str, Option]:
    """Return the options of one group; without a name, those that are in none."""
    if group:
        options = {
            f"{group}.{option.attribute}": option
            for owner in plugins.LAUNCHED[group].owners
            for option in options_of(getattr(plugins, owner))
        }
    else:
        options = {option.name: option for option in options_of(AcceleratorConfig)}
    return {name: option for name, option in options.items() if option.variable}


def resolve_config(
    explicit: Mapping[str, Any], environment: Mapping[str, str]
) -> AcceleratorConfig:
    """Merge explicit arguments, the environment and the defaults, in this precedence.

    Args:
        explicit: options as given to the constructor; ``None`` counts as not given.
        environment: usually ``os.environ``.

    Raises:
        ValueError: a value is invalid; the message has its origin and what is allowed.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, declared in launched_options(environment).items():
        variable = declared.variable
        if explicit.get(name) is not None:
            values[name], origins[name] = explicit[name], "argument"
        elif variable in environment and not declared.is_blank(environment[variable]):
            origins[name] = f"environment variable {variable}"
            try:
                values[name] = declared.convert(environment[variable])
            except ValueError as error:
                raise ValueError(f"{variable}={environment[variable]!r}: {error}") from None
    config = AcceleratorConfig(**_nest_groups(values), origins=origins)
    _check(config)
    return config


_IDLE = ("", "no", "none", "false", "0", "no_wrap")  # values that ask for nothing
_SHOWN = 4


def unread_variables(
    config: AcceleratorConfig, environment: Mapping[str, str], set_by_script: Collection[str]
) -> str:
    """Describe variables of Accelerate that ask for what this run does not do.

    Args:
        config: the options of the run.
        environment: usually ``os.environ``.
        set_by_script: options that the script sets beside those of the config, and groups of
            plugins that the run has.

    Returns:
        An empty string if there are none.
    """
    # They are not read: a shell that was set up for another tool must not change a run.
    options = launched_options(environment)
    names = {f"ACCELERATE_USE_{group.upper()}": group for group in plugins.LAUNCHED}
    names |= {option.foreign: name for name, option in options.items() if option.foreign}
    unread = [
        variable
        for variable, name in names.items()
        if _asks(environment.get(variable, ""), options.get(name))
        and name not in config.origins
        and name not in set_by_script
    ]
    if not unread:
        return ""
    variables = listed((f"{name}={environment[name]}" for name in unread), _SHOWN)
    whole = ", and models are not sharded" if "ACCELERATE_USE_FSDP" in unread else ""
    return (
        f"{variables} {'is' if len(unread) == 1 else 'are'} Accelerate's and not read here"
        f"{whole}: start the script with `accel launch`, which reads the files of `accelerate "
        "config`, or pass the options to the Accelerator."
    )


def _asks(text: str, option: Option | None) -> bool:
    """Return whether the value of a variable asks for something: not for a default or least."""
    usual = () if option is None else (str(option.default).lower(), str(option.least))
    return text.lower() not in (*_IDLE, *usual)


def _nest_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest ``"fsdp.cpu_offload"`` in ``launched["fsdp"]``."""
    options = {name: value for name, value in values.items() if "." not in name}
    launched: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        if group:
            launched.setdefault(group, {})[name] = value
    return {**options, "launched": launched}


def _check(config: AcceleratorConfig) -> None:
    """Raise for invalid values, with their origin."""
    origins = config.origins
    for name, kind in (
        *(("gradient_accumulation_steps", int), ("cpu", bool), ("debug", bool)),
        ("journal", bool),
    ):
        value = getattr(config, name)
        if not isinstance(value, kind):
            raise TypeError(f"{name}={value!r} must be of type {kind.__name__}.")
    if config.mixed_precision not in PRECISIONS:
        raise ValueError(
            f"mixed_precision={config.mixed_precision!r} "
            f"({origins.get('mixed_precision', 'default')}) is unknown; use one of {PRECISIONS}."
            + nearest(
                foreign_name("PRECISIONS", config.mixed_precision) or str(config.mixed_precision),
                PRECISIONS,
            )
        )
    if config.on_conflict not in (known := get_args(OnConflict)):
        hint = nearest(str(config.on_conflict), known)
        raise ValueError(
            f"on_conflict={config.on_conflict!r} ({origins.get('on_conflict', 'default')}) is "
            f"unknown: use 'refuse', 'wait' or 'take_over'.{hint}"
        )
    if config.gradient_accumulation_steps < 1:
        raise ValueError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} "
            f"({origins.get('gradient_accumulation_steps', 'default')}) must be at least 1."
        )
