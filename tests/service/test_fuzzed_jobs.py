"""Laws of what is sent: no body breaks the service, and each refusal names its field and is audited.

The journal gives back what is taken as it came.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from orchestrator.specs.access import Role
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Submitted
from orchestrator.specs.job.spec import make_job_json_schema
from orchestrator.specs.parse import parse_job, parse_job_data
from orchestrator.specs.written import as_yaml
from tests.service.worlds import World

BODIES, BODIES_LONG = 400, 20_000
BATCHED = 200  # bodies between two looks at the audit log
DECODER = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
BASES: tuple[dict[str, Any], ...] = (
    {"name": "s", "global_batch_size": 8, "command": "python train.py", "gpus": 1},
    {
        "name": "d",
        "global_batch_size": 8,
        "model": {"decoder": DECODER | {"num_attention_heads": 2}},
        "data": {"text": ["/proc/version"], "sequence_length": 32},
        "training": {"max_steps": 3, "learning_rate": 1e-3},
        "degrade": {"allow": "semantic", "sequence_lengths": [16]},
    },
    {
        "name": "k",
        "global_batch_size": 8,
        "command": ["python", "train.py"],
        "env": {"A": "b"},
        "secrets": ["TOKEN"],
        "knobs": {"micro_batch_size": {"flag": "--bs", "default": 8}},
        "speeds": {"1": "2s"},
        "profile": {"parameters": 1000, "activations_per_sample": "1MiB"},
        "hang_timeout": "10min",
        "deadline": "2030-01-01T08:00 UTC",
        "depends_on": [],
    },
)
LONE, NUL, LONG = "\ud800", "a\0b", "x" * 200_000
NEVER: tuple[Any, ...] = (
    float("inf"),
    float("-inf"),
    float("nan"),
    2**53 + 1,
    10**400,
    LONE,
    NUL,
    LONG,
    {LONE: 1},
)
ODD: tuple[Any, ...] = (
    *NEVER,
    *(
        -1,
        0,
        1,
        2**31,
        2**53,
        1e300,
        -1e300,
        1e-320,
        True,
        None,
        "",
        " ",
        "0",
        "1e400",
        "9" * 400,
        "-5GiB",
        "5GiB",
    ),
    *(
        "~nobody/x",
        "/" * 5000,
        "a" * 300,
        "../..",
        "{lr}",
        "\x1b[31m",
        "\u202e",
        [],
        {},
        [[]],
        {"a": {"b": None}},
    ),
)


def paths_in(schema: dict[str, Any], node: Any, depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Yield every path of keys that the schema knows, four levels deep."""
    if depth > 4 or not isinstance(node, dict):
        return
    if "$ref" in node:
        yield from paths_in(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], depth)
    for part in (*node.get("anyOf", ()), node.get("items")):
        yield from paths_in(schema, part, depth)
    for key, part in node.get("properties", {}).items():
        yield (key,)
        for rest in paths_in(schema, part, depth + 1):
            yield (key, *rest)


SCHEMA = make_job_json_schema()
PATHS = sorted(set(paths_in(SCHEMA, SCHEMA)))


def bodies(seed: int, count: int) -> Iterator[tuple[dict[str, Any], tuple[str, ...], Any]]:
    """Yield jobs in which one path of the schema has an odd value, with the path and the value."""
    draw = random.Random(seed)
    for _ in range(count):
        spec = copy.deepcopy(draw.choice(BASES))
        path, value = draw.choice(PATHS), draw.choice(ODD)
        place: dict[str, Any] = spec
        for key in path[:-1]:
            inner = place.get(key)
            place[key] = place = inner if isinstance(inner, dict) else {}
        place[path[-1]] = value
        yield spec, path, value


def broken_by(world: World, client: TestClient, seed: int, count: int) -> list[object]:
    """Send bodies to the live API; return what broke a law of this file."""
    broken: list[object] = []
    client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    headers = {"Content-Type": "application/json"}
    taken = audited = 0
    for number, (spec, path, value) in enumerate(bodies(seed, count), 1):
        body = json.dumps({"spec": spec}).encode()
        answer = client.post("/jobs", content=body, headers=headers)
        is_taken = answer.status_code == 200
        taken += is_taken
        is_named = answer.status_code in (422, 409) and any(
            key in answer.json()["error"] for key in (*path, "job")
        )
        if not (is_taken and value not in NEVER) and not is_named:
            broken.append((path, repr(value)[:80], answer.status_code, answer.text[:300]))
        if number % BATCHED == 0:
            audited += sum(
                row.action.startswith("POST /jobs")
                for row in world.accounts.list_audit_rows(BATCHED)
            )
    submitted = [event for event in world.journal.iterate_events() if isinstance(event, Submitted)]
    if (audited, len(submitted)) != (count - count % BATCHED, taken) or not 0 < taken < count:
        broken.append(f"{count} sent, {audited} audited, {taken} taken, {len(submitted)} stored")
    broken += [event.spec for event in submitted if world.journal.round_trip_event(event) != event]
    world.journal.set_aside_unreadable()
    return [*broken, *world.journal.set_aside.list_rows()]


def test_whatever_is_sent_is_refused_by_its_field_or_given_back_by_the_journal(
    world: World,
) -> None:
    assert broken_by(world, world.by(Role.ADMIN, "root"), 0, BODIES) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_thousand_bodies_break_nothing(world: World) -> None:
    seed = random.randrange(2**32)
    assert broken_by(world, world.client, seed, BODIES_LONG) == [], (
        seed
    )  # the owner may send over 6,000 a minute


def test_yaml_and_json_of_one_job_are_taken_or_refused_alike() -> None:
    for spec, path, value in bodies(1, BODIES):
        if isinstance(value, float) and not math.isfinite(value):
            continue  # which YAML says in words
        outcomes = []
        for read in (lambda: parse_job_data(spec, "job"), lambda: parse_job(as_yaml(spec), "job")):  # noqa: B023
            try:
                outcomes.append(read())
            except SpecError:
                outcomes.append(None)
        assert outcomes[0] == outcomes[1], (path, repr(value)[:80])
