"""Models of transformers that from_pretrained builds sharded, for ZeRO stage 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

import transformers

from accel_callbacks import Accelerator, DeepSpeedPlugin
from tests.deepspeed.jobs import PATIENCE, difference, finish, weights
from tests.support.rounding import ABSOLUTE, reordered

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

# As the guides of transformers write it.
CONFIG: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def _folder(path: Path, kind: str) -> str:
    torch.manual_seed(0)
    common = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=32, n_positions=32, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, **common,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, **common,
        )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / kind)
    return str(path / kind)


def _trained(folder: str, options: dict[str, Any] | None) -> Any:
    given = {} if options is None else {"deepspeed_plugin": DeepSpeedPlugin(CONFIG, **options)}
    accel = Accelerator(cpu=True, timeout=PATIENCE, **given)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    sharded = all(parameter.numel() == 0 for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    model, optimizer = accel.prepare(model, optimizer)
    ids = torch.arange(64).reshape(2, 32) % 61 + accel.process_index
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accel.backward(loss)
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    # the ranks end at different lengths
    length = 4 + 2 * accel.process_index
    made = accel.unwrap_model(model).generate(ids[:1, :4], max_new_tokens=length, do_sample=False)
    found = weights((accel, model))
    finish(accel)
    return sharded, losses, made.tolist(), found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_of_a_folder_are_sharded_and_train_as_whole_ones(
    pool, tmp_path: Path, kind: str
) -> None:
    folder = _folder(tmp_path, kind)
    zero = pool.run(_trained, folder, {})
    whole = pool.run(_trained, folder, None)
    late = pool.run(_trained, folder, {"zero3_init_flag": False})
    assert [found[0] for found in (*zero, *whole, *late)] == [True] * 2 + [False] * 4
    for found in (zero, late):
        for one, other in zip(found, whole, strict=True):
            assert one[1] == reordered(other[1])
            assert one[2] == other[2]  # what was generated
        assert difference(found[0][3], whole[0][3]) < ABSOLUTE


def _beside(folder: str) -> Any:
    accel = Accelerator(cpu=True, timeout=PATIENCE, deepspeed_plugin=DeepSpeedPlugin(CONFIG))
    plugin = accel.state.deepspeed_plugin
    make = transformers.AutoModelForCausalLM.from_pretrained
    with plugin.zero3_init_context_manager(enable=False):
        whole = make(folder)
    reference = make(folder)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (whole, reference)]
    reference = accel.prepare(reference)
    ids = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        outputs = [model(ids).logits for model in (whole, reference)]
    finish(accel)
    after = make(folder)  # the run is over
    return sizes, torch.allclose(*outputs, atol=1e-5), sum(p.numel() for p in after.parameters())


def test_it_ends_with_the_context_and_with_the_run(pool, tmp_path: Path) -> None:
    for sizes, same, after in pool.run(_beside, _folder(tmp_path, "gpt2")):
        assert sizes[0] > 0 == sizes[1]
        assert same
        assert after == sizes[0]
