"""A configuration of DeepSpeed: read from a file, and its ``"auto"`` values filled."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["AUTO", "FilledConfig", "HfDeepSpeedConfig", "Known", "fill", "leaves"]

AUTO = "auto"


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed, asked for by keys such as ``"zero_optimization.stage"``.

    Args:
        config_file_or_dict: the path of a JSON file, a dict (which is copied), or the JSON text,
            also in base64.

    Attributes:
        config: the configuration, a dict that may be changed.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> from accel_callbacks.utils import HfDeepSpeedConfig
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        >>> config.is_zero3(), config.get_value("gradient_clipping", 1.0)
        (True, 1.0)
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.source = "the dict"
        if isinstance(config_file_or_dict, Mapping):
            self.config: dict[str, Any] = copy.deepcopy(dict(config_file_or_dict))
        else:
            self.config = self._read(os.fspath(config_file_or_dict))

    def _read(self, text: str) -> dict[str, Any]:
        self.source = "the JSON text"
        if os.path.exists(text):
            self.source = text
            with open(text, encoding="utf-8") as file:
                config = _parse_json(file.read())
        else:
            config = _parse_json(text)
            if config is None:
                config = _parse_json(_decode_base64(text))
        if not isinstance(config, dict):
            raise ValueError(
                f"hf_ds_config={text:.200} must be the path of a JSON file of DeepSpeed's, a dict, "
                "or its JSON text: there is no such file, and it is no JSON object."
            )
        return config

    def set_stage_and_offload(self) -> None:
        """Do nothing: stage and offloading are read from ``config`` each time."""

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that would hold a key, None if there is none, and the key in it."""
        *nodes, key = ds_key_long.split(".")
        node: Any = self.config
        for name in nodes:
            node = node.get(name) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key, ``default`` if it is not set."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set the value of a key, making the dicts around it."""
        *nodes, key = ds_key_long.split(".")
        node = self.config
        for name in nodes:
            node = node.setdefault(name, {})
        node[key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key and what is below it.

        Raises:
            ValueError: it is not there, and ``must_exist``.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is None or key not in node:
            if must_exist:
                raise ValueError(f"the configuration of DeepSpeed has no {ds_key_long!r}.")
            return
        del node[key]

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key is set, to something true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key is set, to something false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return whether the stage is 3."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer states are offloaded."""
        devices = {
            self.get_value(f"zero_optimization.{part}.device")
            for part in ("offload_optimizer", "offload_param")
        }
        return (self.is_zero2() or self.is_zero3()) and bool(devices & {"cpu", "nvme"})


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _decode_base64(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (ValueError, binascii.Error):
        return ""


class Known(NamedTuple):
    """A value that the loop knows, and where it is from."""

    value: Any
    origin: str


class FilledConfig(NamedTuple):
    """A configuration without ``"auto"``, and the origin of each of its values."""

    config: dict[str, Any]
    origins: dict[str, str]

    def describe(self) -> str:
        """Return one line per value, with its origin."""
        return "\n".join(
            f"{key}={value} ({self.origins.get(key, 'file')})" for key, value in leaves(self.config)
        )


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate the values of a configuration by their long keys."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fill(
    config: Mapping[str, Any],
    known: Mapping[str, Known],
    origins: Mapping[str, str] | None = None,
) -> FilledConfig:
    """Return a configuration with values in place of ``"auto"``.

    Args:
        config: as the user wrote it.
        known: values by long key.
        origins: those of values that are set already; a file if left out.

    Raises:
        ValueError: a value is ``"auto"`` and not known.
    """
    held = HfDeepSpeedConfig(config)
    origins = dict(origins or {})
    unknown = []
    for key, value in list(leaves(held.config)):
        if value != AUTO:
            continue
        if key in known:
            held.set_value(key, known[key].value)
            origins[key] = f"auto: {known[key].origin}"
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(
            f"DeepSpeed's {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} 'auto', and "
            "nothing here says the value: write it into the configuration. Known are "
            f"{', '.join(sorted(known))}."
        )
    return FilledConfig(held.config, origins)
