"""Each example of a feature, alone and on two processes; one of them as a user starts it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from accel_callbacks.distributed.topology import destroy_topology
from tests.support import warm
from tests.support.rounding import reordered

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "by_feature"
STARTERS = {
    1: [sys.executable],
    2: [sys.executable, "-m", "accel_callbacks.cli", "launch", "--num_processes", "2"],
}

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="what is expected is of the CPU"),
]


def start(command: list[str], example: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return warm.Popen(
        [*command, str(FOLDER / example), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, warm_children=True,
    )  # fmt: skip


def printed_by(process: subprocess.Popen[str]) -> str:
    """What a process printed; it must have ended well."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def number(pattern: str, printed: str) -> float:
    """The one number that follows the pattern."""
    (found,) = re.findall(pattern + r" ?(-?[\d.]+(?:e[+-]?\d+)?)", printed)
    return float(found)


def numbers(pattern: str, printed: str) -> list[int]:
    """The one list of numbers that follows the pattern."""
    (found,) = re.findall(pattern + r" ?\[([\d, ]+)\]", printed)
    return [int(one) for one in found.split(",")]


def gradient_accumulation(printed: str, processes: int) -> None:
    windows = {1: [3] * 29 + [1], 2: [3] * 14 + [2]}
    assert numbers("epoch:", printed) == windows[processes]
    assert number("big batches:", printed) < 1e-5
    assert number("accuracy", printed) > 90


def token_normalized_accumulation(printed: str, processes: int) -> None:
    assert number("by token: difference to big batches", printed) < 1e-5
    assert number("by batch: difference to big batches", printed) > 1e-2
    assert number("perplexity", printed) < 30  # of 128


def mixed_precision(printed: str, processes: int) -> None:
    low = "layers bfloat16, loss float32, outputs float32, scores bfloat16, weights float32"
    assert f"bf16: {low}\n" in printed
    assert number("accuracy", printed) > 90


def distributed_evaluation(printed: str, processes: int) -> None:
    rows = dict(re.findall(r"^(.+): 357 samples; (.+)$", printed, re.M))
    accuracy, loss = map(float, rows["plain torch"].split())
    assert accuracy > 0.85
    gathered = [float(value) for value in rows["gather_for_metrics"].split()]
    assert gathered == reordered([accuracy, loss])
    assert float(rows["weighted means"]) == reordered(loss)


def several_models(printed: str, processes: int) -> None:
    critic, generator = re.findall(r"(\d+) (?:steps of the critic|of the generator)", printed)
    assert critic == generator == "456"
    before, after = (float(one) for one in re.findall(r"([\d.]+) (?:before|after)", printed))
    assert after < before / 2


def checkpoint_hooks(printed: str, processes: int) -> None:
    adapter, model = map(int, re.findall(r"has (\d+) of (\d+) weights", printed)[0])
    # The adapter, two moments and the count of each of its tensors; nothing of the rest.
    assert 3 * adapter <= number("saved numbers:", printed) < 4 * adapter < model
    assert "resumed and unbroken weights are the same: True" in printed
    assert "histories are the same: True" in printed
    assert number("accuracy", printed) > 80


def evaluate_the_best(printed: str, processes: int) -> None:
    assert "it is the best epoch: True" in printed
    assert "the weights of the run are back: True" in printed
    assert number("the best checkpoint has", printed.replace(",", " ")) > 0.8


def local_sgd(printed: str, processes: int) -> None:
    differed = number("processes differed by", printed)
    assert differed > 1e-3 if processes > 1 else differed == 0
    assert number("processes differ by", printed) == 0
    assert number("accuracy", printed) > 90


