"""Adapters of PEFT models: their tensors and configurations, as the files that peft reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "Adapter", "adapters_of"]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class Adapter(NamedTuple):
    """One adapter of a model, as peft saves it.

    Attributes:
        name: of the adapter in the model; ``"default"`` unless the user chose another.
        tensors: by the names in the file.
        config: the content of ``adapter_config.json``, as text.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    config: str


def adapters_of(model: torch.nn.Module, state: Mapping[str, Any]) -> list[Adapter]:
    """Return the adapters of a PEFT model, none of another model.

    A PEFT model has a dict ``peft_config`` from the names of its adapters to their configurations,
    which are dicts or have a ``to_dict``; models of transformers with ``add_adapter`` have it too.
    Where peft made it, peft selects and names the tensors.

    Args:
        model: as the user built it.
        state: its state dict.

    Example:
        >>> import torch
        >>> from accel_callbacks.models.adapters import adapters_of
        >>> adapters_of(torch.nn.Linear(1, 1), {})
        []
        >>> class Adapted(torch.nn.Module):
        ...     peft_config = {"default": {"peft_type": "LORA", "r": 8}}
        >>> state = {"layer.lora_A.default.weight": torch.ones(1), "layer.weight": torch.ones(1)}
        >>> list(adapters_of(Adapted(), state)[0].tensors)
        ['base_model.model.layer.lora_A.weight']
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return []
    return [
        Adapter(name, _tensors(model, state, name, config), _config_text(model, config))
        for name, config in configs.items()
    ]


def _tensors(
    model: torch.nn.Module, state: Mapping[str, Any], name: str, config: Any
) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by the names in its file."""
    if type(config).__module__.startswith("peft."):
        from peft import PeftModel, get_peft_model_state_dict

        tensors = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=name)
        wrapped = isinstance(model, PeftModel)
    else:
        tensors, wrapped = _drop_adapter_name(state, name), False
    # A model of transformers that holds its adapter itself lacks the prefix that peft expects.
    add = not wrapped and not any(key.startswith(_PREFIX) for key in tensors)
    return {(_PREFIX + key if add else key): tensor for key, tensor in tensors.items()}


def _drop_adapter_name(state: Mapping[str, Any], adapter: str) -> dict[str, Any]:
    """Return the tensors of an adapter, by their names without the adapter's, as in peft."""
    tensors = {}
    for key, tensor in state.items():
        parts = key.split(".")
        if adapter in parts[1:]:
            place = parts.index(adapter, 1)
            saved_whole = parts[place - 1] == "modules_to_save"
            tensors[".".join(parts[: place - saved_whole] + parts[place + 1 :])] = tensor
    return tensors


def _config_text(model: torch.nn.Module, config: Any) -> str:
    """Return the JSON of a configuration, for inference, as peft writes it."""
    plain = config.to_dict() if hasattr(config, "to_dict") else config
    plain = {**plain, "inference_mode": True}
    base = model
    for name in ("base_model", "model"):  # peft's wrapper, then its tuner
        base = getattr(base, name, base)
    if plain.get("base_model_name_or_path") is None:
        plain["base_model_name_or_path"] = vars(base).get("name_or_path") or None
    if plain.get("task_type") is None and base is not model:
        kind = type(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        plain["auto_mapping"] = mapping
    return json.dumps(plain, indent=2, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """Return the JSON form of a set, or of another object."""
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
