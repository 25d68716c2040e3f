"""An ordinary training script, without any code of the orchestrator: plain PyTorch and argparse.

A convolutional byte model. `--batch-size` samples are in memory at a time; `--accumulate` such batches make one step.
"""

import argparse
import pathlib

import torch
from torch import nn
from torch.nn import functional


class ByteModel(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).transpose(1, 2)
        for conv in self.convs:
            x = x + functional.gelu(conv(functional.pad(x, (2, 0))))
        return self.head(x.transpose(1, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--resume", type=pathlib.Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list(b"".join(path.read_bytes() for path in args.data)))
    model = ByteModel(width=64, layers=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    args.output.mkdir(parents=True, exist_ok=True)
    for step in range(first, args.steps):
        rng = torch.Generator().manual_seed(step)
        starts = torch.randint(
            len(text) - args.context - 1, (args.batch_size * args.accumulate,), generator=rng
        )
        optimizer.zero_grad()
        total = 0.0
        for part in starts.split(args.batch_size):
            window = torch.stack([text[start : start + args.context + 1] for start in part])
            logits = model(window[:, :-1])
            loss = (
                functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
                / args.accumulate
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        print(f"step {step + 1}/{args.steps} loss {total:.4f}", flush=True)
        if (step + 1) % args.save_every == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, args.output / f"checkpoint-{step + 1:04d}.pt")
    torch.save(model.state_dict(), args.output / "model.pt")


if __name__ == "__main__":
    main()
