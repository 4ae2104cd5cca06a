"""Plans of launches, without starting anything."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from accel_callbacks import launch as launch_package
from accel_callbacks.cli import launch
from accel_callbacks.cli.launch import configure, given_extras, read_program
from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.launch.environment import changed_environment, loopback_variables
from accel_callbacks.launch.plan import AgentPlan, DirectPlan, Plan, build_plan
from accel_callbacks.launch.rendezvous import Host
from accel_callbacks.launch.resolve import resolve_settings
from accel_callbacks.launch.settings import all_options
from accel_callbacks.plugins.option import SettingsError

NOWHERE = {"ACCEL_HOME": "/nowhere"}


def plan_of(
    *words: str, environ: Mapping[str, str] | None = None, cores: int = 8, gpus: int = 0
) -> Plan:
    parser = CommandParser("accel launch", "")
    configure(parser)
    args = parser.parse(words)
    environment = {**NOWHERE, **(environ or {})}
    resolved = resolve_settings(vars(args), args.config_file, "/nowhere/a.py", environment)
    host = Host(environment, cores, lambda: gpus, lambda: 4321)
    return build_plan(resolved, read_program(args), host, given_extras(args), words)


def plan(
    *words: str, environ: Mapping[str, str] | None = None, cores: int = 8, gpus: int = 0
) -> AgentPlan:
    built = plan_of(*words, environ=environ, cores=cores, gpus=gpus)
    assert isinstance(built, AgentPlan)
    return built


def value(built: AgentPlan, flag: str) -> str:
    return built.torchrun[built.torchrun.index(flag) + 1]


def single(*words: str, environ: Mapping[str, str] | None = None) -> DirectPlan:
    built = plan_of(*words, environ=environ)
    assert isinstance(built, DirectPlan)
    return built


def test_one_process_is_the_command_itself() -> None:
    built = single("-m", "timeit", "--", "x")
    assert built.command == (sys.executable, "-u", "-m", "timeit", "--", "x")
    assert built.env == {
        "OMP_NUM_THREADS": "8",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
    }


@pytest.mark.parametrize(
    "words", ["--max_restarts 1", "--tee 3", "--log_dir x", "--standalone", "--shutdown_timeout 3"]
)
def test_one_process_that_is_to_be_watched(words: str) -> None:
    assert value(plan(*words.split(), "-m", "timeit"), "--nproc-per-node") == "1"


@pytest.mark.parametrize(
    ("words", "gpus", "processes"),
    [
        ((), 4, 4),
        (("--cpu",), 4, 1),
        (("--num_processes", "2", "--cpu"), 0, 2),
        (("--nproc-per-node", "3"), 4, 3),
        (("--gpu_ids", "0,3"), 4, 2),
        (("--distributed_type", "NO"), 4, 1),
    ],
)
def test_number_of_processes(words: tuple[str, ...], gpus: int, processes: int) -> None:
    built = plan_of(*words, "-m", "timeit", gpus=gpus)
    local = built.rendezvous.local if isinstance(built, AgentPlan) else 1
    assert local == processes


def test_asked_settings_reach_the_children() -> None:
    words = "--cpu --mixed-precision bf16 --gradient_accumulation_steps 4 --max_restarts 2"
    assert plan(*words.split(), "-m", "timeit").env == {
        "OMP_NUM_THREADS": "8",
        "ACCEL_CPU": "1",
        "ACCEL_MIXED_PRECISION": "bf16",
        "ACCEL_GRADIENT_ACCUMULATION_STEPS": "4",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **loopback_variables(),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="its loopback interface has another name")
def test_only_processes_of_one_machine_listen_on_loopback() -> None:
    asked = {"GLOO_SOCKET_IFNAME": "eth0"}
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    two = ["--num_processes", "2"]
    alone = plan(*two, "-m", "timeit", environ=asked).env
    assert {name: alone.get(name) for name in names} == {
        "GLOO_SOCKET_IFNAME": None,
        "NCCL_SOCKET_IFNAME": "lo",
    }
    several = [*two, "--num_machines", "2", "--main_process_ip", "node0"]
    assert not names & set(plan(*several, "-m", "timeit").env)


def test_the_users_own_store_setting_is_kept() -> None:
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    assert not set(environ) & set(plan("--max_restarts", "2", "-m", "timeit", environ=environ).env)


@pytest.mark.parametrize(
    ("words", "variable"),
    [((), "CUDA_VISIBLE_DEVICES"), (("--distributed_type", "MULTI_XPU"), "ZE_AFFINITY_MASK")],
)
def test_gpu_ids_are_what_the_children_see(words: tuple[str, ...], variable: str) -> None:
    assert plan("--gpu_ids", "1, 3", *words, "-m", "timeit").env[variable] == "1,3"
    assert variable not in single("--gpu_ids", "1,3", "--cpu", "-m", "timeit").env


@pytest.mark.parametrize(
    ("words", "environ", "threads"),
    [
        ("--num_processes 3", {}, "2"),
        ("--num_processes 64", {}, "1"),
        ("--num_processes 3", {"OMP_NUM_THREADS": "5"}, None),
        ("--num_processes 3 --num_cpu_threads_per_process 7", {"OMP_NUM_THREADS": "5"}, "7"),
    ],
)
def test_threads(words: str, environ: dict[str, str], threads: str | None) -> None:
    built = plan(*words.split(), "-m", "timeit", environ=environ)
    assert built.env.get("OMP_NUM_THREADS") == threads


def test_several_machines() -> None:
    words = "--num_processes 6 --num_machines 2 --machine_rank 1 --main_process_ip node0"
    built = plan(*words.split(), "-m", "timeit")
    expected = {"--nnodes": "2", "--nproc-per-node": "3", "--node-rank": "1"}
    expected |= {"--master-addr": "node0", "--master-port": "29500", "--rdzv-backend": "static"}
    assert {flag: value(built, flag) for flag in expected} == expected
    assert built.env["OMP_NUM_THREADS"] == "2"


def test_one_machine_with_a_port() -> None:
    words = ("--num_processes", "2", "--main_process_port")
    assert value(plan(*words, "4242", "-m", "timeit"), "--master-port") == "4242"
    assert value(plan(*words, "0", "-m", "timeit"), "--master-port") == "4321"


def test_machines_that_come_and_go() -> None:
    words = "--nnodes 1:2 --nproc_per_node 2 --main_process_ip node0"
    built = plan(*words.split(), "-m", "timeit")
    expected = {"--nnodes": "1:2", "--nproc-per-node": "2", "--rdzv-backend": "c10d"}
    assert {flag: value(built, flag) for flag in expected} == expected
    assert value(built, "--rdzv-endpoint") == "node0:29500"
    assert "--rdzv-conf" not in built.torchrun
    assert built.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "the rendezvous assigns their ranks" in built.as_shell()


@pytest.mark.parametrize(("rank", "host"), [("0", "true"), ("1", "false")])
def test_a_known_rank_determines_the_host(rank: str, host: str) -> None:
    words = "--num_machines 2 --num_processes 2 --rdzv_backend c10d --main_process_ip node0"
    built = plan(
        *words.split(), "--rdzv_conf", "timeout=60", "--machine_rank", rank, "-m", "timeit"
    )
    assert value(built, "--rdzv-conf") == f"timeout=60,is_host={host}"


def test_what_torchrun_has_reaches_it_in_both_spellings() -> None:
    words = (
        "--num_processes 2 --log-dir logs --local_ranks_filter 0 --role trainer -r 1 --rdzv-id 7"
    )
    words += " --signals-to-handle SIGTERM,SIGUSR1 --virtual_local_rank --shutdown-timeout 5"
    words += " --numa-binding node --start_method fork --duplicate_stdout_filters a,b"
    built = plan(*words.split(), "-m", "timeit")
    expected = {"--log-dir": "logs", "--local-ranks-filter": "0", "--role": "trainer"}
    expected |= {"--redirects": "1", "--rdzv-id": "7", "--shutdown-timeout": "5"}
    expected |= {"--numa-binding": "node", "--start-method": "fork"}
    expected |= {"--signals-to-handle": "SIGTERM,SIGUSR1", "--duplicate-stdout-filters": "a,b"}
    assert {flag: value(built, flag) for flag in expected} == expected
    assert "--virtual-local-rank" in built.torchrun


def test_standalone_is_torchs_own() -> None:
    built = plan("--num_processes", "2", "--standalone", "-m", "timeit")
    assert "--standalone" in built.torchrun
    assert "--rdzv-backend" not in built.torchrun


def test_all_options_of_torchrun_are_there() -> None:
    from torch.distributed.run import get_args_parser

    parser = CommandParser("accel launch", "")
    configure(parser)
    ours = set(parser._option_string_actions)
    theirs = set(get_args_parser()._option_string_actions)
    assert theirs - ours == {"--run-path", "--run_path"}


def test_every_setting_has_a_flag_that_is_read() -> None:
    parser = CommandParser("accel launch", "")
    configure(parser)
    known = set(parser._option_string_actions)
    flags = [one.flag for one in all_options() if one.kind != "block"]
    assert [flag for flag in flags if flag and flag not in known] == []
    assert len(flags) > 100


def test_the_plan_names_each_child() -> None:
    words = "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip node0"
    shown = plan(*words.split(), "-m", "timeit", "a b").as_shell().splitlines()
    assert shown[1].startswith("torchrun --nnodes 2 --nproc-per-node 2 ")
    assert shown[1].endswith("--module timeit 'a b'")
    assert shown[3] == (
        "# rank 3: RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 "
        "MASTER_ADDR=node0 MASTER_PORT=29500"
    )


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ("--num_processes 2 --max_restarts 1", "c10d"),
        ("--num_processes 2 --max_restarts 1 --rdzv_backend static", "c10d"),
        ("--num_processes 2 --num_machines 2 --main_process_ip a --max_restarts 1", "c10d"),
        ("--num_processes 2 --num_machines 2 --main_process_ip a", "static"),
    ],
)
def test_each_attempt_has_a_store_of_its_own(words: str, backend: str) -> None:
    assert value(plan(*words.split(), "-m", "timeit"), "--rdzv-backend") == backend


def test_a_static_rendezvous_of_machines_cannot_be_repeated() -> None:
    where = ["--num_processes", "2", "--num_machines", "2", "--main_process_ip", "a"]
    with pytest.raises(SettingsError, match="Pass --rdzv_backend c10d"):
        plan(*where, "--max_restarts", "1", "--rdzv_backend", "static", "-m", "timeit")


def test_a_tpu_is_for_torch_xla() -> None:
    built = plan_of("--tpu", "--downcast_bf16", "--num_processes", "8", "-m", "timeit")
    assert isinstance(built, DirectPlan)
    assert built.command[2:] == ("-m", "accel_callbacks.launch.tpu", "main", "timeit")
    assert built.env == {"XLA_DOWNCAST_BF16": "1", "ACCEL_DISTRIBUTED_TYPE": "XLA"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num_machines 2 --num_processes 2 -m timeit", "--main_process_ip"),
        ("--num_machines 2 --num_processes 3 --main_process_ip a -m timeit", "multiple of"),
        ("--num_machines 2 --num_processes 1 --main_process_ip a -m timeit", "multiple of"),
        ("--machine_rank 1 -m timeit", "from 0 to 0"),
        ("--nnodes 2:1 -m timeit", "neither N nor LEAST:MOST"),
        ("--nnodes 1:2 -m timeit", "--rdzv_endpoint HOST:PORT"),
        ("--num_machines 2 --standalone -m timeit", "for one machine"),
        ("--num_machines 2 --rdzv_endpoint node0 -m timeit", "not HOST:PORT"),
        ("--gpu_ids 0,1 --num_processes 3 -m timeit", "names 2 GPUs for 3 processes"),
        ("--tpu --no_python true", "does not go with a TPU"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_of(*words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-m --no_python timeit", "exclude each other"),
        ("absent.py", "not a file"),
        ("-m absent_module.sub", "not a module"),
        ("--no_python absent_program", "not an executable"),
    ],
)
def test_an_absent_program_is_refused(words: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        plan_of(*words.split())


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert single("-m", "only_here").command[-1] == "only_here"


def test_arguments_of_the_script_are_not_read() -> None:
    words = ["--", "--num_processes", "9", "-m", "--", "a b"]
    assert list(single("-m", "timeit", *words).command[-len(words) :]) == words


def test_machines_without_a_driver_are_not_asked(tmp_path: Path) -> None:
    assert not launch._may_have_devices(tmp_path) or sys.platform != "linux"
    (tmp_path / "nvidia0").touch()
    assert launch._may_have_devices(tmp_path) or sys.platform == "darwin"


@pytest.mark.parametrize("text", ["4", "0:9", "stdout", ""])
def test_streams_are_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_of("--tee", text, "-m", "timeit")
    assert "0:1,1:3" in capsys.readouterr().err


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_KEPT", "before")
    before = dict(os.environ)

    def meddle() -> None:
        with changed_environment({"ACCEL_TEST_KEPT": "during"}):
            assert os.environ["ACCEL_TEST_KEPT"] == "during"
            os.environ["ACCEL_TEST_ADDED"] = "by torch"
            del os.environ["PATH"]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        meddle()
    assert dict(os.environ) == before


def test_launch_does_not_import_the_command_line() -> None:
    wrong = re.compile(r"^\s*(from|import) accel_callbacks\.cli\b", re.MULTILINE)
    files = list(Path(launch_package.__path__[0]).glob("*.py"))
    assert len(files) > 10
    assert [file.name for file in files if wrong.search(file.read_text("utf-8"))] == []
