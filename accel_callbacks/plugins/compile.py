"""Options of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from accel_callbacks.errors import nearest
from accel_callbacks.plugins.base import KwargsHandler, Launch, OptionEnum
from accel_callbacks.plugins.option import Block, option

__all__ = ["DynamoBackend", "TorchDynamoPlugin"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_OWN = ("backend", "mode", "disable", "use_regional_compilation")


class DynamoBackend(OptionEnum):
    """Backends of torch.compile under Accelerate's names; others are given as strings.

    Example:
        >>> from accel_callbacks import DynamoBackend
        >>> DynamoBackend.read("inductor", "backend").name
        'INDUCTOR'
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    OPENXLA = "OPENXLA"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


@dataclass(frozen=True)
class TorchDynamoPlugin(KwargsHandler):
    """Options of torch.compile for prepared models; ``Accelerator(dynamo_plugin=...)``.

    Args:
        backend: ``"no"`` (default: nothing is compiled), a :class:`DynamoBackend`, the name of a
            backend that torch has, or a function that takes a graph and its inputs.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or
            ``"max-autotune-no-cudagraphs"``.
        fullgraph: raise for a model that cannot be compiled as one graph.
        dynamic: compile for all shapes (True), for each shape (False), or as torch decides.
        options: a dict for the backend; not together with ``mode``.
        disable: compile nothing, whatever the other options are.
        use_regional_compilation: compile the repeated blocks of a model separately, which takes
            less time than to compile the full model. A model without any is compiled in full.

    Raises:
        ValueError: a backend or mode that does not exist, ``mode`` with ``options``, or options
            of a compilation that does not take place because the backend is ``"no"``.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator, TorchDynamoPlugin
        >>> plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        >>> accel = Accelerator(cpu=True, dynamo_plugin=plugin)
        >>> model = accel.prepare(torch.nn.Linear(2, 1))
        >>> sorted(model.state_dict())
        ['bias', 'weight']
    """

    block: ClassVar = Block(
        "dynamo_config", "torch.compile", prefix="dynamo_", variables="ACCEL_DYNAMO_"
    )

    backend: DynamoBackend | str | Callable[..., Any] | None = option(
        DynamoBackend.NO,
        "backend of torch.compile",
        kind="str",
        default="no",
        passed=True,
        foreign="ACCELERATE_DYNAMO_BACKEND",
        question="Compile models with torch.compile?",
    )
    mode: str | None = option("default", "mode of torch.compile", choices=_MODES, passed=True)
    fullgraph: bool | None = option(
        False, "compile one graph or raise an error", key="use_fullgraph", passed=True
    )
    dynamic: bool | None = option(None, "compile for all shapes", key="use_dynamic", passed=True)
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = option(
        False, "compile the repeated blocks of a model separately", passed=True
    )

    @classmethod
    def from_arguments(cls, **given: Any) -> Any:
        """Return the plugin of an Accelerator, from either of its two arguments.

        Raises:
            ValueError: both are given, or the backend does not exist.
            TypeError: ``dynamo_plugin`` is no :class:`TorchDynamoPlugin`.
        """
        backend, plugin = given["dynamo_backend"], given["dynamo_plugin"]
        if plugin is None:
            return None if backend is None else cls(backend=backend)
        if backend is not None:
            raise ValueError("give dynamo_backend= or dynamo_plugin=, not both.")
        if not isinstance(plugin, TorchDynamoPlugin):
            raise TypeError(
                f"dynamo_plugin={plugin!r} must be a TorchDynamoPlugin; a backend alone is "
                "dynamo_backend=."
            )
        return plugin

    @classmethod
    def from_launch(cls, given: Any, launch: Launch) -> Any:
        """Return the script's plugin, or else the launcher's.

        Raises:
            ValueError: the backend or the mode does not exist; the message has its origin.
        """
        options = launch.launched.get(cls.block.group, {})
        if given is not None or options.get("backend", "no").lower() == "no":
            return given
        try:
            return cls(**options)
        except ValueError as error:
            origin = launch.origins.get("dynamo.backend", "config")
            raise ValueError(
                f"torch.compile as the launch asks for it ({origin}): {error}"
            ) from None

    def __post_init__(self) -> None:
        for field in fields(self):  # None is not given: scripts pass on what may not be set
            if getattr(self, field.name) is None:
                object.__setattr__(self, field.name, field.default)
        if not callable(self.backend):
            object.__setattr__(self, "backend", _read_backend(self.backend))
        if self.mode not in _MODES:
            hint = nearest(str(self.mode), _MODES)
            raise ValueError(f"mode={self.mode!r} is unknown; use one of {_MODES}.{hint}")
        if self.options is not None and self.mode != "default":
            raise ValueError(f"give mode={self.mode!r} or options=, not both.")
        idle = [name for name in self.to_kwargs() if name not in ("backend", "disable")]
        if self.backend is DynamoBackend.NO and idle and not self.disable:
            raise ValueError(
                f"{idle[0]}={getattr(self, idle[0])!r} needs a backend, and it is 'no': give "
                "backend='inductor', say."
            )

    @property
    def compiles(self) -> bool:
        """True if models are compiled."""
        return self.backend is not DynamoBackend.NO and not self.disable

    def compile_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.nn.Module.compile``."""
        chosen = self.backend
        kwargs = {name: value for name, value in self.to_kwargs().items() if name not in _OWN}
        kwargs["backend"] = chosen.value.lower() if isinstance(chosen, DynamoBackend) else chosen
        if self.mode != "default":  # torch refuses options together with any mode, "default" too
            kwargs["mode"] = self.mode
        if self.options is not None:
            kwargs["options"] = dict(self.options)
        return kwargs


def _read_backend(backend: Any) -> DynamoBackend | str:
    """Return a backend by its name; raise if torch does not have it."""
    name = str(backend.value if isinstance(backend, DynamoBackend) else backend)
    if name.upper() == DynamoBackend.NO.value:
        return DynamoBackend.NO
    from torch._dynamo import list_backends

    known = ["no", *list_backends(None)]
    if name.lower() not in known and name not in known:
        raise ValueError(
            f"backend={name!r} is unknown to this torch; use one of {known}."
            f"{nearest(name.lower(), known)} Some need a package that registers them, such as "
            "`pip install torch-tensorrt` for tensorrt."
        )
    members = [member.value for member in DynamoBackend]
    return DynamoBackend(name.upper()) if name.upper() in members else name
