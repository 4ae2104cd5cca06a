"""A small language model with attention, which takes positions; one weight has no dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F

VOCABULARY = 32


class Attention(torch.nn.Module):
    def __init__(self, width: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.causal, self.dropout = causal, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)]
        seen = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(seen.transpose(1, 2).flatten(2))


class Layer(torch.nn.Module):
    def __init__(self, width: int, **options) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = Attention(width, **options)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class LanguageModel(torch.nn.Module):
    def __init__(self, *, causal: bool = True, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(64, width)
        self.layers = torch.nn.ModuleList(
            Layer(width, causal=causal, dropout=dropout) for _ in range(2)
        )
        self.head = torch.nn.Linear(width, VOCABULARY)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))  # which FSDP leaves whole

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale
