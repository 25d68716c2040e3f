"""Laws of the JSON Schemas: each key says what it means, what it is without being said, and how it is written."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from orchestrator.specs.cluster import make_cluster_json_schema
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import make_job_json_schema
from orchestrator.specs.parse import parse_cluster, parse_jobs

SCHEMAS = {"job": make_job_json_schema(), "cluster": make_cluster_json_schema()}
WORDS_MAX = 25
SCRIPT = {"name": "a", "command": "python train.py --seed {seed} --lr {lr}", "global_batch_size": 8}
MODEL = {
    "name": "a",
    "global_batch_size": 8,
    "model": {"hf": "./model"},
    "data": {"text": ["corpus.txt"]},
}
NODE = {"name": "n", "count": 8, "devices": 8, "device": "h100-80gb", "host_memory": "1TiB"}
CLUSTER = {"name": "c", "nodes": [NODE]}
OF_A_MODEL = ("model", "data", "training")
# What else a file has to say where it says the key.
BESIDE: dict[str, dict[str, Any]] = {
    "array": {"name": "a-{lr}"},
    "sweep": {"sweep": {"metric": {"log": r"loss=([\d.]+)"}, "max_trials": 20}},
    "max_concurrent": {"array": {"lr": ["1e-3", "1e-4"]}},
    "guarantee": {"steps": 100, "gpus": {"min": 1, "max": 8}},
    "plan": {
        "knobs": {
            "micro_batch_size": {"flag": "--batch-size"},
            "deepspeed_config": {"flag": "--deepspeed"},
        }
    },
    "deepspeed": {"knobs": {"deepspeed_config": {"flag": "--deepspeed"}}},
    "model.weights": {"precision": "bf16"},
    "knobs.gradient_accumulation_steps": {"knobs": {"micro_batch_size": {"flag": "--batch-size"}}},
    "knobs.micro_batch_size.key": {"config": {"file": "train.yaml"}},
    "knobs.micro_batch_size.accelerate": {"launch": "accelerate"},
    "knobs.micro_batch_size.phase": {"phases": {"evaluation": "Running evaluation"}},
    "knobs.micro_batch_size.also": {"phases": {"evaluation": "Running evaluation"}},
    "degrade.sequence_lengths": {"degrade": {"allow": "semantic"}},
    "training.sync_batch_norm": {"training": {"batch_norm_samples": 8}},
    "policy.half_life": {"policy": {"teams": [{"name": "vision"}]}},
    "notify.report_at": {"notify": {"targets": [{"name": "a", "apprise": "URL"}]}},
    "notify.targets.webhook": {"notify": {"targets": [{"name": "a", "signed_with": "KEY"}]}},
    "notify.targets.signed_with": {"notify": {"targets": [{"name": "a", "webhook": "URL"}]}},
    "notify.targets.name": {"notify": {"targets": [{"name": "a", "apprise": "URL"}]}},
    "notify.targets.kinds": {"notify": {"targets": [{"name": "a", "apprise": "URL"}]}},
    "nodes.device.*": {"nodes": [{"device": {"bf16_tflops": 100}}]},
}
WAYS = ("flag", "switch", "override", "key", "env", "accelerate")
SETTING_OF = {
    "switch": "precision",
    "values": "precision",
    "accelerate": "zero_stage",
    "separator": "devices",
    "relative": "output_dir",
}

Path = tuple[str, ...]


def resolved(schema: dict[str, Any], key: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The sections that a key may hold, itself, in lists or as one of several."""
    if "$ref" in key:
        key = schema["$defs"][key["$ref"].rpartition("/")[2]]
    if "properties" in key:
        yield key
    for inner in (*key.get("anyOf", ()), *([key["items"]] if "items" in key else ())):
        yield from resolved(schema, inner)


