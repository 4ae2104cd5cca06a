"""Options of the engines behind single axes of a mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from accel_callbacks.plugins.base import KwargsHandler
from accel_callbacks.plugins.option import Block, launched

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]

#: The block of the sizes of a mesh, and of the options of its axes.
MESH_BLOCK = Block(
    "parallelism_config",
    "sizes of the axes of parallelism",
    prefix="parallelism_config_",
    variables="ACCEL_PARALLELISM_",
    valued=True,
)
_SCRIPT_GIVES = "a script gives it, as ParallelismConfig(sp_handler=...)"
_ROTATIONS = ("allgather", "alltoall")
_PLANS = ("proposed", "proposed_sequence")
_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass(frozen=True)
class TorchTensorParallelConfig(KwargsHandler):
    """Options of tensor parallelism.

    Args:
        enable_async_tp: overlap communication with computation; off by default.
        plan: which modules are cut, and how: patterns of their names, with ``*`` for one part, to
            ``"colwise"``, ``"rowwise"``, ``"colwise_gather_output"``, ``"embedding_rowwise"``,
            ``"sequence_parallel"``, ``"replicated"`` or a ``ParallelStyle`` of torch; that of the
            model if None. ``"proposed"``: that of the model, else what
            :meth:`Accelerator.propose_tp_plan` gives. ``"proposed_sequence"``: what it gives with
            ``sequence_parallel=True``.

    Raises:
        ValueError: another word in place of a plan.

    Example:
        >>> from accel_callbacks import ParallelismConfig, TorchTensorParallelConfig
        >>> config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig())
        >>> config.tp_handler.enable_async_tp
        False
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.plan, str) and self.plan not in _PLANS:
            raise ValueError(f"plan={self.plan!r} is unknown; use a plan, or one of {_PLANS}.")

    def to_plain(self) -> dict[str, Any]:
        """Return the options as plain values; a ``ParallelStyle`` of torch by its class."""
        if not self.plan or isinstance(self.plan, str):
            return {"enable_async_tp": self.enable_async_tp, "plan": self.plan}
        plan = {
            name: style if isinstance(style, str) else type(style).__name__
            for name, style in self.plan.items()
        }
        return {"enable_async_tp": self.enable_async_tp, "plan": plan}


@dataclass(frozen=True)
class TorchTensorParallelPlugin(KwargsHandler):
    """Tensor parallelism by the plan that a model brings along, as scripts for Accelerate ask it.

    ``Accelerator(torch_tp_plugin=...)`` is ``parallelism_config=ParallelismConfig(tp_size=...)``,
    which has more options.

    Args:
        tp_size: ranks that share each layer, 1 by default.

    Example:
        >>> from accel_callbacks import TorchTensorParallelPlugin
        >>> TorchTensorParallelPlugin(tp_size=2).tp_size
        2
    """

    tp_size: int = 1


@dataclass(frozen=True)
class TorchContextParallelConfig(KwargsHandler):
    """Options of context parallelism.

    Args:
        cp_comm_strategy: how keys and values travel: ``"allgather"`` or ``"alltoall"``; what
            ``accel launch`` was told if None, else ``"allgather"``.
        load_balance: give each rank a piece of the start and one of the end of a sequence, so that
            causal attention takes all of them equally long; on by default. Attention that is not
            causal needs it off.

    Raises:
        ValueError: another strategy.

    Example:
        >>> from accel_callbacks import TorchContextParallelConfig
        >>> TorchContextParallelConfig().cp_comm_strategy
        'allgather'
    """

    block: ClassVar = MESH_BLOCK

    cp_comm_strategy: str | None = launched(
        _ROTATIONS[0],
        "how keys and values travel between the processes that share a sequence",
        choices=_ROTATIONS,
    )
    load_balance: bool = True

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            launched = os.environ.get("ACCEL_PARALLELISM_CP_COMM_STRATEGY", _ROTATIONS[0])
            object.__setattr__(self, "cp_comm_strategy", launched)
        if self.cp_comm_strategy not in _ROTATIONS:
            raise ValueError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}; use one of {_ROTATIONS}."
            )

    def to_plain(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class DeepSpeedSequenceParallelConfig(KwargsHandler):
    """Options of sequence parallelism.

    Args:
        sp_seq_length: length of all sequences, if it does not vary.
        sp_seq_length_is_variable: batches differ in length; on by default.
        sp_attn_implementation: ``"flash_attention_2"``, ``"flash_attention_3"``, ``"sdpa"`` or the
            name of a flash attention kernel on the hub (``"<user>/<...flash-attn...>"``); the
            model's own if None.

    Raises:
        ValueError: an unknown attention, or a fixed length that is not given.

    Example:
        >>> from accel_callbacks import DeepSpeedSequenceParallelConfig
        >>> DeepSpeedSequenceParallelConfig().sp_seq_length_is_variable
        True
    """

    block: ClassVar = MESH_BLOCK

    sp_seq_length: int | None = launched(
        None, "length of a sequence", least=1, passed=False, idle=_SCRIPT_GIVES
    )
    sp_seq_length_is_variable: bool | None = launched(
        True, "expect sequences of differing length", passed=False, idle=_SCRIPT_GIVES
    )
    sp_attn_implementation: str | None = launched(
        "sdpa", "attention of sequence parallelism", passed=False, idle=_SCRIPT_GIVES
    )

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            object.__setattr__(self, "sp_seq_length_is_variable", True)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ValueError(
                "sp_seq_length_is_variable=False needs the length: give sp_seq_length too."
            )
        attention = self.sp_attn_implementation
        if attention is None or attention in _ATTENTION:
            return
        if "/" not in attention or "flash-attn" not in attention:
            raise ValueError(
                f"sp_attn_implementation={attention!r} cannot divide sequences; use one of "
                f"{_ATTENTION} or a flash attention kernel of the hub."
            )

    def to_plain(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return asdict(self)
