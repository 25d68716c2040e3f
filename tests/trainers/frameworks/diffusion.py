"""Like an example of diffusers: its flags, its checkpoint folders, its way to resume; the model is two matrices."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
parser.add_argument("--output_dir", type=Path, default=Path("model"))
parser.add_argument("--resume_from_checkpoint", type=Path)
parser.add_argument("--max_train_steps", type=int, default=4)
parser.add_argument("--checkpointing_steps", type=int, default=2)
parser.add_argument("--die_at", type=int, help="a machine that is taken away, once")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begin = 0
if args.resume_from_checkpoint is not None:
    begin = int(args.resume_from_checkpoint.name.split("-")[1])
    model.load_state_dict(
        torch.load(args.output_dir / args.resume_from_checkpoint.name / "model.pt")
    )
print(
    f"  Instantaneous batch size per device = {args.train_batch_size}, precision {args.mixed_precision}",
    flush=True,
)
for step in range(begin, args.max_train_steps):
    for _ in range(args.gradient_accumulation_steps):
        images = torch.randn(args.train_batch_size, 16, 64)
        out = (
            checkpoint(model, images, use_reentrant=False)
            if args.gradient_checkpointing
            else model(images)
        )
        (out.square().mean() / args.gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}", flush=True)
    if (step + 1) % args.checkpointing_steps == 0:
        folder = args.output_dir / f"checkpoint-{step + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder / "model.pt")
    if step + 1 == args.die_at and begin == 0:
        os.kill(os.getpid(), signal.SIGKILL)
torch.save(model.state_dict(), args.output_dir / "model.pt")