def early_stopping_with_triggers(printed: str, processes: int) -> None:
    epoch, epochs = map(int, re.findall(r"after epoch (\d+) of (\d+)", printed)[0])
    assert epoch < epochs
    assert numbers("steps of each process:", printed) == [epoch * 12 // processes] * processes
    waited = numbers("lower loss, of each process:", printed)
    assert len(waited) == processes
    assert max(waited) == 2


def profiling(printed: str, processes: int) -> None:
    assert "aten::convolution_backward" in printed
    assert "12 convolutions in 6 steps" in printed
    files = ", ".join(f"profile_{rank}.json" for rank in range(processes))
    assert f"traces in runs/profiling: {files}\n" in printed


def inference_with_split_between_processes(printed: str, processes: int) -> None:
    assert numbers("images of each process:", printed) == {1: [597], 2: [299, 298]}[processes]
    assert "597 results for 597 images" in printed
    assert "in the order of the inputs: True" in printed
    assert number("accuracy", printed) > 80


def automatic_batch_size(printed: str, processes: int) -> None:
    tried = numbers("tried", printed)
    used = numbers("size of each process:", printed)
    assert tried[0] == 1024
    assert tried == sorted(tried, reverse=True)
    assert used == [tried[-1]] * processes
    assert tried[-1] < (512 if processes > 1 else 1024)  # the last process has half the memory


def background_saving(printed: str, processes: int) -> None:
    saves, steps = map(int, re.findall(r"(\d+) checkpoints of (\d+) steps", printed)[0])
    assert saves == steps // 10 > 1
    assert "trained on after the last save: True" in printed
    assert "loaded what was saved: True" in printed


def other_number_of_processes(printed: str, processes: int) -> None:
    assert f"saved in {processes} chunks by {processes} processes" in printed
    assert f"loaded by {processes} processes, all as saved: True" in printed


def large_model(printed: str, processes: int) -> None:
    held = numbers("each process holds", printed)
    assert len(held) == processes
    assert sum(held) == number(r"\] of", printed)
    assert max(held) <= sum(held) / processes + 34  # a row of each tensor
    assert number("accuracy in the last epoch:", printed) > 80


def larger_than_memory(printed: str, processes: int) -> None:
    assert re.search(r"MB +disk$", printed, re.MULTILINE)
    assert "the outputs of the model in memory: True" in printed
    weights, on_disk = map(int, re.findall(r"(\d+) bytes of weights, of them (\d+)", printed)[0])
    taken = int(re.findall(r"(\d+) bytes of memory", printed)[0])
    assert weights / 2 < on_disk < weights
    assert taken < 6_000_000 < weights / 2


def adapter_on_a_large_model(printed: str, processes: int) -> None:
    assert number("accuracy in the last epoch:", printed) > 80
    on_disk, peak = re.findall(r"(\d+) bytes of the base on disk, (\d+)", printed)[0]
    (saved,) = re.findall(r"(\d+) bytes of tensors", printed)
    assert int(peak) < int(on_disk) / 2
    assert int(saved) < int(on_disk) / 3


def tensor_parallel(printed: str, processes: int) -> None:
    assert "'blocks.*.up_proj': 'colwise'" in printed
    assert number("keeps\n", printed.replace(",", "")) == {1: 101_834, 2: 52_234}[processes]
    assert number("accuracy", printed) > 80


def context_parallel(printed: str, processes: int) -> None:
    assert ("sequences are not shared" in printed) is (processes > 1)
    assert 0 < number("loss", printed) < 3  # of log 16


def shard_a_model(printed: str, processes: int) -> None:
    whole = number("", printed.split(" weights;")[0].replace(",", ""))
    kept, states = (
        int(text.replace(",", "")) for text in re.findall(r"([\d,]+) (?:of them|states)", printed)
    )
    assert whole / processes <= kept <= whole / processes * 1.1
    assert states == 2 * kept
    assert number("accuracy", printed) > 90


CHECKS: dict[str, tuple[Callable[[str, int], None], tuple[str, ...]]] = {
    "gradient_accumulation.py": (gradient_accumulation, ()),
    "token_normalized_accumulation.py": (token_normalized_accumulation, ()),
    "mixed_precision.py": (mixed_precision, ("--mixed_precision", "bf16", "--epochs", "3")),
    "distributed_evaluation.py": (distributed_evaluation, ()),
    "several_models.py": (several_models, ()),
    "shard_a_model.py": (shard_a_model, ("--cpu",)),
    "tensor_parallel.py": (tensor_parallel, ("--cpu", "--epochs", "2", "--batch_size", "48")),
    "context_parallel.py": (context_parallel, ("--cpu", "--epochs", "1")),
    "checkpoint_hooks.py": (checkpoint_hooks, ()),
    "evaluate_the_best.py": (evaluate_the_best, ()),
    "large_model.py": (large_model, ("--cpu",)),
    "larger_than_memory.py": (larger_than_memory, ()),
    "adapter_on_a_large_model.py": (adapter_on_a_large_model, ("--cpu",)),
    "local_sgd.py": (local_sgd, ("--epochs", "3")),
    "early_stopping_with_triggers.py": (early_stopping_with_triggers, ()),
    "profiling.py": (profiling, ()),
    "inference_with_split_between_processes.py": (inference_with_split_between_processes, ()),
    "automatic_batch_size.py": (automatic_batch_size, ()),
    "background_saving.py": (background_saving, ()),
    "other_number_of_processes.py": (other_number_of_processes, ()),
}


ZERO = "deepspeed_zero.py"  # tests/deepspeed trains with it
TPU = "train_on_a_tpu.py"  # tests/xla trains with it
LAUNCHED = "automatic_batch_size.py"  # limits the memory of its processes, for good


def played(example: str, folder: str, options: tuple[str, ...]) -> str:
    """Run an example as the main module of this process; what it printed."""
    os.chdir(folder)
    sys.argv = [example, *options]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FOLDER / example), run_name="__main__")
    destroy_topology()
    return printed.getvalue()


