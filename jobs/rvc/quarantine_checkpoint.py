"""Renames RVC's incomplete checkpoints, so that the newest remaining ones are complete.

`quarantine_checkpoint.py CHECKPOINT` runs before a restart; CHECKPOINT is the newest complete logs/NAME/G_N.pth. RVC
loads the newest generator (G_) and the newest discriminator (D_). If either fails to load, it silently starts over.
"""

import sys
import zipfile
from pathlib import Path


def main(checkpoint: str) -> None:
    """Rename truncated files, and files without their counterpart, to `.torn`."""
    folder = Path(checkpoint).parent
    numbers = {path.stem.partition("_")[2] for path in folder.glob("[GD]_*.pth")}
    for number in sorted(numbers):
        pair = [folder / f"{letter}_{number}.pth" for letter in "GD"]
        if not all(
            path.is_file() and zipfile.is_zipfile(path) for path in pair
        ):  # torch.save's directory stands last
            for path in pair:
                if path.exists():
                    path.replace(path.with_suffix(".torn"))
                    print(
                        f"{path.name}: truncated, or its counterpart is; renamed to .torn",
                        flush=True,
                    )


if __name__ == "__main__":
    main(sys.argv[1])
