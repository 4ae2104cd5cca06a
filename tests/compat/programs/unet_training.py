"""Unconditional training of a tiny UNet of diffusers: EMA, hooks of checkpoints, a pipeline."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from outcome import digest, report
from torch.nn import functional

logger = get_logger(__name__)
folder = sys.argv[1]
accelerator = Accelerator(
    gradient_accumulation_steps=2,
    mixed_precision="no",
    cpu=True,
    log_with="tensorboard",
    project_config=ProjectConfiguration(folder, logging_dir=os.path.join(folder, "logs")),
)
set_seed(3)
model = UNet2DModel(
    sample_size=8,
    block_out_channels=(8, 8),
    layers_per_block=1,
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
    dropout=0.1,
)
average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)


def save_with_average(models, weights, output_dir):
    if accelerator.is_main_process:
        average.save_pretrained(os.path.join(output_dir, "unet_ema"))
        for one in models:
            accelerator.unwrap_model(one).save_pretrained(os.path.join(output_dir, "unet"))
            weights.pop()


def load_with_average(models, input_dir):
    saved = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
    average.load_state_dict(saved.state_dict())
    while models:
        one = models.pop()
        loaded = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
        accelerator.unwrap_model(one).load_state_dict(loaded.state_dict())


accelerator.register_save_state_pre_hook(save_with_average)
accelerator.register_load_state_pre_hook(load_with_average)
schedule = DDPMScheduler(num_train_timesteps=50)
images = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
loader = torch.utils.data.DataLoader(images, batch_size=2, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
learning_rates = get_cosine_schedule_with_warmup(optimizer, 2, 8 * accelerator.num_processes)
model, optimizer, loader, learning_rates = accelerator.prepare(
    model, optimizer, loader, learning_rates
)
accelerator.init_trackers("unconditional")
logger.info(accelerator.state, main_process_only=False)
losses, step = [], 0


def train(epoch: int) -> None:
    global step
    model.train()
    for clean in loader:
        noise = torch.randn_like(clean)
        times = torch.randint(0, 50, (len(clean),), device=clean.device).long()
        noisy = schedule.add_noise(clean, noise, times)
        with accelerator.accumulate(model):
            predicted = model(noisy, times).sample
            loss = functional.mse_loss(predicted.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            learning_rates.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(model.parameters())
            step += 1
        losses.append(loss.detach().item())
        logs = {"loss": losses[-1], "lr": learning_rates.get_last_lr()[0], "epoch": epoch}
        accelerator.log(logs, step=step)


train(0)
accelerator.save_state(os.path.join(folder, "checkpoint-0"))
train(1)
whole = digest(accelerator.unwrap_model(model))
accelerator.load_state(os.path.join(folder, "checkpoint-0"))
train(1)
trained = accelerator.unwrap_model(model)
average.store(trained.parameters())
average.copy_to(trained.parameters())
pipeline = DDPMPipeline(unet=trained, scheduler=schedule)
pipeline.set_progress_bar_config(disable=True)
sampled = pipeline(
    generator=torch.Generator().manual_seed(0), batch_size=2, num_inference_steps=4,
    output_type="np",
).images  # fmt: skip
average.restore(trained.parameters())
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    pipeline.save_pretrained(os.path.join(folder, "pipeline"))
accelerator.end_training()
report(
    whole=whole,
    resumed=digest(trained) == whole,
    losses=losses,
    sampled=digest({"images": torch.from_numpy(sampled)}),
    precision=AcceleratorState().mixed_precision,
)
