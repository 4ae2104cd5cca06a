"""What a launch tells the parts of an Accelerator, where the script itself says nothing."""

from __future__ import annotations

from typing import Any

from accel_callbacks.config import AcceleratorConfig
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.compile import TorchDynamoPlugin, choose_plugin
from accel_callbacks.plugins.fp8 import AORecipeKwargs

__all__ = ["launched_handlers", "launched_plugin"]


def launched_plugin(
    backend: Any, plugin: TorchDynamoPlugin | None, config: AcceleratorConfig
) -> TorchDynamoPlugin:
    """How models are compiled: an argument of the script wins over the launch.

    Raises:
        ValueError: the backend or the mode does not exist, with the variable that names it.

    Example:
        >>> from accel_callbacks import AcceleratorConfig
        >>> from accel_callbacks.launched import launched_plugin
        >>> config = AcceleratorConfig(dynamo_backend="eager", dynamo_use_fullgraph=True)
        >>> launched_plugin(None, None, config).fullgraph
        True
        >>> launched_plugin("no", None, config).compiles
        False
    """
    given = backend is not None or plugin is not None
    told = config.dynamo_backend
    if given or told is None or told.lower() == "no":
        return choose_plugin(backend, plugin)
    options = {
        "mode": config.dynamo_mode,
        "fullgraph": config.dynamo_use_fullgraph,
        "dynamic": config.dynamo_use_dynamic,
        "use_regional_compilation": config.dynamo_use_regional_compilation,
    }
    kept: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        return TorchDynamoPlugin(backend=told, **kept)
    except ValueError as error:
        origin = config.origins.get("dynamo_backend", "config")
        raise ValueError(f"torch.compile as the launch asks for it ({origin}): {error}") from None


def launched_handlers(handlers: Handlers, config: AcceleratorConfig) -> Handlers:
    """The handlers of the script, and a recipe for fp8 if it has none and the launch has.

    Example:
        >>> from accel_callbacks import AcceleratorConfig, AORecipeKwargs
        >>> from accel_callbacks.launched import launched_handlers
        >>> from accel_callbacks.plugins import sort_handlers
        >>> config = AcceleratorConfig(mixed_precision="fp8", fp8_pad_inner_dim=False)
        >>> launched_handlers(sort_handlers(()), config).get(AORecipeKwargs).pad_inner_dim
        False
    """
    told = config.fp8_pad_inner_dim
    own = handlers.get(AORecipeKwargs)
    if told is None or own is not None or config.mixed_precision != "fp8":
        return handlers
    return Handlers({**handlers.by_class, AORecipeKwargs: AORecipeKwargs(pad_inner_dim=told)})
