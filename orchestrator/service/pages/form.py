"""Fields of the submit page, and the job file that they produce. Both follow the JSON schema of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path as FilePath
from typing import Any

from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.service.commands.init.shell_text import split_first_command
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import make_job_json_schema
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
class FormKey:
    """A key of a job file, shown as a field of the submit form."""

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

    def format_value(self, value: Any) -> str:
        """Return the value as a user would type it into the field."""
        return value if isinstance(value, str) and self._is_unquoted(value) else as_yaml_line(value)

    def parse_value(self, text: str) -> Any:
        """Return the value of a text typed into the field. Raises SpecError."""
        return text if self._is_unquoted(text) else read_value(text, format_key_path(self.path))

    def _is_unquoted(self, text: str) -> bool:
        return self.is_words and not (self.is_yaml and text.startswith(BRACKETS))


@frozen
class Section:
    """The keys of one mapping in a job file; `title` is its path, "" for the top level of the file."""

    title: str
    description: str
    keys: tuple[FormKey, ...]


@cache
def list_form_sections() -> tuple[Section, ...]:
    """Return all keys of a job file by section: the top level, then each mapping, followed by the
    mappings inside it.
    """
    schema = make_job_json_schema()
    return tuple(_iterate_sections((), schema, schema["$defs"]))


def _iterate_sections(
    path: Path, schema: Schema, definitions: Mapping[str, Schema]
) -> Iterator[Section]:
    required = schema.get("required", ())
    keys = []
    inner = []
    for name, schema_of_key in schema["properties"].items():
        section = _find_mapping_schema(schema_of_key, definitions)
        if section is None:
            keys.append(
                _make_key((*path, name), schema_of_key, definitions, is_required=name in required)
            )
        else:
            inner.append(((*path, name), section | {"description": schema_of_key["description"]}))
    if keys:
        yield Section(
            title=format_key_path(path), description=schema.get("description", ""), keys=tuple(keys)
        )
    for below, section in inner:
        yield from _iterate_sections(below, section, definitions)


def _find_mapping_schema(schema: Schema, definitions: Mapping[str, Schema]) -> JsonObject | None:
    """Return the JSON schema of the mapping that a job file's key holds; None if it holds anything
    else.

    It is also None where the mapping may contain itself.
    """
    (kind, *others) = _list_value_schemas(schema)
    noun = kind.get("$ref", "").removeprefix("#/$defs/")
    if (
        others
        or "properties" not in definitions.get(noun, {})
        or f"'{kind['$ref']}'" in str(definitions[noun])
    ):
        return None
    return dict(definitions[noun])


def _list_value_schemas(schema: Schema) -> list[Schema]:
    """Return the JSON schemas of the values that a key may have, except null."""
    if "anyOf" not in schema:
        return [] if schema.get("type") == "null" else [schema]
    kinds = []
    for choice in schema["anyOf"]:
        kinds += _list_value_schemas(choice)
    return kinds


def _make_key(
    path: Path, schema: Schema, definitions: Mapping[str, Schema], *, is_required: bool
) -> FormKey:
    kinds = [
        definitions[kind["$ref"].removeprefix("#/$defs/")] if "$ref" in kind else kind
        for kind in _list_value_schemas(schema)
    ]
    is_flag = [kind.get("type") for kind in kinds] == ["boolean"]
    has_numbers = any(
        kind.get("type") == "integer" for kind in kinds
    )  # `4` of `gpus` is a number, and `1-4` a text
    default = schema.get("default")
    return FormKey(
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


def propose_job_file_for_form(command: str, folder: str) -> str:
    """Return the job file that `orc init` proposes for a command in a folder of this machine. Runs
    nothing.

    Raises SpecError for a command that starts no training.
    """
    if not os.path.isabs(folder) or not os.path.isdir(folder):
        hint = "write an absolute path on the service's machine, or use `orc init` on your own"
        raise SpecError("no such folder", source=SOURCE, path="folder", got=folder, hint=hint)
    return propose_job_file(split_first_command(command), FilePath(folder), {})


def read_field_values(job_text: str) -> dict[str, str]:
    """Return {form field's name: text} of a job file; {} where the file cannot be read."""
    try:
        data = read_document(job_text, SOURCE).data
    except SpecError:
        return {}
    shown = {}
    for key in _iterate_keys():
        value = _get_value_at(data, key.path)
        if value is not None:
            shown[key.name] = " ".join(key.format_value(value).split("\n"))  # a field has one line
    return shown


def write_job_file(form: Form) -> str:
    """Return the text of the job file in a submitted form, with changed fields applied. Raises
    SpecError.

    The text is unchanged where no field changed; otherwise it is rewritten, without comments.
    """
    text = form.get("text", "")
    before = read_field_values(form.get(WRITTEN, ""))
    changed = [
        key
        for key in _iterate_keys()
        if form.get(key.name, "").strip() != before.get(key.name, "").strip()
    ]
    if WRITTEN not in form or not changed:
        return text
    data = read_document(text, SOURCE).data if text.strip() else {}
    for key in changed:
        typed = form.get(key.name, "").strip()
        data = _set_value(data, key.path, key.parse_value(typed) if typed else None)
    return as_yaml(data)


def _iterate_keys() -> Iterator[FormKey]:
    for section in list_form_sections():
        yield from section.keys


def _get_value_at(data: Any, key_path: Path) -> Any:
    for name in key_path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _set_value(data: JsonObject, key_path: Path, value: Any) -> JsonObject:
    """Return the mapping with this value at the path. None removes the key, and each mapping that
    becomes empty.
    """
    (name, *rest) = key_path
    if rest:
        inner = data.get(str(name)) or {}
        if not isinstance(inner, dict):
            what = "there is nothing to set inside a value"
            raise SpecError(what, source=SOURCE, path=str(name), got=str(inner))
        value = _set_value(inner, tuple(rest), value) or None
    return {
        key: entry
        for key, entry in {**data, str(name): value}.items()
        if key != name or value is not None
    }
