"""Split layers over processes: each keeps a part of every layer, and all see the same batch.

A plan says how; the Accelerator proposes one by the usual names of layers. The loop is the one of a
single process. On four processes with --shards 2, FSDP2 shards what the plan has cut. The result is
what a process holds, and the accuracy, which is that of one process.

    python examples/by_feature/tensor_parallel.py
    accel launch --num_processes 2 examples/by_feature/tensor_parallel.py
    accel launch --num_processes 4 examples/by_feature/tensor_parallel.py --shards 2
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_callbacks import (
    Accelerator,
    ParallelismConfig,
    PartialState,
    TorchTensorParallelConfig,
    set_seed,
)


class Block(nn.Module):
    """Attention of the rows of an image to each other, and an MLP, as residuals."""

    def __init__(self, width: int, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(inputs)
        # -1: as many heads as this process has. A size that is written out would be wrong.
        q, k, v = (
            layer(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        inputs = inputs + self.o_proj(seen.transpose(1, 2).flatten(2))
        return inputs + self.down_proj(nn.functional.gelu(self.up_proj(self.norm_2(inputs))))


class Net(nn.Module):
    """An image of 8 x 8 is a sequence of 8 rows."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.result = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.embed(images.unflatten(-1, (8, 8))) + self.place
        for block in self.blocks:
            rows = block(rows)
        return self.result(self.norm(rows.mean(dim=1)))


def local_elements(tensors) -> int:
    """Elements that this process keeps of tensors, cut or not."""
    return sum(t.to_local().numel() if hasattr(t, "to_local") else t.numel() for t in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description="Split layers over the processes.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    model = Net()
    world = PartialState(cpu=args.cpu).num_processes
    # The feature: a plan for attention and MLPs. Read what is proposed before you take it.
    plan = Accelerator(cpu=args.cpu).propose_tp_plan(model)
    sizes = {"tp_size": world // args.shards, "dp_shard_size": args.shards}
    if sizes["tp_size"] > 1:
        sizes["tp_handler"] = TorchTensorParallelConfig(plan=plan)
    accel = Accelerator(cpu=args.cpu, parallelism_config=ParallelismConfig(**sizes))
    accel.print(plan)

    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    train, test = random_split(data, [1440, 357], torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train, test = accel.prepare(
        model,
        optimizer,
        # Processes that share layers read the same data: they count as one.
        DataLoader(train, args.batch_size // accel.data_world, shuffle=True),
        DataLoader(test, 64),
    )
    for _ in range(args.epochs):
        for images, targets in train:
            loss = nn.functional.cross_entropy(model(images), targets)
            accel.backward(loss)
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    hits = []
    with accel.evaluate(model):
        for images, targets in test:
            hits.append(accel.gather_for_metrics(model(images).argmax(dim=1) == targets))
    weights = list(model.parameters())
    accel.print(f"{sum(w.numel() for w in weights):,} weights; this process keeps")
    accel.print(f"{local_elements(weights):,} of them")
    accel.print(f"accuracy {torch.cat(hits).float().mean():.1%}")
    accel.end_training()


if __name__ == "__main__":
    main()
