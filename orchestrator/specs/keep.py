"""KeepSpec: how long the files of ended jobs stay in the home folder, and the folder's limit in bytes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from orchestrator.specs import units
from orchestrator.specs.fields import Bytes, Seconds
from orchestrator.specs.spec_model import SpecModel


class PartKind(StrEnum):
    """Parts of an ended job's folder, in the order in which they are deleted when the home is too
    large.
    """

    SUPERSEDED = "superseded"  # older checkpoints, those that were never complete, and tokens
    LOGS = "logs"  # logs, curves and telemetry of all attempts
    UNSUCCESSFUL = "unsuccessful"  # newest checkpoint and output of a job that did not succeed
    RESULTS = "results"  # of one that did: never removed for the budget


class KeepSpec(SpecModel):
    """How long files of ended jobs stay, counted from the end of the job. By default nothing is removed."""

    superseded: Seconds | None = Field(default=None, ge=0)
    logs: Seconds | None = Field(default=None, ge=0)
    unsuccessful: Seconds | None = Field(default=None, ge=0)
    results: Seconds | None = Field(default=None, ge=86_400)
    budget: Bytes | None = None

    def format_setting(self, setting_name: str) -> str:
        """Return one setting as text of the cluster file, such as `keep.logs: 90d`."""
        pattern = units.SIZE_PATTERN if setting_name == "budget" else units.DURATION_PATTERN
        return f"keep.{setting_name}: {units.format_in_largest_unit(getattr(self, setting_name), pattern)}"


UNLIMITED = KeepSpec()
