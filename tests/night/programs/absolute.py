"""A loop that writes its model into a folder of its own, wherever its output goes."""

import sys
from pathlib import Path

import loop
import torch

folder = Path(sys.argv[1])
training = loop.Loop(loop.parse(*sys.argv[2:]))
training.run()
folder.mkdir(parents=True, exist_ok=True)
torch.save(training.model.state_dict(), folder / "model.pt")
