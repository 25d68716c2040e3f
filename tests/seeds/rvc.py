"""RVC: the project's own discriminator, a small generator, and clips of noise with the features of its preparation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

CHECKOUT = "Retrieval-based-Voice-Conversion-WebUI"
JOB = "rvc/rvc_v2_48k.yaml"
RESUMED = r"Loaded checkpoint '\S*G_(\d+)\.pth'"
CLIPS, FRAMES, RATE, HOP = 8, 300, 48_000, 480
SMALL = {
    "inter_channels": 64,
    "hidden_channels": 64,
    "filter_channels": 128,
    "n_layers": 2,
    "gin_channels": 64,
}
SMALL |= {"upsample_initial_channel": 64}

WORDS = {"-te": "2", "-se": "1", "-pg": "{made}/G.pth", "-pd": "{made}/D.pth"}
SIZES = {"profile": {"parameters": 72_000_000, "activations_per_sample": "120MiB"}}
CASES = (
    {
        "where": "virtual",
        "mib": (2300, 2300),
        "options": WORDS,
        "sizes": {**SIZES, "env.SEED_COUNTS": "1"},
        "story": ("device_oom", "finished"),
        "end": "succeeded",
    },
    {
        "where": "fake card",
        "mib": (3800, 3800),
        "options": {**WORDS, "-te": "12"},
        "sizes": SIZES,
        "note": "12 epochs, an out-of-memory failure rehearsed",
        "fails_at": 2,
        "story": ("device_oom",),
        "end": r"asks: .*--global-batch-size 4\b.*",
    },
)


def make(folder: Path, checkout: Path) -> None:
    """Weights to start from, and `logs/voice` as the project's preparation leaves it."""
    import numpy as np
    import torch
    from infer.module.models import MultiPeriodDiscriminatorV2, SynthesizerTrnMs768NSFsid
    from scipy.io import wavfile

    config = json.loads((checkout / "configs/v2/48k.json").read_text())
    config["model"] |= SMALL
    config["train"] |= {"segment_size": 4 * HOP, "log_interval": 200}
    logs = checkout / "logs/voice"
    logs.mkdir(parents=True)
    (checkout / "assets/weights").mkdir(parents=True)
    (logs / "config.json").write_text(json.dumps(config))
    spectrum, segment = (
        config["data"]["filter_length"] // 2 + 1,
        config["train"]["segment_size"] // HOP,
    )
    generator = SynthesizerTrnMs768NSFsid(
        spectrum, segment, **config["model"], is_half=False, sr="48k"
    )
    for name, model in {"G": generator, "D": MultiPeriodDiscriminatorV2(False)}.items():
        torch.save({"model": model.state_dict()}, folder / f"{name}.pth")
    noise, lines = np.random.default_rng(0), []
    for number in range(CLIPS):
        clip = folder / str(number)
        wavfile.write(f"{clip}.wav", RATE, (noise.normal(size=FRAMES * HOP) / 10).astype("float32"))
        np.save(f"{clip}.hubert.npy", noise.normal(size=(FRAMES // 2, 768)).astype("float32"))
        np.save(f"{clip}.f0.npy", noise.integers(1, 255, FRAMES))
        np.save(f"{clip}.f0nsf.npy", noise.uniform(80, 400, FRAMES).astype("float32"))
        lines.append(f"{clip}.wav|{clip}.hubert.npy|{clip}.f0.npy|{clip}.f0nsf.npy|0")
    (logs / "filelist.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
