"""Translates sbatch and srun options to a job file. Options without an equivalent get a note."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.service.commands.init.vocabulary import VOCABULARY
from orchestrator.specs.job.array import JOBS_MAX
from orchestrator.specs.synonyms import advise_key

# What the proposal says by its name and its devices.
IN_JOB = (
    "--job-name",
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--gpus",
    "--gpus-per-node",
    "--gpus-per-task",
)
TASK = "task"  # the placeholder of the index of an array
TASK_VARIABLE = "SLURM_ARRAY_TASK_ID"
SlurmOptions = Mapping[str, str]  # of sbatch and srun, by their long names


def iterate_slurm_options_and_values(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (long name, value) of each sbatch or srun option in the arguments."""
    index = 0
    while index < len(argv):
        word = argv[index]
        index = index + 1
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:  # -N1
            name = word[:2]
            value = word[2:]
            equals = "="
        if not equals and index < len(argv) and not argv[index].startswith("-"):
            value = argv[index]
            index = index + 1
        yield VOCABULARY["slurm"].get(name, name), value


def count_ranks_and_devices(options: SlurmOptions) -> tuple[int, int | None]:
    """Return (number of processes that srun starts, number of devices in all or None if none are
    asked for).
    """

    def last_number(name: str) -> int:
        """Return the number that an option ends with; 0 where there is none."""
        last = options.get(name, "").rpartition(":")[2].rpartition("-")[2]
        return int(last) if last.isdecimal() else 0

    nodes = last_number("--nodes") or 1
    tasks = last_number("--ntasks") or (last_number("--ntasks-per-node") or 1) * nodes
    per_node = last_number("--gpus-per-node") or (
        last_number("--gres") if "gpu" in options.get("--gres", "") else 0
    )
    per_task = last_number("--gpus-per-task")
    total = last_number("--gpus") or per_node * nodes or per_task * tasks
    return tasks, total or None


def make_array_index_variable(options: SlurmOptions, texts: Iterable[str]) -> dict[str, str]:
    """Return {SLURM_ARRAY_TASK_ID: "{task}"} for an array whose script reads that variable; else
    {}.

    It is also {} where one of `texts` contains {task} already.
    """
    placeholder = f"{{{TASK}}}"
    is_unused = parse_array_indices(options) and not any(placeholder in text for text in texts)
    return {TASK_VARIABLE: placeholder} if is_unused else {}


def iterate_job_lines(options: SlurmOptions, *, quote_values: bool) -> Iterator[str]:
    """Yield the job-file lines for the time limit, and for the array with its placeholder {task}.

    `quote_values` quotes the array's values, as an environment variable needs.
    """
    seconds = _parse_duration(options.get("--time", ""))
    if seconds:
        yield f"time_limit: {_format_duration(seconds)} # --time {options['--time']}"
    tasks = parse_array_indices(options)
    if tasks:
        values = ", ".join(json.dumps(str(task) if quote_values else task) for task in tasks)
        yield f"array: {{{TASK}: [{values}]}} # --array {options['--array']}"
        at_once = options["--array"].partition("%")[2]
        if at_once.isdecimal() and 0 < int(at_once) <= JOBS_MAX:
            yield f"max_concurrent: {at_once}"


def iterate_slurm_notes(options: SlurmOptions) -> Iterator[str]:
    """Yield a note on each option without an equivalent in job files: what to write instead, or
    that it is not needed.
    """
    for name, value in options.items():
        text = f"{name} {value}".strip()
        is_devices = name == "--gres" and "gpu" in value
        is_line = (name == "--time" and _parse_duration(value)) or (
            name == "--array" and parse_array_indices(options)
        )
        if name in IN_JOB or is_devices or is_line:
            continue
        instead = advise_key(name.lstrip("-"))
        if name == "--dependency":
            yield f"CHECK: {text}: write {_dependency_line(value)}"
        elif name == "--begin":
            hours = (
                f"{value[:5]}-{(int(value[:2]) + 8) % 24:02}:00"
                if re.match(r"\d\d:\d\d", value)
                else "22:00-06:00"
            )
            yield f'CHECK: {text}: write start_window: "{hours}", the hours within which it may start'
        elif instead is None:
            yield f"CHECK: not in the job, and nothing is known to stand for it: {text}"
        elif instead.startswith("nothing"):
            yield f"Not needed: {text}{instead.removeprefix('nothing')}"
        else:
            yield f"CHECK: not in the job: {text}: write {instead}"


def parse_array_indices(options: SlurmOptions) -> tuple[int, ...]:
    """Return the indices of `--array 0-15:4%2` or `1,3,5-7`; () without an array or for an unknown form."""
    tasks = list[int]()
    for part in options.get("--array", "").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", part.strip())
        if match is None or match[3] == "0":
            return ()
        tasks += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))[
            : JOBS_MAX + 1
        ]
    return tuple(tasks) if 0 < len(tasks) <= JOBS_MAX else ()


def _dependency_line(dependency: str) -> str:
    """Return the job-file line for a Slurm dependency; the user must replace Slurm's job ids in
    it.
    """
    jobs = [f"JOB-{number}" for number in re.findall(r"(?<=:)(\d+)", dependency)] or ["JOB"]
    if "afterany" in dependency or "afternotok" in dependency:
        jobs = [f"{{job: {job}, when: always}}" for job in jobs]
    return f"depends_on: [{', '.join(jobs)}], with the names or ids that orc gives these jobs"


def _parse_duration(text: str) -> int | None:
    """Return the seconds of Slurm's [days-]hours[:minutes[:seconds]] or minutes[:seconds]; None for another text."""
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,4}))?(?::(\d{1,4}))?", text)
    if match is None:
        return None
    numbers = [int(number) for number in match.groups()[1:] if number is not None]
    if match[1] is None and len(numbers) < 3:  # minutes, minutes:seconds
        numbers = [0, *numbers]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(match[1] or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds or None


def _format_duration(seconds: int) -> str:
    if seconds % 3600 == 0:
        return f"{seconds // 3600}h"
    return f"{seconds // 60}min" if seconds % 60 == 0 else f"{seconds}s"
