"""Behaves as audiocraft under dora: a signature of its settings names its folder, epochs go on only for the same one.

Written for these tests after reading facebookresearch/dora and the notes in trainers.md on audiocraft; none of their
code.
"""

import hashlib
import os
import pathlib
import signal
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

IGNORED = ("dataset.num_workers",)


class XP:
    def __init__(self, argv):
        options = sorted(word for word in argv if not word.startswith(IGNORED))
        self.cfg = dict(word.split("=", 1) for word in options)
        self.sig = hashlib.sha1(" ".join(options).encode()).hexdigest()[:8]
        self.folder = pathlib.Path(os.environ["AUDIOCRAFT_DORA_DIR"]) / "xps" / self.sig


class main:
    get_xp = XP


class LM(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def solve(xp):
    cfg, ranks = xp.cfg, int(os.environ.get("WORLD_SIZE", "1"))
    assert cfg.get("autocast") != cfg.get("fsdp.use", "false") or cfg.get("autocast") == "false", (
        "autocast XOR fsdp"
    )
    on_card = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", "0")) if ranks > 1 else 0
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_card else torch.device("cpu")
    )
    if on_card:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if on_card else "gloo")
    size, rest = divmod(int(cfg["dataset.batch_size"]), ranks)
    assert not rest, "dataset.batch_size must be divisible by the world size"
    torch.manual_seed(0)
    lm = LM(cfg["transformer_lm.checkpointing"] == "torch").to(device)
    devices = [device.index] if on_card else None
    model = nn.parallel.DistributedDataParallel(lm, device_ids=devices) if ranks > 1 else lm
    optimizer = torch.optim.AdamW(model.parameters())
    first, saved = 1, xp.folder / "checkpoint.th"
    if saved.exists():
        state = torch.load(saved, weights_only=True, map_location="cpu")
        lm.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    xp.folder.mkdir(parents=True, exist_ok=True)
    for epoch in range(first, int(cfg["optim.epochs"]) + 1):
        for _ in range(2):
            x = torch.randn(
                size, int(cfg.get("frames", "256")) * (1 if epoch < 3 else 2), 64, device=device
            )
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"Train Summary | Epoch {epoch} | samples={size * ranks}", flush=True)
            if str(epoch) == cfg.get("die_in_valid") and not (xp.folder / "died").exists():
                (xp.folder / "died").touch()
                os.kill(
                    os.getpid(), signal.SIGKILL
                )  # as upstream: validation and the checkpoint come after the line
            torch.save(
                {"model": lm.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                saved,
            )
            (xp.folder / "history.json").write_text("[]")
    if on_card:
        torch.cuda.synchronize()
    if rank == 0:
        (xp.folder / "done").touch()


if __name__ == "__main__":
    try:
        solve(XP(sys.argv[1:]))
    except Exception:  # hydra's run_and_report: it prints, and leaves by an exit code
        traceback.print_exc()
        sys.exit(1)
