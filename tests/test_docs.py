"""Laws of README and docs: links lead somewhere, files are read, commands exist and run, reference is up to date."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from docs import generate
from orchestrator.cli import app, main
from orchestrator.service.demo.run import write_demo_files
from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.choices import Engine, ParallelLayout, Sharding, ZeroStage
from orchestrator.specs.cluster import make_cluster_json_schema
from orchestrator.specs.job.sections import Retries
from orchestrator.specs.job.spec import make_job_json_schema
from orchestrator.specs.parse import parse_cluster, parse_jobs
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import format_settings

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("C*.md"), *(ROOT / "docs").rglob("*.md")])
DEMO = (
    "fits",
    "wrong_profile",
    "foreign",
    "bug",
    "never_fits",
)  # in this order: the docs name their ids
ANY_EXIT = ("doctor",)  # 1 where the machine lacks something
ORC = (sys.executable, "-m", "orchestrator.cli")
COMMAND_TIMEOUT_S = 280
PLACEHOLDER = re.compile(r"[A-Z]{2,}(\.yaml|:\d+|\.\.\.)?")  # JOB, JOB.yaml, HEAD:6379, FILE...
FENCE = re.compile(r"^( *)(```+|~~~+) *([^\n`]*)\n(.*?)^\1\2 *$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.M)
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A command line that a page shows; `prompted` where it says so with `$ `."""

    where: str
    command: tuple[str, ...]
    into: str | None  # the file after `>`
    prompted: bool

    @property
    def text(self) -> str:
        return shlex.join(self.command) + (f" > {self.into}" if self.into else "")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=match[3].strip().split(" ")[0],
            text=re.sub(rf"^{match[1]}", "", match[4], flags=re.M),
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


# ------------------------------------------------------------------------------------------------------------ links


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs agree on it where there is nothing but words in it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    return {slug(match[1]) for match in re.finditer(r"^#{1,6} +(.+?) *#*$", prose_of(page), re.M)}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for match in LINK.finditer(INLINE_CODE.sub("", text)):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            dead.append(f"{link}: there is no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors_of(target)):
            dead.append(f"{link}: there is no such heading")
        elif (ROOT / "docs") in page.parents and (ROOT / "docs") not in target.parents:
            dead.append(
                f"{link}: the site has only what is in docs/; name the file in `code` instead"
            )
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert dead_links(page, prose_of(page)) == []


def test_a_dead_link_and_a_dead_anchor_are_found() -> None:
    page = ROOT / "docs/reference/cli.md"
    planted = "[a](cli.md) [b](gone.md) [c](cli.md#orc-up) [d](#orc-upp) [e](https://pytorch.org)"
    assert [link.partition(":")[0] for link in dead_links(page, planted)] == ["gone.md", "#orc-upp"]


# ------------------------------------------------------------------------------------------------------- yaml blocks

JOB_KEYS, CLUSTER_KEYS = (
    set(schema()["properties"]) for schema in (make_job_json_schema, make_cluster_json_schema)
)
FRAGMENT_OF_A_JOB = {"name": "fragment", "global_batch_size": 8}
FRAGMENT_OF_A_CLUSTER = {
    "name": "fragment",
    "nodes": [
        {"name": "n", "count": 8, "devices": 8, "device": "h100-80gb", "host_memory": "1TiB"}
    ],
}


def read_as_what_it_is(text: str) -> str:
    """Parse a YAML block as the file, or part of a file, that it is; the kind that it was. Raises SpecError.

    Manifests of Kubernetes, lists of `orc simulate` and Prometheus' settings have other readers.
    """
    data = yaml.safe_load(text)
    if (
        not isinstance(data, dict)
        or {"apiVersion", "kind"} <= set(data)
        or {"jobs", "scrape_configs"} & set(data)
    ):
        return "other"
    keys = set(data)
    if "nodes" in keys or (keys & CLUSTER_KEYS and len(keys & CLUSTER_KEYS) > len(keys & JOB_KEYS)):
        whole = keys >= {"name", "nodes"}
        parse_cluster(text if whole else yaml.safe_dump({**FRAGMENT_OF_A_CLUSTER, **data}), "block")
        return "cluster" if whole else "part of a cluster"
    if keys >= {"name", "global_batch_size"}:
        parse_jobs(text, "block")
        return "job"
    parse_jobs(_with_what_is_missing(text, data), "block")
    return "part of a job"


def _with_what_is_missing(text: str, data: Mapping[str, Any]) -> str:
    of_a_model = bool({"training", "data"} & set(data)) and "command" not in data
    base: dict[str, Any] = dict(FRAGMENT_OF_A_JOB)
    if "model" not in data and "command" not in data:
        fields = " ".join(
            f"{{{name}}}" for name in (data["array"] if isinstance(data.get("array"), dict) else ())
        )
        base |= (
            {"model": {"factory": "model.py:build"}}
            if of_a_model
            else {"command": f"python train.py {fields}"}
        )
    if "guarantee" in data:
        base |= {"steps": 1000, "gpus": {"min": 1, "max": 8}}
    base = {name: value for name, value in base.items() if name not in data}
    return yaml.safe_dump(base) + text


YAML_BLOCKS = [block for block in BLOCKS if block.language in ("yaml", "yml")]


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=lambda block: block.where)
def test_every_yaml_block_is_read_by_the_parser(block: Block) -> None:
    assert read_as_what_it_is(block.text)


