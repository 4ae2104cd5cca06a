"""float8 matrix products with torchao, inside of bfloat16 autocast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from accel_callbacks.collectives import is_sharded
from accel_callbacks.logging import notice
from accel_callbacks.models.fp8.gather import Float8Shard, share_scales
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.precision import AORecipeKwargs
from accel_callbacks.precision.amp import BF16
from accel_callbacks.strategy import GatherCast, Strategy
from checkpoint_io.warning import warn

__all__ = ["FP8"]

_Filter = Callable[[torch.nn.Module, str], bool]
_OVERRIDES = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
_FIRST_CAPABILITY = (8, 9)  # Ada and Hopper are the first with fp8


class FP8(BF16):
    """Linear layers in float8, under autocast to bfloat16.

    ``wrap`` replaces layers of the model in place. Parameters stay the same objects under the
    same names, so that optimizers and checkpoints see no difference; ``unwrap`` restores the plain
    layers, but for those of a sharded model. What a sharded model gathers of them is in fp8 too, if
    the recipe does not say otherwise.

    Args:
        device: the device that the model computes on.
        handlers: for their :class:`accel_callbacks.AORecipeKwargs`.

    Raises:
        ImportError: torchao is not installed.
        ValueError: the device has no fp8, and the recipe has no emulation; or weights are to be
            gathered in fp8 with a config that has a scale for each row of them.

    Example:
        >>> from accel_callbacks.models.fp8 import FP8
        >>> FP8.dtype
        torch.bfloat16
    """

    name = "fp8"

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        self.recipe = self.handlers.get(AORecipeKwargs, AORecipeKwargs())
        self.float8_config = _read_config(self.recipe)
        asked = self.recipe.enable_fsdp_float8_all_gather
        self._asks_for_gather = self.recipe.config is not None if asked is None else asked
        self._warned_uncompiled = False
        if not self.float8_config.emulate:
            _check_capability(device)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the linear layers that the recipe selects, and autocast the model's forward."""
        self.unwrap(model)
        converted = _converted(model)
        chosen = _chosen_layers(model, self.recipe.module_filter_func)
        if "" in chosen:
            raise ValueError(
                "a model that is one Linear cannot be changed in place to fp8: put it into "
                "torch.nn.Sequential(...), or leave it out in module_filter_func."
            )
        if chosen and any(map(is_sharded, model.parameters())):
            raise ValueError(
                f"{type(model).__name__} is sharded already, and FSDP would not find its layers if "
                "they were converted to fp8 now: leave fully_shard to prepare(), or convert the "
                "model before it."
            )
        if not chosen and not converted:
            warn(
                f"no layer of {type(model).__name__} was converted to fp8, so it trains in bf16: "
                "layers need sizes that are multiples of 16, and the first and the last are left "
                "out. AORecipeKwargs(module_filter_func=...) picks others.",
            )
        import_module("torchao.float8").convert_to_float8_training(
            model,
            module_filter_fn=lambda _, name: name in chosen,
            # torchao would replace the parameters here; `after_setup` casts their shards.
            config=dataclasses.replace(self.float8_config, enable_fsdp_float8_all_gather=False),
        )
        for name, layer in chosen.items():
            _copy_hooks_and_mode(layer, model.get_submodule(name))
        return super().wrap(model)

    def call(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` under autocast; in ``torch.inference_mode()`` without gradients only."""
        if not torch.is_inference_mode_enabled():
            return super().call(forward, *args, **kwargs)
        # torchao's tensors have no views and casts in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return super().call(forward, *args, **kwargs)

    def after_setup(self, model: torch.nn.Module, strategy: Strategy) -> None:
        """Let the strategy gather the weights of converted layers in fp8."""
        if not self.float8_config.enable_fsdp_float8_all_gather:
            return
        layers = _converted(model)
        casts = [
            GatherCast(layer.weight, partial(Float8Shard, layer=layer)) for layer in layers.values()
        ]
        gathered = strategy.gather_through(model, casts)
        if gathered is not None:
            share_scales(model, gathered)
            _note_others(layers)
        elif self._asks_for_gather:
            self._asks_for_gather = False  # once
            warn(
                "enable_fsdp_float8_all_gather has no effect: the weights of "
                f"{type(model).__name__} are not sharded. Accelerator(fsdp_plugin=...) shards them."
            )

    def check_compiled(self, compiled: bool) -> None:
        """Warn once if a model is not compiled: its casts to fp8 are kernels of their own then."""
        if not (compiled or self._warned_uncompiled or self.float8_config.emulate):
            self._warned_uncompiled = True
            warn(
                "fp8 without torch.compile is usually slower than bf16, because each cast is a "
                "kernel of its own: give the Accelerator dynamo_backend='inductor', or compile the "
                "model before prepare()."
            )

    def release(self, model: torch.nn.Module) -> None:
        """Restore the plain layers, with the current parameters; not those of a sharded model."""
        # FSDP puts gathered weights into the layers that it has found.
        if any(map(is_sharded, model.parameters())):
            return
        for name, layer in _converted(model).items():
            with torch.device("meta"):
                plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight, plain.bias = layer.weight, layer.bias
            _copy_hooks_and_mode(layer, plain)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, plain)


def _converted(model: torch.nn.Module) -> dict[str, Any]:
    """Return the fp8 layers of a model, by name."""
    kind = import_module("torchao.float8.float8_linear").Float8Linear
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kind)}


def _note_others(layers: Mapping[str, Any]) -> None:
    """Note the layers whose sharded weights are gathered in their own dtype."""
    others = [
        name
        for name, layer in layers.items()
        if is_sharded(layer.weight) and not isinstance(layer.weight._local_tensor, Float8Shard)
    ]
    if others:
        notice(
            f"the weights of {len(others)} of {len(layers)} fp8 layers, such as {others[0]!r}, are "
            "gathered in their own dtype: the ranks cannot share their rows equally, or "
            "reshard_after_forward is a number"
        )


def _read_config(recipe: AORecipeKwargs) -> Any:
    """Return the recipe as torchao's own config."""
    try:
        kind = import_module("torchao.float8").Float8LinearConfig
    except ImportError as error:
        raise ImportError(
            f"mixed_precision='fp8' needs torchao ({error}): pip install torchao"
        ) from error
    config = recipe.config
    if config is None:
        config = kind(pad_inner_dim=True, enable_fsdp_float8_all_gather=True)
    if not isinstance(config, kind):
        raise TypeError(
            f"AORecipeKwargs(config={config!r}) must be a torchao.float8.Float8LinearConfig."
        )
    overrides = {name: getattr(recipe, name) for name in _OVERRIDES}
    try:
        return dataclasses.replace(config, **{k: v for k, v in overrides.items() if v is not None})
    except AssertionError as error:  # of torchao
        raise ValueError(
            f"AORecipeKwargs(enable_fsdp_float8_all_gather=True) does not go with its config: "
            f"{error}. Leave it out: weights are then gathered in their own dtype."
        ) from error


def _check_capability(device: torch.device) -> None:
    """Refuse a device without fp8 matrix products."""
    reason = "it has no fp8 matrix products"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _FIRST_CAPABILITY:
            return
        reason = "its compute capability is {}.{}, and fp8 needs 8.9".format(*capability)
    raise ValueError(
        f"mixed_precision='fp8' does not work on {device}: {reason}. Use 'bf16', or emulate fp8 "
        "with kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig(emulate=True))]."
    )


def _chosen_layers(model: torch.nn.Module, picked: _Filter | None) -> dict[str, torch.nn.Module]:
    """Return the linear layers to convert, by name."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    # A subclass may compute something else, and release() would restore a plain Linear.
    plain = {name: layer for name, layer in layers.items() if type(layer) is torch.nn.Linear}
    if picked is not None:
        return {name: layer for name, layer in plain.items() if picked(layer, name)}
    inner = list(layers)[1:-1]  # the first and last layers lose too much accuracy in fp8
    return {
        name: layer
        for name, layer in plain.items()
        if name in inner and layer.in_features % 16 == 0 and layer.out_features % 16 == 0
    }


def _copy_hooks_and_mode(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Copy hooks and training mode to the layer that replaces another."""
    hooks = {name: value for name, value in vars(old).items() if "_hook" in name}
    vars(new).update(hooks, training=old.training)
