"""``accel config`` as users run it: in a real process, on a terminal for its questions."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from accel_callbacks.cli import config
from accel_callbacks.cli.main import main
from accel_callbacks.launch.config_file import read_config, values_of
from accel_callbacks.launch.machine import Machine, detect_machine
from accel_callbacks.launch.settings import all_options
from accel_callbacks.options import resolve_config
from accel_callbacks.plugins import DeepSpeedPlugin

Run = Callable[..., "subprocess.CompletedProcess[str]"]
COMMAND = [sys.executable, "-m", "accel_callbacks.cli", "config"]
GPUS = Machine(gpus=("A100", "A100", "A100", "A100"), gpu_kind="cuda", cores=64)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the config files of the user who runs the tests."""
    home = tmp_path / "home"
    monkeypatch.setenv("ACCEL_HOME", str(home))
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TPU_", "ACCEL_")) and name != "ACCEL_HOME":
            monkeypatch.delenv(name)
    return home


class Terminal:
    """A child that has a terminal, which answers when it is asked."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execv(sys.executable, [*COMMAND, *words])
        self.text = ""

    def until(self, prompt: str) -> None:
        """Read until it asks this."""
        while prompt not in self.text:
            self.text += os.read(self.end, 4096).decode().replace("\r\n", "\n")
        self.text = self.text.partition(prompt)[2]

    def answer(self, prompt: str, text: str) -> None:
        self.until(prompt)
        os.write(self.end, f"{text}\n".encode())

    def interrupt(self) -> None:
        """Send Ctrl-C until there is output: Python misses one just before it starts to read."""
        os.kill(self.pid, signal.SIGINT)
        while not select.select([self.end], [], [], 2)[0]:
            os.kill(self.pid, signal.SIGINT)

    def finish(self) -> tuple[int, str]:
        """Its exit code, and what is left of its text."""
        try:
            while chunk := os.read(self.end, 4096):
                self.text += chunk.decode().replace("\r\n", "\n")
        except OSError:  # the other end is closed
            pass
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.end)
        return os.waitstatus_to_exitcode(status), self.text


# --- the questions -------------------------------------------------------------------------


def test_asks_and_writes_and_prints_how_to_launch(tmp_path: Path) -> None:
    shell = Terminal(tmp_path)
    shell.until("This machine:")
    shell.answer("Number [1] ", "9")
    shell.until("type a number from 1 to")
    cpu = 2 if detect_machine(os.environ).gpus else 1
    shell.answer("Number [1] ", str(cpu))
    shell.answer("How many processes on this machine?", "none")
    shell.until("must be an integer")
    shell.answer("How many processes on this machine?", "2")
    shell.answer("How many machines take part? [1] ", "2")
    shell.answer("from 0 on? [0] ", "1")
    shell.answer("Address of machine 0", "node0")
    shell.answer("A free port on it? [29500] ", "")
    shell.answer("Number [1] ", "")
    shell.answer("Number [1] ", "3")
    shell.answer("torch.compile? [y/N] ", "y")
    shell.answer("Number [1] ", "1")
    code, text = shell.finish()
    assert code == 0, text
    assert "accel launch train.py  # here, machine 1" in text
    assert "accel launch --machine_rank N train.py" in text
    assert read_config(tmp_path / "accel.yaml") == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "num_machines": 2,
        "num_processes": 4,
        "use_cpu": True,
        "machine_rank": 1,
        "main_process_ip": "node0",
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "mixed_precision": "bf16",
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    }


def test_ctrl_c_writes_nothing(tmp_path: Path) -> None:
    shell = Terminal(tmp_path, "--config_file", "a.yaml")
    shell.until("Number [1] ")
    shell.interrupt()
    code, text = shell.finish()
    assert (code, "Traceback" in text) == (130, False)
    assert "nothing was written" in text
    assert not list(tmp_path.glob("*.yaml"))


def test_the_end_of_the_input_writes_nothing(tmp_path: Path) -> None:
    shell = Terminal(tmp_path, "--config_file", "a.yaml")
    shell.until("Number [1] ")
    os.write(shell.end, b"\x04")
    code, text = shell.finish()
    assert (code, "Traceback" in text) == (1, False)
    assert "the input ended; nothing was written" in text
    assert not list(tmp_path.glob("*.yaml"))


def test_a_file_that_is_there_is_replaced_only_after_a_yes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("use_cpu: true\n")
    shell = Terminal(tmp_path, "--config_file", "a.yaml", "--mixed_precision", "no")
    shell.answer("Number [1] ", "")
    shell.answer("How many processes on this machine?", "1")
    shell.answer("How many machines take part? [1] ", "")
    shell.answer("torch.compile? [y/N] ", "")
    shell.answer("Replace it? [y/N] ", "")
    assert shell.finish()[0] == 1
    assert (tmp_path / "a.yaml").read_text() == "use_cpu: true\n"


def test_without_a_terminal_it_names_the_way_without_questions(accel: Run) -> None:
    done = accel("config")
    assert done.returncode == 2
    assert "accel config --default" in done.stderr


def ask(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, *typed: str
) -> tuple[dict[str, object], list[str]]:
    """The answers on another machine than this, and the questions that were asked."""
    asked: list[str] = []
    left = list(typed)

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return left.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    values = config.answers(machine, None)
    assert left == []
    values_of(values, "what was asked")
    return values, asked


def test_on_gpus_all_of_them_are_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = ask(monkeypatch, GPUS, "", "", "", "", "2", "")
    assert values["distributed_type"] == "MULTI_GPU"
    assert values["num_processes"] == 4
    assert values["mixed_precision"] == "fp16"


def test_some_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = ask(monkeypatch, GPUS, "", "2", "0,3", "", "", "", "")
    assert values["gpu_ids"] == "0,3"
    assert values["num_processes"] == 2


def test_in_slurm_nothing_is_asked_that_slurm_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Machine(gpus=GPUS.gpus, gpu_kind="cuda", cores=64, slurm_nodes=2)
    values, asked = ask(monkeypatch, job, "", "", "", "", "")
    assert not any("machines" in question for question in asked)
    assert values["nproc_per_node"] == 4
    assert not {"num_machines", "num_processes", "machine_rank"} & set(values)


FSDP = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
}


@pytest.mark.parametrize(
    ("typed", "block"),
    [
        (["", "", "", ""], {}),
        (
            ["n", "y", "y", "2", "GPT2Block"],
            {
                "fsdp_reshard_after_forward": False,
                "fsdp_offload_params": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
                "fsdp_activation_checkpointing": True,
            },
        ),
        (
            ["", "", "", "3", "9000"],
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 9000},
        ),
    ],
    ids=["defaults", "classes", "sizes"],
)
def test_how_models_are_sharded(
    typed: list[str], block: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, _ = ask(monkeypatch, GPUS, "", "", "", "2", *typed, "", "")
    assert values["distributed_type"] == "FSDP"
    assert values["fsdp_config"] == FSDP | block


def test_a_tpu_is_asked_for_machines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = ask(monkeypatch, Machine(), "3", "", "", "")
    assert values["distributed_type"] == "XLA"
    assert "num_processes" not in values


@pytest.mark.parametrize(
    ("typed", "block"),
    [
        (["", "", "", ""], {"zero_stage": 2, "offload_optimizer_device": "none"}),
        (["", "0", "1.5"], {"zero_stage": 0, "gradient_clipping": "1.5"}),
        (["", "1", "", "2"], {"zero_stage": 1, "offload_optimizer_device": "cpu"}),
        (
            ["", "9", "3", "0.5", "3", "/nvme", "2", "y"],
            {
                "zero_stage": 3,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/nvme",
                "offload_param_device": "cpu",
                "zero3_init_flag": True,
                "gradient_clipping": "0.5",
            },
        ),
        (["ds.json"], {"deepspeed_config_file": "ds.json"}),
    ],
    ids=["default", "stage 0", "stage 1", "all", "file"],
)
def test_deepspeed_is_asked_of(
    typed: list[str],
    block: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    values, _ = ask(monkeypatch, Machine(), "", "2", "", "3", *typed, "", "")
    assert values["distributed_type"] == "DEEPSPEED"
    assert values["deepspeed_config"] == block
    # a launch of the file gives the processes the same
    Path("asked.yaml").write_text(yaml.safe_dump(values))
    assert main(["launch", "--dry_run", "--config_file", "asked.yaml", "-m", "timeit"]) == 0
    words = capsys.readouterr().out.split()
    variables = dict(word.split("=", 1) for word in words if word.startswith("ACCEL_"))
    plugins = DeepSpeedPlugin.from_launch(None, resolve_config({}, variables))
    assert plugins is not None
    plugin = plugins.active
    assert plugin.zero_stage == block.get("zero_stage", 2)
    clipping = block.get("gradient_clipping", "auto")
    assert plugin.gradient_clipping == (clipping if clipping == "auto" else float(str(clipping)))
    for name in ("offload_optimizer_device", "offload_param_device"):
        assert getattr(plugin, name) == block.get(name, "none")


# --- --default, update ---------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--default"], ["default"]])
def test_default_writes_what_fits_and_can_be_launched(
    accel: Run, tmp_path: Path, own_home: Path, words: list[str]
) -> None:
    done = accel("config", *words, ACCEL_HOME=str(own_home))
    assert done.returncode == 0, done.stderr
    path = own_home / "default_config.yaml"
    assert f"wrote {path}\nlaunch with:\n  accel launch train.py\n" in done.stdout
    values, gone = values_of(read_config(path), str(path))
    assert values["num_processes"] >= 1
    assert not gone
    again = accel("config", *words, ACCEL_HOME=str(own_home))
    assert again.returncode == 1
    assert "--force replaces it" in again.stderr
    forced = accel("config", *words, "--force", ACCEL_HOME=str(own_home))
    assert forced.returncode == 0


def test_a_tilde_that_the_shell_left_is_the_home_for_all_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text("use_cpu: true  # by hand\n")
    assert main(["config", "--default", "--config_file=~/mine.yaml"]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert path.read_text() == "use_cpu: true  # by hand\n"
    assert main(["config", "show", "--config_file=~/mine.yaml"]) == 0


def test_default_in_slurm_leaves_the_machines_to_it() -> None:
    values = config.defaults(Machine(gpus=("A100",) * 4, slurm_nodes=2), None)
    assert values["nproc_per_node"] == 4
    assert not {"num_machines", "num_processes"} & set(values)


def test_default_on_gpus_takes_all() -> None:
    values = config.defaults(GPUS, "bf16")
    assert (values["num_processes"], values["mixed_precision"]) == (4, "bf16")


def test_another_file_is_named_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "--default", "--config_file", "mine.json"]) == 0
    assert (
        f"accel launch --config_file {tmp_path / 'mine.json'} train.py" in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "mine.json").read_text())["compute_environment"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--default", "--mixed_precision", "bf17"], "Did you mean 'bf16'"),
        (["--default", "--config_file", "/proc/none/a.yaml"], "cannot be written"),
        (["--defualt"], "did you mean '--default'"),
        (["shwo"], "invalid choice"),
        (["update"], "found no config file to update"),
        (["update", "--config_file", "missing.yaml"], "there is no such file"),
        (["show", "--config_file", "missing.yaml"], "there is no such file"),
    ],
)
def test_mistakes_exit_with_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_update_renames_and_drops_old_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.yaml"
    old = {"distributed_type": "NO", "fp16": True, "ipex_config": {}, "num_processes": 1}
    path.write_text("# by hand\n" + yaml.safe_dump(old))
    assert main(["config", "update", "--config_file", str(path)]) == 0
    text = capsys.readouterr().out
    assert "removed fp16" in text
    assert "added mixed_precision: fp16" in text
    assert "comments are not kept" in text
    new = {"distributed_type": "NO", "mixed_precision": "fp16", "num_processes": 1}
    assert read_config(path) == new
    before = path.read_text()
    assert main(["config", "--config_file", str(path), "update"]) == 0
    assert path.read_text() == before


# --- show ----------------------------------------------------------------------------------


def test_show_without_any_file_shows_the_defaults(accel: Run, own_home: Path) -> None:
    done = accel("config", "show", ACCEL_HOME=str(own_home))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("config file: none (accel.yaml in ")
    rows = [line.split() for line in done.stdout.splitlines()[3:]]
    assert [row[0] for row in rows] == [one.path for one in all_options() if not one.block]
    assert {row[-1] for row in rows} == {"default"}


def test_show_prints_origins_and_what_has_no_effect(accel: Run, tmp_path: Path) -> None:
    path = tmp_path / "accel.yaml"
    path.write_text("num_processes: 2\nsame_network: true\nfsdp_config: {fsdp_version: 2}\n")
    done = accel("config", "show", ACCEL_DEBUG="1")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()[3:]}
    origin = f"accel.yaml ({path})"
    assert rows["num_processes"] == ["2", origin]
    assert rows["debug"] == ["true", "environment variable ACCEL_DEBUG"]
    assert rows["same_network"][1].startswith(f"{origin}; no effect: ")
    idle = f"{origin}; no effect: distributed_type is not FSDP"
    assert rows["fsdp_config.fsdp_version"] == ["2", idle]
    assert rows["fsdp_config.fsdp_offload_params"] == ["false", "default"]


def test_show_searches_from_a_script_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accel.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n")
    words = ["--script", str(tmp_path / "src" / "train.py"), "--json"]
    assert main(["config", "show", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(path)
    assert facts["refused"].startswith("fsdp_config.fsdp_sharding_strategy: NO_SHARD")
    assert facts["settings"]["distributed_type"]["value"] == "FSDP"


def test_a_pipe_that_closes_is_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m accel_callbacks.cli config show | true"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["show"], ["--default", "--force"], ["--help"]])
def test_config_needs_no_torch(tmp_path: Path, words: list[str]) -> None:
    code = "import sys; from accel_callbacks.cli.main import main; c = main(sys.argv[1:])"
    code += "; print('torch' in sys.modules); sys.exit(c)"
    done = subprocess.run(
        [sys.executable, "-c", code, "config", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# --- this machine --------------------------------------------------------------------------


def test_gpus_are_found_by_the_drivers_tool(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100'\necho 'NVIDIA H100'\n")
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = detect_machine({"PATH": path}, tmp_path)
    assert (found.gpu_kind, found.gpus) == ("cuda", ("NVIDIA H100", "NVIDIA H100"))
    hidden = detect_machine({"PATH": path, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path)
    assert len(hidden.gpus) == 1
    assert detect_machine({"PATH": path, "CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == ()
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert detect_machine({"PATH": path}, tmp_path).gpus == ()


def test_gpus_are_found_by_the_kernels_files(tmp_path: Path) -> None:
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t NVIDIA L4\nIRQ: 1\n")
    assert detect_machine({"PATH": ""}, tmp_path).gpus == ("NVIDIA L4",)


def test_gpus_of_amd_are_distinguished_from_cpus(tmp_path: Path) -> None:
    for number, units in enumerate(("0", "304")):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\n")
    found = detect_machine({"PATH": ""}, tmp_path)
    assert (found.gpu_kind, found.gpus) == ("rocm", ("AMD GPU",))


def test_slurm_is_found_by_its_variables(tmp_path: Path) -> None:
    job = {"PATH": "", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}
    found = detect_machine(job, tmp_path)
    assert found.slurm_nodes == 4
    assert detect_machine({"PATH": ""}, tmp_path).slurm_nodes == 0