@pytest.mark.parametrize(
    "text", ["name: a\nglobal_batch_size: 1\ncommand: x\nprioriti: 1\n", "gpu: 4\n", "node: 1\n"]
)
def test_a_wrong_key_in_a_block_is_found(text: str) -> None:
    with pytest.raises(ValueError, match="unknown key"):
        read_as_what_it_is(text)


# ---------------------------------------------------------------------------------------------------------- commands


def shown_in(block: Block) -> Iterator[Shown]:
    """The commands of a block: lines after a prompt, and lines that begin with `orc`."""
    if block.language in ("yaml", "yml", "text", "python"):
        return
    for number, line in enumerate(block.text.replace("\\\n", " ").splitlines(), block.line + 1):
        prompted = line.startswith("$ ")
        where = f"{block.page.relative_to(ROOT)}:{number}"
        if prompted or re.match(r"(\S*/)?orc ", line):
            yield from commands_of(where, line.removeprefix("$ "), prompted=prompted)


def commands_of(where: str, line: str, *, prompted: bool) -> Iterator[Shown]:
    """The commands of one line, cut as a shell cuts it: at `&&`, `;` and `|`, without comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word in ("&&", ";", "|", "||"):
            parts.append([])
        else:
            parts[-1].append(word)
    for command in filter(None, parts):
        into = command[command.index(">") + 1] if ">" in command else None
        command = command[: command.index(">")] if into else command
        if command[0].rpartition("/")[2] == "orc":
            command[0] = "orc"
        yield Shown(where=where, command=tuple(command), into=into, prompted=prompted)


IN_BLOCKS = [shown for block in BLOCKS for shown in shown_in(block)]
IN_PROSE = [
    shown
    for page in PAGES
    for match in INLINE_CODE.finditer(prose_of(page))
    if re.match(r"(\S*/)?orc ", match[1])
    for shown in commands_of(
        f"{page.relative_to(ROOT)}:{prose_of(page).count(chr(10), 0, match.start()) + 1}",
        match[1],
        prompted=False,
    )
]


whole_command = functools.cache(lambda: typer.main.get_command(app))  # making it takes 0.1 s


def why_unknown(command_line: tuple[str, ...]) -> str | None:
    """Return why the CLI refuses a command line, or None. Arguments may be missing."""
    command = whole_command()
    name, arguments = "", list(command_line[1:])
    while isinstance(command, TyperGroup) and arguments:
        if arguments[0].startswith("-"):
            taken = {
                word: 1 if option.is_flag else 2
                for option in command.params
                for word in option.opts
            } | {"--help": 1}
            if arguments[0] not in taken:
                return f"orc has no option {arguments[0]}"
            del arguments[: taken[arguments[0]]]
            continue
        name = f"{name} {arguments.pop(0)}".strip()
        inner = command.commands.get(name.rpartition(" ")[2])
        if inner is None:
            return f"orc has no command {name}"
        command = inner
    if isinstance(command, TyperGroup):
        return None
    arguments = [word for word in arguments if word not in ("...", "[...]")]
    try:
        command.make_context(name, list(arguments))
    except Exception as error:
        if type(error).__name__ in ("MissingParameter", "Exit"):
            return None
        return f"orc {name}: {getattr(error, 'message', error)}"
    return None


def test_every_command_line_that_is_shown_is_one_of_the_cli() -> None:
    assert len(IN_BLOCKS) + len(IN_PROSE) > 20
    orc_commands = [
        shown
        for shown in (*IN_BLOCKS, *IN_PROSE)
        if shown.command[0] == "orc" and len(shown.command) > 1
    ]
    wrong = [
        f"{shown.where}: {reason}"
        for shown in orc_commands
        if (reason := why_unknown(shown.command))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "orc shwo a",
        "orc up --rays HEAD:6379",
        "orc queue --ended many",
        "orc drain a b",
        "orc --versions",
    ],
)
def test_a_wrong_command_or_option_is_found(line: str) -> None:
    assert why_unknown(tuple(line.split()))


# ---------------------------------------------------------------------------------------------------- running them


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Somebody who types what the docs show, in a copy of the repository's jobs, with one service."""

    folder: Path
    home: Path

    @property
    def variables(self) -> dict[str, str]:
        return {"ORC_HOME": str(self.home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}

    def spawn(self, *arguments: str) -> Answer:
        """Run a program in a process of its own."""
        ended = subprocess.run(
            arguments,
            cwd=self.folder,
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        return Answer(code=ended.returncode, out=ended.stdout, err=ended.stderr)

    def ask(self, *arguments: str) -> Answer:
        """Run a command of ours in this process, which saves two seconds of imports."""
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, self.variables),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main(arguments)
        return Answer(code=int(ended.value.code or 0), out=out.getvalue(), err=err.getvalue())

    def submitted_and_cancelled(
        self, arguments: tuple[str, ...], command: str = "submit"
    ) -> Answer:
        """The answer to `orc submit` of what would be run, which is then taken back."""
        answer = self.ask(command, *arguments)
        for job_id in answer.out.split():
            self.ask("cancel", job_id)
        return answer


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    made_here = shutil.ignore_patterns("__pycache__", "corpus", "cache", "model")
    for name in ("jobs", "clusters", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=made_here)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    write_demo_files(folder / "orc-demo")
    shutil.copy(folder / "orc-demo" / "train_bytes.py", folder / "train.py")
    for name, text in READERS_FILES.items():
        (folder / name).write_text(text)
    reader = Reader(folder=folder, home=folder / "home")
    try:
        started = reader.spawn(*ORC, "up", "--cluster", "clusters/two-virtual-devices.yaml")
        assert started.code == 0, started
        for name in DEMO:
            assert reader.ask("submit", f"orc-demo/{name}.yaml").code == int(name == "never_fits")
        for job_id in ("fits-1", "wrong-profile-2"):  # trained by tests/test_demo.py
            assert reader.ask("cancel", job_id).code == 0
        yield reader
    finally:
        ended = reader.spawn(*ORC, "down", "--force")
        assert ended.code == 0, ended


OWN_JOB = "name: own\ngpus: 1\nglobal_batch_size: 8\ncommand: python train.py\nsteps: 20\nspeeds: {1: 1s}\n"
OWN_CLUSTER = "name: own\nnodes: [{name: n, devices: 2, device: a100-80gb, host_memory: 64GiB}]\n"
READERS_FILES = {
    **dict.fromkeys(("job.yaml", "prepare.yaml", "sweep.yaml"), OWN_JOB),
    "train.yaml": OWN_JOB.replace("own", "train"),
    "night.yaml": "begins: 2026-11-23T18:00\njobs:\n  - {file: prepare.yaml}\n  - {at: 10min, file: sweep.yaml}\n",
    "train.sbatch": "#!/bin/sh\n#SBATCH --gres=gpu:1\npython train.py --batch-size 8\n",
    **dict.fromkeys(("shared.yaml", "cluster.yaml"), OWN_CLUSTER),
}
# What a page names and no test has -> what the reader has in its place. Nothing answers at the
# addresses.
STAND_INS = {
    "JOB": "fits-1",
    "JOB.yaml": "job.yaml",
    "CLUSTER.yaml": "cluster.yaml",
    "NODE": "virtual",
    "HEAD:6379": "127.0.0.1:1",
    "10.0.0.1:8443": "127.0.0.1:1",
    "0.0.0.0:8443": "127.0.0.1:1",
    "https://orc.example.com": "https://127.0.0.1:1",
    "https://gpu.example:8443": "https://127.0.0.1:1",
    "/backups/monday.orc": "monday.orc",
    "/srv/orc": "srv",
    "/shared/orc": "srv",
    "finetune-3": "fits-1",
    "finetune-4": "wrong-profile-2",
}
# A certificate or a token of another machine is needed; `launch` ends with the code of its script.
OF_OTHERS = ("login", "join", "launch")
STARTS = ("up", "demo")  # a second service, which other tests start


def stood_in(shown: Shown) -> Shown:
    """Return the command with what the reader has."""
    return replace(shown, command=tuple(STAND_INS.get(word, word) for word in shown.command))


def is_parsed_only(shown: Shown) -> bool:
    """Return whether a command names a thing that no test has: another cluster, a file of the reader's."""
    return (
        not shown.prompted
        or any(map(PLACEHOLDER.fullmatch, shown.command))
        or "--ray" in shown.command
    )


def is_of_a_reader(shown: Shown) -> bool:
    return shown.command[0] in ("orc", "python") or shown.command[0].endswith("/python")


def distinct(every: list[Shown]) -> list[Shown]:
    return list({shown.text: shown for shown in reversed(every)}.values())[::-1]


TRAINS = ("run", "rehearse", "compare")
TO_RUN = distinct(
    [shown for shown in IN_BLOCKS if is_of_a_reader(shown) and not is_parsed_only(shown)]
)
TRAINING = [
    shown for shown in TO_RUN if shown.command[:1] == ("orc",) and shown.command[1] in TRAINS
]


def perform(reader: Reader, shown: Shown, *, trains: bool) -> Answer:
    program, *arguments = shown.command
    if program != "orc":
        return reader.spawn(sys.executable, *arguments)
    if "--queue" in arguments:  # plays a job that is there
        job_ids = reader.ask("submit", "job.yaml").out.split()
        answer = reader.ask(*arguments)
        reader.ask("cancel", *job_ids)
        return answer
    if arguments[0] == "retry":
        return reader.submitted_and_cancelled(tuple(arguments[1:]), "retry")
    if arguments[0] == "submit" or (arguments[0] in TRAINS and not trains):
        line = re.sub(
            r" --(fail|rank|step|strategies|steps|picture) \S+", "", shlex.join(arguments[1:])
        )
        return reader.submitted_and_cancelled(tuple(shlex.split(line)))
    if arguments[0] in ("up", "down", *TRAINS):
        return reader.spawn(*ORC, *arguments)
    return reader.ask(*arguments)


def failures_of(reader: Reader, every: Sequence[Shown], *, trains: Sequence[Shown]) -> list[str]:
    """Run the commands in the order of the pages, and train with some; the fixture runs `orc down`."""
    wrong = []
    for shown in every:
        if shown.command[:2] == ("orc", "down"):
            continue
        answer = perform(reader, shown, trains=shown in trains)
        if shown.into is not None:
            (reader.folder / shown.into).write_text(answer.out)
        if answer.code and shown.command[1] not in ANY_EXIT:
            wrong.append(
                f"{shown.where}: {shown.text}\n  exit code {answer.code}: {answer.err[-800:] or answer.out[-800:]}"
            )
    return wrong


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_command_that_the_docs_show_runs(reader: Reader) -> None:
    """Commands that train are submitted and cancelled, and `make test-long` trains them."""
    assert len(TO_RUN) > 20
    assert failures_of(reader, TO_RUN, trains=()) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_command_whose_names_are_the_readers_runs_with_stand_ins(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    """None is refused as typed wrong, and none ends in a traceback. The world may refuse: nothing answers elsewhere."""
    shown_commands = distinct(
        [shown for shown in IN_BLOCKS if shown.command[0] == "orc" and is_parsed_only(shown)]
    )
    assert len(shown_commands) > 30
    wrong = []
    for shown in shown_commands:
        if set(STARTS) & set(shown.command) or "down" in shown.command:
            continue
        answer = perform(reader, stood_in(shown), trains=False)
        if shown.into is not None:
            (reader.folder / shown.into).write_text(answer.out)
        with capsys.disabled():
            print(f"\n{answer.code} {shown.where}: {shown.text} {answer.err.strip()[:120]}", end="")
        may_refuse = shown.command[1] in OF_OTHERS
        if (
            answer.code not in ((0, 1, 2) if may_refuse else (0, 1))
            or "Traceback (most recent" in answer.err
        ):
            wrong.append(
                f"{shown.where}: {shown.text}\n  exit code {answer.code}: {answer.err[-800:]}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_training_that_the_docs_show_ends_well(reader: Reader) -> None:
    prepared = [shown for shown in TO_RUN if shown in TRAINING or shown.command[0] != "orc"]
    assert len(TRAINING) > 1
    assert failures_of(reader, prepared, trains=TRAINING) == []


# --------------------------------------------------------------------------------------------------------- reference


def test_every_command_and_option_has_a_help_text_of_short_sentences() -> None:
    texts = {}
    for name, function in generate.commands(app):
        texts[name] = (function.__doc__ or "").partition("\n")[0]
        texts |= {
            f"{name} {option}": info.help or ""
            for option, _, info, _ in generate.parameters(function)
        }
    sentences = [
        (where, sentence)
        for where, text in texts.items()
        for sentence in re.split(r"(?<=\.) ", text)
    ]
    assert [
        (where, sentence)
        for where, sentence in sentences
        if not sentence.endswith(".") or len(sentence.split()) >= 25
    ] == []


@pytest.mark.parametrize("path", generate.pages(), ids=lambda path: path.name)
def test_the_generated_reference_is_up_to_date(path: Path) -> None:
    assert path.read_text() == generate.pages()[path], "`make docs` writes it"


def test_each_failure_kind_has_a_row_with_its_budget() -> None:
    text = (ROOT / "docs/reference/failures-and-retries.md").read_text()
    rows = {
        cells[0]: cells
        for cells in (line.strip("| ").split(" | ") for line in text.splitlines())
        if cells
    }
    defaults = Retries()
    for kind in FailureKind:
        budget = kind.restart and kind.restart.budget
        assert f"`{kind}`" in rows, f"{kind} has no row"
        budget_text = rows[f"`{kind}`"][3]
        assert (
            budget_text.startswith("none")
            if budget is None
            else budget_text == f"`retries.{budget}` ({getattr(defaults, budget)})"
        )


def names_recorded(path: Path) -> Iterator[str]:
    """The names under which a module records params, metrics and tags: keys of the mappings that it fills."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        into = target.value if isinstance(target, ast.Subscript) else target
        if not isinstance(into, ast.Name) or into.id not in ("tags", "params", "metrics", "flat"):
            continue
        keys = (
            [target.slice] if isinstance(target, ast.Subscript) else getattr(node.value, "keys", [])
        )
        yield from (
            key.value
            for key in keys
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )


def test_the_page_of_mlflow_names_all_that_is_recorded() -> None:
    text = (ROOT / "docs/reference/mlflow.md").read_text()
    plan = Plan(
        engine=Engine.SCRIPT,
        layout=ParallelLayout(dp=2),
        micro_batch_size=1,
        zero_stage=ZeroStage.PARAMETERS,
        sharding=Sharding.FSDP,
        sequence_length=512,
    )
    names = {
        *names_recorded(ROOT / "orchestrator/backends/mlflow/content.py"),
        *format_settings(plan),
    }
    assert len(names) > 40
    assert sorted(name for name in names if f"`{name}`" not in text) == []


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "diff"], ids=lambda block: block.where
)
def test_every_change_that_the_docs_show_applies_to_this_tree(block: Block) -> None:
    checked = subprocess.run(
        ["git", "apply", "--check", "-"], input=block.text, text=True, capture_output=True, cwd=ROOT
    )
    assert not checked.returncode, checked.stderr


def test_every_test_that_the_page_of_security_names_is_there() -> None:
    page = (ROOT / "docs/security.md").read_text()
    promised = page[page.index("## Promised") : page.index("## Not promised")]
    rows = [
        row
        for row in promised.splitlines()
        if row.startswith("| ") and row != "| promise | tests |"
    ]
    named = {row: re.findall(r"`([\w/]+\.py)::(test_\w+)`", row) for row in rows}
    assert len(rows) > 30
    assert not [row for row, tests in named.items() if not tests], "a promise without a test"
    for file, name in itertools.chain.from_iterable(named.values()):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_the_support_matrix_has_the_versions_of_the_package() -> None:
    text = (ROOT / "docs/reference/support-matrix.md").read_text()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = {
        requirement[: match.start()]: requirement[match.start() :]
        for requirement in wanted
        if (match := re.search("[><=!]", requirement))
    }
    for package in ("ray", "torch", "deepspeed", "mlflow"):
        assert f"| {package} | `{named[package]}` |" in text


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    pages = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    loaded = {
        url
        for page in pages
        for url in re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', page)
    }
    assert loaded == set()


# page -> the English page that it follows, and how many headings of its own it ends with
CHINESE = {
    "README.md": ("README.md", 0),
    "quickstart.md": ("docs/quickstart.md", 1),
    "debug-oom.md": ("docs/guides/debug-oom.md", 1),
    "own-script.md": ("docs/guides/own-script.md", 1),
    "finetune.md": ("docs/guides/finetune.md", 0),
    "notifications.md": ("docs/guides/notifications.md", 0),
    "frameworks.md": ("docs/guides/frameworks.md", 1),
    "your-card.md": ("docs/guides/your-card.md", 0),
}


@pytest.mark.parametrize("name", CHINESE)
def test_a_chinese_page_has_the_headings_and_the_commands_of_the_english_one(name: str) -> None:
    english, more = CHINESE[name]
    pages = [(ROOT / english).read_text(), (ROOT / "docs" / "zh" / name).read_text()]
    levels = [re.findall(r"^(#+) ", FENCED.sub("", page), re.M) for page in pages]
    assert levels[1] == [*levels[0], *["##"] * more]
    commands = [typed_commands(page) for page in pages]
    assert commands[0] == commands[1]


FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def typed_commands(page: str) -> list[str]:
    """Return the lines of a page's blocks that a reader types, without comments."""
    blocks = FENCED.findall(page)
    shells = [line for language, block in blocks if language == "sh" for line in block.splitlines()]
    consoles = [line for _, block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [line.split("  #")[0].strip() for line in (*shells, *consoles)]


def test_the_readme_begins_with_the_demo_and_the_tests() -> None:
    assert typed_commands((ROOT / "README.md").read_text())[:2] == ["make demo", "make test"]


def test_every_target_of_make_that_is_shown_is_one_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    wrong, count = [], 0
    for page in PAGES:
        codes = [match[1] for match in INLINE_CODE.finditer(prose_of(page))]
        for code in (*codes, *typed_commands(page.read_text())):
            match = re.match(r"make ([a-z][\w-]*)", code)
            count += match is not None
            if match is not None and match[1] not in targets:
                wrong.append(f"{page.relative_to(ROOT)}: {code}")
    assert count > 20
    assert not wrong, wrong
