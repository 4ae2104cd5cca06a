"""A tiny text-to-image pipeline of diffusers: whole, offloaded by model and by layer, in groups."""

from __future__ import annotations

import sys

import accelerate
import torch
from accelerate import cpu_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from language import tokenizer
from outcome import digest, report
from transformers import CLIPTextConfig, CLIPTextModel

folder = sys.argv[1]


def pipeline() -> StableDiffusionPipeline:
    set_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), norm_num_groups=4,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    decoder = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    words = tokenizer()
    text = CLIPTextConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=len(words), max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    made = StableDiffusionPipeline(
        vae=decoder, text_encoder=CLIPTextModel(text), tokenizer=words, unet=unet,
        scheduler=DDIMScheduler(num_train_timesteps=50, clip_sample=False), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def drawn(pipe: StableDiffusionPipeline) -> str:
    images = pipe(
        "word1 word2", num_inference_steps=2, height=16, width=16, output_type="np",
        generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip
    return digest({"images": torch.from_numpy(images)})


outcomes = {"whole": drawn(pipeline())}

pipe = pipeline()
pipe.enable_attention_slicing()
outcomes["sliced"] = drawn(pipe)

pipe = pipeline()
pipe.enable_model_cpu_offload(device="cpu")
outcomes["models"] = drawn(pipe)
outcomes["models, twice"] = drawn(pipe)
pipe.maybe_free_model_hooks()
pipe.remove_all_hooks()
outcomes["models, removed"] = drawn(pipe)

if accelerate.__version__ != "1.15.0":  # which raises a TypeError in both, with torch 2.13
    pipe = pipeline()
    pipe.enable_sequential_cpu_offload(device="cpu")
    assert drawn(pipe) == drawn(pipe) == outcomes["whole"]
    pipe.remove_all_hooks()
    assert drawn(pipe) == outcomes["whole"]
    pipe = pipeline()
    for model in (pipe.unet, pipe.text_encoder):
        cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    assert drawn(pipe) == outcomes["whole"]

pipe = pipeline()
pipe.enable_group_offload(
    onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
)
outcomes["groups"] = drawn(pipe)

pipe = pipeline()
pipe.save_pretrained(folder)
with init_empty_weights():
    empty = UNet2DConditionModel.from_config(pipe.unet.config)
placed = {name: "disk" if name == "up_blocks" else "cpu" for name, _ in empty.named_children()}
pipe.unet = load_checkpoint_and_dispatch(
    empty, f"{folder}/unet/diffusion_pytorch_model.safetensors",
    device_map=placed, offload_folder=f"{folder}/offload",
)  # fmt: skip
outcomes["a part on disk"] = drawn(pipe)
loaded = StableDiffusionPipeline.from_pretrained(folder, low_cpu_mem_usage=True)
loaded.set_progress_bar_config(disable=True)
outcomes["loaded"] = drawn(loaded)

dispatched = pipeline()
dispatched.unet = dispatch_model(dispatched.unet, {"": "cpu"})
outcomes["dispatched"] = drawn(dispatched)


class Count(ModelHook):
    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        Count.calls += 1
        return args, kwargs


add_hook_to_module(dispatched.unet, Count())
drawn(dispatched)
remove_hook_from_module(dispatched.unet)
drawn(dispatched)
report(**outcomes, calls=Count.calls)
