"""Under SLURM: what is read from its variables, and real processes by a stand-in for srun."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel_callbacks.cli.launch import configure, given_extras, read_program
from accel_callbacks.cli.parser import CommandParser
from accel_callbacks.distributed import topology
from accel_callbacks.launch.plan import AgentPlan, DirectPlan, Plan, build_plan
from accel_callbacks.launch.rendezvous import Host
from accel_callbacks.launch.resolve import resolve_settings
from accel_callbacks.launch.slurm import expand_hosts, expand_tasks, slurm_place
from accel_callbacks.plugins.option import SettingsError
from tests.cli.fake_slurm import put_tools

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BATCH = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_NNODES": "2"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
TASK = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}

MEETING = """
import os, sys, datetime
if "fail" in sys.argv:
    raise ValueError("boom on one") if os.environ["RANK"] == "1" else SystemExit
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
value = torch.ones(1)
dist.all_reduce(value)
names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]
with open(f"out{dist.get_rank()}", "w") as out:
    print(value.item(), *(os.environ[name] for name in names), *sys.argv[1:], file=out)
dist.barrier()
dist.destroy_process_group()
"""


def plan(*words: str, environ: Mapping[str, str], cores: int = 8, gpus: int = 4) -> Plan:
    parser = CommandParser("accel launch", "")
    configure(parser)
    args = parser.parse([*words, "-m", "timeit"])
    environment = {"ACCEL_HOME": "/nowhere", **environ}
    resolved = resolve_settings(vars(args), args.config_file, "/nowhere/a.py", environment)
    host = Host(environment, cores, lambda: gpus, lambda: 4321)
    return build_plan(resolved, read_program(args), host, given_extras(args), ["-m", "timeit"])


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ("node1",)),
        ("node[01-04,7]", ("node01", "node02", "node03", "node04", "node7")),
        ("login,gpu[9-10]-ib", ("login", "gpu9-ib", "gpu10-ib")),
        ("r[1-2]n[1,3]", ("r1n1", "r1n3", "r2n1", "r2n3")),
        ("a[08-11]", ("a08", "a09", "a10", "a11")),
    ],
)
def test_lists_of_machines(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["node[1-", "node[]", "node[a-b]", "a,,b", "node]1[", "n[1-999999999]", "n[1-2]]", ","]
)
def test_broken_lists_are_one_line(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        expand_hosts(text)
    assert "\n" not in str(caught.value)


def test_a_list_of_more_machines_than_there_are_is_refused_before_it_is_made() -> None:
    with pytest.raises(SettingsError, match="more machines than any cluster has"):
        expand_hosts("r[0-999]n[0-999]")


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_JOB_NODELIST": "a\nreboot\n,b"},
        {"SLURM_JOB_NODELIST": "a[1-2]\n,b"},
        {"SLURM_JOB_NODELIST": "a[1\n],b"},
        {"SLURM_JOB_NODELIST": "a[1-2,0-999999999,\nreboot],b"},
        {"SLURM_JOB_NODELIST": "a;reboot,b"},
        {"SLURM_JOB_ID": "7\nreboot"},
        {"SLURM_TRES_PER_TASK": "gpu", "SLURM_CPUS_PER_TASK": "1\nreboot"},
        {**STEP, "SLURM_STEP_NODELIST": "a\nreboot,b"},
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "1\nreboot"},
        {**TASK, "SLURM_PROCID": "6\nreboot"},
    ],
)
def test_line_breaks_in_variables_add_no_lines(changed: dict[str, str]) -> None:
    """To the commands of a dry run, or to the error."""
    with pytest.raises(SettingsError) as caught:
        plan(environ={**BATCH, **changed})
    assert "\n" not in str(caught.value)


def test_line_breaks_in_names_add_no_lines_to_a_dry_run() -> None:
    made = DirectPlan(("srun",), {}, note="on a\nreboot")
    assert made.as_shell() == "srun\n# on a\\nreboot"


def test_tasks_of_each_machine() -> None:
    assert expand_tasks("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(SettingsError):
        expand_tasks("2(x")


def test_outside_of_slurm() -> None:
    assert slurm_place({"SLURM_CONF": "x"}) is None


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID"])
def test_variables_that_slurm_does_not_write(name: str) -> None:
    with pytest.raises(SettingsError, match="without SLURM"):
        slurm_place({**STEP, name: "x"})


def test_a_machine_that_is_not_in_the_list() -> None:
    with pytest.raises(SettingsError, match="SLURM_NODEID=2 is not among the 2 machines"):
        slurm_place({**STEP, "SLURM_NODEID": "2"})


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_the_shells_of_salloc_and_sbatch_are_no_steps(step: str) -> None:
    place = slurm_place({**BATCH, "SLURM_STEP_ID": step})
    assert place is not None
    assert (place.in_step, place.needs_srun) == (False, True)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_shell_of_srun_is_no_task(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """With `srun -n 8 --pty bash` it would wait for seven shells that have gone."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: terminal))
    place = slurm_place({**TASK, "SLURM_PTY_PORT": "40000"})
    assert place is not None
    assert place.task_is_process is not terminal


