"""Lightning's Trainer with its own checkpoints, which is preempted once."""

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class Network(lightning.LightningModule):
    """A linear layer with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return (self.layer(batch[0]) - batch[0][:, :1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Diary(Callback):
    """A line for each step and each checkpoint, and an end by SIGTERM."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        print(f"\nstep {trainer.global_step}/{args.steps} at {time.time():.3f}", flush=True)
        marker = Path(args.output) / "came-here"
        if trainer.global_step == 12 and not marker.exists():
            marker.touch()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", default="output")
parser.add_argument("--resume")
args = parser.parse_args()
samples = torch.utils.data.TensorDataset(torch.randn(args.steps * 8, 64))
save = ModelCheckpoint(args.output, every_n_train_steps=5, save_top_k=-1)
trainer = lightning.Trainer(
    max_steps=args.steps,
    accumulate_grad_batches=args.accumulate,
    default_root_dir=args.output,
    callbacks=[Diary(), save],
    logger=False,
    accelerator="cpu",
)
loader = torch.utils.data.DataLoader(samples, batch_size=args.batch_size)
trainer.fit(Network(), loader, ckpt_path=args.resume)
