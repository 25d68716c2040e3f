"""Copy the newest checkpoint of a job to a path that a later job names: `keep_checkpoint.py JOB FILE`.

JOB is the job's name, without its number. A stage of a training runs it after the stage before: audiocraft's
`continue_from` wants a path, and the folder of an experiment is named after its settings. ORC_HOME is the service's
home, ~/.orc where it is not set.
"""

import os
import shutil
import sys
from pathlib import Path


def main(job: str, file: str) -> None:
    """Copy the checkpoint; the file is whole or not there."""
    home = Path(os.environ.get("ORC_HOME", "~/.orc")).expanduser()
    pattern = f"{job}-[0-9]*/output/xps/*/checkpoint.th"
    checkpoints = sorted((home / "jobs").glob(pattern), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        sys.exit(f"no checkpoint of {job}: {home / 'jobs' / pattern}")
    target = Path(file).expanduser()
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.copyfile(checkpoints[-1], temporary)
    temporary.replace(target)
    print(f"copied {checkpoints[-1]} to {target}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
