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
from dataclasses import replace
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
    shell.answer("Number [1] ", str(len(config._places(detect_machine(os.environ)))))
    shell.answer("How many processes on this machine?", "none")
    shell.until("must be an integer")
    shell.answer("How many processes on this machine?", "2")
    shell.answer("How many machines take part? [1] ", "2")
    shell.answer("from 0 (the first) to 1? [0] ", "1")
    shell.answer("Address of machine 0", "node0")
    shell.answer("A free port on it? [29500] ", "")
    shell.answer("(FSDP), to save memory? [y/N] ", "")
    shell.answer("(tensor parallelism, by a plan)? [y/N] ", "")
    shell.answer("Number [1] ", "2")
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
    monkeypatch: pytest.MonkeyPatch, machine: Machine, *typed: str, everything: bool = False
) -> tuple[dict[str, object], list[str]]:
    """The answers on another machine than this, and the questions that were asked."""
    asked: list[str] = []
    left = list(typed)

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return left.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    values = config.answers(machine, None, everything)
    assert left == []
    values_of(values, "what was asked")
    return values, asked


def test_on_gpus_all_of_them_are_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = ask(monkeypatch, GPUS, "", "", "", "", "2", "")
    assert values["distributed_type"] == "MULTI_GPU"
    assert values["num_processes"] == 4
    assert values["mixed_precision"] == "fp16"


def test_some_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = ask(monkeypatch, GPUS, "2", "7", "0, 3", "", "", "", "", "")
    assert values["gpu_ids"] == "0,3"
    assert values["num_processes"] == 2


def test_in_slurm_nothing_is_asked_that_slurm_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Machine(gpus=GPUS.gpus, gpu_kind="cuda", cores=64, slurm_nodes=2)
    values, asked = ask(monkeypatch, job, "", "", "", "")
    assert not any("machine" in question for question in asked)
    assert values["nproc_per_node"] == 4
    assert not {"num_machines", "num_processes", "machine_rank"} & set(values)


FSDP = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}


