"""Laws of practice: what a commit's hook and a public host check, what is public, and who is told of a weakness."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.test_docs import dead_links

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def read_yaml(path: Path) -> Any:
    return yaml.load(
        path.read_text(), yaml.BaseLoader
    )  # all texts: `on` is a key, and 3.10 is no 3.1


def test_the_page_of_public_names_has_each_place_whose_names_are_held() -> None:
    page = (ROOT / "docs" / "reference" / "public.md").read_text()
    places = re.findall(r"^\| ([^|]+?) \|", page, re.M)
    wire_names = json.loads((ROOT / "tests" / "releases" / "0.1.0" / "names.json").read_text())
    assert set(wire_names) <= set(places)


def test_links_of_the_security_policy_lead_somewhere() -> None:
    page = ROOT / "SECURITY.md"
    assert "docs/security.md" in page.read_text()
    assert dead_links(page, page.read_text()) == []


def test_a_public_host_runs_what_we_run_on_each_python_that_is_supported() -> None:
    workflow = read_yaml(WORKFLOW)
    assert set(workflow["on"]) == {"push", "pull_request"}
    (job,) = workflow["jobs"].values()
    versions = job["strategy"]["matrix"]["python"]
    classified = [
        line.rpartition(" ")[2]
        for line in PROJECT["classifiers"]
        if re.search(r"Python :: 3\.\d", line)
    ]
    assert versions == classified
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert job["container"] == "python:${{ matrix.python }}-trixie"
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert workflow["permissions"] == {"contents": "read"}


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
