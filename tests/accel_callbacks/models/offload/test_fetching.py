"""How units come: in inference mode, and ahead where blocks differ by a page."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from accel_callbacks import load_checkpoint_and_dispatch
from accel_callbacks.models.offload.residence import OffloadOptions, offload_hooks
from tests.accel_callbacks.models.offload.adapted import (
    dispatched,
    loss_of,
    pretrained,
    saved,
    words,
)


def test_inference_first_and_training_afterwards(tmp_path):
    model, here = dispatched(saved(tmp_path)), pretrained()
    batch = torch.stack(words(2))
    with torch.inference_mode():
        assert torch.equal(model(batch), here(batch))
    x = here.embedding(batch).detach()
    gradients = []
    for one in (model, here):
        inputs = x.clone().requires_grad_()
        one.requires_grad_(False)
        one.blocks[1](inputs).square().sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)
    with torch.no_grad():
        assert torch.equal(loss_of(model, batch), loss_of(here, batch))


def test_blocks_that_need_a_page_more_are_read_ahead_as_others(tmp_path):
    """A block that begins within a page, as behind the end of another file, needs one more."""
    blocks = torch.nn.Sequential(*(torch.nn.Linear(700, 700, bias=False) for _ in range(7)))
    state = blocks.requires_grad_(False).state_dict()
    index = {}
    for number, name in enumerate(state):
        file = f"{number}.safetensors"
        notes = {"format": "pt", "note": "x" * 1500 * (number % 4)}
        save_file({name: state[name]}, tmp_path / file, metadata=notes)
        index[name] = file
    lines = ", ".join(f'"{name}": "{file}"' for name, file in index.items())
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{lines}}}}}')
    x = torch.randn(3, 700)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700, bias=False) for _ in range(7)))
    model.requires_grad_(False)
    load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, options=OffloadOptions(direct=True))
    for _ in range(3):
        assert torch.equal(model(x), blocks(x))
    offload = next(offload_hooks(model)).offload
    assert len(set(offload.window._sizes)) == 1
    assert offload.traffic.misses == 1
    assert offload.traffic.peak <= offload.window_limit
