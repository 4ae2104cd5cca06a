"""Processes that a process standing in for Accelerate starts stand in too."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from accel_callbacks.compat.children import child_variables
from accel_callbacks.compat.finder import AliasFinder
from tests.compat.test_alias import ROOT, run

ASK = """
    import accelerate

    def version():
        return accelerate.__version__
"""
STANDS_IN = "1.15.0+accel.callbacks"


def test_spawned_processes_and_workers_stand_in(tmp_path):
    said = run(
        tmp_path,
        ASK
        + """
    import os, subprocess, sys
    import torch
    from torch.utils.data import DataLoader

    def show(rank):
        print(version(), flush=True)

    def text(items):
        return version()

    if __name__ == "__main__":
        torch.multiprocessing.spawn(show, nprocs=1)
        options = dict(num_workers=1, multiprocessing_context="spawn", collate_fn=text)
        print(*DataLoader(range(1), **options), flush=True)
        command = "import accelerate; print(accelerate.__version__)"
        subprocess.run([sys.executable, "-c", command], check=True)
        again = dict(os.environ, ACCEL_AS_ACCELERATE="0")
        command = "import sys; print([f for f in sys.meta_path if 'compat' in str(type(f))])"
        subprocess.run([sys.executable, "-c", command], check=True, env=again)
    """,
    )
    assert said.splitlines() == [STANDS_IN] * 3 + ["[]"]


def test_a_sitecustomize_of_others_is_run_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('of others')\n")
    said = run(
        tmp_path,
        """
        import os, subprocess, sys
        import accelerate

        environment = dict(os.environ)
        places = [environment["PYTHONPATH"], os.path.dirname(os.path.abspath(__file__))]
        environment["PYTHONPATH"] = os.pathsep.join(places)
        command = "import accelerate, sys; print(accelerate.__version__); "
        command += "print([place for place in sys.path if place.endswith('startup')])"
        subprocess.run([sys.executable, "-c", command], check=True, env=environment)
        """,
    )
    assert said.splitlines() == ["of others", STANDS_IN, "[]"]


def test_options_of_a_launch_have_the_names_of_accelerate():
    variables = child_variables(
        {
            **{"ACCEL_MIXED_PRECISION": "bf16", "ACCEL_CPU": "1", "ACCEL_DYNAMO_MODE": "default"},
            **{"ACCEL_DISTRIBUTED_TYPE": "FSDP", "ACCEL_FSDP_OFFLOAD_PARAMS": "1"},
            **{"ACCEL_FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "Block", "PYTHONPATH": "here"},
            **{"ACCEL_PARALLELISM_TP_SIZE": "2", "ACCEL_DEEPSPEED_ZERO_STAGE": "3"},
            **{"ACCELERATE_MIXED_PRECISION": "fp16", "ACCEL_LOG_LEVEL": "info"},
        }
    )
    places = variables.pop("PYTHONPATH").split(os.pathsep)
    assert places[1:] == ["here"]
    assert Path(places[0], "sitecustomize.py").exists()
    assert variables == {
        **{"ACCEL_AS_ACCELERATE": "1", "ACCELERATE_USE_CPU": "1"},
        **{"ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_USE_FSDP": "true"},
        **{"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "1"},
        **{"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "PARALLELISM_CONFIG_TP_SIZE": "2"},
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    }
    assert child_variables({"PYTHONPATH": os.pathsep.join(places)})["PYTHONPATH"] == (
        os.pathsep.join(places)
    )


@pytest.mark.slow  # test_alias.py has a launch of both processes, with one of the variables
@pytest.mark.distributed
def test_a_launch_sets_the_variables_of_accelerate(tmp_path):
    said = run(
        tmp_path,
        """
        import os
        from accelerate import Accelerator

        names = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "FSDP_VERSION")
        accelerator = Accelerator()
        accelerator.print(*(os.environ[name] for name in names), accelerator.distributed_type.value)
        """,
        *("-m", "accel_callbacks.cli", "launch", "--as_accelerate", "--cpu", "--use_fsdp"),
        *("--num_processes", "2", "--mixed_precision", "bf16"),
    )
    assert said.split() == ["bf16", "true", "2", "FSDP"]


def test_the_distribution_is_in_no_folder_that_a_tool_names(tmp_path):
    finder = AliasFinder()
    sys.meta_path.insert(0, finder)
    try:
        names = [found.metadata["Name"] for found in importlib.metadata.distributions()]
        assert names[0] == "accelerate"
        assert list(importlib.metadata.distributions(path=[str(tmp_path)])) == []
    finally:
        sys.meta_path.remove(finder)


SHOW = f"""
    import os, sys
    import accelerate

    assert accelerate.__version__ == "{STANDS_IN}"
    assert sys.argv[1:] == ["--lr", "1"]
    print(f"{{os.environ['RANK']}} stands in", flush=True)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("form", "processes"),
    [
        pytest.param("{script}", 1, id="script", marks=pytest.mark.first),
        pytest.param("-m script", 1, id="module"),
        pytest.param("--no_python {python} {script}", 1, id="program"),
        pytest.param("--no_python {folder}/start.sh", 2, id="shell"),
    ],
)
def test_each_form_of_start_stands_in(tmp_path, form, processes):
    (tmp_path / "script.py").write_text(textwrap.dedent(SHOW))
    (tmp_path / "start.sh").write_text(f'#!/bin/sh\nexec "{sys.executable}" script.py "$@"\n')
    (tmp_path / "start.sh").chmod(0o700)
    words = form.format(script="script.py", python=sys.executable, folder=tmp_path).split()
    options = ["--as_accelerate", "--cpu", "--num_processes", str(processes)]
    done = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "launch", *options, *words, "--lr", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **{"cwd": tmp_path, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    # Lines of two processes may run into each other.
    said = sorted(re.findall(r"\d stands in", done.stdout))
    assert said == [f"{rank} stands in" for rank in range(processes)]


@pytest.mark.parametrize("function", ["main", "train"])
def test_a_function_that_a_tpu_launch_calls_stands_in(tmp_path, function):
    (tmp_path / "script.py").write_text(
        "import accelerate\n\ndef train():\n    print(accelerate.__version__)\n\n"
        + ("train()\n" if function == "main" else "")
    )
    call = "from accel_callbacks.launch.tpu import call_main; call_main(*['script.py', []], {})"
    done = subprocess.run(
        [sys.executable, "-c", call.format(repr(function))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCEL_AS_ACCELERATE": "1"},
        **{"cwd": tmp_path, "capture_output": True, "text": True},
    )
    assert done.stdout == f"{STANDS_IN}\n", done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_fails_where_nothing_can_stand_in(tmp_path, processes):
    (tmp_path / "script.py").write_text("print('trains on something else')\n")
    broken = tmp_path / "transformers.py"  # imported before the script, as by a sitecustomize
    broken.write_text("")
    (tmp_path / "sitecustomize.py").write_text("import transformers\n")
    options = ["--as_accelerate", "--cpu", "--num_processes", str(processes)]
    done = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "launch", *options, "script.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        **{"cwd": tmp_path, "capture_output": True, "text": True},
    )
    assert done.returncode == 1
    assert "transformers is imported already, and has looked for accelerate" in done.stderr
    assert "something else" not in done.stdout
