"""Token-normalized accumulation: every token counts the same, wherever it is.

A small language model reads sentences of many lengths. The mean over a batch's tokens, averaged
over batches and processes, lets a token of a short batch count more. A loss that is a sum, with
`normalizer=` its number of tokens, does not: the weights are those of one big batch.

    python examples/by_feature/token_normalized_accumulation.py
    accel launch --num_processes 2 examples/by_feature/token_normalized_accumulation.py
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn import datasets
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, DataLoaderConfiguration, set_seed

PADDING = 0
SIZE = 128  # ASCII


def load_sentences() -> list[torch.Tensor]:
    """The descriptions that scikit-learn gives of its data sets, in sentences of characters."""
    described = (datasets.load_digits(), datasets.load_iris(), datasets.load_wine())
    text = " ".join(" ".join(one.DESCR.split()) for one in described)
    sentences = [sentence.strip()[:120] for sentence in text.split(". ") if sentence.strip()]
    ascii_only = [sentence.encode("ascii", "ignore") for sentence in sentences]
    return [torch.tensor(list(characters)) for characters in ascii_only][:82]


def collate(sentences: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(sentences, batch_first=True, padding_value=PADDING)


class NextCharacter(nn.Module):
    """Guesses each next character from the four before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, 32)
        self.hidden = nn.Conv1d(32, 128, kernel_size=4)
        self.head = nn.Linear(128, SIZE)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        embedded = nn.functional.pad(self.embedding(characters).transpose(1, 2), (3, 0))
        return self.head(self.hidden(embedded).relu().transpose(1, 2))


def loss_of(model: nn.Module, batch: torch.Tensor, reduction: str) -> torch.Tensor:
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction=reduction
    )


def train(
    args: argparse.Namespace, sentences: list[torch.Tensor], *, by_token: bool
) -> tuple[Accelerator, nn.Module]:
    set_seed(0)
    accel = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(even_batches=False),  # no sentence counts twice
        cpu=args.cpu,
    )
    model = NextCharacter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(sentences, args.batch_size, collate_fn=collate)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for _ in range(args.epochs):
        for batch in loader:
            with accel.accumulate(model):
                if by_token:  # the feature: a sum, and what it was summed over
                    tokens = (batch[:, 1:] != PADDING).sum()
                    accel.backward(loss_of(model, batch, "sum"), normalizer=tokens)
                else:
                    accel.backward(loss_of(model, batch, "mean"))
                optimizer.step()
                optimizer.zero_grad()
    return accel, accel.unwrap_model(model).cpu()


def train_plainly(epochs: int, sentences: list[torch.Tensor], batch_size: int) -> nn.Module:
    """Plain torch: one process, and all sentences of a step in one batch."""
    set_seed(0)
    model = NextCharacter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(epochs):
        for batch in DataLoader(sentences, batch_size, collate_fn=collate):
            loss_of(model, batch, "mean").backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((left - right).abs().max().item() for left, right in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Average over tokens, not over batches.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=4, help="sentences, of each process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    sentences = load_sentences()
    accel, by_token = train(args, sentences, by_token=True)
    _, by_batch = train(args, sentences, by_token=False)
    at_once = args.batch_size * args.gradient_accumulation_steps * accel.num_processes
    reference = train_plainly(args.epochs, sentences, at_once)

    with torch.no_grad():
        loss = loss_of(by_token, collate(sentences), "mean").item()
    accel.print(f"{len(sentences)} sentences; perplexity {math.exp(loss):.1f} of {SIZE} characters")
    accel.print(f"by token: difference to big batches {difference(by_token, reference):.1e}")
    accel.print(f"by batch: difference to big batches {difference(by_batch, reference):.1e}")
    accel.end_training()


if __name__ == "__main__":
    main()
