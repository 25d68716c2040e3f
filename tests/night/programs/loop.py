"""A plain loop, as a user's own script: a small network, a safe save and a resume.

The other programs here import it and change what happens at one step.
"""

import argparse
import os
import time
from typing import Any

import torch
from torch import nn

FEATURES = 64


def parse(*words: str) -> argparse.Namespace:
    """Return the arguments of the command line, or of `words`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--eval-batch-size", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two steps")
    parser.add_argument("--output", default="output")
    parser.add_argument("--resume")
    return parser.parse_args(words or None)


class Loop:
    """A training in progress. A program replaces what one of its steps does."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(0)
        self.step = 0
        self.build()
        os.makedirs(args.output, exist_ok=True)
        if args.resume:
            self.load(args.resume)

    def build(self) -> None:
        """Make the model and its optimizer."""
        self.model = nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def parts(self) -> dict[str, Any]:
        """Return what a checkpoint holds the state of, by name."""
        return {"model": self.model, "optimizer": self.optimizer}

    def load(self, path: str) -> None:
        """Take up a checkpoint."""
        state = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.step = state["step"]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        states = {name: part.state_dict() for name, part in self.parts().items()}
        return {**states, "step": self.step}

    def batch(self) -> torch.Tensor:
        """Return the samples of one micro-batch."""
        return torch.randn(self.args.batch_size, FEATURES)

    def loss(self) -> torch.Tensor:
        """Return the loss of one micro-batch."""
        samples = self.batch()
        return (self.model(samples[:, :FEATURES]) - samples[:, :1]).square().mean()

    def save(self) -> None:
        """Write a checkpoint under another name first, so that its own name means a whole file."""
        torch.save(self.state(), f"{self.args.output}/partial.tmp")
        os.replace(
            f"{self.args.output}/partial.tmp", f"{self.args.output}/checkpoint-{self.step:04d}.pt"
        )
        print(f"saved {self.step}", flush=True)

    def run(self) -> None:
        """Train to the last step, and write the model."""
        while self.step < self.args.steps:
            for _ in range(self.args.accumulate):
                loss = self.loss() / self.args.accumulate
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            print(
                f"step {self.step}/{self.args.steps} loss {loss.item():.4f} at {time.time():.3f}",
                flush=True,
            )
            if self.step % self.args.save_every == 0:
                self.save()
            time.sleep(self.args.pause)
        torch.save(self.model.state_dict(), f"{self.args.output}/model.pt")


if __name__ == "__main__":
    Loop(parse()).run()
