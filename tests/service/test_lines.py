"""Laws of `orc init` on command lines that were written down before it was asked about any of them."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.specs.errors import SpecError

ROWS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "lines.yaml").read_text()
)


def source_of(flags: list[str]) -> str:
    """Return a script with argparse, of `NAME=DEFAULT|HELP`; `!` behind a name makes a switch."""
    lines = ["import argparse", "parser = argparse.ArgumentParser()"]
    for flag in flags:
        text, _, meaning = flag.partition("|")
        name, equals, default = text.partition("=")
        arguments = [repr(name.rstrip("!"))]
        if name.endswith("!"):
            arguments.append("action='store_true'")
        elif equals:
            arguments.append(f"default={default}")
        if meaning:
            arguments.append(f"help={meaning!r}")
        lines.append(f"parser.add_argument({', '.join(arguments)})")
    return "\n".join([*lines, "args = parser.parse_args()", ""])


def verdict_of(row: dict[str, Any]) -> str:
    """Return `right`, `honest` (no number), `misleading` (another number, whatever is said beside it) or `refused`."""
    with TemporaryDirectory() as folder:
        for name, content in row["files"].items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source_of(content) if isinstance(content, list) else content)
            path.chmod(0o755)
        try:
            text = propose_job_file(shlex.split(row["typed"]), Path(folder), {})
        except SpecError:
            return "refused"
    (batch,) = [line for line in text.splitlines() if line.startswith("global_batch_size:")] or [""]
    number = batch.partition("#")[0].partition(":")[2].strip()
    if number == str(row["batch"]):
        return "right"
    return "misleading" if number else "honest"


# Measured before anything was changed for them: right 41, honest 8, misleading 10, refused 1. These are left: a
# launcher of the project's own, and a product that only code which is not here divides.
LEFT = {
    "EleutherAI/gpt-neox",
    "eric-mitchell/direct-preference-optimization",
}


def test_few_lines_are_read_as_another_batch_than_they_train() -> None:
    verdicts = {row["repo"]: verdict_of(row) for row in ROWS}
    counts = Counter(verdicts.values())
    assert len(ROWS) == 60
    assert counts["right"] >= 40
    assert counts["right"] + counts["honest"] >= 56
    assert {repo for repo, verdict in verdicts.items() if verdict == "misleading"} <= LEFT


@pytest.mark.parametrize(
    ("typed", "flags", "verdict"),
    [
        ("mpirun -n 4 python t.py --batch-size 16 --microbatch-size 2", [], "honest"),
        ("srun -n 4 python t.py --batch_size 16 --micro_batch_size 2", [], "honest"),
        ("mpirun -n 4 python t.py --total-batch-size 16 --microbatch-size 2", [], "right"),
        ("mpirun -n 4 python t.py --batch-size 16 --batch-per-gpu 2", [], "right"),
        (
            "mpirun -n 4 python t.py --batch-size 16 --microbatch-size 2",
            ["--batch-size=8|samples of a step over all ranks"],
            "right",
        ),
        ("torchrun --nproc_per_node 4 t.py --batch_size 16 --micro_batch_size 2", [], "right"),
    ],
)
def test_a_batch_of_one_rank_or_of_all_is_no_number_where_nothing_says_which(
    typed: str, flags: list[str], verdict: str
) -> None:
    names = [word for word in shlex.split(typed) if "batch" in word]
    others = [name for name in names if not any(flag.startswith(name) for flag in flags)]
    files = {"t.py": [*others, *flags]}
    assert verdict_of({"typed": typed, "files": files, "batch": 16}) == verdict
