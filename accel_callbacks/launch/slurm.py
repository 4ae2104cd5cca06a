"""Read the place of this process in a SLURM job from the variables that SLURM sets."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from accel_callbacks.plugins.option import SettingsError

__all__ = ["SlurmPlace", "expand_hosts", "expand_tasks", "slurm_place"]

_FIRST_PORT, _PORTS = 20_001, 12_000  # below the ports that the kernel hands out
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on: step ids of the shells of sbatch and salloc
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class SlurmPlace:
    """Machines of a SLURM job or step, and this process among its tasks.

    Args:
        hosts: machines of the step, or of the job outside of a step.
        in_step: `srun` started this process as one of its tasks.
        tasks: number of tasks of the step.
        tasks_here: number of tasks on this machine.
        machine_rank: index of this machine.
        rank: index of this task.
        local_rank: index of this task on this machine.
        port: for the rendezvous; the same on all machines, different for each step.
    """

    hosts: tuple[str, ...]
    in_step: bool
    tasks: int = 1
    tasks_here: int = 1
    machine_rank: int = 0
    rank: int = 0
    local_rank: int = 0
    port: int = _FIRST_PORT

    @property
    def task_is_process(self) -> bool:
        """True if each task is a process of the run: there are more tasks than machines."""
        return self.in_step and self.tasks > len(self.hosts)

    @property
    def needs_srun(self) -> bool:
        """True in the batch script of several machines, which runs on the first only."""
        return not self.in_step and len(self.hosts) > 1


def slurm_place(environment: Mapping[str, str]) -> SlurmPlace | None:
    """Return the place of this process; None outside of a SLURM job.

    Raises:
        SettingsError: a variable is missing or malformed.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    job = _number(environment, "SLURM_JOB_ID")
    step = _number(environment, "SLURM_STEP_ID", _SPECIAL_STEPS)
    if step >= _SPECIAL_STEPS or _in_a_shell(environment):
        listed = _hosts(environment, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        return SlurmPlace(listed, in_step=False, port=_port(job, 0))
    hosts = _hosts(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    machine_rank = _number(environment, "SLURM_NODEID", 0)
    if machine_rank >= len(hosts):
        raise SettingsError(
            f"SLURM_NODEID={machine_rank} is not among the {len(hosts)} machines of the step; "
            "pass --num_machines, --machine_rank and --main_process_ip to go without SLURM"
        )
    layout = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    counts = expand_tasks(layout) if layout else (1,) * len(hosts)
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    rank = _number(environment, "SLURM_PROCID", 0)
    if rank >= tasks:  # a heterogeneous job: ranks count all components, the variables only one
        raise SettingsError(
            f"SLURM_PROCID={rank} is not among the {tasks} tasks of the step; pass --num_machines, "
            "--machine_rank and --main_process_ip to go without SLURM"
        )
    return SlurmPlace(
        hosts,
        in_step=True,
        tasks=tasks,
        tasks_here=counts[machine_rank] if machine_rank < len(counts) else 1,
        machine_rank=machine_rank,
        rank=rank,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        port=_port(job, step),
    )


def _in_a_shell(environment: Mapping[str, str]) -> bool:
    """Return whether this is the shell of `srun --pty`, whose other tasks do not launch."""
    return "SLURM_PTY_PORT" in environment and sys.stdin is not None and sys.stdin.isatty()


def _port(job: int, step: int) -> int:
    return _FIRST_PORT + (job * 31 + step) % _PORTS


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or len(text) > 18:
        raise SettingsError(
            f"{name}={text!r} is not what SLURM writes; unset SLURM_JOB_ID to go without SLURM"
        )
    return int(text)


def _hosts(environment: Mapping[str, str], *names: str) -> tuple[str, ...]:
    text = next((environment[name] for name in names if environment.get(name)), "")
    hosts = expand_hosts(text)
    if not hosts:
        raise SettingsError(f"{names[0]} is not set; unset SLURM_JOB_ID to go without SLURM")
    return hosts


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a SLURM host list.

    Raises:
        SettingsError: the list is malformed.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text:
        raise SettingsError(f"{text[:80]!r} is not a list of machines as SLURM writes it")
    hosts: list[str] = []
    for part in parts:
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", part):
            if not piece.startswith("[") and re.fullmatch(r"[\w.:-]+", piece) is None:
                raise SettingsError(f"{text[:80]!r} is not a list of machines as SLURM writes it")
            endings = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            if len(names) * len(endings) + len(hosts) > _MOST_HOSTS:
                raise SettingsError(f"{text[:80]!r} are more machines than any cluster has")
            names = [name + ending for name in names for ending in endings]
        hosts += names
    return tuple(hosts)


def _numbers(text: str) -> list[str]:
    """Expand ranges such as ``01-03,7``, keeping leading zeros."""
    hosts: list[str] = []
    quoted = repr(f"[{text[:80]}]")
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None:
            raise SettingsError(f"{quoted} is not a range of machines as SLURM writes it")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first > _MOST_HOSTS:
            raise SettingsError(f"{quoted} are more machines than any cluster has")
        hosts += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return hosts


def expand_tasks(text: str) -> tuple[int, ...]:
    """Expand the number of tasks per machine from a text such as ``2(x3),1``.

    Raises:
        SettingsError: the text is malformed.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise SettingsError(f"{text[:80]!r} are not tasks per machine as SLURM writes them")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
