"""The block of Megatron-LM in a config file, with the keys of Accelerate's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel_callbacks.launch.option import option

__all__ = ["MegatronConfig"]


@dataclass(frozen=True)
class MegatronConfig:
    """Megatron-LM.

    Example:
        >>> from accel_callbacks.launching.megatron import MegatronConfig
        >>> MegatronConfig().megatron_lm_tp_degree
        1
    """

    BLOCK: ClassVar[str] = "megatron_lm_config"

    megatron_lm_tp_degree: int = option(1, "tensor parallel", least=1)
    megatron_lm_pp_degree: int = option(1, "pipeline parallel", least=1)
    megatron_lm_num_micro_batches: int | None = option(None, "of a batch", least=1)
    megatron_lm_sequence_parallelism: bool = option(False, "shard sequences", valued=True)
    megatron_lm_recompute_activations: bool = option(False, "selectively", valued=True)
    megatron_lm_use_distributed_optimizer: bool = option(False, "shard its states", valued=True)
    megatron_lm_gradient_clipping: float = option(1.0, "largest norm; 0 for none", least=0)
    megatron_lm_recompute_granularity: str | None = option(
        None, "what is computed twice", choices=("full", "selective")
    )
    megatron_lm_recompute_method: str | None = option(
        None, "which layers are computed twice", choices=("uniform", "block")
    )
    megatron_lm_recompute_num_layers: int | None = option(None, "layers of a unit", least=1)
    megatron_lm_attention_backend: str | None = option(None, "such as flash")
    megatron_lm_expert_model_parallel_size: int | None = option(None, "experts", least=1)
    megatron_lm_expert_tensor_parallel_size: int | None = option(None, "in experts", least=1)
    megatron_lm_context_parallel_size: int | None = option(None, "context parallel", least=1)
    megatron_lm_attention_dropout: float | None = option(None, "in attention", least=0, most=1)
    megatron_lm_hidden_dropout: float | None = option(None, "in layers", least=0, most=1)
    megatron_lm_attention_softmax_in_fp32: bool = option(False, "in fp32", valued=True)
    megatron_lm_calculate_per_token_loss: bool = option(False, "mean over tokens", valued=True)
    megatron_lm_use_rotary_position_embeddings: bool = option(False, "rotary", valued=True)
    megatron_lm_use_custom_fsdp: bool = option(False, "its own FSDP", valued=True)
    megatron_lm_no_load_optim: bool = option(False, "leave states out at load", valued=True)
    megatron_lm_no_save_optim: bool = option(False, "leave states out at save", valued=True)
    megatron_lm_eod_mask_loss: bool = option(False, "no loss after the end", valued=True)
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = option(False, "overlap", valued=True)
    megatron_lm_optimizer_cpu_offload: bool = option(False, "states on the host", valued=True)
    megatron_lm_use_precision_aware_optimizer: bool = option(False, "own types", valued=True)
    megatron_lm_decoder_last_pipeline_num_layers: int | None = option(
        None, "layers of the last stage", least=1
    )
