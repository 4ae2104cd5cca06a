"""The settings of a launch: those of its own, of the Accelerator, and blocks of plugins'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from accel_callbacks import plugins
from accel_callbacks.errors import nearest
from accel_callbacks.options import AcceleratorConfig
from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin
from accel_callbacks.plugins.option import Block, Option, SettingsError, option, options_of
from accel_callbacks.plugins.parallelism_handlers import DeepSpeedSequenceParallelConfig
from accel_callbacks.plugins.precision import AORecipeKwargs

__all__ = ["LaunchSettings", "all_options", "find"]

_ONLY_ON_A_POD = "only for a pod of TPUs"
_ON_HOSTS = (
    "hosts are not started from here: remove it, and start `accel launch` on each machine, with "
    "--num_machines, or under SLURM"
)
_OTHER_BACKENDS = "only for backends that are not in this version"


def _of_accelerator(name: str) -> Any:
    """Declare a setting as the Accelerator's option is declared."""
    declared = AcceleratorConfig.__dataclass_fields__[name]
    return field(default=declared.default, metadata=declared.metadata)


def _block(*owners: type[Any]) -> Any:
    """Declare a nested block, of the options that these classes declare."""
    return option(None, owners[0].block.title, kind="block", owners=owners)


def _plugin(group: str, *owners: type[Any]) -> Any:
    """Declare the block of a group of plugins, and of classes that only launches know."""
    return _block(*(getattr(plugins, name) for name in plugins.LAUNCHED[group].owners), *owners)


