"""Behaves as Parler-TTS's trainer: three phases with a batch each, a strict output folder, a resume that overshoots.

Written for these tests after reading the notes on huggingface/parler-tts; none of its code.
"""

import argparse
import json
import pathlib
import shutil

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def yes(word):
    return word.lower() == "true"


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=pathlib.Path, required=True)
parser.add_argument("--overwrite_output_dir", type=yes, default=False)
parser.add_argument("--resume_from_checkpoint", type=pathlib.Path)
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
parser.add_argument("--audio_encoder_per_device_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--gradient_checkpointing", type=yes, default=False)
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--save_steps", type=int, default=2)
parser.add_argument("--die_at", type=int, default=0)  # this test's own: ends by SIGKILL there, once
parser.add_argument("--codec_frames", type=int, default=256)
args = parser.parse_args()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + (
                checkpoint(layer, x, use_reentrant=False)
                if args.gradient_checkpointing
                else layer(x)
            )
        return x


def encode():
    print("*** Encode target audio with encodec ***", flush=True)
    codec = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with torch.no_grad():
        for _ in range(2):
            codec(torch.randn(args.audio_encoder_per_device_batch_size, args.codec_frames * 4, 64))


def evaluate(model):
    print("Evaluating - Inference ...", flush=True)
    with torch.no_grad():
        model(torch.randn(args.per_device_eval_batch_size, 256, 64))


def main():
    filled = args.output_dir.is_dir() and any(args.output_dir.iterdir())
    if filled and not args.overwrite_output_dir and not args.resume_from_checkpoint:
        raise ValueError(f"Output directory ({args.output_dir}) already exists and is not empty.")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "preprocessor_config.json").write_text("{}")  # before any step, as upstream
    encode()
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if args.resume_from_checkpoint:
        model.load_state_dict(
            torch.load(args.resume_from_checkpoint / "model.pt", weights_only=True)
        )
        optimizer.load_state_dict(
            torch.load(args.resume_from_checkpoint / "optimizer.pt", weights_only=True)
        )
        step = json.loads((args.resume_from_checkpoint / "state.json").read_text())["step"]
        print(f"Continuing training from global step {step}", flush=True)
    print("***** Running training *****", flush=True)
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    while True:
        step += 1
        for part in range(accumulation):
            rng = torch.Generator().manual_seed(1000 * step + part)
            x = torch.randn(micro, 256, 64, generator=rng)
            ((model(x) - x).square().mean() / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"Step {step} / {args.max_steps} samples {micro * accumulation}", flush=True)
        if step % args.save_steps == 0:
            folder = args.output_dir / f"checkpoint-{step}-epoch-0"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            torch.save(model.state_dict(), folder / "model.pt")
            if step == args.die_at and not (args.output_dir / "died").exists():
                (args.output_dir / "died").touch()
                (folder / "optimizer.pt").touch()  # half-written
                __import__("os").kill(__import__("os").getpid(), 9)
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            (folder / "state.json").write_text(json.dumps({"step": step}))
        if step == args.max_steps:  # as upstream: one that resumes there counts on for ever
            break
    evaluate(model)
    torch.save(model.state_dict(), args.output_dir / "model.safetensors")
    print("***** Training finished *****", flush=True)


main()
