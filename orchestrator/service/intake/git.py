"""Reads a folder's commit from git."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from orchestrator.backends.environment import select_inherited
from orchestrator.specs.job.code_source import WORDS_MAX, CodeSource

TIMEOUT_S = 5.0  # a submission does not wait longer for a slow disk
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")


def read_code_source(folder: Path) -> CodeSource | None:
    """Return the commit and state of the folder's git work tree; None without one, without a
    commit, or without git.
    """
    status = _run_git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return None
    headers = dict(
        line[2:].partition(" ")[::2] for line in status.splitlines() if line.startswith("# branch.")
    )
    commit = headers.get("branch.oid", "")
    branch = headers.get("branch.head", "")
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):  # `(initial)`
        return None
    remotes = _run_git(folder, "config", "--get-regexp", r"^remote\..*\.url$") or ""
    url = _PASSWORD.sub("", remotes.partition("\n")[0].partition(" ")[2])
    return CodeSource(
        commit=commit,
        branch="" if branch == "(detached)" else branch[:WORDS_MAX],
        repo_url=url[:WORDS_MAX],
        dirty=any(not line.startswith("#") for line in status.splitlines()),
    )


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Return what this git command prints; None where it fails. Hooks of the repository are not
    run.
    """
    try:
        process = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            env={**select_inherited(os.environ), "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.decode(errors="replace") if process.returncode == 0 else None