def keys(
    schema: dict[str, Any], section: dict[str, Any], path: Path, titles: set[str]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every key of a file with the first path at which it can stand: a section is entered once."""
    for name, key in section["properties"].items():
        yield (*path, name), key
    for name, key in section["properties"].items():
        for inner in resolved(schema, key):
            if inner["title"] not in titles:
                titles.add(inner["title"])
                yield from keys(schema, inner, (*path, name), titles)


EVERY = {noun: list(keys(schema, schema, (), set())) for noun, schema in SCHEMAS.items()}


@pytest.mark.parametrize("noun", SCHEMAS)
def test_every_key_has_a_description_of_one_short_sentence_an_example_and_a_default_unless_required(
    noun: str,
) -> None:
    assert len(EVERY[noun]) > 25
    wrong = []
    for path, key in EVERY[noun]:
        description = key.get("description", "")
        if (
            not description.endswith(".")
            or ". " in description
            or not 0 < len(description.split()) < WORDS_MAX
        ):
            wrong.append(f"{'.'.join(path)}: description {description!r}")
        if not key.get("examples"):
            wrong.append(f"{'.'.join(path)}: no example")
    sections = [SCHEMAS[noun], *SCHEMAS[noun]["$defs"].values()]
    for section in sections:
        for name in (
            set(section.get("properties", {}))
            - set(section.get("required", ()))
            - {"array", "max_concurrent", "sweep"}
        ):
            if "default" not in section["properties"][name]:
                wrong.append(f"{section['title']}.{name}: neither required nor with a default")
    assert not wrong, "\n".join(wrong)


def merged(below: Any, above: Any) -> Any:
    """Mappings key by key, and first entries of lists; anything else from above."""
    if isinstance(below, dict) and isinstance(above, dict):
        names = dict.fromkeys((*below, *above))
        return {
            name: merged(below[name], above[name])
            if name in below and name in above
            else {**below, **above}[name]
            for name in names
        }
    if (
        isinstance(below, list)
        and isinstance(above, list)
        and below
        and above
        and isinstance(below[0], dict)
    ):
        return [merged(below[0], above[0]), *above[1:]]
    return above


def nested(schema: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    """A document that says the value at this path, and of each section on the way what it requires."""
    document: dict[str, Any] = {}
    place, section = document, schema
    for depth, name in enumerate(path):
        for required in section.get("required", ()) if depth else ():
            place[required] = deepcopy(section["properties"][required]["examples"][0])
        if depth == len(path) - 1:
            place[name] = value
            break
        key = section["properties"][name]
        section = next(
            branch for branch in resolved(schema, key) if path[depth + 1] in branch["properties"]
        )
        is_list = key.get("type") == "array" or name == "depends_on"
        inner: dict[str, Any] = {}
        place[name] = [inner] if is_list else inner
        place = inner
    return document


def document_with(noun: str, path: Path, value: object) -> dict[str, Any]:
    """A file that says the value at this path, with what the parser asks for beside it."""
    dotted, document = ".".join(path), nested(SCHEMAS[noun], path, value)
    if noun == "cluster":
        base: dict[str, Any] = deepcopy(CLUSTER)
    elif dotted == "model.weights":  # a key of models that scripts train
        base, document = deepcopy(SCRIPT), {"trains": {"hf": "./model", **document["model"]}}
    else:
        base = deepcopy(MODEL if path[0] in OF_A_MODEL else SCRIPT)
    if path in (("model",), ("model", "factory")) or path[:2] == ("model", "decoder"):
        base["model"] = {}
    if path[0] == "data" and len(path) == 2:
        base["data"] = (
            {} if path[1] in ("text", "chat", "tokens", "tensors") else {"text": ["corpus.txt"]}
        )
    if dotted.startswith("knobs.micro_batch_size."):
        document = {"knobs": knob_with(path[-1], value)}
    if dotted.startswith("nodes.device."):
        base["nodes"][0]["device"] = {}
    for where, beside in BESIDE.items():
        if dotted == where or dotted.startswith(
            where.removesuffix("*") if where.endswith("*") else where + "."
        ):
            base = merged(base, deepcopy(beside))
    return merged(base, document)


def knob_with(name: str, value: object) -> dict[str, Any]:
    """The knob of a setting that can say the value, taken in one way."""
    setting = SETTING_OF.get(name, "micro_batch_size")
    knob = {name: value} if name in WAYS else {"flag": "--option", name: value}
    if name == "phase":
        return {setting: {"flag": "--first", "also": [{**knob, "default": 8}]}}
    return {setting: knob}


def why_refused(noun: str, document: dict[str, Any]) -> str | None:
    """The parser's error; None for a document that it takes."""
    text = yaml.safe_dump(document, sort_keys=False)
    try:
        if noun == "job":
            parse_jobs(text, "example.yaml")
        else:
            parse_cluster(text, "example.yaml")
    except SpecError as error:
        return str(error)
    return None


CASES = [
    (noun, path, index)
    for noun, every in EVERY.items()
    for path, key in every
    for index in range(len(key["examples"]))
]


@pytest.mark.parametrize(
    ("noun", "path", "index"), CASES, ids=[f"{n}:{'.'.join(p)}:{i}" for n, p, i in CASES]
)
def test_every_example_is_accepted_by_the_parser(noun: str, path: Path, index: int) -> None:
    example = next(key for where, key in EVERY[noun] if where == path)["examples"][index]
    assert why_refused(noun, document_with(noun, path, deepcopy(example))) is None


@pytest.mark.parametrize("noun", SCHEMAS)
def test_every_default_that_is_text_or_a_number_is_accepted_where_it_is_said(noun: str) -> None:
    defaults = {
        path: key["default"]
        for path, key in EVERY[noun]
        if isinstance(key.get("default"), str | int | float) and key["default"] != ""
    }
    assert len(defaults) > 5
    refused = {
        path: why_refused(noun, document_with(noun, path, default))
        for path, default in defaults.items()
    }
    assert {path: error for path, error in refused.items() if error is not None} == {}


def unbounded(node: object, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the place of each number without a greatest value, and of each text without a greatest length or a form."""
    if isinstance(node, list):
        for part in node:
            yield from unbounded(part, path)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    has_form = {"pattern", "maxLength", "enum", "const", "format"} & node.keys()
    if kind in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & node.keys():
        yield ".".join(path)
    if kind == "string" and not has_form and path[-1:] not in DESCRIBED:
        yield ".".join(path)
    for key, part in node.items():
        if key not in ("examples", "default"):
            yield from unbounded(part, (*path, key))


# Texts that a parser of their own reads, and whose schema is written by hand.
DESCRIBED = (("additionalProperties",), ("anyOf",), ("items",), ("propertyNames",))


@pytest.mark.parametrize(
    "schema", [make_job_json_schema(), make_cluster_json_schema()], ids=["job", "cluster"]
)
def test_every_number_and_every_text_of_a_file_has_a_bound(schema: dict[str, Any]) -> None:
    assert [*unbounded(schema)] == []
    assert [*unbounded({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}})] != []
