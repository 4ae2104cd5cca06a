"""The public names of each module of Accelerate, which are made when they are asked for."""

from __future__ import annotations

__all__ = ["public_names"]

_NAMES = {
    "": """
        Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
        DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin
        GradScalerKwargs InitProcessGroupKwargs ParallelismConfig PartialState ProfileKwargs
        cpu_offload cpu_offload_with_hook debug_launcher disk_offload dispatch_model
        find_executable_batch_size infer_auto_device_map init_empty_weights init_on_device
        is_rich_available load_checkpoint_and_dispatch load_checkpoint_in_model notebook_launcher
        prepare_pippy skip_first_batches synchronize_rng_states
    """,
    "accelerator": """
        Accelerator
    """,
    "big_modeling": """
        attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model
        init_empty_weights init_on_device load_checkpoint_and_dispatch
    """,
    "checkpointing": """
        load_accelerator_state load_custom_state save_accelerator_state save_custom_state
    """,
    "data_loader": """
        BatchSamplerShard DataLoaderAdapter DataLoaderDispatcher DataLoaderShard
        DataLoaderStateMixin IterableDatasetShard SeedableRandomSampler SkipBatchSampler
        SkipDataLoader get_sampler prepare_data_loader skip_first_batches
    """,
    "hooks": """
        AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook
        add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks
        attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules
    """,
    "inference": """
        build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy
    """,
    "launchers": """
        debug_launcher notebook_launcher test_launch
    """,
    "local_sgd": """
        LocalSGD
    """,
    "logging": """
        MultiProcessAdapter get_logger
    """,
    "optimizer": """
        AcceleratedOptimizer move_to_device patch_optimizer_step
    """,
    "parallelism_config": """
        ParallelismConfig
    """,
    "scheduler": """
        AcceleratedScheduler
    """,
    "state": """
        AcceleratorState GradientState PartialState ThreadLocalSharedDict do_nothing is_initialized
    """,
    "tracking": """
        AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker LOGGER_TYPE_TO_CLASS
        MLflowTracker SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker filter_trackers
        get_available_trackers on_main_process register_tracker_class
    """,
    "utils.ao": """
        convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers
        find_first_last_linear_layers has_ao_layers
    """,
    "utils.bnb": """
        has_4bit_bnb_layers load_and_quantize_model
    """,
    "utils.constants": """
        BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION
        BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE
        FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_PYTORCH_VERSION
        FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION
        MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME
        SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME
        SCHEDULER_NAME STR_OPERATION_TO_FUNC SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
        TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES TORCH_LAUNCH_PARAMS WEIGHTS_INDEX_NAME
        WEIGHTS_NAME WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
    """,
    "utils.dataclasses": """
        AORecipeKwargs AutocastKwargs BaseEnum BnbQuantizationConfig ComputeEnvironment CustomDtype
        DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
        DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs DistributedType DynamoBackend
        EnumWithContains FP8BackendType FP8RecipeKwargs FullyShardedDataParallelPlugin
        GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType
        MSAMPRecipeKwargs MegatronLMPlugin PrecisionType ProfileKwargs ProjectConfiguration RNGType
        SageMakerDistributedType TERecipeKwargs TensorInformation TorchContextParallelConfig
        TorchDynamoPlugin TorchTensorParallelConfig TorchTensorParallelPlugin
        add_model_config_to_megatron_parser get_module_class_from_name
    """,
    "utils.deepspeed": """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim
        DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin
    """,
    "utils.environment": """
        CPUInformation are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support
        clear_environment convert_dict_to_env_variables get_cpu_distributed_information
        get_current_device_type get_driver_version get_gpu_info get_int_from_env
        override_numa_affinity parse_choice_from_env parse_flag_from_env patch_environment
        purge_accelerate_environment set_numa_affinity str_to_bool
    """,
    "utils.fsdp_utils": """
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied
        fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict
        fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters
        get_fsdp2_grad_scaler get_parameters_from_modules load_fsdp_model load_fsdp_optimizer
        merge_fsdp_weights save_fsdp_model save_fsdp_optimizer
    """,
    "utils.imports": """
        deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available
        is_amdsmi_available is_bf16_available is_bitsandbytes_multi_backend_available
        is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available
        is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available
        is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available
        is_import_timer_available is_lomo_available is_matplotlib_available is_megatron_lm_available
        is_mlflow_available is_mlu_available is_mps_available is_msamp_available is_musa_available
        is_neuron_available is_npu_available is_numpy_available is_pandas_available
        is_peft_available is_pippy_available is_pynvml_available is_pytest_available
        is_rich_available is_rocm_available is_sagemaker_available is_schedulefree_available
        is_sdaa_available is_swanlab_available is_tensorboard_available is_timm_available
        is_torch_distributed_available is_torch_xla_available is_torchao_available
        is_torchdata_available is_torchdata_stateful_dataloader_available is_torchvision_available
        is_tqdm_available is_trackio_available is_transformer_engine_available
        is_transformer_engine_mxfp8_available is_transformers_available is_triton_available
        is_wandb_available is_weights_only_available is_xccl_available is_xpu_available
        torchao_required
    """,
    "utils.launch": """
        PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env
        prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu
    """,
    "utils.megatron_lm": """
        AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader
        MegatronLMDummyScheduler T5TrainStep avg_losses_across_data_parallel_group
        prepare_data_loader
    """,
    "utils.memory": """
        clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size
    """,
    "utils.modeling": """
        WEIGHTS_INDEX_NAME align_module_device calculate_maximum_sizes check_device_map
        check_tied_parameters_in_config check_tied_parameters_on_same_device clean_device_map
        compute_module_sizes compute_module_total_buffer_size convert_file_size_to_int
        dtype_byte_size fallback_allocate find_tied_parameters get_balanced_memory get_grad_scaler
        get_max_layer_size get_max_memory get_mixed_precision_context_manager get_module_leaves
        get_module_size_with_ties get_non_persistent_buffers get_state_dict_from_offload
        get_state_dict_offloaded_model has_offloaded_params id_tensor_storage infer_auto_device_map
        is_peft_model load_checkpoint_in_model load_offloaded_weights load_state_dict
        named_module_tensors retie_parameters set_module_tensor_to_device
    """,
    "utils.offload": """
        OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
        offload_state_dict offload_weight save_offload_index
    """,
    "utils.operations": """
        CannotPadNestedTensorWarning DistributedOperationException GatheredParameters broadcast
        broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32
        copy_tensor_to_devices find_batch_size find_device gather gather_object get_data_structure
        get_shape honor_type ignorant_find_batch_size initialize_tensors is_namedtuple
        is_tensor_information is_torch_tensor listify pad_across_processes pad_input_tensors
        recursively_apply reduce send_to_device slice_tensors
    """,
    "utils.other": """
        check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed
        compile_regions_fsdp2 convert_bytes extract_model_from_parallel get_free_port
        get_module_children_bottom_up get_pretty_name has_compiled_regions has_repeated_blocks
        is_compiled_module is_port_in_use load merge_dicts model_has_dtensor recursive_getattr save
        wait_for_everyone
    """,
    "utils.random": """
        set_seed synchronize_rng_state synchronize_rng_states
    """,
    "utils.torch_xla": """
        install_xla
    """,
    "utils.tqdm": """
        tqdm
    """,
    "utils.transformer_engine": """
        apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers
    """,
    "utils.versions": """
        compare_versions is_torch_version
    """,
}

