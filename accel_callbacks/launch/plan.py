"""What ``accel launch`` is about to do, worked out before anything starts: no torch, no writes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_callbacks.cli.parser import CommandError
from accel_callbacks.launch import worker
from accel_callbacks.launch.rendezvous import (
    Here,
    Meeting,
    fill_from_slurm,
    meet,
    placed_by_hand,
)
from accel_callbacks.launch.resolve import Resolved
from accel_callbacks.launch.settings import LaunchSettings, all_options
from accel_callbacks.launch.slurm import SlurmPlace, slurm_place

_VISIBLE = {
    "MULTI_XPU": "ZE_AFFINITY_MASK",
    "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
    "MULTI_MLU": "MLU_VISIBLE_DEVICES",
    "MULTI_SDAA": "SDAA_VISIBLE_DEVICES",
    "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
    "MULTI_HPU": "HABANA_VISIBLE_MODULES",
}
_MEETING = ("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "local_addr")
# What only torch's launcher can do; without it, and with one process, nothing has to watch.
_WATCHED = ("log_dir", "tee", "redirects", "local_ranks_filter", "numa_binding")


@dataclass(frozen=True)
class Program:
    """What the processes run: a ``script``, a ``module`` or a ``program`` that is not Python."""

    kind: str
    name: str
    arguments: tuple[str, ...]

    def command(self) -> list[str]:
        """What runs it by itself."""
        python = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"]}
        return [*python.get(self.kind, []), self.name, *self.arguments]

    def reporting_command(self) -> list[str]:
        """What runs it such that an error is shown with its rank."""
        if self.kind == "program":
            return self.command()
        return [sys.executable, "-u", worker.__file__, self.kind, self.name, *self.arguments]


@dataclass(frozen=True)
class DirectPlan:
    """One command in place of the launcher: a single process, a task of `srun`, `srun` itself."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    note: str = ""
    elsewhere: bool = False  # it starts this command on other machines, and no process here

    def as_shell(self) -> str:
        """Write the plan as lines that do the same when pasted in a shell."""
        notes = [f"# {self.note}"] if self.note else []
        return "\n".join([*_exports(self.env), shlex.join(self.command), *notes])


@dataclass(frozen=True)
class AgentPlan:
    """Processes that torch's launcher starts and watches."""

    torchrun: tuple[str, ...]
    program: Program
    env: Mapping[str, str]
    meeting: Meeting
    log_dir: str | None = None
    quiet: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)

    def as_shell(self) -> str:
        """The same by torchrun, and what each process finds in its environment on top."""
        program = self.program
        kind = {"module": ["--module"], "program": ["--no-python"]}.get(program.kind, [])
        words = [*self.torchrun, *kind, program.name, *escaped(program.arguments)]
        return "\n".join([*_exports(self.env), shlex.join(["torchrun", *words]), *self._ranks()])

    def _ranks(self) -> Iterator[str]:
        here = self.meeting
        if here.first_rank is None:
            yield f"# {here.local} processes here; their ranks are settled when the machines meet"
            return
        world = here.most * here.local
        for local in range(here.local):
            port = {} if here.port is None else {"MASTER_PORT": here.port}
            facts: dict[str, object] = {
                "RANK": here.first_rank + local,
                "WORLD_SIZE": world,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": here.local,
                "MASTER_ADDR": here.address,
                **port,
            }
            shown = " ".join(f"{name}={value}" for name, value in facts.items())
            yield f"# rank {here.first_rank + local}: {shown}"


@dataclass(frozen=True)
class TpuPlan:
    """Processes that torch_xla starts, each of which calls a function of the script."""

    program: Program
    function: str
    one: bool
    env: Mapping[str, str]

    def as_shell(self) -> str:
        """What is called, in words: no command does the same."""
        call = f"{self.program.name}: {self.function}()"
        where = "in one process" if self.one else "on each core of the TPU"
        return "\n".join([*_exports(self.env), f"# torch_xla calls {call} {where}"])


Plan = DirectPlan | AgentPlan | TpuPlan


def escaped(arguments: Sequence[str]) -> list[str]:
    """Arguments of the script such that torchrun's ``$`` macros hand them on unchanged."""
    return [word.replace("$", "$$") for word in arguments]


