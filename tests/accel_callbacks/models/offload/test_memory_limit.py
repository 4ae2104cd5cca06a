"""A model of three times the memory that its process may have runs, with the same output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.accel_callbacks.models.offload.under_a_limit import built, digest
from tests.support import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA and /proc")

ROOT = Path(__file__).resolve().parents[4]
MB = 1 << 20


def saved(folder: Path, blocks: int, width: int) -> tuple[int, str]:
    """Save a model in a file a block; return its bytes and the digest of its output."""
    torch.manual_seed(0)
    one = built(1, width)
    with torch.no_grad():
        x = output = torch.linspace(-1, 1, width).expand(4, width).contiguous()
        for _ in range(blocks):
            output = one(output)
    index = {}
    for number in range(blocks):
        names = {name: f"{number}.{name[2:]}" for name in one.state_dict()}
        file = f"model-{number}.safetensors"
        save_file({names[name]: value for name, value in one.state_dict().items()}, folder / file)
        index.update(dict.fromkeys(names.values(), file))
    lines = ", ".join(f'"{name}": "{file}"' for name, file in index.items())
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{lines}}}}}')
    assert x.shape == output.shape
    return blocks * sum(value.nbytes for value in one.state_dict().values()), digest(output)


def check(start, folder, blocks, width, limit, how_much):
    nbytes, output = saved(folder, blocks, width)
    assert nbytes >= 3 * limit
    options = [str(one) for one in (folder, blocks, width, limit, how_much)]
    ended = start(
        [sys.executable, "-m", "tests.accel_callbacks.models.offload.under_a_limit", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.split() == ["streamed", output], ended.stderr
    assert ended.returncode == 1
    assert "load_model" in ended.stderr
    assert "allocate memory" in ended.stderr or "MemoryError" in ended.stderr


def test_a_model_of_three_times_the_memory_that_is_left(tmp_path):
    check(warm.run, tmp_path, 48, 512, 16 * MB, "more")


@pytest.mark.slow
def test_a_model_of_three_times_the_memory_of_the_whole_process(tmp_path):
    check(subprocess.run, tmp_path, 60, 2048, 320 * MB, "whole")
