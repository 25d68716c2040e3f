"""Behaves as Orpheus-TTS's finetune/train.py: no arguments, ./config.yaml, no accumulation, too large for Adam.

Written for these tests after the notes in trainers.md on canopyai/Orpheus-TTS; none of its code. What accelerate's
plugin would shard through transformers.Trainer is sharded here by FSDP2, which runs on CPU too.
"""

import os
import pathlib

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import fully_shard

config = yaml.safe_load(pathlib.Path("config.yaml").read_text())
tokens = pathlib.Path("tokens.txt").read_text()  # a neighbour of the script in its folder

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
model = nn.Sequential(*layers)
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    print(f"FSDP: {os.environ['FSDP_SHARDING_STRATEGY']}", flush=True)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
else:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=float(config["learning_rate"]))
folder = pathlib.Path(
    f"./{config['save_folder']}"
)  # as upstream: an absolute path becomes one below
for step in range(1, config["epochs"] + 1):
    x = torch.randn(config["batch_size"], len(tokens), 256)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"'epoch': {step} samples {config['batch_size'] * dist.get_world_size()}", flush=True)
if dist.get_rank() == 0:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "done").write_text("x")
    pathlib.Path("wandb").mkdir(exist_ok=True)  # what a script leaves in its working directory
dist.barrier()
