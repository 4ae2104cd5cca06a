"""Plan what ``accel launch`` runs, before anything starts: without torch, and without writes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_callbacks.launch.environment import (
    OWN_STORES,
    child_environment,
    exports,
    loopback_variables,
    rank_variables,
    recorder_variables,
)
from accel_callbacks.launch.extension import extensions
from accel_callbacks.launch.interface import gloo_variables
from accel_callbacks.launch.program import Program
from accel_callbacks.launch.rendezvous import (
    Host,
    Rendezvous,
    fill_from_slurm,
    has_explicit_place,
    plan_rendezvous,
)
from accel_callbacks.launch.resolve import Resolved
from accel_callbacks.launch.settings import LaunchSettings, all_options
from accel_callbacks.launch.slurm import SlurmPlace, slurm_place
from accel_callbacks.launch.unsupported import IDLE
from accel_callbacks.plugins.base import EnginePlugin
from accel_callbacks.plugins.option import SettingsError
from accel_callbacks.terminal_text import printable

# Already among the options of the rendezvous.
_RENDEZVOUS_OPTIONS = ("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "local_addr")
# Options that only torch's launcher implements; without them a single process runs directly.
_AGENT_OPTIONS = ("log_dir", "tee", "redirects", "local_ranks_filter", "numa_binding")


@dataclass(frozen=True)
class DirectPlan:
    """A command in place of the launcher: one process, a task of `srun`, or `srun` itself."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    note: str = ""
    elsewhere: bool = False  # `srun`, which runs this command again on each machine

    def as_shell(self) -> str:
        """Return equivalent shell commands."""
        notes = [printable(f"# {self.note}")] if self.note else []
        return "\n".join([*exports(self.env), shlex.join(self.command), *notes])


@dataclass(frozen=True)
class AgentPlan:
    """Processes that torch's launcher starts and monitors."""

    torchrun: tuple[str, ...]
    program: Program
    env: Mapping[str, str]
    rendezvous: Rendezvous
    log_dir: str | None = None
    quiet: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)
    max_preemptions: int = 0

    def as_shell(self) -> str:
        """Return the equivalent torchrun command, and the variables that it adds for each rank."""
        program = self.program
        kind = {"module": ["--module"], "program": ["--no-python"]}.get(program.kind, [])
        words = [*self.torchrun, *kind, program.name, *escaped(program.arguments)]
        return "\n".join([*exports(self.env), shlex.join(["torchrun", *words]), *self._ranks()])

    def _ranks(self) -> Iterator[str]:
        rendezvous = self.rendezvous
        if rendezvous.first_rank is None:
            yield f"# {rendezvous.local} processes here; the rendezvous assigns their ranks"
            return
        world = rendezvous.most * rendezvous.local
        for local in range(rendezvous.local):
            rank = rendezvous.first_rank + local
            variables = rank_variables(
                *(rank, world, local, rendezvous.local, rendezvous.address, rendezvous.port)
            )
            shown = " ".join(f"{name}={value}" for name, value in variables.items())
            yield printable(f"# rank {rank}: {shown}")


Plan = DirectPlan | AgentPlan


def escaped(arguments: Sequence[str]) -> list[str]:
    """Escape ``$`` in arguments of the script, where torchrun would expand macros."""
    return [word.replace("$", "$$") for word in arguments]


