"""Declare every setting of a launch once: the source of flags, file keys, questions and docs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

from accel_callbacks.config import PRECISIONS, OnConflict
from accel_callbacks.errors import nearest
from accel_callbacks.launch.option import (
    Option,
    SettingsError,
    described,
    option,
    options_of,
)
from accel_callbacks.launch.parallelism_settings import (
    DeepSpeedConfig,
    DynamoConfig,
    Fp8Config,
    FsdpConfig,
    MegatronConfig,
    MpirunConfig,
    ParallelismConfig,
)

__all__ = ["LaunchSettings", "all_options", "find"]

_KINDS = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA"),
    *("MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "FSDP", "DEEPSPEED", "MEGATRON_LM"),
)
_SHORT_KINDS = {
    "--multi_gpu": "MULTI_GPU",
    "--tpu": "XLA",
    "--use_fsdp": "FSDP",
    "--use_deepspeed": "DEEPSPEED",
    "--use_megatron_lm": "MEGATRON_LM",
}


# The groups are never instantiated; generating their methods would only cost import time.


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Processes:
    """Number of processes, and where they run."""

    compute_environment: str = option(
        "LOCAL_MACHINE",
        "where a run takes place; only LOCAL_MACHINE",
        choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
    )
    distributed_type: str | None = option(
        None,
        "kind of run; follows from the rest where it is not given",
        choices=_KINDS,
        renamed={"TPU": "XLA"},
        shorthands=_SHORT_KINDS,
        variable="ACCEL_DISTRIBUTED_TYPE",
        child=True,
    )
    num_processes: int | None = option(
        None,
        "processes on all machines together; default: one a GPU, or 1 without a GPU",
        least=1,
        most=1_000_000,
        unset=(-1,),
    )
    nproc_per_node: int | None = option(
        None, "processes on each machine, in place of num_processes", least=1, most=100_000
    )
    use_cpu: bool = option(
        False, "do not use GPUs", flags=("--cpu",), variable="ACCEL_CPU", child=True
    )
    gpu_ids: str | None = option(
        None, "which GPUs of this machine, such as 0,2; default: all", unset=("all",)
    )
    num_cpu_threads_per_process: int | None = option(
        None,
        "OMP_NUM_THREADS; default: the set one, or cores divided by processes here",
        least=1,
        most=100_000,
    )
    enable_cpu_affinity: bool = option(False, "bind each process to the cores near its GPU")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Machines:
    """Several machines, and the rendezvous of their processes."""

    num_machines: int = option(1, "machines that take part", least=1, most=1_000_000)
    nnodes: str | None = option(None, "the same, or least:most for a run that can shrink and grow")
    machine_rank: int = option(
        0, "which machine this is; 0 is the first", least=0, most=1_000_000, flags=("--node_rank",)
    )
    main_process_ip: str | None = option(
        None, "address of the first machine", flags=("--master_addr",)
    )
    main_process_port: int | None = option(
        None,
        "port on the first machine; default: a free one on one machine, 29500 on several",
        least=0,
        most=65535,
        flags=("--master_port",),
    )
    rdzv_backend: str | None = option(
        None,
        "backend of the rendezvous; default: static, or c10d where nnodes is a range",
        torchrun=True,
    )
    rdzv_endpoint: str | None = option(
        None, "HOST:PORT of the rendezvous; default: from the first machine", torchrun=True
    )
    rdzv_id: str | None = option(None, "name of the run among others", torchrun=True)
    rdzv_conf: str | None = option(None, "further key=value,... of the backend", torchrun=True)
    same_network: bool = option(False, "expect the machines in one network, for Accelerate's files")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Training:
    """Defaults of the Accelerator in the script."""

    mixed_precision: str = option(
        "no",
        "type to compute in",
        choices=PRECISIONS,
        variable="ACCEL_MIXED_PRECISION",
        child=True,
    )
    gradient_accumulation_steps: int = option(
        1,
        "micro-batches of one optimizer step",
        least=1,
        most=1_000_000,
        variable="ACCEL_GRADIENT_ACCUMULATION_STEPS",
        child=True,
    )
    debug: bool = option(
        False,
        "compare the operands on all ranks before each collective, and show which differ",
        variable="ACCEL_DEBUG",
        child=True,
    )
    on_conflict: str = option(
        "refuse",
        "what to do if a run that lives has the project's folder",
        choices=get_args(OnConflict),
        variable="ACCEL_ON_CONFLICT",
        child=True,
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Running:
    """Starting, monitoring and logging of processes."""

    max_restarts: int = option(
        0,
        "restart all processes after a failure, up to N times",
        least=0,
        most=10**6,
        torchrun=True,
    )
    monitor_interval: float = option(
        0.1, "seconds between two polls of the processes", least=0, most=10**6, torchrun=True
    )
    role: str | None = option(None, "name of the processes in messages", torchrun=True)
    log_dir: str | None = option(None, "folder of the files of tee and redirects", torchrun=True)
    tee: str | None = option(
        None,
        "screen and file: 1 stdout, 2 stderr, 3 both, or by local rank as in 0:1,1:3",
        flags=("-t",),
        torchrun=True,
    )
    redirects: str | None = option(None, "file only", flags=("-r",), torchrun=True)
    local_ranks_filter: str | None = option(
        None, "local ranks whose output is shown, such as 0,1", torchrun=True
    )
    local_addr: str | None = option(None, "address of this machine for the others", torchrun=True)
    start_method: str | None = option(
        None, "how Python makes processes", choices=("spawn", "fork", "forkserver"), torchrun=True
    )
    full_traceback: bool = option(
        False,
        "show all frames of an error, and the tracebacks of all processes",
        variable="ACCEL_FULL_TRACEBACK",
        child=True,
    )
    as_accelerate: bool = option(
        False,
        "let `import accelerate` in the script get this library",
        variable="ACCEL_AS_ACCELERATE",
        child=True,
    )
    numa_binding: str | None = option(
        None,
        "bind processes to cores",
        choices=("node", "socket", "exclusive", "core-complex"),
        torchrun=True,
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Tpu:
    """TPUs and pods of them."""

    main_training_function: str = option("main", "function that a launch on a TPU calls")
    downcast_bf16: bool = option(False, "treat float as bfloat16 on a TPU", lenient=True)
    tpu_name: str | None = option(None, "name of the TPU")
    tpu_zone: str | None = option(None, "zone of the TPU")
    tpu_use_cluster: bool = option(
        False,
        "start a pod of TPUs",
        lenient=True,
        flags=("--tpu_cluster",),
        shorthands={"--no_tpu_cluster": False},
    )
    tpu_use_sudo: bool = option(False, "run commands with sudo on the pod", lenient=True)
    tpu_vm: tuple[str, ...] = option((), "machines of the pod", flags=("--vm",))
    tpu_env: tuple[str, ...] = option((), "variables for the pod", flags=("--env",))
    commands: tuple[str, ...] = option((), "commands to run first on the pod")
    command_file: str | None = option(None, "file of commands to run first on the pod")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Blocks:
    """Nested blocks: the options of one feature each."""

    dynamo_config: DynamoConfig | None = field(
        default=None, metadata=described(DynamoConfig, "torch.compile")
    )
    fp8_config: Fp8Config | None = field(
        default=None, metadata=described(Fp8Config, "fp8 training")
    )
    fsdp_config: FsdpConfig | None = field(default=None, metadata=described(FsdpConfig, "FSDP"))
    parallelism_config: ParallelismConfig | None = field(
        default=None, metadata=described(ParallelismConfig, "sizes of the axes of parallelism")
    )
    deepspeed_config: DeepSpeedConfig | None = field(
        default=None, metadata=described(DeepSpeedConfig, "DeepSpeed")
    )
    megatron_lm_config: MegatronConfig | None = field(
        default=None, metadata=described(MegatronConfig, "Megatron-LM")
    )
    mpirun_config: MpirunConfig | None = field(
        default=None, metadata=described(MpirunConfig, "mpirun")
    )


@dataclass(frozen=True)
class LaunchSettings(Blocks, Tpu, Running, Training, Machines, Processes):
    """All settings of a launch; the base classes are its groups.

    A block is None if none of its options is given.

    Example:
        >>> from accel_callbacks.launch.settings import LaunchSettings
        >>> LaunchSettings(num_processes=2).mixed_precision
        'no'
    """


@cache
def all_options() -> tuple[Option, ...]:
    """Return all options; those of a block follow it.

    Example:
        >>> from accel_callbacks.launch.settings import all_options
        >>> [one.flag for one in all_options() if one.group == "Training"]
        ['--mixed_precision', '--gradient_accumulation_steps', '--debug', '--on_conflict']
    """
    found: list[Option] = []
    for one in options_of(LaunchSettings):
        found.append(one)
        found += options_of(one.model) if one.model is not None else ()
    return tuple(found)


def find(path: str) -> Option:
    """Return the option of a path, ``"num_processes"`` or ``"fsdp_config.fsdp_version"``.

    Raises:
        SettingsError: there is no such option; the text names the nearest one.

    Example:
        >>> from accel_callbacks.launch.settings import find
        >>> find("max_restarts").default
        0
    """
    known: dict[str, Any] = {one.path: one for one in all_options()}
    if path not in known:
        raise SettingsError(f"there is no setting {path!r}.{nearest(path, known)}")
    one: Option = known[path]
    return one
