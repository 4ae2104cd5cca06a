"""The kinds of runs, by the names that scripts for Accelerate compare with."""

from __future__ import annotations

from enum import Enum

__all__ = ["DistributedType"]


class DistributedType(str, Enum):
    """The kind of a run; the names are those of Hugging Face Accelerate.

    Example:
        >>> from accel_callbacks import DistributedType
        >>> DistributedType.NO == "NO"
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"
    TPU = "XLA"  # its old name, an alias, which scripts compare with
    # Never returned by this version, but scripts written for Accelerate compare with them.
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def of(cls, device_type: str, world_size: int) -> DistributedType:
        """Return the kind of a run without an engine that has one of its own.

        Args:
            device_type: of the devices that ranks compute on.
            world_size: number of processes.
        """
        if device_type == "xla":
            return cls.XLA
        if world_size == 1:
            return cls.NO
        return cls.MULTI_CPU if device_type == "cpu" else cls.MULTI_GPU
