"""LatentSync: its own stage-2 file with paths and sizes of a small UNet; most of its frozen models are not made yet."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

CHECKOUT = "LatentSync"
JOB = "latentsync/stage2.yaml"
RESUMED = r"resume from global_step: (\d+)"

SIZES = {
    "gpus": 2,
    "profile": {
        "parameters": 4_000_000,
        "layers": 16,
        "activations_per_sample": "60MiB",
        "checkpointed_per_sample": "10MiB",
    },
}
CASES = ({"where": "fake card", "mib": (2500, 2500), "options": {}, "sizes": SIZES},)


def make(folder: Path, checkout: Path) -> None:
    """The stage's file, without a checkpoint to start from."""
    path = checkout / "configs/unet/stage2.yaml"
    config = yaml.safe_load(path.read_text())
    config["data"] |= {
        "train_fileslist": str(folder / "clips.txt"),
        "num_workers": 1,
        "resolution": 64,
    }
    config["data"] |= {f"audio_{kind}_cache_dir": str(folder / kind) for kind in ("embeds", "mel")}
    config["ckpt"] |= {"resume_ckpt_path": "", "save_ckpt_steps": 2}
    config["run"]["max_train_steps"] = 4
    config["model"] |= {"block_out_channels": [32, 32, 64, 64], "sample_size": 8}
    path.write_text(yaml.safe_dump(config))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
