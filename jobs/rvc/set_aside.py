"""Sets aside RVC's checkpoints that a kill tore, so that the newest ones are whole.

`set_aside.py CHECKPOINT`, run before a restart; CHECKPOINT is the newest whole logs/NAME/G_N.pth. RVC takes the newest
generator (G_) and the newest discriminator (D_), and starts over in silence where one of them does not load.
"""

import sys
import zipfile
from pathlib import Path


def main(checkpoint: str) -> None:
    """Rename what is torn, and what has lost its partner, beside it."""
    folder = Path(checkpoint).parent
    numbers = {path.stem.partition("_")[2] for path in folder.glob("[GD]_*.pth")}
    for number in sorted(numbers):
        pair = [folder / f"{letter}_{number}.pth" for letter in "GD"]
        if not all(path.is_file() and zipfile.is_zipfile(path) for path in pair):  # torch.save's directory stands last
            for path in pair:
                if path.exists():
                    path.replace(path.with_suffix(".torn"))
                    print(f"{path.name} is not whole, or alone", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
