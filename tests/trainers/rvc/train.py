"""Behaves as RVC's train/train.py: spawns its ranks, multiplies its batch by them, swallows their ends, starts over.

Written for these tests after reading RVC-Project/Retrieval-based-Voice-Conversion-WebUI; none of its code.
"""

import argparse
import os
import pathlib
import sys
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("-e", dest="name", required=True)
parser.add_argument("-bs", type=int, default=4)
parser.add_argument("-g", dest="gpus", default="0")
parser.add_argument("-te", dest="epochs", type=int, default=3)
parser.add_argument("-se", dest="save_every", type=int, default=1)
parser.add_argument(
    "--fail-after", type=int, default=0
)  # this test's own: the machine dies in that epoch
parser.add_argument("--abandon", type=float, default=0.0)
args = parser.parse_args()
os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus.replace("-", ",")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402

LOGS = pathlib.Path("logs") / args.name


class Clips(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((1024, 64), float(index) / 16)


def newest(pattern):
    paths = sorted(
        LOGS.glob(pattern), key=lambda path: int("".join(filter(str.isdigit, path.name)))
    )
    return paths[-1]


def run(rank, ranks):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group(
        "gloo", init_method="env://?use_libuv=False", world_size=ranks, rank=rank
    )
    torch.manual_seed(0)
    size = args.bs * ranks  # as upstream: the sampler of every rank is given batch_size * n_gpus
    sampler = torch.utils.data.distributed.DistributedSampler(Clips(), ranks, rank, shuffle=False)
    loader = torch.utils.data.DataLoader(
        Clips(), size, sampler=sampler, num_workers=1, persistent_workers=True
    )
    # as upstream: then cuda tensors over gloo, in fp16 with a GradScaler
    on_card = torch.cuda.is_available()
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    if on_card:
        torch.cuda.set_device(rank)
        net = net.cuda(rank)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=on_card)
    net = nn.parallel.DistributedDataParallel(net, device_ids=[rank] if on_card else None)
    try:
        saved = torch.load(newest("G_*.pth"), weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    except Exception:  # as upstream: start over silently on any error of the checkpoint
        first = 1
    for epoch in range(first, args.epochs + 1):
        for batch in loader:
            if on_card:
                batch = batch.cuda(rank, non_blocking=True)
            with torch.autocast("cuda", enabled=on_card):
                loss = (net(batch) - batch).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if rank == 0:
                print(f"Train Epoch: {epoch} samples {len(batch) * ranks}", flush=True)
        if rank == 0:
            LOGS.mkdir(parents=True, exist_ok=True)
            if epoch % args.save_every == 0:
                state = {
                    "model": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, LOGS / f"G_{epoch}.pth")
        if epoch == args.fail_after and not (LOGS / "failed").exists():
            dist.barrier()
            (LOGS / "failed").touch()
            os._exit(9)
    if rank == 0:
        weights = pathlib.Path("assets/weights")
        weights.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), weights / f"{args.name}.pth")
        print("Saving final checkpoint: Success", flush=True)
    if (
        args.abandon
    ):  # as upstream: the first rank leaves at once, and the others are in their next step by then
        if rank == 0:
            os._exit(0)
        threading.Thread(
            target=time.sleep, args=(args.abandon,)
        ).start()  # of which a process is slow to end
    dist.barrier()
    os._exit(0)


def main():
    ranks = len(args.gpus.split("-"))
    children = [mp.Process(target=run, args=(rank, ranks)) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()  # as upstream: their exit codes are ignored


if __name__ == "__main__":
    mp.set_start_method("spawn")
    main()
    sys.exit(0)
