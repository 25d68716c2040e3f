"""Somebody's script on samples of unlike lengths, which knows nothing of ours: one rank, fp32, accumulating."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 512


class Block(nn.Module):
    """A residual two-layer network on each token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Logits of every token by itself, so that padding changes none of them."""

    def __init__(self, hidden: int, layers: int, recompute: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY)
        self._recompute = recompute

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._recompute else block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in (
        "--batch",
        "--accumulate",
        "--hidden",
        "--layers",
        "--length",
        "--steps",
        "--seed",
    ):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument(
        "--spread", type=float, required=True, help="of the logarithm of the lengths"
    )
    parser.add_argument("--checkpoint", choices=("none", "full"), default="none")
    said = parser.parse_args()
    torch.manual_seed(said.seed)
    model = Model(said.hidden, said.layers, said.checkpoint == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    draw = torch.Generator().manual_seed(said.seed)
    for step in range(1, said.steps + 1):
        count = said.batch * said.accumulate
        lengths = (
            said.length * torch.exp(said.spread * torch.randn(count, generator=draw).abs())
        ).long()
        samples = [
            torch.randint(0, VOCABULARY, (int(length),), generator=draw) for length in lengths
        ]
        total = 0.0
        for first in range(0, count, said.batch):
            words = nn.utils.rnn.pad_sequence(
                samples[first : first + said.batch], True, padding_value=0
            )
            held = lengths[first : first + said.batch, None] > torch.arange(words.shape[1])
            told = model(words).flatten(0, 1)
            losses = functional.cross_entropy(
                told, ((words * 7 + 3) % VOCABULARY).flatten(), reduction="none"
            )
            loss = (losses * held.flatten()).sum() / lengths.sum()
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {total:.9f}", flush=True)


if __name__ == "__main__":
    main()
