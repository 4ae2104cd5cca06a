"""Find, read and write config files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_callbacks.errors import nearest
from accel_callbacks.errors.removed import REMOVED, advice
from accel_callbacks.launch.settings import all_options
from accel_callbacks.plugins.option import Option, SettingsError, shown
from checkpoint_io.local_files import remove, replace, sync_file

__all__ = [
    "GONE",
    "cache_folder",
    "default_path",
    "expanded",
    "find_config",
    "read_config",
    "values_of",
    "write_config",
]

#: Keys of older Accelerate files that no longer have a meaning, and why.
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
PROJECT_FILE = "accel.yaml"
CACHE_FILES = ("default_config.yaml", "default_config.json")
# Raised by the readers for scalars that are none, besides their own errors.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def values_of(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a file by path, and its obsolete keys with the reason.

    Raises:
        SettingsError: a key is unknown (the text names the nearest known one), or a value has
            the wrong type; the text begins with ``source``.
    """
    _refuse_sagemaker(data, source)
    gone = {key: GONE[key] for key in data if key in GONE}
    known = {option.path: option for option in all_options()}
    values: dict[str, Any] = {}
    for key, value in _modern(data, source).items():
        option = known.get(key)
        if option is None or option.block:
            raise _unknown(key, [name for name in known if "." not in name], source)
        if option.kind != "block":
            values.update(_read_value(option, value, source))
            continue
        for inner, part in _block(option, value, source).items():
            path = _path_in(key, inner, known)
            if path not in known:
                names = [name.partition(".")[2] for name in known if name.startswith(f"{key}.")]
                raise _unknown(inner, names, f"{source}: {key}")
            if path in values:
                raise SettingsError(f"{source}: {path} is given under two names: keep one")
            values.update(_read_value(known[path], part, source))
    return values, gone


def _path_in(block: str, inner: str, known: Mapping[str, Option]) -> str:
    """Return the path of a key in a block; Accelerate omits the prefix of keys in some blocks."""
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
    """Replace keys of older Accelerate versions by their current names."""
    modern = {key: value for key, value in data.items() if key not in GONE}
    if "fp16" in modern:
        fp16 = modern.pop("fp16")
        if not isinstance(fp16, bool):
            raise SettingsError(f"{source}: fp16 must be true or false, not {shown(fp16)}")
        modern.setdefault("mixed_precision", "fp16" if fp16 else "no")
    if "dynamo_backend" in modern:
        backend = modern.pop("dynamo_backend")
        modern.setdefault("dynamo_config", {"dynamo_backend": backend})
    return modern


def _block(block: Option, value: Any, source: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SettingsError(f"{source}: {block.name} must be a block of keys, not {shown(value)}")
    return value


def _read_value(option: Option, value: Any, source: str) -> dict[str, Any]:
    """Return the value under its path; nothing for null, which Accelerate writes for "not set"."""
    try:
        read = option.read(value)
    except ValueError as error:
        raise SettingsError(f"{source}: {option.path} {error}") from None
    return {} if option.is_unset(value) else {option.path: read}


def _unknown(key: str, names: list[str], source: str) -> SettingsError:
    hint = advice(REMOVED, key) or nearest(key[:100], names)
    return SettingsError(f"{source}: has no key {shown(key)}.{hint}")


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand ``~``, which shells leave in place in ``--config_file=~/a.yaml``.

    Raises:
        SettingsError: ``~name`` names a user without a home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(f"{_label(path)}: there is no such home; write the path out") from None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the user's config file."""
    if home := environment.get("ACCEL_HOME"):
        return expanded(home)
    if home := environment.get("HF_HOME"):
        return expanded(home) / "accelerate"
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(cache)
    with suppress(RuntimeError):  # a user without a home
        path = path.expanduser()
    return path / "huggingface" / "accelerate"


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the file that ``accel config`` writes by default."""
    return cache_folder(environment) / CACHE_FILES[0]


def find_config(script: str | None, environment: Mapping[str, str]) -> Path | None:
    """Find ``accel.yaml`` in the script's folder or above it, or else the user's config file.

    Args:
        script: the search starts in its folder; in the working directory if None.
        environment: usually ``os.environ``.

    Raises:
        SettingsError: a variable of the cache folder names a user without a home directory.
    """
    with suppress(OSError, ValueError, RuntimeError):
        start = Path.cwd() if script is None else Path(script).resolve().parent
        for folder in (start, *start.parents):
            if (folder / PROJECT_FILE).is_file():
                return folder / PROJECT_FILE
    folder = cache_folder(environment)
    with suppress(OSError, ValueError):
        return next((folder / name for name in CACHE_FILES if (folder / name).is_file()), None)
    return None


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML or JSON file of plain values under string keys; no code in it is run.

    Raises:
        SettingsError: the file cannot be read; one line with its name and the reason.
    """
    import yaml

    name, file = _label(path), expanded(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
        data = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
        _check_shape(data)
    except SettingsError as error:
        raise SettingsError(f"{name}: {error}") from None
    except FileNotFoundError:
        raise SettingsError(f"{name}: there is no such file; `accel config` writes one") from None
    except (OSError, yaml.YAMLError, *_MALFORMED) as error:
        raise SettingsError(f"{name}: cannot be read: {_one_line(error)}") from None
    return data if isinstance(data, dict) else {}


def _label(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    return name if name.isprintable() else ascii(name)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:200]


def _check_shape(data: Any) -> None:
    """Raise SettingsError unless the data is a mapping with string keys, on both levels."""
    if data is not None and not isinstance(data, dict):
        raise SettingsError(f"must hold `key: value` lines, not {shown(data)}")
    nested = [value for value in (data or {}).values() if isinstance(value, dict)]
    for level in (data or {}, *nested):
        for key in level:
            if not isinstance(key, str):
                raise SettingsError(f"has the key {shown(key)}, and keys must be text")


def write_config(path: str | os.PathLike[str], values: Mapping[str, Any]) -> Path:
    """Write YAML (or JSON, for a name with that suffix) atomically; comments are not preserved.

    Returns:
        The file that was written, with symbolic links resolved.

    Raises:
        SettingsError: the file cannot be written; an existing one is unchanged.
    """
    target = Path(os.path.realpath(expanded(path)))
    text = _as_text(target, values)
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            sync_file(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            remove(temporary)
        raise SettingsError(
            f"{_label(path)}: cannot be written: {error.strerror}; --config_file names another"
        ) from None
    return target


def _as_text(target: Path, values: Mapping[str, Any]) -> str:
    plain = {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
    }
    if target.suffix == ".json":
        return json.dumps(plain, indent=2, sort_keys=True) + "\n"
    import yaml

    return str(yaml.safe_dump(plain, sort_keys=True, allow_unicode=True))