# The longest ones.
SLOW = ("large_model.py", "shard_a_model.py")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in sorted(CHECKS.keys() - {LAUNCHED})
    ],
)
def test_it_works_alone_and_on_two_processes(alone, pool, example, tmp_path):
    check, options = CHECKS[example]
    for group in (alone, pool):
        folder = tmp_path / str(group.size)
        folder.mkdir()
        check("".join(group.run(played, example, str(folder), options)), group.size)


def test_what_two_processes_saved_is_loaded_by_one(pool, tmp_path):
    example = "other_number_of_processes.py"
    pool.run(played, example, str(tmp_path), ())
    printed = printed_by(start(STARTERS[1], example, tmp_path, "--load", "runs/sharded"))
    assert printed == "loaded by 1 processes, all as saved: True\n"


def test_the_example_of_callbacks_alone_and_on_two_processes(alone, pool, tmp_path):
    for group in (alone, pool):
        folder = tmp_path / str(group.size)
        folder.mkdir()
        printed = "".join(group.run(played, "../callbacks.py", str(folder), ("--epochs", "3")))
        assert number("averaged weights", printed) > 85
        # Windows of two in the first epoch, then of one.
        steps = {1: 24 + 47 + 47, 2: 12 + 24 + 24}[group.size]
        assert f"{steps} steps, " in printed
        assert "on_before_optimizer_step   Freeze:backbone.*, GradientNorm:grad_norm, " in printed


def test_the_example_of_own_callbacks(alone, tmp_path):
    (printed,) = alone.run(played, "../own_callback.py", str(tmp_path), ())
    assert "EpochLoss keeps the contract" in printed
    assert re.search(r"^step 20: loss", printed, re.M)
    assert "of 20: the loss is below 0.3" in printed


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_it_works_as_launched(tmp_path, processes):
    printed = printed_by(start(STARTERS[processes], LAUNCHED, tmp_path / "run"))
    automatic_batch_size(printed, processes)


def test_every_file_is_tested_and_described():
    files = {file.name for file in FOLDER.glob("*.py")}
    assert files == {*CHECKS, ZERO, TPU}
    described = re.findall(
        r"^\| \[(\w+\.py)\]\((\w+\.py)\) \|", (FOLDER / "README.md").read_text(), re.M
    )
    assert sorted(described) == sorted((name, name) for name in files)


def test_fp8_says_why_it_cannot_be_used_here(tmp_path):
    process = start(STARTERS[1], "mixed_precision.py", tmp_path, "--mixed_precision", "fp8")
    _, err = process.communicate()
    assert process.returncode == 1
    assert re.search(r"^fp8 cannot be used here: .*mixed_precision='fp8'", err, re.M)
    assert "Traceback" not in err


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_the_example_of_deepspeed_says_what_to_install(tmp_path):
    process = start(STARTERS[1], ZERO, tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err == "this example needs DeepSpeed: pip install 'accel-callbacks[deepspeed]'\n"
