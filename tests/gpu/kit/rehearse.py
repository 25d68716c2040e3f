"""`make gpu-rehearsal`: the kit on a card that is not there, without a network, in an environment of packed wheels.

What the machine with a GPU has is an environment of links to this one's; the rest must come from the wheels. All of it
runs in a network namespace that has only the loopback.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fake_card import environment
from tests.gpu.kit.install import FOLDER, ROOT, VENV
from tests.gpu.kit.pack import THERE, pack, packed_versions, versions_of
from tests.gpu.measure import RAN

CARD_MIB = 2048  # a context takes 752, and the planner supposes 564 for a communicator
LIMIT_S = 3600
# A kernel that torch compiles for a card, NVIDIA's own programs, and a compilation of minutes on
# two cores.
NOT_HERE = {
    "pairs: 8-bit moments",
    "sharing: MPS",
    "deepspeed: compile cpu_adam",
    "busy: small and small under MPS",
    "busy: small and full under MPS",
    "busy: full and full under MPS",
    "busy: a fault beside small under MPS",
}
# to NVML
SHOWN = " name=NVIDIA_H100_REHEARSED cores=16896 sm=1785 mem=2619 bus=6016 pcie=5:16 capability=9.0"
SMI = f"""#!/bin/sh
case "$1" in
*memory.free*total*) echo "rehearsed, {CARD_MIB} MiB" ;;
*memory.free) echo {CARD_MIB} ;;
*) echo "rehearsed, {CARD_MIB}, none" ;;
esac
"""


def main() -> int:
    """0 where all went as on a card."""
    python = "{}.{}".format(*sys.version_info[:2])
    folder = FOLDER / "rehearsal"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(VENV, ignore_errors=True)
    (FOLDER / "measured.txt").unlink(missing_ok=True)
    (folder / "bin").mkdir(parents=True)
    if code := pack(python):
        return code
    machine = _machine(folder / "machine")
    variables = environment(folder, [CARD_MIB])
    state = Path(variables["NVIDIA_FAKE_STATE"])
    state.write_text(state.read_text().rstrip("\n") + SHOWN + "\n")
    smi = folder / "bin" / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    variables |= {
        "KIT_PATIENCE": "6",
        "OUT": str(folder / "out"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{smi.parent}:{os.environ['PATH']}",
    }
    kit = [str(machine), "-m", "tests.gpu.kit", "run", *sys.argv[1:], "--tiny"]
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", *kit]
    command = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), "--net", *inside]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, timeout=LIMIT_S, check=True)
    lines = [
        json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()
    ]
    wrong = {line.get("name") or line["step"]: why for line in lines if (why := failure(line))}
    print(f"{len(lines)} lines, as they should not be: {json.dumps(wrong, indent=1)}")
    return int(bool(wrong))


def failure(line: Mapping[str, Any]) -> str | None:
    """Return the failure in a line of results; None for none, or for what no stand-in for a card can do."""
    name = line.get("name", "")
    if name in NOT_HERE or (name.startswith("compiled:") and name.endswith(", compiled")):
        return None
    if (ended := line.get("ended", "done")) != "done":
        return str(ended)
    if line.get("code"):
        return f"exits with {line['code']}: {line.get('output')}"
    jobs = line.get("jobs", [line])
    return line.get("error") or next(
        (
            f"{job.get('outcome')} {job.get('status')}: {job.get('reason')}"
            for job in jobs
            if job.get("outcome", RAN) != RAN or job.get("status", "succeeded") != "succeeded"
        ),
        None,
    )


def _machine(folder: Path) -> Path:
    """The Python of an environment with what is there beside a GPU, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name in versions_of(THERE - {"triton"}).keys() - packed_versions().keys():
        distribution = importlib.metadata.distribution(name)
        tops = {Path(str(file)).parts[0] for file in distribution.files or ()} - {
            "..",
            "__pycache__",
        }
        for top in tops:
            (site_packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main())
