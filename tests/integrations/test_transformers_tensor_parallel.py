"""Models that transformers has cut by their plan pass through prepare, alone and under FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the workers import this file alone

from accel_callbacks import Accelerator, ParallelismConfig
from tests.support.bound import BOUND
from tests.support.rounding import assert_reordered

pytest.importorskip("accelerate", reason="transformers cuts none without it: test_adapters")
tensor_parallel = pytest.importorskip("transformers.distributed", reason="an older transformers")

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

WORDS = 32


def save(folder: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def trains(folder: str, sizes: dict[str, int], cut: dict[str, int]) -> dict[str, Any]:
    """Losses, norms and the last weights; they are saved and loaded on the way."""
    from transformers import LlamaForCausalLM

    config = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
    accel = Accelerator(cpu=True, timeout=BOUND, **config)
    options = {"distributed_config": tensor_parallel.DistributedConfig(**cut)} if cut else {}
    model = LlamaForCausalLM.from_pretrained(folder, **options)
    before = any(hasattr(one, "device_mesh") for one in model.parameters())
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4))
    result: dict[str, Any] = {"cut": before, "losses": [], "norms": []}
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        batch = torch.randint(0, WORDS, (4, 8), generator=generator)
        each = 4 // accel.data_world
        first = accel.process_index * accel.data_world // accel.num_processes * each
        mine = batch[first : first + each]
        loss = model(input_ids=mine, labels=mine).loss
        accel.backward(loss)
        result["losses"].append(accel.reduce(loss.detach(), "mean").item())
        result["norms"].append(accel.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and cut:
            path = f"{folder}/state"
            accel.save_state(path)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
            accel.load_state(path)
    state = accel.get_state_dict(model, all_ranks=True)
    result["weights"] = {name: value.tolist() for name, value in state.items()}
    return result


def assert_alike(result: dict[str, Any], wanted: dict[str, Any], cut: bool) -> None:
    assert result["cut"] == cut
    for name in ("losses", "norms", "weights"):
        assert_reordered(result[name], wanted[name], name)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_transformers_has_cut_trains_as_one_process(pool, tmp_path, tied):
    save(tmp_path, tied)
    wanted = trains(str(tmp_path), {}, {})
    for result in pool.run(trains, str(tmp_path), {"tp_size": 2}, {"tp_size": 2}):
        assert_alike(result, wanted, cut=True)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, {"tp_size": 2, "fsdp_size": 2}])
def test_it_is_sharded_too(pool_of_4, tmp_path, cut):
    """By us, with the plan of the model; or by transformers, which takes all ranks for it."""
    save(tmp_path, False)
    wanted = trains(str(tmp_path), {}, {})
    sizes = {"dp_shard_size": 2, "tp_size": 2}
    for result in pool_of_4.run(trains, str(tmp_path), sizes, cut):
        assert_alike(result, wanted, cut=bool(cut))
