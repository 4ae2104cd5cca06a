"""The commands of the page about launching have the documented effect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import clean_environment
from tests.cli.fake_slurm import put_tools

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "launch-anywhere.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(\w*)\$ accel (.+)$", TEXT, re.M)
ALONE = [words for machine, words in COMMANDS if not machine and "--tpu" not in words]
TPU = [words for machine, words in COMMANDS if "--tpu" in words]
BATCH = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.M | re.S)

# Leaves a file for each process: no torch, so that a dozen launches take a few seconds.
TRAIN = """
import os, sys
def main():
    rank, world = os.environ.get("RANK", "none"), os.environ.get("WORLD_SIZE", "none")
    with open(f"{sys.argv[0].rpartition('/')[2]}-{rank}", "w") as out:
        print(world, os.environ.get("ACCEL_CPU"), *sys.argv[1:], file=out)
train = main
if __name__ == "__main__":
    main()
"""

RUN_ALL = """
import os, shlex, sys
from accel_callbacks.cli.main import main
top = os.getcwd()
for number, words in enumerate(sys.argv[1:]):
    os.chdir(f"{top}/{number}")
    sys.stdout.flush()
    os.dup2(os.open("stdout", os.O_CREAT | os.O_WRONLY), 1)
    assert main(shlex.split(words)) == 0, words
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").touch()
    return tmp_path


def left(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.glob("train.py-*")}


def test_the_page_has_them() -> None:
    assert (len(ALONE), len(TPU), len(BATCH)) == (7, 2, 2)
    assert {machine for machine, _ in COMMANDS} == {"", "node0", "node1"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each command, run one after the other by one interpreter: torch comes once."""
    place = tmp_path_factory.mktemp("alone")
    for number in range(len(ALONE)):
        (place / str(number)).mkdir()
        (place / str(number) / "train.py").write_text(TRAIN)
    # Where there is no GPU, a launch on some is refused; what would run is shown everywhere.
    commands = [words.replace("--gpu_ids", "--dry_run --gpu_ids") for words in ALONE]
    command = [sys.executable, "-c", RUN_ALL, *commands]
    done = subprocess.run(
        command,
        cwd=place,
        env=clean_environment(place),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.distributed
@pytest.mark.parametrize("words", ALONE)
def test_commands_for_one_machine(words: str, ran: Path) -> None:
    place = ran / str(ALONE.index(words))
    out, files = (place / "stdout").read_text(), left(place)
    if "--no_python" in words:
        assert out == "process 0 of 1\n"
    elif "--gpu_ids" in words:
        assert "export CUDA_VISIBLE_DEVICES=0,1" in out
        assert (out.count("# rank "), files) == (2, {})
    elif "--dry_run" in words:
        assert "export ACCEL_MIXED_PRECISION=bf16" in out
        assert (out.count("# rank "), files) == (2, {})
    else:
        count = 2 if "--num_processes 2" in words else 1
        assert sorted(files) == [f"train.py-{rank}" for rank in range(count)]
        cpu, rest = "1" if "--cpu" in words else "None", " --lr 0.1" if "--lr" in words else ""
        assert set(files.values()) == {f"{count} {cpu}{rest}\n"}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", ["--num_machines", pytest.param("--nnodes", marks=pytest.mark.slow)]
)
def test_commands_for_two_machines(kind: str, start: Start, place: Path, free_port: int) -> None:
    commands = [words for machine, words in COMMANDS if machine and kind in words]
    where = f"--main_process_ip 127.0.0.1 --main_process_port {free_port}"
    machines = [
        start(*words.replace("--main_process_ip node0", where).split()) for words in commands
    ]
    assert len(machines) == 2
    for machine in machines:
        _, err = machine.communicate()
        assert machine.returncode == 0, err
    assert left(place) == {f"train.py-{rank}": "4 None\n" for rank in range(4)}


@pytest.mark.parametrize("words", TPU)
def test_commands_for_a_tpu(words: str, accel: Run, place: Path) -> None:
    done = accel(*words.split(), PYTHONPATH=str(place))
    assert done.returncode == 0, done.stderr
    assert left(place) == {"train.py-none": "none None --lr 0.1\n"}


def test_a_tpu_without_torch_xla_or_without_the_function(accel: Run, place: Path) -> None:
    words = ["launch", "--tpu", "--main_training_function", "absent", "train.py"]
    done = accel(*words, PYTHONPATH=str(place))
    assert done.returncode == 2
    assert "train.py has no function 'absent'" in done.stderr
    (place / "torch_xla" / "__init__.py").write_text("raise ImportError('no TPU library')")
    done = accel(*words, PYTHONPATH=str(place))
    assert done.returncode == 2
    assert "pip install 'torch_xla[tpu]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.distributed
@pytest.mark.parametrize(("file", "processes"), [(0, 8), (1, 4)])
def test_batch_files(file: int, processes: int, place: Path) -> None:
    tools = put_tools(place / "bin")
    each = re.findall(r"--ntasks-per-node=(\d)", BATCH[file])[0]
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost,second"}
    job |= {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": each, "SLURM_CPUS_PER_TASK": "1"}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", BATCH[file]],
        cwd=place,
        env={**os.environ, **job, "PATH": path, "ACCEL_HOME": str(place), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    files = left(place)
    assert len(files) == processes
    assert {text.split()[0] for text in files.values()} == {str(processes)}
