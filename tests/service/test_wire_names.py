"""The names that others read stay: in job and cluster files, the journal, the API, metrics and MLflow's records."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from orchestrator.specs import events
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import make_cluster_json_schema
from orchestrator.specs.job.spec import make_job_json_schema
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State
from tests.service.worlds import World
from tests.test_docs import names_recorded

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/releases/0.1.0/names.json"
METRIC = re.compile(r'"(orc_[a-z_]+)"')


def properties(schema: Any) -> Iterator[str]:
    """Yield the key of each property of a JSON schema, also of its parts."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("properties"), Mapping):
            yield from schema["properties"]
        for part in schema.values():
            yield from properties(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from properties(part)


def stored_fields(noun: Any, nouns: set[Any]) -> Iterator[str]:
    """Yield the fields of a noun that the journal keeps, and of the nouns in it, each as `Noun.field`."""
    for part in typing.get_args(noun):
        yield from stored_fields(part, nouns)
    if not isinstance(noun, type) or noun in nouns:
        return
    nouns.add(noun)
    if dataclasses.is_dataclass(noun):
        hints = typing.get_type_hints(noun, include_extras=True)
        for field in dataclasses.fields(noun):
            yield f"{noun.__name__}.{field.name}"
            yield from stored_fields(hints[field.name], nouns)
    elif issubclass(noun, BaseModel):
        for name, info in noun.model_fields.items():
            yield f"{noun.__name__}.{name}"
            yield from stored_fields(info.annotation, nouns)


def wire_names(world: World) -> dict[str, list[str]]:
    """Return every name that others read, by where it stands."""
    document = world.app.openapi()
    stored, nouns = set[str](), set[Any]()
    for noun in (events.Event, Job, Attempt, State):
        stored |= set(stored_fields(noun, nouns))
    return {
        "job file": sorted({*properties(make_job_json_schema())}),
        "cluster file": sorted({*properties(make_cluster_json_schema())}),
        "journal": sorted(stored),
        "routes": sorted(
            f"{method.upper()} {path}"
            for path, item in document["paths"].items()
            for method in item
        ),
        "API": sorted({*properties(document["components"])}),
        "metrics": sorted(
            {*METRIC.findall((ROOT / "orchestrator/service/server/metrics.py").read_text())}
        ),
        "MLflow": sorted({*names_recorded(ROOT / "orchestrator/backends/mlflow/content.py")}),
    }


def test_no_name_that_others_read_has_gone(world: World) -> None:
    current = wire_names(world)
    for place, names in json.loads(FILE.read_text()).items():
        missing = sorted({*names} - {*current[place]})
        assert not missing, (
            f"{place}: others read {', '.join(missing)}; a rename needs both names, or a migration"
        )
        assert len(names) > 5, place
