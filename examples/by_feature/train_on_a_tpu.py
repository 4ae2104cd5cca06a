"""A TPU: one process has all of its devices, and batches and parameters are cut over them.

The loop is that of any device. Parameters are whole on each device, or cut with --shard. Batches
have one shape, as XLA compiles a step for each shape; losses are fetched once an epoch, as each
fetch waits for the device.

    accel launch --tpu examples/by_feature/train_on_a_tpu.py --shard
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/by_feature/train_on_a_tpu.py --shard
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, set_seed


def load_data() -> TensorDataset:
    """Return samples of two classes that a line separates."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(1024, 16, generator=draw)
    return TensorDataset(points, (points[:, :2].sum(dim=1) > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on all devices of a TPU.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=64, help="of all devices together")
    parser.add_argument("--shard", action="store_true", help="cut parameters over the devices")
    args = parser.parse_args()

    set_seed(0)
    accel = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if args.shard else None)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # A short last batch would be compiled by itself.
    loader = DataLoader(load_data(), args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        total = torch.zeros((), device=accel.device)
        for points, classes in loader:
            loss = nn.functional.cross_entropy(model(points), classes)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()  # loss.item() would wait, and compute the forward again
        accel.print(f"epoch {epoch}: loss {total.item() / len(loader):.3f}")

    right = torch.zeros((), device=accel.device)
    with accel.evaluate(model):
        for points, classes in loader:
            right += (model(points).argmax(dim=1) == classes).sum()
    samples = len(loader) * args.batch_size
    accel.print(f"accuracy {right.item() / samples:.1%} on {accel.device}")
    accel.end_training()


if __name__ == "__main__":
    main()