def test_each_step_has_its_port() -> None:
    places = [slurm_place({**STEP, "SLURM_STEP_ID": step}) for step in ("0", "1", "0")]
    ports = [place.port for place in places if place is not None]
    assert ports[0] == ports[2] != ports[1]
    assert all(1024 < port < 32768 for port in ports)


def test_one_task_a_machine_is_a_launcher() -> None:
    built = plan(environ=STEP)
    assert isinstance(built, AgentPlan)
    words = " ".join(built.torchrun)
    assert words.startswith("--nnodes 2 --nproc-per-node 4 --rdzv-backend static --node-rank 1 ")
    assert "--master-addr node01 --master-port 22388" in words
    assert built.rendezvous.first_rank == 4


def test_the_command_line_wins() -> None:
    built = plan("--main_process_port", "4242", "--machine_rank", "0", environ=STEP)
    assert isinstance(built, AgentPlan)
    assert "--node-rank 0 --master-addr node01 --master-port 4242" in " ".join(built.torchrun)
    for environ in (STEP, BATCH):
        alone = plan("--num_machines", "1", "--num_processes", "2", environ=environ)
        assert isinstance(alone, AgentPlan)
        assert alone.rendezvous.most == 1


def test_machines_that_come_and_go_connect_to_the_first() -> None:
    built = plan("--nnodes", "1:2", environ=STEP)
    assert isinstance(built, AgentPlan)
    assert "--rdzv-endpoint node01:22388 --rdzv-conf is_host=false" in " ".join(built.torchrun)


