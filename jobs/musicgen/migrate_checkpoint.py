"""Copies audiocraft's newest checkpoint into the folder of the new settings, so that training resumes there.

`migrate_checkpoint.py CHECKPOINT ARGUMENTS...` runs before a restart, in audiocraft's folder and environment.
audiocraft names an experiment's folder after its settings. A new batch size, checkpointing or autocast is therefore a
new experiment, which starts at epoch 1. `continue_from` would load the weights alone.

Limits: FSDP must not be switched on or off, and the number of ranks must stay. Under FSDP each rank has its own file.
"""

import os
import shutil
import sys
from pathlib import Path

CHECKPOINT, HISTORY = "checkpoint.th", "history.json"


def main(checkpoint: str, arguments: list[str]) -> None:
    """Copy the checkpoint and the history into the folder of the experiment that `arguments` select."""
    sys.path.insert(0, os.getcwd())
    from audiocraft.train import main as solver  # not installed where this file is checked

    old = Path(checkpoint).parent
    new = old.parent / solver.get_xp([word for word in arguments if "=" in word]).sig
    if new == old:
        return
    new.mkdir(parents=True, exist_ok=True)
    ranks = (path.name for path in old.glob(f"{CHECKPOINT}.*") if path.suffix[1:].isdigit())
    for name in (
        *ranks,
        HISTORY,
        CHECKPOINT,
    ):  # the first rank's is last: a copy that a kill cut short is not taken
        if (old / name).exists():
            temporary = new / f"{name}.tmp"
            shutil.copyfile(old / name, temporary)
            temporary.replace(new / name)
    print(f"copied the checkpoint of {old.name} to {new.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
