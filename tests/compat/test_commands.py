"""Modules of Accelerate that are programs: `python -m`, and their `main`."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_callbacks.compat.finder import AliasFinder
from accel_callbacks.compat.names import PROGRAMS, resolve
from tests.compat.test_alias import run

MODULE = ("-m", "accel_callbacks.as_accelerate", "-m")
STANDS_IN = "1.15.0+accel.callbacks"
TELL = """
    import os, sys
    import accelerate

    if os.environ.get("RANK", "0") == "0":
        print(accelerate.__version__, os.environ.get("WORLD_SIZE", "1"))
"""


def test_a_launch_by_its_module_stands_in(tmp_path):
    said = run(tmp_path, TELL, *MODULE, "accelerate.commands.launch", "--cpu")
    assert said.split() == [STANDS_IN, "1"]


@pytest.mark.distributed
def test_a_launch_by_the_module_of_all_commands_stands_in_on_each_process(tmp_path):
    words = ("launch", "--cpu", "--num_processes", "2")
    said = run(tmp_path, TELL, *MODULE, "accelerate.commands.accelerate_cli", *words)
    assert said.split() == [STANDS_IN, "2"]


def test_a_script_launches_others_by_their_module_and_gets_the_exit_code(tmp_path):
    (tmp_path / "other.py").write_text(
        "import accelerate, sys\nprint(accelerate.__version__)\nsys.exit(3)\n"
    )
    said = run(
        tmp_path,
        """
        import os, subprocess, sys
        import accelerate

        other = os.path.join(os.path.dirname(os.path.abspath(__file__)), "other.py")
        words = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", other]
        print(subprocess.run(words).returncode)
        """,
    )
    assert said.split() == [STANDS_IN, "3"]


def test_a_module_that_is_no_program_says_so_in_one_sentence(tmp_path):
    said = run(tmp_path, "", *MODULE, "accelerate.data_loader", expected=1)
    assert "accelerate.data_loader is no program" in said
    assert "accelerate.commands.launch" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("module", sorted(PROGRAMS))
def test_the_main_of_a_module_is_its_subcommand(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    resolve(module, "main")()
    assert f"usage: {' '.join(['accel', PROGRAMS[module]]).strip()} " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["program", "--no_such_option"])
    with pytest.raises(SystemExit) as stop:
        resolve(module, "main")()
    assert stop.value.code == 2


def test_a_process_that_a_program_spawns_does_not_run_it_again():
    exec(AliasFinder().get_code("accelerate.commands.launch"), {"__name__": "__mp_main__"})


@pytest.mark.parametrize(
    ("name", "subcommand", "words"),
    [
        ("env", "env", []),
        ("estimate", "estimate-memory", ["bert"]),
        ("merge", "merge-weights", ["source", "destination"]),
        ("test", "test", ["--dry_run", "--num_processes", "1"]),
        ("to_fsdp2", "to-fsdp2", ["--config_file", "here.yaml"]),
        ("launch", "launch", ["--dry_run", "-m", "timeit"]),
    ],
)
def test_each_command_has_its_parser_and_one_inside_of_others(name, subcommand, words):
    module = f"accelerate.commands.{name}"
    make = resolve(module, f"{name}_command_parser")
    assert callable(resolve(module, f"{name}_command"))
    outer = argparse.ArgumentParser()
    make(outer.add_subparsers())
    inner = outer.parse_args([subcommand, *words])
    assert inner.func is resolve(module, f"{name}_command")
    assert {**vars(inner), "func": None} == {**vars(make().parse_args(words)), "func": None}


def test_a_command_runs_what_its_parser_reads(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    module = "accelerate.commands.merge"
    args = resolve(module, "merge_command_parser")().parse_args([str(folder), str(tmp_path / "a")])
    resolve(module, "merge_command")(args)
    assert load_file(tmp_path / "a" / "model.safetensors")["weight"].tolist() == [1.0, 1.0]


def test_a_command_that_fails_ends_with_its_exit_code(tmp_path):
    module = "accelerate.commands.launch"
    script = tmp_path / "script.py"
    script.write_text("import accelerate, sys; sys.exit(len(accelerate.__version__))")
    args = resolve(module, "launch_command_parser")().parse_args(["--cpu", str(script)])
    with pytest.raises(SystemExit) as stop:
        resolve(module, "launch_command")(args)
    assert stop.value.code == len(STANDS_IN)


def test_a_config_is_made_read_and_written(tmp_path):
    module, path = "accelerate.commands.config.config_args", str(tmp_path / "config.yaml")
    made = resolve(module, "ClusterConfig")(mixed_precision="bf16", num_processes=2)
    made.to_yaml_file(path)
    read = resolve(module, "load_config_from_file")(path)
    assert isinstance(read, resolve(module, "ClusterConfig"))
    assert isinstance(read, resolve(module, "BaseConfig"))
    assert (read.mixed_precision, read.to_dict()) == ("bf16", made.to_dict())
    resolve(module, "SageMakerConfig")(compute_environment="AMAZON_SAGEMAKER").to_yaml_file(path)
    read = resolve(module, "load_config_from_file")(path)
    assert isinstance(read, resolve(module, "SageMakerConfig"))
    with pytest.raises(FileNotFoundError, match="`accel config` writes one"):
        resolve(module, "load_config_from_file")(str(tmp_path / "other.yaml"))


def test_a_command_raises_what_scripts_know(tmp_path):
    module = "accelerate.commands.to_fsdp2"
    source, target = tmp_path / "one.yaml", tmp_path / "two.yaml"
    source.write_text("fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_version: 1}\n")

    def convert(*words):
        args = resolve(module, "to_fsdp2_command_parser")().parse_args(words)
        return resolve(module, "to_fsdp2_command")(args)

    with pytest.raises(FileNotFoundError, match=r"absent\.yaml does not exist"):
        convert("--config_file", "absent.yaml")
    with pytest.raises(ValueError, match="give --output_file, or --overwrite"):
        convert("--config_file", str(source))
    convert("--config_file", str(source), "--output_file", str(target))
    with pytest.raises(FileExistsError, match="--overwrite replaces it"):
        convert("--config_file", str(source), "--output_file", str(target))
    given = {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}, "debug": True}
    config = resolve(module, "convert_config_to_fsdp2")(given)
    assert config["debug"] is True
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] in (True, "true")


def test_kinds_of_run_are_attributes_that_a_script_may_assign(capsys):
    module = "accelerate.commands.launch"
    parser, launch = (
        resolve(module, "launch_command_parser")(),
        resolve(module, "launch_command"),
    )
    args = parser.parse_args(["--dry_run", "--multi-gpu", "--use_fsdp", "-m", "timeit"])
    assert (args.multi_gpu, args.use_fsdp, args.use_deepspeed) == (True, True, False)
    with pytest.raises(ValueError, match="--use_fsdp contradicts distributed_type MULTI_GPU"):
        launch(args)
    words = ["--dry_run", "--cpu", "--num-processes", "2", "-m", "timeit"]
    args = parser.parse_args(words)
    args.use_fsdp = True
    launch(args)
    assert "ACCEL_DISTRIBUTED_TYPE=FSDP" in capsys.readouterr().out


# --- all machines of a TPU ----------------------------------------------------------------------


def tpu_config(*words: str) -> None:
    parser = resolve("accelerate.commands.tpu", "tpu_command_parser")()
    resolve("accelerate.commands.tpu", "tpu_command_launcher")(parser.parse_args(words))


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """A program of the name, which writes the words that it gets, and fails for a zone."""
    program, said = tmp_path / "bin" / "gcloud", tmp_path / "said"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n! echo "$@" | grep -q nowhere\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return said


def test_commands_run_on_all_machines_of_a_tpu(gcloud, tmp_path):
    config = tmp_path / "pod.yaml"
    config.write_text("tpu_name: pod\ntpu_zone: here\ncommands: [echo a, echo b]\n")
    tpu_config("--config_file", str(config), "--install_accelerate", "--accelerate_version", "1.2")
    words = gcloud.read_text().splitlines()
    assert words[:6] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone"]
    line = "cd /usr/share; pip install accelerate==1.2; echo a; echo b"
    assert words[6:] == ["here", "--command", line, "--worker", "all"]
    file = tmp_path / "commands.sh"
    file.write_text("ls\npwd\n")
    tpu_config("--config_file", str(config), "--command_file", str(file), "--use_alpha")
    assert gcloud.read_text().splitlines()[0] == "alpha"
    assert "cd /usr/share; ls; pwd" in gcloud.read_text()


def test_a_command_that_fails_on_a_tpu_is_an_error(gcloud, tmp_path, capsys):
    where = ("--tpu_name", "pod", "--tpu_zone", "nowhere")
    with pytest.raises(subprocess.CalledProcessError):
        tpu_config("--command", "ls", *where)
    gcloud.unlink()
    tpu_config("--command", "ls", *where, "--debug")
    assert (
        "ssh pod --zone nowhere --command cd /usr/share; ls --worker all" in capsys.readouterr().out
    )
    assert not gcloud.exists()
    with pytest.raises(ValueError, match="no command to run"):
        tpu_config(*where)
    with pytest.raises(ValueError, match="tpu_name"):
        tpu_config("--command", "ls")