def build_plan(
    resolved: Resolved,
    program: Program,
    host: Host,
    extras: Mapping[str, Any],
    words: Sequence[str] = (),
    quiet: bool = False,
) -> Plan:
    """Turn the settings into a plan.

    Args:
        resolved: the settings.
        program: the program to run.
        host: this machine.
        extras: options that only torchrun has.
        words: the arguments after ``accel launch``, which `srun` repeats on each machine.
        quiet: print no report after a failure.

    Raises:
        SettingsError: the settings do not fit together, or do not fit the SLURM job.
    """
    place = slurm_place(host.environment)
    explicit = has_explicit_place(resolved) or bool(extras.get("standalone"))
    if place is not None and not explicit and place.needs_srun:
        return _srun_plan(place, host, words)
    if place is not None and not explicit and place.task_is_process:
        return _task_plan(resolved, place, program, host, extras)
    settings = resolved.settings if extras.get("standalone") else fill_from_slurm(resolved, place)
    for kind in extensions():
        if (own := kind().command(settings, program)) is not None:
            command, variables = own
            return DirectPlan(command, {**resolved.variables(), **variables})
    knows_rank = resolved.given("machine_rank") or settings != resolved.settings
    rendezvous = plan_rendezvous(settings, extras, host, knows_rank)
    if rendezvous.least == rendezvous.most:
        _check_blocks(settings, rendezvous.most * rendezvous.local)
    env = child_environment(resolved, host, host.cores // rendezvous.local)
    alone = rendezvous.most * rendezvous.local == 1 and rendezvous.first_rank is not None
    if alone and not _needs_agent(settings, extras):
        port = rendezvous.port or host.free_port()
        variables = rank_variables(0, 1, 0, 1, rendezvous.address, port)
        return DirectPlan(tuple(program.command(settings.as_accelerate)), env | variables)
    chosen = {} if "static" in rendezvous.words else dict(OWN_STORES)
    if rendezvous.most == 1:
        chosen |= loopback_variables()
    else:
        chosen |= gloo_variables(rendezvous.address, host.environment)
    if settings.log_dir is not None and not settings.use_cpu and host.count_devices():
        chosen |= recorder_variables(settings.log_dir, host.environment)
    env |= {name: value for name, value in chosen.items() if name not in host.environment}
    torchrun = _torchrun_words(resolved, rendezvous, extras)
    return AgentPlan(
        torchrun,
        program,
        env,
        rendezvous,
        settings.log_dir,
        quiet,
        extras,
        settings.max_preemptions,
    )


def _check_blocks(settings: LaunchSettings, processes: int) -> None:
    """Raise SettingsError for a block that does not arrange all processes, before any starts."""
    for option in all_options():
        block = getattr(settings, option.name) if option.kind == "block" else None
        if block is None or (option.name in IDLE and IDLE[option.name][0](settings)):
            continue
        for owner in option.owners:
            if issubclass(owner, EnginePlugin):
                owner.check_launch(block, processes)


def _needs_agent(settings: LaunchSettings, extras: Mapping[str, Any]) -> bool:
    asked = any(getattr(settings, name) is not None for name in _AGENT_OPTIONS)
    return bool(extras) or asked or settings.max_restarts > 0


def _torchrun_words(
    resolved: Resolved, rendezvous: Rendezvous, extras: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the options of torchrun, without the program."""
    nodes = (
        str(rendezvous.most)
        if rendezvous.least == rendezvous.most
        else f"{rendezvous.least}:{rendezvous.most}"
    )
    words = ["--nnodes", nodes, "--nproc-per-node", str(rendezvous.local), *rendezvous.words]
    for option in all_options():
        if (
            option.torchrun
            and resolved.given(option.path)
            and option.name not in _RENDEZVOUS_OPTIONS
        ):
            words += [f"--{option.name.replace('_', '-')}", str(resolved.value(option.path))]
    for name, value in extras.items():
        if name != "standalone":
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return tuple(words)


def _srun_plan(place: SlurmPlace, host: Host, words: Sequence[str]) -> DirectPlan:
    """Run this command again by `srun`: once per machine, or per task if each task owns a GPU."""
    command, variables = ["srun", "--kill-on-bad-exit=1"], host.environment
    # Since SLURM 23.11 SLURM_TRES_PER_TASK also has the cores of a task: `cpu=8,gres/gpu=1`.
    if "SLURM_GPUS_PER_TASK" in variables or "gpu" in variables.get("SLURM_TRES_PER_TASK", ""):
        cores = variables.get("SLURM_CPUS_PER_TASK")  # since 22.05 srun ignores the variable
        if cores and not cores.isdecimal():
            raise SettingsError(
                f"SLURM_CPUS_PER_TASK={cores[:80]!r} is not what SLURM writes; unset SLURM_JOB_ID "
                "to go without SLURM"
            )
        command += [f"--cpus-per-task={cores}"] if cores else []
    else:
        machines = str(len(place.hosts))
        command += ["--nodes", machines, "--ntasks", machines, "--ntasks-per-node=1"]
        command += ["--cpu-bind=none"]  # the processes of a machine share its cores
    command += [sys.executable, "-m", "accel_callbacks.cli", "launch", *words]
    note = f"starts this command again on {', '.join(place.hosts[:4])}"
    return DirectPlan(tuple(command), {}, note + (", ..." if len(place.hosts) > 4 else ""), True)


def _task_plan(
    resolved: Resolved,
    place: SlurmPlace,
    program: Program,
    host: Host,
    extras: Mapping[str, Any],
) -> DirectPlan:
    """Plan the process of this task: `srun` has started one task per process."""
    asked, settings = resolved.settings.num_processes, resolved.settings
    if asked not in (None, place.tasks):
        raise SettingsError(
            f"num_processes: {asked} ({resolved.origins['num_processes']}), but srun has started "
            f"{place.tasks} tasks on {len(place.hosts)} machines, one a process: leave it out, or "
            "start one task a machine with srun --ntasks-per-node=1"
        )
    if _needs_agent(settings, extras):
        raise SettingsError(
            "srun has started one task a process, so there is no launcher that could restart, log "
            "or bind them: leave these options out, or start one task a machine with srun "
            "--ntasks-per-node=1"
        )
    _check_blocks(settings, place.tasks)
    port = settings.main_process_port or place.port
    one_machine = len(place.hosts) == 1
    address = "127.0.0.1" if one_machine else place.hosts[0]
    variables = rank_variables(
        *(place.rank, place.tasks, place.local_rank, place.tasks_here, address, port)
    )
    env = child_environment(resolved, host, _cores_of_a_task(place, host))
    chosen = loopback_variables() if one_machine else gloo_variables(address, host.environment)
    env |= {name: value for name, value in chosen.items() if name not in host.environment}
    return DirectPlan(tuple(program.reporting_command()), env | variables)


def _cores_of_a_task(place: SlurmPlace, host: Host) -> int:
    """Return the cores of one task, whether or not srun has bound it to them."""
    cpus = host.environment.get("SLURM_CPUS_PER_TASK", "")
    if cpus.isdecimal():
        return int(cpus)
    on_node = host.environment.get("SLURM_CPUS_ON_NODE", "")
    bound = on_node.isdecimal() and host.cores < int(on_node)
    return host.cores if bound else host.cores // place.tasks_here
