"""Blocks of settings: torch.compile, fp8, FSDP, the mesh, DeepSpeed and Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel_callbacks.launch.option import option

__all__ = [
    "DeepSpeedConfig",
    "DynamoConfig",
    "Fp8Config",
    "FsdpConfig",
    "MegatronConfig",
    "MpirunConfig",
    "ParallelismConfig",
]

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class DynamoConfig:
    """torch.compile of prepared models.

    Example:
        >>> from accel_callbacks.launch.parallelism_settings import DynamoConfig
        >>> DynamoConfig(dynamo_backend="INDUCTOR").dynamo_mode
        'default'
    """

    BLOCK: ClassVar[str] = "dynamo_config"

    dynamo_backend: str = option(
        "no", "backend of torch.compile", variable="ACCEL_DYNAMO_BACKEND", child=True
    )
    dynamo_mode: str = option(
        "default",
        "mode of torch.compile",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        variable="ACCEL_DYNAMO_MODE",
        child=True,
    )
    dynamo_use_fullgraph: bool = option(
        False,
        "compile one graph or raise an error",
        variable="ACCEL_DYNAMO_USE_FULLGRAPH",
        child=True,
    )
    dynamo_use_dynamic: bool | None = option(
        None, "compile for all shapes", variable="ACCEL_DYNAMO_USE_DYNAMIC", child=True
    )
    dynamo_use_regional_compilation: bool = option(
        False,
        "compile the repeated blocks of a model separately",
        variable="ACCEL_DYNAMO_USE_REGIONAL_COMPILATION",
        child=True,
    )


@dataclass(frozen=True)
class Fp8Config:
    """Options of ``mixed_precision: fp8``.

    Example:
        >>> from accel_callbacks.launch.parallelism_settings import Fp8Config
        >>> Fp8Config(backend="AO").pad_inner_dim is None
        True
    """

    BLOCK: ClassVar[str] = "fp8_config"
    PREFIX: ClassVar[str] = "fp8_"

    backend: str = option(
        "AO",
        "library that computes in fp8",
        choices=("AO", "TE", "MSAMP"),
        renamed={"MS-AMP": "MSAMP"},
    )
    pad_inner_dim: bool | None = option(
        None,
        "pad inputs to the sizes of fp8 (AO)",
        valued=True,
        variable="ACCEL_FP8_PAD_INNER_DIM",
        child=True,
    )
    enable_fsdp_float8_all_gather: bool | None = option(
        None,
        "gather weights in fp8 (AO, FSDP)",
        valued=True,
        variable="ACCEL_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
        child=True,
    )
    use_autocast_during_eval: bool = option(False, "compute in fp8 in evaluation too (TE)")
    margin: int = option(0, "margin of the scale (TE)")
    interval: int = option(1, "steps between two scales (TE)", least=1)
    fp8_format: str = option(
        "HYBRID", "number format (TE)", choices=("HYBRID", "E4M3", "E5M2"), flag="--fp8_format"
    )
    amax_history_length: int = option(
        1024, "length of the history (TE)", least=1, flags=("--fp8_amax_history_len",)
    )
    amax_compute_algorithm: str = option(
        "most_recent",
        "what is taken of the history (TE)",
        choices=("max", "most_recent"),
        flags=("--fp8_amax_compute_algo",),
    )
    override_linear_precision: tuple[str, ...] = option(
        (), "which of fprop, dgrad, wgrad have higher precision (TE)"
    )
    optimization_level: str = option(
        "O2", "level of optimization (MSAMP)", choices=("O1", "O2"), flags=("--fp8_opt_level",)
    )


@dataclass(frozen=True)
class FsdpConfig:
    """Fully sharded data parallelism: FSDP2. Options of FSDP1 are read: see `fsdp2`.

    Example:
        >>> from accel_callbacks.launch.parallelism_settings import FsdpConfig
        >>> FsdpConfig().fsdp_version
        2
    """

    BLOCK: ClassVar[str] = "fsdp_config"

    fsdp_version: int = option(2, "version of FSDP; 1 is trained as 2", least=1, most=2)
    fsdp_sharding_strategy: str = option(
        "FULL_SHARD",
        "what is sharded, in the words of version 1",
        choices=_SHARDING,
        renamed=dict(zip("12345", _SHARDING, strict=True)),
        variable="ACCEL_FSDP_SHARDING_STRATEGY",
        child=True,
    )
    fsdp_reshard_after_forward: str = option(
        "true",
        "whether weights are freed after forward, or the number of processes that then share them",
        choices=("true", "false", *_SHARDING),
        numbers=True,
        variable="ACCEL_FSDP_RESHARD_AFTER_FORWARD",
        child=True,
    )
    fsdp_offload_params: bool = option(
        False,
        "keep weights in host memory",
        valued=True,
        variable="ACCEL_FSDP_OFFLOAD_PARAMS",
        child=True,
    )
    fsdp_auto_wrap_policy: str | None = option(
        None,
        "which modules are gathered as a unit; default: the blocks that a model repeats",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        variable="ACCEL_FSDP_AUTO_WRAP_POLICY",
        child=True,
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = option(
        None,
        "classes that are units, such as BertLayer,T5Block (TRANSFORMER_BASED_WRAP)",
        variable="ACCEL_FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP",
        child=True,
    )
    fsdp_min_num_params: int = option(
        100_000_000,
        "fewest weights of a unit (SIZE_BASED_WRAP)",
        least=0,
        variable="ACCEL_FSDP_MIN_NUM_PARAMS",
        child=True,
    )
    fsdp_ignored_modules: str | None = option(
        None,
        "names of modules that stay whole, as a regular expression",
        variable="ACCEL_FSDP_IGNORED_MODULES",
        child=True,
    )
    fsdp_backward_prefetch: str | None = option(
        None,
        "what is gathered early in backward (version 1)",
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    )
    fsdp_forward_prefetch: bool = option(
        False,
        "gather the next unit early in forward",
        valued=True,
        variable="ACCEL_FSDP_FORWARD_PREFETCH",
        child=True,
    )
    fsdp_state_dict_type: str | None = option(
        None,
        "layout of checkpoints, which has one format here",
        choices=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    )
    fsdp_use_orig_params: bool = option(
        True, "keep the weights' own names (version 1)", valued=True
    )
    fsdp_cpu_ram_efficient_loading: bool = option(
        True,
        "load weights of transformers on one process only",
        valued=True,
        variable="ACCEL_FSDP_CPU_RAM_EFFICIENT_LOADING",
        child=True,
    )
    fsdp_sync_module_states: bool = option(
        True,
        "take the weights of the first process on all",
        valued=True,
        variable="ACCEL_FSDP_SYNC_MODULE_STATES",
        child=True,
    )
    fsdp_no_sync: bool = option(
        False,
        "reduce gradients at the end of a gradient window only, which takes more memory",
        valued=True,
        variable="ACCEL_FSDP_NO_SYNC",
        child=True,
    )
    fsdp_activation_checkpointing: str = option(
        "false",
        "compute activations twice, to save memory; N: of every N-th block",
        choices=("true", "false", "selective"),
        numbers=True,
        variable="ACCEL_FSDP_ACTIVATION_CHECKPOINTING",
        child=True,
    )
    fsdp_activation_checkpointing_offload: bool = option(
        False,
        "keep in host memory what these blocks are computed from",
        valued=True,
        variable="ACCEL_FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        child=True,
    )


@dataclass(frozen=True)
class ParallelismConfig:
    """Sizes of the axes of parallelism.

    Example:
        >>> from accel_callbacks.launch.parallelism_settings import ParallelismConfig
        >>> ParallelismConfig().parallelism_config_tp_size
        1
    """

    BLOCK: ClassVar[str] = "parallelism_config"

    parallelism_config_dp_replicate_size: int = option(
        1,
        "replicas of the model, or of its shards",
        least=1,
        variable="ACCEL_PARALLELISM_DP_REPLICATE_SIZE",
        child=True,
    )
    parallelism_config_dp_shard_size: int = option(
        1,
        "shards of each replica (FSDP)",
        least=1,
        variable="ACCEL_PARALLELISM_DP_SHARD_SIZE",
        child=True,
    )
    parallelism_config_tp_size: int = option(
        1,
        "processes that share each layer (tensor parallelism), by a plan",
        least=1,
        variable="ACCEL_PARALLELISM_TP_SIZE",
        child=True,
    )
    parallelism_config_pp_size: int = option(
        1,
        "processes that each have some layers (a pipeline), for prepare_pipeline",
        least=1,
        variable="ACCEL_PARALLELISM_PP_SIZE",
        child=True,
    )
    parallelism_config_cp_size: int = option(
        1,
        "processes that share each sequence (context parallelism)",
        least=1,
        variable="ACCEL_PARALLELISM_CP_SIZE",
        child=True,
    )
    parallelism_config_cp_backend: str = option(
        "torch", "backend of context parallelism", choices=("torch",)
    )
    parallelism_config_cp_comm_strategy: str = option(
        "allgather",
        "how keys and values travel between the processes that share a sequence",
        choices=("allgather", "alltoall"),
        variable="ACCEL_PARALLELISM_CP_COMM_STRATEGY",
        child=True,
    )
    parallelism_config_sp_size: int = option(
        1,
        "processes of sequence parallelism",
        least=1,
        variable="ACCEL_PARALLELISM_SP_SIZE",
        child=True,
    )
    parallelism_config_sp_backend: str = option(
        "deepspeed", "backend of sequence parallelism", choices=("deepspeed",)
    )
    parallelism_config_sp_seq_length: int | None = option(None, "length of a sequence", least=1)
    parallelism_config_sp_seq_length_is_variable: bool = option(
        True, "expect sequences of differing length", valued=True
    )
    parallelism_config_sp_attn_implementation: str = option(
        "sdpa", "attention of sequence parallelism"
    )


@dataclass(frozen=True)
class DeepSpeedConfig:
    """DeepSpeed.

    Example:
        >>> from accel_callbacks.launch.parallelism_settings import DeepSpeedConfig
        >>> DeepSpeedConfig().zero_stage
        2
    """

    BLOCK: ClassVar[str] = "deepspeed_config"

    deepspeed_config_file: str | None = option(
        None, "DeepSpeed's own JSON file", variable="ACCEL_DEEPSPEED_CONFIG_FILE", child=True
    )
    zero_stage: int = option(
        2, "stage of ZeRO", least=0, most=3, variable="ACCEL_DEEPSPEED_ZERO_STAGE", child=True
    )
    offload_optimizer_device: str = option(
        "none",
        "where the optimizer's states are",
        choices=_DEVICES,
        variable="ACCEL_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        child=True,
    )
    offload_param_device: str = option(
        "none",
        "where the weights are",
        choices=_DEVICES,
        variable="ACCEL_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        child=True,
    )
    offload_optimizer_nvme_path: str | None = option(
        None,
        "folder for the optimizer's states",
        variable="ACCEL_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        child=True,
    )
    offload_param_nvme_path: str | None = option(
        None,
        "folder for the weights",
        variable="ACCEL_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        child=True,
    )
    gradient_accumulation_steps: str | None = option(
        None,
        "micro-batches of a step, or auto",
        flag="",
        variable="ACCEL_DEEPSPEED_GRADIENT_ACCUMULATION_STEPS",
        child=True,
    )
    gradient_clipping: str | None = option(
        None,
        "largest norm of the gradients, or auto",
        variable="ACCEL_DEEPSPEED_GRADIENT_CLIPPING",
        child=True,
    )
    zero3_init_flag: bool = option(
        False,
        "shard weights while a model is built",
        valued=True,
        variable="ACCEL_DEEPSPEED_ZERO3_INIT",
        child=True,
    )
    zero3_save_16bit_model: bool = option(
        False,
        "gather weights to save them",
        valued=True,
        variable="ACCEL_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        child=True,
    )
    deepspeed_hostfile: str | None = option(None, "file that lists the hosts")
    deepspeed_exclusion_filter: str | None = option(None, "hosts and devices left out")
    deepspeed_inclusion_filter: str | None = option(None, "hosts and devices taken")
    deepspeed_multinode_launcher: str | None = option(
        None,
        "launcher for several machines",
        choices=("pdsh", "standard", "openmpi", "mvapich", "mpich", "slurm", "nossh"),
    )
    deepspeed_moe_layer_cls_names: str | None = option(
        None,
        "classes of expert layers",
        variable="ACCEL_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        child=True,
    )


@dataclass(frozen=True)
class MegatronConfig:
    """Megatron-LM.

    Example:
        >>> from accel_callbacks.launch.parallelism_settings import MegatronConfig
        >>> MegatronConfig().megatron_lm_tp_degree
        1
    """

    BLOCK: ClassVar[str] = "megatron_lm_config"

    megatron_lm_tp_degree: int = option(
        1,
        "processes of tensor parallelism",
        least=1,
        variable="ACCEL_MEGATRON_LM_TP_DEGREE",
        child=True,
    )
    megatron_lm_pp_degree: int = option(
        1,
        "processes of a pipeline",
        least=1,
        variable="ACCEL_MEGATRON_LM_PP_DEGREE",
        child=True,
    )
    megatron_lm_num_micro_batches: int | None = option(
        None,
        "micro-batches of a batch",
        least=1,
        variable="ACCEL_MEGATRON_LM_NUM_MICRO_BATCHES",
        child=True,
    )
    megatron_lm_sequence_parallelism: bool = option(
        False,
        "shard sequences",
        valued=True,
        variable="ACCEL_MEGATRON_LM_SEQUENCE_PARALLELISM",
        child=True,
    )
    megatron_lm_recompute_activations: bool = option(
        False,
        "compute selected activations twice",
        valued=True,
        variable="ACCEL_MEGATRON_LM_RECOMPUTE_ACTIVATIONS",
        child=True,
    )
    megatron_lm_use_distributed_optimizer: bool = option(
        False,
        "shard the optimizer's states",
        valued=True,
        variable="ACCEL_MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
        child=True,
    )
    megatron_lm_gradient_clipping: float = option(
        1.0,
        "largest norm of the gradients; 0 for none",
        least=0,
        variable="ACCEL_MEGATRON_LM_GRADIENT_CLIPPING",
        child=True,
    )
    megatron_lm_recompute_granularity: str | None = option(
        None,
        "what is computed twice",
        choices=("full", "selective"),
        variable="ACCEL_MEGATRON_LM_RECOMPUTE_GRANULARITY",
        child=True,
    )
    megatron_lm_recompute_method: str | None = option(
        None,
        "which layers are computed twice",
        choices=("uniform", "block"),
        variable="ACCEL_MEGATRON_LM_RECOMPUTE_METHOD",
        child=True,
    )
    megatron_lm_recompute_num_layers: int | None = option(
        None,
        "layers of a unit that is computed twice",
        least=1,
        variable="ACCEL_MEGATRON_LM_RECOMPUTE_NUM_LAYERS",
        child=True,
    )
    megatron_lm_attention_backend: str | None = option(None, "backend of attention, such as flash")
    megatron_lm_expert_model_parallel_size: int | None = option(
        None, "processes that share the experts", least=1
    )
    megatron_lm_expert_tensor_parallel_size: int | None = option(
        None, "tensor parallelism in experts", least=1
    )
    megatron_lm_context_parallel_size: int | None = option(
        None,
        "processes of context parallelism",
        least=1,
        variable="ACCEL_MEGATRON_LM_CONTEXT_PARALLEL_SIZE",
        child=True,
    )
    megatron_lm_attention_dropout: float | None = option(
        None, "dropout in attention", least=0, most=1
    )
    megatron_lm_hidden_dropout: float | None = option(None, "dropout in layers", least=0, most=1)
    megatron_lm_attention_softmax_in_fp32: bool = option(
        False, "compute the softmax of attention in fp32", valued=True
    )
    megatron_lm_calculate_per_token_loss: bool = option(
        False, "take the mean loss over tokens", valued=True
    )
    megatron_lm_use_rotary_position_embeddings: bool = option(
        False, "use rotary position embeddings", valued=True
    )
    megatron_lm_use_custom_fsdp: bool = option(
        False,
        "shard with Megatron-LM's own FSDP",
        valued=True,
        variable="ACCEL_MEGATRON_LM_USE_CUSTOM_FSDP",
        child=True,
    )
    megatron_lm_no_load_optim: bool = option(False, "load no states of the optimizer", valued=True)
    megatron_lm_no_save_optim: bool = option(False, "save no states of the optimizer", valued=True)
    megatron_lm_eod_mask_loss: bool = option(
        False, "mask the loss at the end of a document", valued=True
    )
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = option(
        False, "overlap the copies of an optimizer on the host", valued=True
    )
    megatron_lm_optimizer_cpu_offload: bool = option(
        False,
        "keep the optimizer's states on the host",
        valued=True,
        variable="ACCEL_MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD",
        child=True,
    )
    megatron_lm_use_precision_aware_optimizer: bool = option(
        False, "choose the types of the optimizer's states", valued=True
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = option(
        None, "layers of the last stage of the pipeline", least=1
    )


@dataclass(frozen=True)
class MpirunConfig:
    """Start with ``mpirun``.

    Example:
        >>> from accel_callbacks.launch.parallelism_settings import MpirunConfig
        >>> MpirunConfig().mpirun_hostfile is None
        True
    """

    BLOCK: ClassVar[str] = "mpirun_config"

    mpirun_hostfile: str | None = option(
        None, "file that lists the hosts, for mpirun", lenient=False
    )
    mpirun_ccl: str | None = option(None, "workers of oneCCL", flag="")
