"""A small DDP training; rank 0 writes the time of its first completed step to the file named on the command line."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Three steps of a small network on every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mark", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        loss = model(torch.randn(options.batch_size, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and dist.get_rank() == 0:
            options.mark.write_text(repr(time.time()))
    os._exit(0)  # gloo may abort on its way out


if __name__ == "__main__":
    main()
