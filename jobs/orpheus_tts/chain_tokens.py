"""Write the rows of a data set as one row of tokens: `python chain_tokens.py DATASET FILE.npy`.

DATASET is a name of the hub, or a folder that `save_to_disk` wrote. Its rows have `input_ids`, as the project's
notebook makes them. It runs in the project's environment, which has `datasets` and numpy.
"""

from __future__ import annotations

import sys
from pathlib import Path

COLUMN = "input_ids"


def main(name: str, file: str) -> None:
    """Write the tokens of all rows, in their order, as a one-dimensional array of int32."""
    import numpy as np
    from datasets import load_dataset, load_from_disk

    rows = load_from_disk(name) if Path(name).is_dir() else load_dataset(name, split="train")
    if COLUMN not in rows.column_names:
        sys.exit(f"{name} has no column {COLUMN}: {', '.join(rows.column_names)}")
    arrays = [np.asarray(row, dtype=np.int32) for row in rows[COLUMN]]
    if not arrays:
        sys.exit(f"{name} has no rows")
    tokens = np.concatenate(arrays)
    np.save(file, tokens)
    print(f"{len(arrays):,} rows, {len(tokens):,} tokens in {file}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
