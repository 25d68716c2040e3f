"""The git commit and changes of a job's code when the job was submitted."""

from __future__ import annotations

from pydantic import Field

from orchestrator.specs.spec_model import SpecModel

WORDS_MAX = 1000


class CodeSource(SpecModel):
    """The state of the job's git work tree when the job was submitted."""

    commit: str = Field(pattern=r"^[0-9a-f]{40,64}$")
    branch: str = Field(default="", max_length=WORDS_MAX)  # "" where none is checked out
    repo_url: str = Field(
        default="", max_length=WORDS_MAX
    )  # of its first remote, without a password
    dirty: bool = False  # tracked files differed from the commit