#: Names of modules of ``utils`` that ``utils`` itself has not.
_INNER = """
    BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION
    BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION BaseEnum
    CPUInformation CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION
    DistributedOperationException ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION
    EnumWithContains FP8BackendType FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE
    FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_PYTORCH_VERSION
    FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE STR_OPERATION_TO_FUNC
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DYNAMO_MODES clean_device_map
    clear_device_cache compute_module_total_buffer_size fallback_allocate filter_linear_layers
    find_first_last_linear_layers fsdp2_prepare_auto_wrap_policy get_driver_version
    get_free_port get_module_class_from_name get_module_leaves get_module_size_with_ties
    get_non_persistent_buffers get_parameters_from_modules get_shape get_state_dict_from_offload
    get_state_dict_offloaded_model has_repeated_blocks is_numpy_available
    is_torch_distributed_available is_tqdm_available override_numa_affinity prepare_data_loader
    should_reduce_batch_size
"""
#: Names of ``utils`` that are in none of its modules.
_OUTER = ("ParallelismConfig", "get_model_tp_size", "write_basic_config")


def public_names(module: str) -> list[str]:
    """Return the names that ``from module import *`` gives, for a module of Accelerate.

    Modules of commands give none.
    """
    name = module.removeprefix("accelerate").removeprefix(".")
    if name != "utils":
        return _NAMES.get(name, "").split()
    parts = (names.split() for part, names in _NAMES.items() if part.startswith("utils."))
    return sorted({name for names in parts for name in names} - {*_INNER.split()} | {*_OUTER})