@pytest.mark.parametrize(
    ("typed", "block", "mesh"),
    [
        (["y", "", "", "", "", "", "", ""], {"fsdp_activation_checkpointing": False}, None),
        (
            ["y", "n", "y", "2", "GPT2Block", "y", "2"],
            {
                "fsdp_reshard_after_forward": False,
                "fsdp_offload_params": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
                "fsdp_activation_checkpointing": True,
            },
            {"dp_replicate_size": 2, "dp_shard_size": 2},
        ),
        (
            ["y", "", "", "3", "9000", "", "3", "4", "1", "", ""],
            {
                "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
                "fsdp_min_num_params": 9000,
                "fsdp_activation_checkpointing": False,
            },
            None,
        ),
        (
            ["y", "", "", "", "", "", "4", "2"],
            {"fsdp_activation_checkpointing": False},
            {"tp_size": 2, "dp_shard_size": 2},
        ),
        (
            ["y", "", "", "", "", "", "", "2"],
            {"fsdp_activation_checkpointing": False},
            {"cp_size": 2, "dp_shard_size": 2},
        ),
    ],
    ids=["defaults", "classes and replicas", "sizes", "layers", "sequences"],
)
def test_how_models_are_sharded(
    typed: list[str],
    block: dict[str, object],
    mesh: dict[str, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, _ = ask(monkeypatch, GPUS, "", "", *typed, "", "")
    assert values["distributed_type"] == "FSDP"
    assert values["fsdp_config"] == FSDP | block
    named = mesh and {f"parallelism_config_{key}": size for key, size in mesh.items()}
    assert values.get("parallelism_config") == named


def test_layers_are_cut_over_all_processes_where_nothing_is_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, _ = ask(monkeypatch, GPUS, "", "", "", "y", "", "")
    assert values["distributed_type"] == "MULTI_GPU"
    assert values["parallelism_config"] == {"parallelism_config_tp_size": 4}


def test_a_tpu_is_offered_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = ask(monkeypatch, Machine(tpu=True, torch_xla=True), "", "", "", "")
    assert values["distributed_type"] == "XLA"
    assert "the TPU" not in config._places(Machine(tpu=True))


def test_a_machine_is_not_asked_of_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, asked = ask(monkeypatch, Machine(cores=4), "2", "8", "", "y", "", "", "", "", "", "", "", "")
    text = capsys.readouterr().out + "".join(asked)
    assert not any(word in text for word in ("fp8", "GPU", "TPU", "DeepSpeed", "(context"))
    assert "(tensor parallelism" in text
    for fp8 in (False, True):
        machine = Machine(gpus=("a", "b"), gpu_kind="cuda", fp8=fp8)
        ask(monkeypatch, machine, "", "", "", "", "", "")
        assert ("fp8" in capsys.readouterr().out) == fp8


def test_all_questions_are_asked_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    there = len(config._places(Machine(cores=4)))
    on_gpus = (str(there + 2), "", "")
    zero = ("y", "", "1", "", "")
    values, _ = ask(monkeypatch, Machine(cores=4), *on_gpus, "", *zero, "4", "", everything=True)
    assert (values["distributed_type"], values["num_processes"]) == ("DEEPSPEED", 8)
    assert (values["deepspeed_config"], values["mixed_precision"]) == ({"zero_stage": 1}, "fp8")
    values, _ = ask(monkeypatch, Machine(cores=4), "1", "", "", "", everything=True)
    assert values["distributed_type"] == "XLA"


@pytest.mark.parametrize(
    ("place", "typed", "block"),
    [
        ("CPU", ["n", "", "", ""], {"zero_stage": 2}),
        ("GPUs", ["n", "", "", ""], {"zero_stage": 2}),
        ("CPU", ["", "0", "1.5"], {"zero_stage": 0, "gradient_clipping": 1.5}),
        ("CPU", ["", "1", "2", ""], {"zero_stage": 1, "offload_optimizer_device": "cpu"}),
        ("CPU", ["", "3", "", "", "", ""], {"zero_stage": 3, "zero3_init_flag": True}),
        ("one GPU", ["", "3", "", "", "", ""], {"zero_stage": 3, "zero3_init_flag": True}),
        (
            "CPU",
            ["", "3", "3", "/nvme", "2", "n", "zero", "-1", "0.5"],
            {
                "zero_stage": 3,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/nvme",
                "offload_param_device": "cpu",
                "zero3_init_flag": False,
                "gradient_clipping": 0.5,
            },
        ),
        ("CPU", ["y", "none.json", "ds.json"], {"deepspeed_config_file": "ds.json"}),
    ],
    ids=[
        "default", "default, GPUs", "stage 0", "stage 1", "stage 3", "stage 3, one GPU", "all",
        "file",
    ],
)  # fmt: skip
def test_deepspeed_is_asked_of_where_it_is_installed(
    place: str,
    typed: list[str],
    block: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    before = {
        "GPUs": ["", "", ""],
        "one GPU": ["3", ""],
        "CPU": [str(len(config._places(GPUS))), "2", "", ""],
    }[place]
    machine = replace(GPUS, deepspeed=True)
    values, _ = ask(monkeypatch, machine, *before, "y", *typed, "", "")
    assert values["distributed_type"] == "DEEPSPEED"
    assert values["deepspeed_config"] == block
    if place != "CPU":
        return
    # a launch of the file gives the processes the same
    Path("asked.yaml").write_text(yaml.safe_dump(values))
    assert main(["launch", "--dry_run", "--config_file", "asked.yaml", "-m", "timeit"]) == 0
    words = capsys.readouterr().out.split()
    variables = dict(word.split("=", 1) for word in words if word.startswith("ACCEL_"))
    plugins = DeepSpeedPlugin.from_launch(None, resolve_config({}, variables))
    assert plugins is not None
    plugin = plugins.active
    assert plugin.zero_stage == block.get("zero_stage", 2)
    assert plugin.gradient_clipping == block.get("gradient_clipping", "auto")
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
    idle = (
        f"{origin}; no effect: distributed_type is not FSDP; "
        "it would set: version of FSDP; 1 is trained as 2"
    )
    assert rows["fsdp_config.fsdp_version"] == ["2", idle]
    assert rows["fsdp_config.fsdp_offload_params"] == ["false", "default"]


def test_c17_no_effect_says_what_the_setting_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accel.yaml"
    path.write_text("enable_cpu_affinity: true\nmachine_rank: 1\nuse_mps_device: true\n")
    assert main(["config", "show", "--config_file", str(path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    assert [row.split("; it would ")[1] for row in rows] == [
        "bind each process to the cores near its GPU",
        "set: which machine this is; 0 is the first",
        "take that GPU",
    ]
    assert main(["config", "show", "--config_file", str(path), "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["enable_cpu_affinity"]["purpose"].startswith("it would bind each process")
    assert settings["num_processes"]["purpose"] is None


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


@pytest.mark.parametrize(
    ("answer", "fp8"),
    [("9.0\n8.9", True), ("9.0\n8.0", False), ("12.0", True), ("[N/A]", False), ("", False)],
)
def test_fp8_needs_the_capability_of_all_gpus(tmp_path: Path, answer: str, fp8: bool) -> None:
    tool = tmp_path / "nvidia-smi"
    script = f"case $1 in *name*) echo H100;; *) printf '{answer}';; esac"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert detect_machine({"PATH": str(tmp_path)}, tmp_path).fp8 == fp8


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


def test_slurm_and_tpu_are_found_by_their_variables(tmp_path: Path) -> None:
    job = {"PATH": "", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "TPU_NAME": "t"}
    found = detect_machine(job, tmp_path)
    assert (found.slurm_nodes, found.tpu) == (4, True)
    assert detect_machine({"PATH": ""}, tmp_path).slurm_nodes == 0
