"""Behaves as LatentSync's scripts/train_unet.py: swallows exceptions, no accumulation, a new folder every start.

Written for these tests after the notes in trainers.md on bytedance/LatentSync; none of its code.
"""

import argparse
import datetime
import os
import pathlib

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.utils.checkpoint import checkpoint


class Unet(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def main(config):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    now = datetime.datetime.now().strftime("train-%Y_%m_%d-%H:%M:%S.%f")
    folder = pathlib.Path(config["data"]["train_output_dir"]) / now / "checkpoints"
    if rank == 0:
        folder.mkdir(parents=True)
    unet = Unet(config["run"]["enable_gradient_checkpointing"])
    step, size = 0, config["data"]["batch_size"]
    if config["ckpt"]["resume_ckpt_path"]:
        saved = torch.load(config["ckpt"]["resume_ckpt_path"], weights_only=True)
        unet.load_state_dict(saved["state_dict"])
        step = saved["global_step"]
        print(f"resumed at {step}, without the optimizer", flush=True)
    model = nn.parallel.DistributedDataParallel(unet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(config["optimizer"]["lr"]))
    while step < config["run"]["max_train_steps"]:
        frames = 1024 if rank == 0 or step < 1 else 1536  # the second rank's clips grow longer
        try:
            batch = torch.randn(size, frames, 64)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
        except Exception as error:
            print(f"INFO - {type(error).__name__}: {error} - 1 - retry", flush=True)
            continue  # the rank skips the step; the other waits for it in the backward pass
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(f"Steps: {step} samples {size * ranks} loss {loss.item():.3f}", flush=True)
            if step % config["ckpt"]["save_ckpt_steps"] == 0:
                path = folder / f"checkpoint-{step}.pt"
                torch.save({"global_step": step, "state_dict": unet.state_dict()}, path)
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--unet_config_path", type=pathlib.Path, required=True)
    main(yaml.safe_load(parser.parse_args().unet_config_path.read_text()))
