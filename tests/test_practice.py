"""Laws of practice: what a commit's hook checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.BaseLoader)


def test_a_commit_hook_runs_tools_of_the_lint_and_fetches_none() -> None:
    (repository,) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = repository["hooks"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in hooks} == {"system"}
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert lint is not None
    lines = [line.strip() for line in lint[1].replace("$(BIN)", ".venv/bin").splitlines()]
    tools = [re.sub(r" --check| \.$", "", line) for line in lines]
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in hooks] == [
        tool for tool in tools if tool != ".venv/bin/mypy"
    ]