# The groups are never instantiated; generating their methods would only cost import time.


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Processes:
    """Number of processes, and where they run."""

    compute_environment: str = option(
        "LOCAL_MACHINE",
        "where a run takes place; only LOCAL_MACHINE",
        choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
        idle="a launch runs on this machine and those it connects to",
    )
    distributed_type: str | None = _of_accelerator("distributed_type")
    num_processes: int | None = option(
        None,
        "processes on all machines together; default: one a GPU, or 1 without a GPU",
        least=1,
        most=1_000_000,
        unset=(-1,),
        question="How many processes on this machine?",
    )
    nproc_per_node: int | None = option(
        None, "processes on each machine, in place of num_processes", least=1, most=100_000
    )
    use_cpu: bool = _of_accelerator("cpu")
    gpu_ids: str | None = option(
        None,
        "which GPUs of this machine, such as 0,2; default: all",
        unset=("all",),
        question="Which GPUs, such as 0,2, if not the first ones?",
    )
    num_cpu_threads_per_process: int | None = option(
        None,
        "OMP_NUM_THREADS; default: the set one, or cores divided by processes here",
        least=1,
        most=100_000,
    )
    enable_cpu_affinity: bool = option(
        False,
        "bind each process to the cores near its GPU",
        idle="numa_binding binds processes to cores",
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Machines:
    """Several machines, and the rendezvous of their processes."""

    num_machines: int = option(
        1,
        "machines that take part",
        least=1,
        most=1_000_000,
        question="How many machines take part?",
    )
    nnodes: str | None = option(None, "the same, or least:most for a run that can shrink and grow")
    machine_rank: int = option(
        0,
        "which machine this is; 0 is the first",
        least=0,
        most=1_000_000,
        flags=("--node_rank",),
        question="Which of them is this, from 0 on?",
    )
    main_process_ip: str | None = option(
        None,
        "address of the first machine",
        flags=("--master_addr",),
        question="Address of machine 0, seen from the others?",
    )
    main_process_port: int | None = option(
        None,
        "port on the first machine; default: a free one on one machine, 29500 on several",
        least=0,
        most=65535,
        flags=("--master_port",),
        question="A free port on it?",
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
    same_network: bool = option(
        False,
        "expect the machines in one network, for Accelerate's files",
        idle="machines connect to main_process_ip in either case",
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Training:
    """Defaults of the Accelerator in the script."""

    mixed_precision: str = _of_accelerator("mixed_precision")
    gradient_accumulation_steps: int = _of_accelerator("gradient_accumulation_steps")
    debug: bool = _of_accelerator("debug")
    on_conflict: str = _of_accelerator("on_conflict")
    journal: bool = _of_accelerator("journal")


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
    max_preemptions: int = option(
        100,
        "restarts after a SIGTERM to a process, or its exit code 75, that max_restarts does not "
        "count",
        least=0,
        most=10**6,
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
    )
    as_accelerate: bool = option(
        False,
        "let `import accelerate` in the script get this library",
        variable="ACCEL_AS_ACCELERATE",
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
    tpu_name: str | None = option(None, "name of the TPU", idle=_ONLY_ON_A_POD)
    tpu_zone: str | None = option(None, "zone of the TPU", idle=_ONLY_ON_A_POD)
    tpu_use_cluster: bool = option(
        False,
        "start a pod of TPUs",
        lenient=True,
        flags=("--tpu_cluster",),
        shorthands={"--no_tpu_cluster": False},
    )
    tpu_use_sudo: bool = option(
        False, "run commands with sudo on the pod", lenient=True, idle=_ONLY_ON_A_POD
    )
    tpu_vm: tuple[str, ...] = option(
        (), "machines of the pod", flags=("--vm",), idle=_ONLY_ON_A_POD
    )
    tpu_env: tuple[str, ...] = option(
        (), "variables for the pod", flags=("--env",), idle=_ONLY_ON_A_POD
    )
    commands: tuple[str, ...] = option((), "commands to run first on the pod", idle=_ONLY_ON_A_POD)
    command_file: str | None = option(
        None, "file of commands to run first on the pod", idle=_ONLY_ON_A_POD
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class OtherFp8:
    """Options of fp8 of backends that are not in this version."""

    block: ClassVar = AORecipeKwargs.block

    backend: str = option(
        "AO",
        "library that computes in fp8",
        choices=("AO", "TE", "MSAMP"),
        renamed={"MS-AMP": "MSAMP"},
    )
    use_autocast_during_eval: bool = option(
        False, "compute in fp8 in evaluation too (TE)", idle=_OTHER_BACKENDS
    )
    margin: int = option(0, "margin of the scale (TE)", idle=_OTHER_BACKENDS)
    interval: int = option(1, "steps between two scales (TE)", least=1, idle=_OTHER_BACKENDS)
    fp8_format: str = option(
        "HYBRID",
        "number format (TE)",
        choices=("HYBRID", "E4M3", "E5M2"),
        flag="--fp8_format",
        idle=_OTHER_BACKENDS,
    )
    amax_history_length: int = option(
        1024,
        "length of the history (TE)",
        least=1,
        flags=("--fp8_amax_history_len",),
        idle=_OTHER_BACKENDS,
    )
    amax_compute_algorithm: str = option(
        "most_recent",
        "what is taken of the history (TE)",
        choices=("max", "most_recent"),
        flags=("--fp8_amax_compute_algo",),
        idle=_OTHER_BACKENDS,
    )
    override_linear_precision: tuple[str, ...] = option(
        (), "which of fprop, dgrad, wgrad have higher precision (TE)", idle=_OTHER_BACKENDS
    )
    optimization_level: str = option(
        "O2",
        "level of optimization (MSAMP)",
        choices=("O1", "O2"),
        flags=("--fp8_opt_level",),
        idle=_OTHER_BACKENDS,
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class DeepSpeedHosts:
    """Hosts that DeepSpeed's own launcher would start."""

    block: ClassVar = DeepSpeedPlugin.block

    deepspeed_hostfile: str | None = option(None, "file that lists the hosts", refused=_ON_HOSTS)
    deepspeed_exclusion_filter: str | None = option(
        None, "hosts and devices left out", refused=_ON_HOSTS
    )
    deepspeed_inclusion_filter: str | None = option(
        None, "hosts and devices taken", refused=_ON_HOSTS
    )
    deepspeed_multinode_launcher: str | None = option(
        None,
        "launcher for several machines",
        choices=("pdsh", "standard", "openmpi", "mvapich", "mpich", "slurm", "nossh"),
        idle="`accel launch` is started on each machine",
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Mpirun:
    """Start with ``mpirun``."""

    block: ClassVar = Block("mpirun_config", "mpirun")

    mpirun_hostfile: str | None = option(
        None, "file that lists the hosts, for mpirun", lenient=False
    )
    mpirun_ccl: str | None = option(None, "workers of oneCCL", flag="")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Blocks:
    """Nested blocks: the options of one feature each."""

    dynamo_config: Mapping[str, Any] | None = _plugin("dynamo")
    fp8_config: Mapping[str, Any] | None = _plugin("fp8", OtherFp8)
    fsdp_config: Mapping[str, Any] | None = _plugin("fsdp")
    parallelism_config: Mapping[str, Any] | None = _plugin(
        "parallelism", DeepSpeedSequenceParallelConfig
    )
    deepspeed_config: Mapping[str, Any] | None = _plugin("deepspeed", DeepSpeedHosts)
    megatron_lm_config: Mapping[str, Any] | None = _plugin("megatron_lm")
    mpirun_config: Mapping[str, Any] | None = _block(Mpirun)


@dataclass(frozen=True)
class LaunchSettings(Blocks, Tpu, Running, Training, Machines, Processes):
    """All settings of a launch; the base classes are its groups.

    A block is None if none of its options is given.
    """


@cache
def all_options() -> tuple[Option, ...]:
    """Return all options; those of a block follow it."""
    options: list[Option] = []
    for setting in options_of(LaunchSettings):
        options.append(setting)
        for owner in setting.owners:
            options += options_of(owner)
    return tuple(options)


def find(path: str) -> Option:
    """Return the option of a path, ``"num_processes"`` or ``"fsdp_config.fsdp_version"``.

    Raises:
        SettingsError: there is no such option; the text names the nearest one.
    """
    known = {option.path: option for option in all_options()}
    if path not in known:
        raise SettingsError(f"there is no setting {path!r}.{nearest(path, known)}")
    return known[path]
