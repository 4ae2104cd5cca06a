"""Train on sequences that processes share: each has a part of the tokens, attention sees all.

It needs a GPU for each process: torch has no such attention for CPUs. On CPUs, and on one process,
the same loop trains without: `maybe_context_parallel` does nothing there. The result is the loss of
a model that learns to copy the first half of a sequence, which is that of one process.

    python examples/by_feature/context_parallel.py
    accel launch --num_processes 2 examples/by_feature/context_parallel.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, ParallelismConfig, PartialState, set_seed


class Block(nn.Module):
    """Causal attention and an MLP, as residuals."""

    def __init__(self, width: int, head: int = 16) -> None:
        super().__init__()
        self.head = head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.packed(self.norm_1(inputs)).unflatten(-1, (3, -1, self.head))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(2))
        # A mask would be of this process's tokens alone: is_causal, of those of all.
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        inputs = inputs + self.joined(seen.transpose(1, 2).flatten(2))
        return inputs + self.mlp(self.norm_2(inputs))


class Net(nn.Module):
    """A small language model, which is told where its tokens are."""

    def __init__(self, words: int, length: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def sequences(number: int, length: int, words: int) -> TensorDataset:
    """Return sequences whose second half is their first; labels of the first are left out."""
    half = torch.randint(words, (number, length // 2), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([half, half], dim=1)
    # Shifted before the sequence is cut: a process has no successor of its last token.
    labels = torch.cat([tokens[:, 1:], torch.full((number, 1), -100)], dim=1)
    labels[:, : length // 2 - 1] = -100
    positions = torch.arange(length).expand(number, length).clone()
    return TensorDataset(tokens, labels, positions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on sequences that processes share.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="a multiple of 2 x processes")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    state = PartialState(cpu=args.cpu)
    # The feature: all processes share each sequence. CPUs cannot, and read different ones instead.
    shared = state.device.type != "cpu"
    mesh = ParallelismConfig(cp_size=state.num_processes) if shared else None
    accel = Accelerator(cpu=args.cpu, parallelism_config=mesh)
    if not shared and accel.num_processes > 1:
        accel.print("no GPUs: sequences are not shared, the processes are data parallel")
    model = Net(words=16, length=args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = sequences(640, args.length, words=16)
    loader = DataLoader(data, args.batch_size // accel.data_world, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        totals = torch.zeros(2, device=accel.device)
        for tokens, labels, positions in loader:
            # Inside, these three have the tokens of this process.
            with accel.maybe_context_parallel([tokens, labels, positions], [1, 1, 1]):
                logits = model(tokens, positions).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
                # Processes have different numbers of labels: the mean is over those of all.
                counted = (labels != -100).sum()
                accel.backward(loss, normalizer=counted)
            optimizer.step()
            optimizer.zero_grad()
            totals += torch.stack([loss.detach(), counted])
        total, number = accel.reduce(totals, "sum").tolist()
        accel.print(f"epoch {epoch + 1}: loss {total / number:.4f}")
    accel.end_training()


if __name__ == "__main__":
    main()
