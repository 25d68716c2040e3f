"""The law of docs/architecture.md: each file, function, class and value that it names is one of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import FENCE, INLINE_CODE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "orchestrator"
PAGE = ROOT / "docs" / "architecture.md"
OTHER_PROGRAMS = ("orc ", "py-spy ", "GET ")  # tests/test_docs.py has the commands of ours
PLACEHOLDER = re.compile(r"<[^>]*>")
NAME = re.compile(r"\w[\w.-]*\w")
PATH = re.compile(r"[\w./]+(?:\.py\b|/(?!\w))")
CODE_IN_A_DRAWING = re.compile(
    r"\b\w*(?:_|[a-z][A-Z])\w*\b"
)  # `step_s`, `JobSpec`; else a word may be prose
HOME = "## What is on disk"


@pytest.fixture(scope="module")
def names() -> set[str]:
    """What the package defines: modules, classes, functions, fields and parameters, and its strings."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        names |= {path.name, path.stem, *path.relative_to(PACKAGE).parts}
        for node in ast.walk(ast.parse(path.read_text())):
            names |= set(defined(node))
    return names


def defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines, and the text of a string without the slashes around it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.strip("/")


def unknown_names(page: str, names: set[str]) -> list[str]:
    """Return what a page names in `code` or draws, and the package lacks."""
    code, _, home = page.partition(HOME)
    unknown = []
    for line in FENCE.sub("", code).splitlines():
        codes = INLINE_CODE.findall(line)
        # A row of a table may name a package first, and then folders in it.
        folders = (ROOT, PACKAGE, PACKAGE / codes[0].rstrip("/")) if codes else ()
        for word in codes:
            if word.startswith(OTHER_PROGRAMS):
                continue
            if PATH.fullmatch(word):
                unknown += [word] if not any((folder / word).exists() for folder in folders) else []
            else:
                unknown += unknown_parts(word, names)
    for word in INLINE_CODE.findall(home):
        if not word.startswith((*OTHER_PROGRAMS, "trackers:")):
            unknown += unknown_parts(word, names)
    for match in FENCE.finditer(page):
        paths = PATH.findall(match[4])
        unknown += [path for path in paths if not (PACKAGE / path).exists()]
        unknown += [
            word for word in CODE_IN_A_DRAWING.findall(PATH.sub("", match[4])) if word not in names
        ]
    return unknown


def unknown_parts(word: str, names: set[str]) -> list[str]:
    """Return the parts of a dotted name, a call or a path that are no names of the package."""
    parts = NAME.findall(PLACEHOLDER.sub("", word))
    return [part for part in parts if part not in names and not set(part.split(".")) <= names]


def test_the_page_names_only_what_is_there(names: set[str]) -> None:
    assert unknown_names(PAGE.read_text(), names) == []


@pytest.mark.parametrize(
    "planted",
    [
        "`_finished` classifies",
        "`scheduling/gone.py` decides",
        "| `scheduling` | `gone/` has it |",
        "`Scheduler.stepp`",
        "`Scheduler(state).stepp(event)`",
        "`rank<r>.omm.json`",
        "```\nstep   scheduling/transitions.py   _finished: classify\n```",
        "```\nstep   transitions.py   decides\n```",
        "```\nDecideSomething\n```",
        f"{HOME}\n`jobs/<job id>/checkpointz/`",
    ],
)
def test_a_name_that_is_gone_is_reported(planted: str, names: set[str]) -> None:
    assert len(unknown_names(planted, names)) == 1
