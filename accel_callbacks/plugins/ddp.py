"""Options of DistributedDataParallel and of its communication hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accel_callbacks.errors import nearest
from accel_callbacks.plugins.base import KwargsHandler, OptionEnum

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs"]


class DDPCommunicationHookType(OptionEnum):
    """The communication hook of gradients.

    ``FP16`` and ``BF16`` send them in half precision. ``POWER_SGD`` and ``BATCHED_POWER_SGD`` send
    approximations of low rank.

    Example:
        >>> from accel_callbacks import DDPCommunicationHookType
        >>> DDPCommunicationHookType("power_sgd").name
        'POWER_SGD'
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
_WRAPPERS = ("no", "fp16", "bf16")
_HOOK_FIELDS = {"comm_hook", "comm_wrapper", "comm_state_option"}


@dataclass(frozen=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel``; no effect on one process.

    Args:
        dim: the dimension of inputs that torch scatters over devices.
        broadcast_buffers: broadcast the buffers of rank 0 at each forward; under FSDP and
            DeepSpeed too.
        bucket_cap_mb: MiB of gradients that are sent together.
        find_unused_parameters: search for parameters that a forward did not use; needed if there
            are any, and slower. Parameters that are frozen between steps count as unused. Under
            FSDP and ZeRO needed if ranks use different ones in one step.
        check_reduction: torch only warns that it is deprecated.
        gradient_as_bucket_view: keep gradients in the memory that is sent, which saves a copy.
        static_graph: let torch rely on the same parameters being used in each step.
        comm_hook: the communication hook, as a :class:`DDPCommunicationHookType` or its value.
        comm_wrapper: ``fp16`` or ``bf16`` around another hook.
        comm_state_option: options of ``PowerSGDState``, such as ``matrix_approximation_rank``.

    Raises:
        ValueError: a hook, wrapper or option of PowerSGD does not exist, or has no effect together
            with the others.

    Example:
        >>> from accel_callbacks import Accelerator, DistributedDataParallelKwargs
        >>> options = DistributedDataParallelKwargs(bucket_cap_mb=50, comm_hook="fp16")
        >>> options.to_kwargs()
        {'bucket_cap_mb': 50}
        >>> accel = Accelerator(cpu=True, kwargs_handlers=[options])
    """

    role: ClassVar[str] = "data parallelism"

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("comm_hook", "comm_wrapper"):
            chosen = DDPCommunicationHookType.read(getattr(self, name), name)
            object.__setattr__(self, name, chosen)
        if self.comm_wrapper.value not in _WRAPPERS:
            raise ValueError(
                f"comm_wrapper={self.comm_wrapper.value!r} wraps no hook; use one of {_WRAPPERS}."
            )
        wraps = self.comm_wrapper is not DDPCommunicationHookType.NO
        if wraps and self.comm_hook is DDPCommunicationHookType.NO:
            raise ValueError(
                f"comm_wrapper={self.comm_wrapper.value!r} has no comm_hook to wrap: give "
                f"comm_hook={self.comm_wrapper.value!r} instead."
            )
        if self.comm_state_option:
            self._check_state()

    def _check_state(self) -> None:
        if self.comm_hook not in _POWER_SGD:
            raise ValueError(
                f"comm_state_option is for PowerSGD: give comm_hook='power_sgd' with it, not "
                f"{self.comm_hook.value!r}."
            )
        known = _power_sgd_options()
        for name in self.comm_state_option:
            if name not in known:
                hint = nearest(str(name), known)
                raise ValueError(f"comm_state_option has no {name!r}; it takes {known}.{hint}")

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel; the hook is registered afterwards."""
        options = super().to_kwargs()
        return {name: value for name, value in options.items() if name not in _HOOK_FIELDS}


def _power_sgd_options() -> list[str]:
    """Return the options of ``PowerSGDState`` in the installed torch."""
    import inspect

    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    parameters = inspect.signature(PowerSGDState.__init__).parameters
    return [name for name in parameters if name not in ("self", "process_group")]
