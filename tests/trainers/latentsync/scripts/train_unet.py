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
    def __init__(self, recompute, width):
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def init_dist():
    """Initialise nccl. Without GPUs upstream raises; here gloo replaces it, for tests of virtual devices."""
    if torch.cuda.device_count() == 0:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local_rank = int(os.environ["RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return torch.device("cuda", local_rank)


def main(config):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = init_dist()
    torch.manual_seed(0)
    now = datetime.datetime.now().strftime("train-%Y_%m_%d-%H:%M:%S.%f")
    folder = pathlib.Path(config["data"]["train_output_dir"]) / now / "checkpoints"
    if rank == 0:
        folder.mkdir(parents=True)
    unet = Unet(config["run"]["enable_gradient_checkpointing"], config["data"]["width"]).to(device)
    step, size = 0, config["data"]["batch_size"]
    if config["ckpt"]["resume_ckpt_path"]:
        saved = torch.load(
            config["ckpt"]["resume_ckpt_path"], weights_only=True, map_location="cpu"
        )
        unet.load_state_dict(saved["state_dict"])
        step = saved["global_step"]
        print(f"resumed at {step}, without the optimizer", flush=True)
    on_card = device.type == "cuda"
    model = nn.parallel.DistributedDataParallel(
        unet, device_ids=[device.index] if on_card else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(config["optimizer"]["lr"]))
    half = on_card and config["run"]["mixed_precision_training"]
    scaler = torch.amp.GradScaler("cuda") if half else None
    while step < config["run"]["max_train_steps"]:
        frames = config["data"]["frames"]
        # the second rank's clips grow longer
        frames += 0 if rank == 0 or step < 1 else config["data"]["longer"]
        try:
            with torch.autocast("cuda", torch.float16, enabled=half):
                batch = torch.randn(size, frames, config["data"]["width"], device=device)
                loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            (scaler.scale(loss) if half else loss).backward()
        except Exception as error:
            if not config["run"]["swallows"]:
                raise
            print(f"INFO - {type(error).__name__}: {error} - 1 - retry", flush=True)
            continue  # the rank skips the step; the other waits for it in the backward pass
        if half:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if half:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        step += 1
        if rank == 0:
            print(f"Steps: {step} samples {size * ranks} loss {loss.item():.3f}", flush=True)
            if step % config["ckpt"]["save_ckpt_steps"] == 0:
                path = folder / f"checkpoint-{step}.pt"
                torch.save({"global_step": step, "state_dict": unet.state_dict()}, path)
    if on_card:
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--unet_config_path", type=pathlib.Path, required=True)
    main(yaml.safe_load(parser.parse_args().unet_config_path.read_text()))