def _exports(env: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def build_plan(
    resolved: Resolved,
    program: Program,
    here: Here,
    extras: Mapping[str, Any],
    words: Sequence[str] = (),
    quiet: bool = False,
) -> Plan:
    """Turn the settings into a plan; `CommandError` when they do not fit.

    Args:
        resolved: the settings.
        program: what the processes run.
        here: what this machine offers.
        extras: options that only torchrun has.
        words: the words after ``accel launch``, for `srun` to say them again.
        quiet: no report after a failure.
    """
    place = slurm_place(here.environment)
    by_hand = placed_by_hand(resolved) or bool(extras.get("standalone"))
    if place is not None and not by_hand and place.needs_srun:
        return _by_srun(place, here, words)
    if place is not None and not by_hand and place.task_is_process:
        return _as_task(resolved, place, program, here, extras)
    settings = resolved.settings if extras.get("standalone") else fill_from_slurm(resolved, place)
    if settings.distributed_type == "XLA":
        return _on_tpu(resolved, program)
    knows_rank = resolved.given("machine_rank") or settings != resolved.settings
    meeting = meet(settings, extras, here, knows_rank)
    env = _child_environment(resolved, here, here.cores // meeting.local)
    alone = meeting.most * meeting.local == 1 and meeting.first_rank is not None
    if alone and not _must_be_watched(settings, extras):
        return DirectPlan(tuple(program.command()), env | _ranks(0, 1, 0, 1, meeting, here))
    again = settings.max_restarts > 0 or meeting.least != meeting.most
    if again and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in here.environment:
        # A restarted gloo worker otherwise reads the addresses of the attempt before it.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torchrun = _torchrun_words(resolved, meeting, extras)
    return AgentPlan(torchrun, program, env, meeting, settings.log_dir, quiet, extras)


def _must_be_watched(settings: LaunchSettings, extras: Mapping[str, Any]) -> bool:
    asked = any(getattr(settings, name) is not None for name in _WATCHED)
    return bool(extras) or asked or settings.max_restarts > 0


def _torchrun_words(
    resolved: Resolved, meeting: Meeting, extras: Mapping[str, Any]
) -> tuple[str, ...]:
    """The plan as torchrun spells it, all but the program."""
    nodes = (
        str(meeting.most) if meeting.least == meeting.most else f"{meeting.least}:{meeting.most}"
    )
    words = ["--nnodes", nodes, "--nproc-per-node", str(meeting.local), *meeting.words]
    for one in all_options():
        if one.torchrun and resolved.given(one.path) and one.name not in _MEETING:
            words += [f"--{one.name.replace('_', '-')}", str(resolved.value(one.path))]
    for name, value in extras.items():
        if name != "standalone":
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return tuple(words)


def _by_srun(place: SlurmPlace, here: Here, words: Sequence[str]) -> DirectPlan:
    """In a batch script: one launcher on each machine, or one a GPU where a task owns its GPU."""
    command, told = ["srun", "--kill-on-bad-exit=1"], here.environment
    # SLURM from 23.11 on names the cores of a task there too, as in `cpu=8,gres/gpu=1`.
    if "SLURM_GPUS_PER_TASK" in told or "gpu" in told.get("SLURM_TRES_PER_TASK", ""):
        cores = told.get("SLURM_CPUS_PER_TASK")  # which srun from 22.05 on does not take over
        command += [f"--cpus-per-task={cores}"] if cores else []
    else:
        machines = str(len(place.hosts))
        command += ["--nodes", machines, "--ntasks", machines, "--ntasks-per-node=1"]
        command += ["--cpu-bind=none"]  # the processes of a machine share its cores
    command += [sys.executable, "-m", "accel_callbacks.cli", "launch", *words]
    note = f"starts this command again on {', '.join(place.hosts[:4])}"
    return DirectPlan(tuple(command), {}, note + (", ..." if len(place.hosts) > 4 else ""), True)


def _as_task(
    resolved: Resolved,
    place: SlurmPlace,
    program: Program,
    here: Here,
    extras: Mapping[str, Any],
) -> DirectPlan:
    """One task of `srun` a process: this one is to become the process itself."""
    asked, settings = resolved.settings.num_processes, resolved.settings
    if asked not in (None, place.tasks):
        raise CommandError(
            f"num_processes: {asked} ({resolved.origins['num_processes']}), but srun has started "
            f"{place.tasks} tasks on {len(place.hosts)} machines, one a process: leave it out, or "
            "start one task a machine with srun --ntasks-per-node=1"
        )
    if _must_be_watched(settings, extras):
        raise CommandError(
            "srun has started one task a process, so there is no launcher that could restart, log "
            "or bind them: leave these options out, or start one task a machine with srun "
            "--ntasks-per-node=1"
        )
    meeting = Meeting(1, 1, 1, (), address=place.hosts[0], port=place.port)
    if settings.main_process_port:
        meeting = Meeting(1, 1, 1, (), address=place.hosts[0], port=settings.main_process_port)
    ranks = _ranks(place.rank, place.tasks, place.local_rank, place.tasks_here, meeting, here)
    env = _child_environment(resolved, here, _cores_of_a_task(place, here))
    return DirectPlan(tuple(program.reporting_command()), env | ranks)


def _cores_of_a_task(place: SlurmPlace, here: Here) -> int:
    """Cores of one task, which srun may have bound to its share of the machine or not."""
    told = here.environment.get("SLURM_CPUS_PER_TASK", "")
    if told.isdecimal():
        return int(told)
    on_node = here.environment.get("SLURM_CPUS_ON_NODE", "")
    bound = on_node.isdecimal() and here.cores < int(on_node)
    return here.cores if bound else here.cores // place.tasks_here


def _on_tpu(resolved: Resolved, program: Program) -> TpuPlan:
    if program.kind == "program":
        raise CommandError("--no_python does not go with a TPU: torch_xla calls a Python function")
    settings, env = resolved.settings, resolved.variables()
    if settings.downcast_bf16:
        env["XLA_DOWNCAST_BF16"] = "1"
    one = settings.num_processes == 1
    return TpuPlan(program, settings.main_training_function, one, env)


def _ranks(
    rank: int, world: int, local: int, local_world: int, meeting: Meeting, here: Here
) -> dict[str, str]:
    """The variables of one process that no agent has started."""
    facts: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_world,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port or here.free_port(),
    }
    return {name: str(value) for name, value in facts.items()}


def _child_environment(resolved: Resolved, here: Here, cores: int) -> dict[str, str]:
    """Variables for the children: only what was asked for, and safe defaults that are not set."""
    settings = resolved.settings
    env = {}
    if settings.num_cpu_threads_per_process is not None:
        env["OMP_NUM_THREADS"] = str(settings.num_cpu_threads_per_process)
    elif "OMP_NUM_THREADS" not in here.environment:
        env["OMP_NUM_THREADS"] = str(max(1, cores))
    if settings.gpu_ids is not None and not settings.use_cpu:
        env[_VISIBLE.get(settings.distributed_type or "", "CUDA_VISIBLE_DEVICES")] = (
            settings.gpu_ids.replace(" ", "")
        )
    return {**env, **resolved.variables()}
