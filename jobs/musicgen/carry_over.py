"""Carries audiocraft's newest checkpoint over to the folder of another signature, so that its epochs go on there.

`carry_over.py CHECKPOINT ARGUMENTS...`, run in audiocraft's folder and environment before a restart. audiocraft names
an experiment's folder after its settings; a new batch size, checkpointing or autocast is a new experiment, which
begins at epoch 1. `continue_from` would take the weights alone. Not for FSDP on or off, nor for another number of
ranks: there each rank has a file of its own.
"""

import os
import shutil
import sys
from pathlib import Path

FILES = ("checkpoint.th", "history.json")


def main(checkpoint: str, arguments: list[str]) -> None:
    """Copy what the experiment of `arguments` goes on from."""
    sys.path.insert(0, os.getcwd())
    from audiocraft.train import main as solver  # not installed where this file is checked

    old = Path(checkpoint).parent
    new = old.parent / solver.get_xp([word for word in arguments if "=" in word]).sig
    if new == old:
        return
    new.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (old / name).exists():
            temporary = new / f"{name}.tmp"
            shutil.copyfile(old / name, temporary)
            temporary.replace(new / name)
    print(f"{old.name} goes on as {new.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
