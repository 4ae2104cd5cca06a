"""A model that is larger than its devices: empty, planned, loaded in parts, run."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import (
    Accelerator,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.utils import (
    compute_module_sizes,
    find_tied_parameters,
    get_balanced_memory,
    named_module_tensors,
    set_module_tensor_to_device,
    set_seed,
)
from language import language_model, texts, tokenizer
from outcome import digest, report
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
model = language_model().eval()
words = tokenizer()(texts(2, shortest=6, longest=6), return_tensors="pt").input_ids
with torch.no_grad():
    whole = model(words).logits
Accelerator(cpu=True).save_model(model, os.path.join(folder, "weights"), max_shard_size="8KB")
model.save_pretrained(os.path.join(folder, "pretrained"), max_shard_size="8KB")


def empty():
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(model.config).eval()


def same(other) -> bool:
    with torch.no_grad():
        return bool(torch.equal(other(words).logits, whole))


sizes = compute_module_sizes(empty())
layer = ["LlamaDecoderLayer"]
half = {"cpu": sizes[""] // 2, "disk": sizes[""]}
plan = infer_auto_device_map(empty(), max_memory=half, no_split_module_classes=layer)
outcomes = {
    "sizes": {name: int(sizes[name]) for name in ("", "model", "model.layers.0", "lm_head")},
    # A module without weights may be anywhere.
    "plan": {name: str(device) for name, device in plan.items() if name != "model.rotary_emb"},
    "balanced": get_balanced_memory(empty(), max_memory={"cpu": 1000}, low_zero=False),
    "tied": find_tied_parameters(empty()),
    "tensors": sorted(name for name, _ in named_module_tensors(empty(), recurse=True)),
}
weights = os.path.join(folder, "weights")
loaded = load_checkpoint_and_dispatch(
    empty(), weights, device_map=plan, offload_folder=os.path.join(folder, "a"),
    no_split_module_classes=layer,
)  # fmt: skip
outcomes["in parts"] = same(loaded), sorted(set(map(str, loaded.hf_device_map.values())))
plain = language_model().eval()
load_checkpoint_in_model(plain, os.path.join(folder, "pretrained"))
outcomes["in a model"] = same(plain), digest(plain)
outcomes["on disk"] = same(
    disk_offload(language_model().eval(), os.path.join(folder, "b"), torch.device("cpu"))
)
outcomes["dispatched"] = same(dispatch_model(language_model().eval(), {"": "cpu"}))
first, hook = cpu_offload_with_hook(language_model().eval(), torch.device("cpu"))
second, _ = cpu_offload_with_hook(language_model().eval(), torch.device("cpu"), hook)
outcomes["one after the other"] = same(first), same(second)
hook.offload()
one = torch.nn.Linear(2, 1, device="meta")
set_module_tensor_to_device(one, "weight", "cpu", value=torch.ones(1, 2))
outcomes["a tensor"] = one.weight.tolist()
set_seed(1)
outcomes["by transformers"] = same(
    AutoModelForCausalLM.from_pretrained(
        os.path.join(folder, "pretrained"), device_map={"": "cpu"}
    ).eval()
)
report(**outcomes)
