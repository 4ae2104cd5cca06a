"""Several models: a generator and a critic of handwritten digits, with optimizers in turns.

Each batch, first the critic learns to tell real images from made ones, then the generator learns
to deceive it, while the critic is frozen. The result is the distance between made and real images,
before and after.

    python examples/by_feature/several_models.py
    accel launch --num_processes 2 examples/by_feature/several_models.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, set_seed

NOISE = 16


def build_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64),
        nn.Sigmoid(),
    )  # fmt: skip


def build_critic() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, 1),
    )  # fmt: skip


def frechet_distance(made: torch.Tensor, real: torch.Tensor) -> float:
    """Between two sets of images, each taken as a Gaussian over pixels."""
    made, real = made.double().cpu(), real.double().cpu()
    means = (made.mean(dim=0) - real.mean(dim=0)).square().sum()
    one, other = made.T.cov(), real.T.cov()
    overlap = torch.linalg.eigvals(one @ other).real.clamp(min=0).sqrt().sum()
    return (means + one.trace() + other.trace() - 2 * overlap).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two models in turns.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    accel = Accelerator(cpu=args.cpu)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(images, args.batch_size // accel.num_processes, shuffle=True)
    generator, critic = build_generator(), build_critic()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.0, 0.99))
    # The feature: all of them in one call; each optimizer moves the parameters it was made with.
    generator, critic, generator_optimizer, critic_optimizer, loader = accel.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )
    judge = nn.MSELoss()
    noise = torch.randn(1000, NOISE, device=accel.device)
    with accel.evaluate(generator):
        before = frechet_distance(generator(noise), images)

    set_seed(0, device_specific=True)  # each process makes images of its own
    critic_steps = generator_steps = 0
    for _ in range(args.epochs):
        for real in loader:
            size = len(real)
            ones, zeros = real.new_ones(size, 1), real.new_zeros(size, 1)

            made = generator(torch.randn(size, NOISE, device=accel.device))
            verdict = critic(torch.cat([real, made.detach()]))
            accel.backward(judge(verdict, torch.cat([ones, zeros])))
            critic_optimizer.step()
            critic_optimizer.zero_grad()
            critic_steps += 1

            critic.requires_grad_(False)  # its turn is over: nothing is computed for it
            accel.backward(judge(critic(made), ones))
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            critic.requires_grad_(True)
            generator_steps += 1

    with accel.evaluate(generator):
        after = frechet_distance(generator(noise), images)
    accel.print(f"{critic_steps} steps of the critic, {generator_steps} of the generator")
    accel.print(f"distance to real images: {before:.1f} before, {after:.1f} after")
    accel.end_training()


if __name__ == "__main__":
    main()
