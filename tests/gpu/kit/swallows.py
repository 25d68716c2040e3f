"""A user's script that goes on after an out-of-memory error, and exits with 0 though no step was made."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--mib", type=int, default=16)  # of a sample
args = parser.parse_args()
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
for _step in range(3):
    try:
        for _ in range(args.accumulate):
            samples = torch.zeros(args.batch_size, args.mib * 2**18, device="cuda")
            model(samples[:, :8]).sum().backward()
        optimizer.step()
        done += 1
    except torch.OutOfMemoryError:
        print("skipping batch", flush=True)
    optimizer.zero_grad()
print(f"{done} steps by batches of {args.batch_size}")
