"""What a config file says: old keys renamed, unknown ones refused, each value checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_callbacks.errors import nearest
from accel_callbacks.launch.option import Option, SettingsError, shown
from accel_callbacks.launch.settings import all_options

__all__ = ["GONE", "values_of"]

#: Keys of older files of Accelerate that say nothing any more.
GONE: Mapping[str, str] = {
    "ipex_config": "torch needs no extension on Intel CPUs",
    "command": "only for a pod of TPUs",
    "use_mps_device": "the GPU of a Mac is taken unless use_cpu is true",
}
_RENAMED = {
    "fp8_config.amax_history_len": "amax_history_length",
    "fp8_config.amax_compute_algo": "amax_compute_algorithm",
    "fp8_config.opt_level": "optimization_level",
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
}
_PREFIXED = ("fsdp_config", "dynamo_config", "fp8_config")


def values_of(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that a file gives, by path, and which of its keys are gone, with the reason.

    Raises:
        SettingsError: an unknown key, with the nearest known one, or a value of the wrong kind;
            the text begins with ``source``.

    Example:
        >>> from accel_callbacks.launching.reading import values_of
        >>> values_of({"fp16": True, "fsdp_config": {}}, "accel.yaml")
        ({'mixed_precision': 'fp16'}, {})
        >>> values_of({"num_proceses": 2}, "accel.yaml")
        Traceback (most recent call last):
        accel_callbacks.launch.option.SettingsError: accel.yaml: has no key 'num_proceses'. ...
    """
    _refuse_sagemaker(data, source)
    gone = {key: GONE[key] for key in data if key in GONE}
    known = {one.path: one for one in all_options()}
    found: dict[str, Any] = {}
    for key, value in _modern(data, source).items():
        one = known.get(key)
        if one is None or one.block:
            raise _unknown(key, [name for name in known if "." not in name], source)
        if one.model is None:
            found.update(_given(one, value, source))
            continue
        for inner, part in _block(one, value, source).items():
            path = _path_in(key, inner, known)
            if path not in known:
                names = [name.partition(".")[2] for name in known if name.startswith(f"{key}.")]
                raise _unknown(inner, names, f"{source}: {key}")
            if path in found:
                raise SettingsError(f"{source}: {path} is given under two names: keep one")
            found.update(_given(known[path], part, source))
    return found, gone


def _path_in(block: str, inner: str, known: Mapping[str, Option]) -> str:
    """The path of a key in a block: in these, Accelerate reads keys with and without the prefix."""
    prefix = f"{block.removesuffix('_config')}_"
    names = [inner]
    if block in _PREFIXED:
        names += [f"{prefix}{inner}", inner.removeprefix(prefix)]
    paths = [f"{block}.{_RENAMED.get(f'{block}.{name}', name)}" for name in names]
    return next((path for path in paths if path in known), paths[0])


def _refuse_sagemaker(data: Mapping[str, Any], source: str) -> None:
    if data.get("compute_environment") == "AMAZON_SAGEMAKER" or "ec2_instance_type" in data:
        raise SettingsError(
            f"{source}: is for Amazon SageMaker (compute_environment), whose jobs are not started "
            "from here: start them with its own SDK, and `accel launch` inside of them"
        )


def _modern(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keys of today for those of older versions of Accelerate."""
    found = {key: value for key, value in data.items() if key not in GONE}
    if "fp16" in found:
        fp16 = found.pop("fp16")
        if not isinstance(fp16, bool):
            raise SettingsError(f"{source}: fp16 must be true or false, not {shown(fp16)}")
        found.setdefault("mixed_precision", "fp16" if fp16 else "no")
    if "dynamo_backend" in found:
        backend = found.pop("dynamo_backend")
        found.setdefault("dynamo_config", {"dynamo_backend": backend})
    return found


def _block(one: Option, value: Any, source: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SettingsError(f"{source}: {one.name} must be a block of keys, not {shown(value)}")
    return value


def _given(one: Option, value: Any, source: str) -> dict[str, Any]:
    """The value under its path; nothing for a null, which Accelerate writes for "not given"."""
    try:
        read = one.read(value)
    except ValueError as error:
        raise SettingsError(f"{source}: {one.path} {error}") from None
    return {} if one.is_unset(value) else {one.path: read}


def _unknown(key: str, names: list[str], source: str) -> SettingsError:
    return SettingsError(f"{source}: has no key {shown(key)}.{nearest(key[:100], names)}")
