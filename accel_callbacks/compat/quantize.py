"""Models with linear layers of 8 or 4 bits, by bitsandbytes, under Accelerate's names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from accel_callbacks._siblings import require_neighbor
from accel_callbacks.distributed.topology import own_accelerator
from accel_callbacks.offload.assignment import Place, device_of, weights_of
from accel_callbacks.offload.placeholder import is_absent
from accel_callbacks.offload.sizes import CustomDtype, find_tied_parameters
from accel_callbacks.offload.slots import Slot
from accel_callbacks.offload.units import place_of
from accel_callbacks.terminal_text import listed
from accel_callbacks.warning import warn

__all__ = [
    "BnbQuantizationConfig",
    "get_keys_to_not_convert",
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
]

_Model = TypeVar("_Model", bound=torch.nn.Module)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_THRESHOLD = 6.0


@dataclass
class BnbQuantizationConfig:
    """Options of :func:`load_and_quantize_model`.

    Args:
        load_in_8bit: 8-bit integers, with ``llm_int8_threshold`` for outliers.
        llm_int8_threshold: columns of the input with a larger value are computed in 16 bits.
        load_in_4bit: 4-bit numbers.
        bnb_4bit_quant_type: ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: quantize the scales too.
        bnb_4bit_compute_dtype: of the computation with 4-bit weights: a dtype, or ``"fp32"``,
            ``"fp16"`` or ``"bf16"``.
        torch_dtype: of all that is not quantized. With 8 bits float16, with 4 bits that of the
            computation, if ``None``.
        skip_modules: names of modules that are not quantized; the head and tied ones, if ``None``.
        keep_in_fp32_modules: names of modules that are not quantized, and stay in float32.

    Raises:
        ValueError: both or none of 8 and 4 bits are asked for, or a value is unknown.

    Example:
        >>> from accel_callbacks.utils import BnbQuantizationConfig
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").torch_dtype
        torch.float16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = _THRESHOLD
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is neither True nor False.")
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError("set exactly one of load_in_8bit and load_in_4bit to True.")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(
                f'bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is neither "fp4" nor "nf4".'
            )
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise ValueError(f"{name}={getattr(self, name)!r} is no list of names.")
        if isinstance(self.llm_int8_threshold, bool) or not isinstance(
            self.llm_int8_threshold, (int, float)
        ):
            raise ValueError(f"llm_int8_threshold={self.llm_int8_threshold!r} is no number.")
        if self.load_in_4bit and self.llm_int8_threshold != _THRESHOLD:
            warn("llm_int8_threshold has no effect with load_in_4bit")
        self.bnb_4bit_compute_dtype = _dtype(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _dtype(self.torch_dtype, "torch_dtype")

    @property
    def target_dtype(self) -> Any:
        """The dtype of quantized weights, to plan with."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _dtype(value: Any, name: str) -> torch.dtype:
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name}={value!r} is no dtype of torch, nor one of {list(_DTYPES)}.")
    return dtype


def load_and_quantize_model(
    model: _Model,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Place] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> _Model:
    """Quantize the linear layers of a model with bitsandbytes, as their weights are loaded.

    One layer is in full precision at a time. Weights that are quantized in the files already, by
    ``save_model`` of such a model, are taken as they are. bitsandbytes computes on a CPU too: it is
    used where there is no accelerator.

    Args:
        model: changed in place. Built under ``init_empty_weights()``; one with weights is quantized
            where it is, or on the accelerator.
        bnb_quantization_config: how; it is not changed.
        weights_location: as for ``load_checkpoint_in_model``; needed for a model without weights.
        device_map: devices by the names of modules, or a policy of ``infer_auto_device_map``. The
            accelerator, or else the CPU, if ``None``.
        no_split_module_classes: for a policy: classes whose modules stay on one device.
        max_memory: for a policy: bytes by device.
        offload_folder: for modules on ``"disk"``.
        offload_state_dict: accepted for Accelerate; there is no state dict in memory.

    Returns:
        The model.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: the model has no weights and ``weights_location`` is missing, or 4-bit layers
            would be offloaded.
        checkpoint_io.CheckpointError: weights are missing, damaged, or do not fit the model.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import BnbQuantizationConfig, load_and_quantize_model
        >>> config = BnbQuantizationConfig(load_in_8bit=True)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> model = load_and_quantize_model(model, config)  # doctest: +SKIP
        >>> model[0].weight.dtype  # doctest: +SKIP
        torch.int8
    """
    _require_bitsandbytes()
    rule = _Rule(model, bnb_quantization_config)
    tensors = [*model.parameters(), *model.buffers()]
    absent = any(map(is_absent, model.parameters()))
    if absent and weights_location is None:
        raise ValueError(
            f"{type(model).__name__} was built without weights: give weights_location, the path of "
            "its weights."
        )
    devices: dict[str, Place]
    if absent:
        if isinstance(device_map, Mapping):
            rule.keep_offloaded(device_map)
        _replace_layers(model, rule)
        planned = _planned(model, rule, device_map, no_split_module_classes, max_memory)
        devices = planned or {"": _default_device()}
        rule.refuse_offloaded(devices)
        _load(model, rule, os.fspath(weights_location or ""), devices)
    else:
        current = next((tensor.device for tensor in tensors), torch.device("cpu"))
        one_device = current if current.type != "cpu" else _default_device()
        devices = {"": one_device}
        _replace_layers(model, rule)
        _convert(model, rule, one_device)
    marks: Any = model
    marks.is_loaded_in_4bit = bnb_quantization_config.load_in_4bit
    marks.is_loaded_in_8bit = bnb_quantization_config.load_in_8bit
    if len(set(map(str, devices.values()))) > 1 or "disk" in devices.values():
        from accel_callbacks.compat.big_modeling import dispatch_model

        return dispatch_model(model, device_map=devices, offload_dir=offload_folder)
    marks.hf_device_map = dict(devices)
    return model


def _require_bitsandbytes() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            "load_and_quantize_model needs bitsandbytes: "
            'pip install "accel-callbacks[bitsandbytes]"'
        )


def _default_device() -> torch.device:
    kind = own_accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, 0)


def get_keys_to_not_convert(model: torch.nn.Module) -> list[str]:
    """Return the names of modules that stay in full precision: the head, and tied modules.

    A model of transformers without a head and without tied weights has none.

    Example:
        >>> import torch
        >>> from accel_callbacks.compat.quantize import get_keys_to_not_convert
        >>> get_keys_to_not_convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
        ['1']
    """
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    is_base = prefix is not None and not hasattr(model, prefix)
    if is_base and not tied:
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys([*tied, *last]))


def has_4bit_bnb_layers(model: torch.nn.Module) -> bool:
    """Return whether a model has 4-bit linear layers of bitsandbytes.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import has_4bit_bnb_layers
        >>> has_4bit_bnb_layers(torch.nn.Linear(2, 2))
        False
    """
    return any(
        kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes")
        for module in model.modules()
        for kind in type(module).__mro__
    )


class _Rule:
    """The rule that selects the modules of a model to quantize."""

    def __init__(self, model: torch.nn.Module, config: BnbQuantizationConfig) -> None:
        self.config = config
        skipped = config.skip_modules
        self.skipped = list(get_keys_to_not_convert(model) if skipped is None else skipped)
        self.in_fp32 = list(config.keep_in_fp32_modules or ())

    def converts(self, name: str, module: torch.nn.Module) -> bool:
        """Return whether a module is quantized."""
        return type(module) is torch.nn.Linear and not _is_in(name, [*self.skipped, *self.in_fp32])

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a tensor that is not quantized."""
        if not dtype.is_floating_point:
            return dtype
        return torch.float32 if _is_in(name, self.in_fp32) else self.config.torch_dtype

    def keep_offloaded(self, device_map: Mapping[str, Place]) -> None:
        """Leave modules in full precision that are given a place off the accelerator, of 4 bits."""
        away = [name for name, place in device_map.items() if place in ("cpu", "disk")]
        if self.config.load_in_4bit and len(device_map) > 1:
            self.skipped += away

    def refuse_offloaded(self, device_map: Mapping[str, Place]) -> None:
        """Raise ValueError if 4-bit layers would be on the CPU or the disk, but run elsewhere."""
        places = {str(place) for place in device_map.values()}
        away = [
            name
            for name, place in device_map.items()
            if place in ("cpu", "disk") and not _is_in(name, [*self.skipped, *self.in_fp32])
        ]
        if self.config.load_in_4bit and away and places != {"cpu"}:
            raise ValueError(
                f"4-bit layers cannot be offloaded, and {listed(away, most=3)} would be: allow "
                "more memory on the accelerator, use load_in_8bit, or name these in a device_map "
                "of your own, which leaves them in torch_dtype."
            )

    def layer(self, old: torch.nn.Linear) -> torch.nn.Module:
        """Return a quantized layer without values."""
        import bitsandbytes as bnb

        config, has_bias = self.config, old.bias is not None
        if config.load_in_8bit:
            layer: torch.nn.Module = bnb.nn.Linear8bitLt(
                old.in_features,
                old.out_features,
                has_bias,
                has_fp16_weights=False,
                threshold=config.llm_int8_threshold,
                device="meta",
            )
        else:
            layer = bnb.nn.Linear4bit(
                old.in_features,
                old.out_features,
                has_bias,
                config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
                device="meta",
            )
        return layer.requires_grad_(False).train(old.training)


def _is_in(name: str, keys: Sequence[str]) -> bool:
    """Return whether a name has one of the keys as a part: ``"lm_head"``, or ``"h.1.attn"``."""
    return any(f".{key}." in f".{name}." for key in keys if key)


def _replace_layers(model: torch.nn.Module, rule: _Rule) -> None:
    """Replace linear layers by quantized ones, which take over their tensors."""
    names = [name for name, module in model.named_modules() if name and rule.converts(name, module)]
    for name in names:
        path, _, key = name.rpartition(".")
        parent = model.get_submodule(path)
        old = parent.get_submodule(key)
        assert isinstance(old, torch.nn.Linear)
        new = rule.layer(old)
        if not is_absent(old.weight):
            vars(new)["_unquantized"] = old.weight
        if old.bias is not None:
            new._parameters["bias"] = torch.nn.Parameter(old.bias.detach(), requires_grad=False)
        parent._modules[key] = new
    if not names:
        warn(
            f"{type(model).__name__} has no linear layer to quantize: all are skipped, or it has "
            "layers of other classes, such as transformers' Conv1D"
        )


def _quantized(layer: Any, value: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """Quantize values in full precision to the weight of a layer."""
    like = layer.weight
    parameter: Any = type(like)(value, requires_grad=False, **vars(like))
    quantized: torch.nn.Parameter = parameter.to(device)
    return quantized


def _convert(model: torch.nn.Module, rule: _Rule, device: torch.device) -> None:
    """Quantize a model with weights, and move it."""
    for layer in model.modules():
        old = vars(layer).pop("_unquantized", None)
        if old is not None:
            value = old.detach().to("cpu", rule.config.torch_dtype)
            layer._parameters["weight"] = _quantized(layer, value, device)
    # All names of tied parameters, one of which may be kept in float32.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(rule.dtype_of(name, parameter.dtype))
    model.to(device)


def _planned(
    model: torch.nn.Module,
    rule: _Rule,
    device_map: str | Mapping[str, Place] | None,
    classes: Sequence[str] | None,
    max_memory: Mapping[Any, int | str] | None,
) -> dict[str, Place] | None:
    """Return devices by the names of modules; None for the default device."""
    if device_map is None or isinstance(device_map, Mapping):
        return None if device_map is None else dict(device_map)
    special = {
        name: rule.dtype_of(name, parameter.dtype)
        for name, parameter in model.named_parameters()
        if _is_in(name, [*rule.skipped, *rule.in_fp32])
    }
    from accel_callbacks.offload.device_map import planned_device_map

    return dict(
        planned_device_map(
            model, device_map, max_memory, classes, rule.config.target_dtype, special_dtypes=special
        )
    )


def _load(model: torch.nn.Module, rule: _Rule, location: str, devices: Mapping[str, Place]) -> None:
    """Read the weights of a model module by module, and quantize each as it comes."""
    require_neighbor("checkpoint_io")
    from checkpoint_io import CheckpointError, TransferProgress
    from checkpoint_io.weights import open_weights

    source = open_weights(location, 0, None)
    stored = {**{key: key for key in source.infos}, **source.tied}
    progress = TransferProgress("loading", 0, enabled=False)

    def read(name: str) -> torch.Tensor:
        key = stored[name]
        info = source.infos[key]
        target = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        source.read([(key, target)], progress)
        return target

    missing: list[str] = []
    for weight in weights_of(model):
        name = next((name for name in weight.names if name in stored), None)
        old = weight.tensor
        if name is not None:
            new = _made(Slot.of(model, name), name, old, read, stored, rule, devices)
            if old.shape != new.shape and not hasattr(new, "quant_state"):
                raise CheckpointError(
                    f"{location}: {name} has shape {tuple(new.shape)}, and the model's "
                    f"{tuple(old.shape)}: these are weights of another model"
                )
            weight.put(new)
        elif is_absent(old):
            missing.append(weight.name)
        elif not weight.is_parameter:
            weight.put(old.to(_device_for(weight.name, devices)))
    if missing:
        raise CheckpointError(
            f"{location} does not have {listed(missing, most=3)}, which {type(model).__name__} has"
        )


def _device_for(name: str, devices: Mapping[str, Place]) -> torch.device:
    """Return the device of the longest entry that a name is in; the CPU for what is on disk."""
    place = place_of(name, devices)
    return torch.device("cpu") if place is None or place == "disk" else device_of(place)


def _made(
    slot: Slot,
    name: str,
    old: torch.Tensor,
    read: Callable[[str], torch.Tensor],
    stored: Mapping[str, str],
    rule: _Rule,
    devices: Mapping[str, Place],
) -> torch.Tensor:
    """Return a parameter or buffer with its stored values."""
    value, device = read(name), _device_for(name, devices)
    kind = type(old).__name__
    if slot.key == "weight" and kind in ("Int8Params", "Params4bit"):
        quantized: Any = type(old)
        weight: torch.Tensor
        path = name.rpartition(".")[0]
        if kind == "Int8Params" and value.dtype == torch.int8:
            scales = read(f"{path}.SCB").to(device)
            value = value.to(device)
            weight = quantized(
                value, requires_grad=False, has_fp16_weights=False, CB=value, SCB=scales
            )
            return weight
        prefix = f"{name}."
        parts = {key.removeprefix(prefix): key for key in stored if key.startswith(prefix)}
        if kind == "Params4bit" and parts:
            statistics = {short: read(key) for short, key in parts.items()}
            weight = quantized.from_prequantized(
                value, statistics, device=device, module=slot.module
            )
            return weight
        if value.shape != old.shape:
            return value  # of another model, as the caller says
        return _quantized(slot.module, value.to(rule.config.torch_dtype), device)
    value = value.to(device, rule.dtype_of(name, value.dtype))
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(value, old.requires_grad and value.is_floating_point())
    return value