def test_one_task_a_process_becomes_the_process() -> None:
    built = plan(environ={**TASK, "SLURM_CPUS_PER_TASK": "6"})
    assert isinstance(built, DirectPlan)
    assert built.command[-2:] == ("module", "timeit")
    expected = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    expected |= {"MASTER_ADDR": "node01", "MASTER_PORT": "22388", "OMP_NUM_THREADS": "6"}
    assert built.env == expected


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({}, "2"), ({"SLURM_CPUS_ON_NODE": "8"}, "2"), ({"SLURM_CPUS_ON_NODE": "32"}, "8")],
)
def test_threads_of_a_task(variables: dict[str, str], threads: str) -> None:
    built = plan(environ={**TASK, **variables})
    assert built.env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num_processes", "4"), "srun has started 8 tasks"),
        (("--max_restarts", "1"), "one task a machine"),
        (("--tee", "3"), "one task a machine"),
    ],
)
def test_what_a_task_cannot_do(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan(*words, environ=TASK)


def test_a_file_that_disagrees_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "accel.yaml"
    file.write_text("num_machines: 1\nmachine_rank: 0\nnum_processes: 2\n")
    with pytest.raises(SettingsError, match=r"num_machines: 1 \(.*runs on 2 machines"):
        plan("--config_file", str(file), environ=STEP)
    file.write_text("num_machines: 2\nmachine_rank: 0\nnum_processes: 2\n")
    built = plan("--config_file", str(file), environ=STEP)
    assert isinstance(built, AgentPlan)
    assert "--node-rank 1" in " ".join(built.torchrun)


def test_a_batch_file_repeats_the_command_through_srun() -> None:
    built = plan(environ=BATCH)
    assert isinstance(built, DirectPlan)
    assert built.command[:2] == ("srun", "--kill-on-bad-exit=1")
    assert built.command[2:7] == ("--nodes", "2", "--ntasks", "2", "--ntasks-per-node=1")
    assert built.command[-3:] == ("launch", "-m", "timeit")
    assert built.elsewhere


@pytest.mark.parametrize(
    ("variables", "a_task_a_process"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu=8"}, False),
    ],
)
def test_srun_gets_the_cores_of_a_task(variables: dict[str, str], a_task_a_process: bool) -> None:
    built = plan(environ={**BATCH, **variables, "SLURM_CPUS_PER_TASK": "8"})
    assert isinstance(built, DirectPlan)
    assert ("--ntasks" not in built.command) == a_task_a_process
    assert ("--cpus-per-task=8" in built.command) == a_task_a_process


def test_a_task_of_another_component_of_the_job_is_refused() -> None:
    with pytest.raises(SettingsError, match="SLURM_PROCID=9 is not among the 8 tasks"):
        slurm_place({**TASK, "SLURM_PROCID": "9"})


def test_a_job_on_one_machine_is_one_machine() -> None:
    built = plan(environ={**BATCH, "SLURM_JOB_NODELIST": "node01", "SLURM_NNODES": "1"})
    assert isinstance(built, AgentPlan)
    assert (built.rendezvous.most, built.rendezvous.local) == (1, 4)


# --- real processes ------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The variables of a batch job on two machines, with a `srun` in the path."""
    tools = put_tools(tmp_path / "bin")
    (tmp_path / "train.py").write_text(MEETING)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost,second"}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return {**job, "SLURM_NNODES": "2", "PATH": path, "ACCEL_CPU": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.distributed
def test_a_batch_file_without_srun(accel: Run, cluster: dict[str, str], tmp_path: Path) -> None:
    done = accel("launch", "--nproc_per_node", "1", "train.py", "x", **cluster)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == ["2.0 0 1 x\n"] * 2


@pytest.mark.distributed
def test_a_task_that_fails_shows_its_rank(cluster: dict[str, str], tmp_path: Path) -> None:
    command = ["srun", "--nodes=1", "--ntasks-per-node=2", "accel", "launch", "train.py", "fail"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **cluster},
        executable=tmp_path / "bin" / "srun",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 of 2 failed (local rank 1, pid ")
    assert done.stderr.endswith("ValueError: boom on one\n")


def test_no_srun(accel: Run, cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "srun").unlink()
    done = accel("launch", "train.py", **{**cluster, "PATH": str(tmp_path / "bin")})
    assert done.returncode == 2
    assert done.stderr == "accel launch: error: cannot run 'srun': No such file or directory\n"


# --- the device of a task ------------------------------------------------------------------


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch sees one GPU; nothing is computed on it."""
    monkeypatch.setattr(topology, "own_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(topology, "select_device", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_a_task_with_one_gpu_of_its_own_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert topology.pick_device(False, 3) == torch.device("cuda", 0)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("index", [None, "0"], ids=["no scheduler", "a launcher under srun"])
def test_processes_that_would_share_a_gpu_are_refused(
    index: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    if index is not None:
        monkeypatch.setenv("SLURM_LOCALID", index)
    with pytest.raises(RuntimeError, match="local rank 1 has no device: this machine shows 1"):
        topology.pick_device(False, 1)
