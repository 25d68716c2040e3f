"""Fields of the submit page, and the job file that they produce. Both follow the JSON schema of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path as FilePath
from typing import Any

from orchestrator.service.commands.init.proposal import proposal
from orchestrator.service.commands.init.shell_text import first_command
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import job_json_schema
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.written import as_yaml, as_yaml_line
from orchestrator.specs.yaml_text import Path, format_key_path, read_document, read_value

SOURCE = "the job"
OF_KEY = "key:"  # begins the name of the form's field of a key
WRITTEN = "written"  # the form's field with the job file that its other fields were filled from
BRACKETS = ("[", "{")

Schema = Mapping[str, Any]
Form = Mapping[str, str]  # what was typed, by the name of its field


@frozen
class Key:
    """A key of a job file as a form field."""

    path: Path
    description: str
    is_required: bool
    is_words: bool  # a string is typed as it stands
    is_yaml: bool  # other values are typed as YAML; beside strings, those that begin with a bracket
    choices: tuple[str, ...]  # empty: anything may be typed
    default: str
    example: str

    @property
    def name(self) -> str:
        return OF_KEY + format_key_path(self.path)

    def typed(self, value: Any) -> str:
        """Return the value as a user would type it."""
        return value if isinstance(value, str) and self._stands(value) else as_yaml_line(value)

    def read(self, typed: str) -> Any:
        """Return the value of a typed text. Raises SpecError."""
        return typed if self._stands(typed) else read_value(typed, format_key_path(self.path))

    def _stands(self, typed: str) -> bool:
        return self.is_words and not (self.is_yaml and typed.startswith(BRACKETS))


@frozen
class Section:
    """Keys of one mapping in a job file; `title` is its path, "" for the top level."""

    title: str
    description: str
    keys: tuple[Key, ...]


@cache
def sections() -> tuple[Section, ...]:
    """Return all keys of a job file: the top level, then its sections, each followed by its inner sections."""
    schema = job_json_schema()
    return tuple(_sections((), schema, schema["$defs"]))


def _sections(path: Path, place: Schema, nouns: Mapping[str, Schema]) -> Iterator[Section]:
    required = place.get("required", ())
    keys = []
    inner = []
    for name, schema_of_key in place["properties"].items():
        section = _section(schema_of_key, nouns)
        if section is None:
            keys.append(_key((*path, name), schema_of_key, nouns, is_required=name in required))
        else:
            inner.append(((*path, name), section | {"description": schema_of_key["description"]}))
    if keys:
        yield Section(
            title=format_key_path(path), description=place.get("description", ""), keys=tuple(keys)
        )
    for below, section in inner:
        yield from _sections(below, section, nouns)


def _section(schema: Schema, nouns: Mapping[str, Schema]) -> JsonObject | None:
    """Return the schema of the mapping that a key holds; None where it may hold more, or a mapping of the same kind."""
    (kind, *others) = _kinds(schema)
    noun = kind.get("$ref", "").removeprefix("#/$defs/")
    if others or "properties" not in nouns.get(noun, {}) or f"'{kind['$ref']}'" in str(nouns[noun]):
        return None
    return dict(nouns[noun])


def _kinds(schema: Schema) -> list[Schema]:
    """Return the schemas of the values that a key may hold, without null."""
    if "anyOf" in schema:
        return [kind for choice in schema["anyOf"] for kind in _kinds(choice)]
    return [] if schema.get("type") == "null" else [schema]


def _key(path: Path, schema: Schema, nouns: Mapping[str, Schema], *, is_required: bool) -> Key:
    kinds = [
        nouns[kind["$ref"].removeprefix("#/$defs/")] if "$ref" in kind else kind
        for kind in _kinds(schema)
    ]
    is_flag = [kind.get("type") for kind in kinds] == ["boolean"]
    has_numbers = any(
        kind.get("type") == "integer" for kind in kinds
    )  # `4` of `gpus` is a number, and `1-4` a text
    default = schema.get("default")
    return Key(
        path=path,
        description=schema["description"],
        is_required=is_required,
        is_words=any(
            kind.get("type") == "string" and not (has_numbers and "pattern" in kind)
            for kind in kinds
        ),
        is_yaml=any(kind.get("type") != "string" for kind in kinds),
        choices=("true", "false")
        if is_flag
        else tuple(kinds[0].get("enum", ()))
        if len(kinds) == 1
        else (),
        default="" if default in (None, [], {}) else as_yaml_line(default),
        example=as_yaml_line(schema["examples"][0]),
    )


def propose(command: str, folder: str) -> str:
    """Return the job file that `orc init` proposes for a command in a folder of this machine. Runs nothing.

    Raises SpecError for a command that starts no training.
    """
    if not os.path.isabs(folder) or not os.path.isdir(folder):
        hint = "write an absolute path on the service's machine, or use `orc init` on your own"
        raise SpecError("no such folder", source=SOURCE, path="folder", got=folder, hint=hint)
    return proposal(first_command(command), FilePath(folder), {})


def field_values(text: str) -> dict[str, str]:
    """Return {field name: text} of a job file; {} where the file cannot be read."""
    try:
        data = read_document(text, SOURCE).data
    except SpecError:
        return {}
    shown = {}
    for key in _keys():
        value = _value_at(data, key.path)
        if value is not None:
            shown[key.name] = " ".join(key.typed(value).split("\n"))  # a field has one line
    return shown


def write_job_file(form: Form) -> str:
    """Return the job file of a form: its text, with changed fields applied. Raises SpecError.

    The text is unchanged where no field changed; otherwise it is rewritten, without comments.
    """
    text = form.get("text", "")
    before = field_values(form.get(WRITTEN, ""))
    changed = [
        key for key in _keys() if form.get(key.name, "").strip() != before.get(key.name, "").strip()
    ]
    if WRITTEN not in form or not changed:
        return text
    data = read_document(text, SOURCE).data if text.strip() else {}
    for key in changed:
        typed = form.get(key.name, "").strip()
        data = _with(data, key.path, key.read(typed) if typed else None)
    return as_yaml(data)


def _keys() -> Iterator[Key]:
    return (key for section in sections() for key in section.keys)


def _value_at(data: Any, path: Path) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _with(data: JsonObject, path: Path, value: Any) -> JsonObject:
    """Return the mapping with a value at the path; None removes the key, and each mapping that becomes empty."""
    (name, *rest) = path
    if rest:
        inner = data.get(str(name)) or {}
        if not isinstance(inner, dict):
            what = "there is nothing to set inside a value"
            raise SpecError(what, source=SOURCE, path=str(name), got=str(inner))
        value = _with(inner, tuple(rest), value) or None
    return {
        key: entry
        for key, entry in {**data, str(name): value}.items()
        if key != name or value is not None
    }
