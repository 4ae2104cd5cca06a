"""Folds, each with an Accelerator's parts of its own, and the mean of their predictions."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from outcome import digest, report
from problem import classifier, rows
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, Subset

FOLDS = 3
accelerator = Accelerator(cpu=True)
data, test = rows(48), DataLoader(rows(16, seed=5), batch_size=8)
weights, predictions, accuracies = [], [], []
for fold in range(FOLDS):
    held = set(range(fold, 48, FOLDS))
    set_seed(10 + fold)
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=0.02)
    train = DataLoader(Subset(data, [i for i in range(48) if i not in held]), 8, shuffle=True)
    valid = DataLoader(Subset(data, sorted(held)), 8)
    model, optimizer, train, valid, prepared_test = accelerator.prepare(
        model, optimizer, train, valid, test
    )
    for _ in range(2):
        model.train()
        for points, classes in train:
            accelerator.backward(cross_entropy(model(points), classes))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        for points, classes in valid:
            with torch.no_grad():
                guesses = model(points).argmax(-1)
            guesses, classes = accelerator.gather_for_metrics((guesses, classes))
            right += int((guesses == classes).sum())
        accuracies.append(right)
    with torch.no_grad():
        scores = [accelerator.gather_for_metrics(model(points)) for points, _ in prepared_test]
    predictions.append(torch.cat(scores))
    weights.append(digest(accelerator.unwrap_model(model)))
    model, optimizer, train, valid, prepared_test = accelerator.free_memory(
        model, optimizer, train, valid, prepared_test
    )
mean = torch.stack(predictions).mean(0)
report(weights=weights, accuracies=accuracies, mean=digest({"mean": mean}))
