"""Small functions of ``accelerate.utils`` without a state, as scripts call them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from accel_callbacks.collectives import is_sharded
from accel_callbacks.utils.imports import is_package_available

__all__ = [
    "are_libraries_initialized",
    "convert_bytes",
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "get_module_children_bottom_up",
    "get_module_class_from_name",
    "get_pretty_name",
    "has_compiled_regions",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_peft_model",
    "is_port_in_use",
    "is_rocm_available",
    "is_torchdata_stateful_dataloader_available",
    "is_weights_only_available",
    "is_xccl_available",
    "merge_dicts",
    "model_has_dtensor",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "str_to_bool",
]

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_FORBIDDEN = frozenset(";\n<> ")  # in lines of an environment file
_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


# --- the environment --------------------------------------------------------------------------


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for a text that means yes, 0 for one that means no.

    Args:
        value: the text, in any case.
        to_bool: return True or False instead.

    Raises:
        ValueError: it means neither.
    """
    text = value.lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"invalid truth value {value}: use one of {sorted(_TRUE | _FALSE)}.")
    return text in _TRUE if to_bool else int(text in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable means yes; the default without it."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable; the default without it."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first of some variables that is a number of at least 0; the default without it."""
    numbers = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((number for number in numbers if number >= 0), default)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return the lines of an environment file, without values that such a file cannot have."""
    return [
        f"{key}={value}\n"
        for key, value in current_env.items()
        if key and value and _FORBIDDEN.isdisjoint(key + value)
    ]


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of some libraries that are imported already."""
    return [name for name in library_names if name in sys.modules]


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether something listens on a port of this machine, 29500 by default."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


# --- values -----------------------------------------------------------------------------------


def merge_dicts(
    source: Mapping[str, Any], destination: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Write the values of a dict and those inside of it over those of another, and return that."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text, in the largest unit of which there is one."""
    power = 0
    while size >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{round(size, 2)} {_UNITS[power]}"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or class, or of the class of another object."""
    for named in (obj, type(obj)):
        for attribute in ("__qualname__", "__name__"):
            if hasattr(named, attribute):
                return str(getattr(named, attribute))
    return str(obj)


# --- models -----------------------------------------------------------------------------------


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[Any] | None:
    """Return the class of this name of the module or one inside of it, None without one."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of a model, each after those inside of it, the model last.

    Args:
        model: the model.
        return_fqns: return pairs of name and module instead.
    """
    pairs = list(_bottom_up(model, ""))
    return pairs if return_fqns else [module for _, module in pairs]


def _bottom_up(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for key, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{key}" if name else key)
    yield name, module


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether parameters of a model are sharded or cut."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return whether modules inside of a model are compiled."""
    compiled = getattr(getattr(torch, "_dynamo", None), "OptimizedModule", ())
    return any(
        isinstance(part, compiled) or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
        if part is not module
    )


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether a model is one of peft."""
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


# --- what there is ----------------------------------------------------------------------------


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed."""
    return is_package_available("bitsandbytes")


is_8bit_bnb_available = is_4bit_bnb_available


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata with its StatefulDataLoader is installed."""
    return is_package_available("torchdata") and is_package_available(
        "torchdata.stateful_dataloader"
    )


def is_weights_only_available() -> bool:
    """Return True: ``torch.load`` reads weights only in each torch that this library supports."""
    return True


def is_rocm_available() -> bool:
    """Return whether torch is built for AMD's GPUs and sees one."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_xccl_available() -> bool:
    """Return whether torch has the collectives of Intel's GPUs."""
    is_built = getattr(torch.distributed, "is_xccl_available", None)
    return bool(is_built and is_built())
