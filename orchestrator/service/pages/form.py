"""Which fields does the page of a new job have, and which job file do they write? Both follow the schema of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import job_json_schema
from orchestrator.specs.parse import Path, dotted, read_document, read_value
from orchestrator.specs.written import as_yaml, as_yaml_line

SOURCE = "the job"
OF_KEY = "key:"  # begins the name of the form's field of a key
WRITTEN = "written"  # the form's field with the job file that its other fields were filled from
BRACKETS = ("[", "{")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a job file, as a field of a form."""

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
        return OF_KEY + dotted(self.path)

    def typed(self, value: Any) -> str:
        """What a user types for the value."""
        return value if isinstance(value, str) and self._stands(value) else as_yaml_line(value)

    def read(self, typed: str) -> Any:
        """The value of what a user typed. Raises SpecError."""
        return typed if self._stands(typed) else read_value(typed, dotted(self.path))

    def _stands(self, typed: str) -> bool:
        return self.is_words and not (self.is_yaml and typed.startswith(BRACKETS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Keys under one mapping of a job file; `title` is its path, empty for the top."""

    title: str
    description: str
    keys: tuple[Key, ...]


@cache
def sections() -> tuple[Section, ...]:
    """Every key that a job file may say: its top, then its sections, each followed by those inside it."""
    schema = job_json_schema()
    return tuple(_sections((), schema, schema["$defs"]))


def _sections(path: Path, place: Schema, nouns: Mapping[str, Schema]) -> Iterator[Section]:
    required, keys, inner = place.get("required", ()), [], []
    for name, said in place["properties"].items():
        section = _section(said, nouns)
        if section is None:
            keys.append(_key((*path, name), said, nouns, is_required=name in required))
        else:
            inner.append(((*path, name), section | {"description": said["description"]}))
    if keys:
        yield Section(title=dotted(path), description=place.get("description", ""), keys=tuple(keys))
    for below, section in inner:
        yield from _sections(below, section, nouns)


def _section(said: Schema, nouns: Mapping[str, Schema]) -> dict[str, Any] | None:
    """The mapping that a key holds, where it holds nothing else and no other of its own kind."""
    (kind, *others) = _kinds(said)
    noun = kind.get("$ref", "").removeprefix("#/$defs/")
    if others or "properties" not in nouns.get(noun, {}) or f"'{kind['$ref']}'" in str(nouns[noun]):
        return None
    return dict(nouns[noun])


def _kinds(said: Schema) -> list[Schema]:
    """What a key may hold, but for null."""
    if "anyOf" in said:
        return [kind for one in said["anyOf"] for kind in _kinds(one)]
    return [] if said.get("type") == "null" else [said]


def _key(path: Path, said: Schema, nouns: Mapping[str, Schema], *, is_required: bool) -> Key:
    kinds = [nouns[kind["$ref"].removeprefix("#/$defs/")] if "$ref" in kind else kind for kind in _kinds(said)]
    is_flag = [kind.get("type") for kind in kinds] == ["boolean"]
    has_numbers = any(kind.get("type") == "integer" for kind in kinds)  # `4` of `gpus` is a number, and `1-4` a text
    default = said.get("default")
    return Key(
        path=path,
        description=said["description"],
        is_required=is_required,
        is_words=any(kind.get("type") == "string" and not (has_numbers and "pattern" in kind) for kind in kinds),
        is_yaml=any(kind.get("type") != "string" for kind in kinds),
        choices=("true", "false") if is_flag else tuple(kinds[0].get("enum", ())) if len(kinds) == 1 else (),
        default="" if default in (None, [], {}) else as_yaml_line(default),
        example=as_yaml_line(said["examples"][0]),
    )


def filled(text: str) -> dict[str, str]:
    """What the fields show of a job file, by their names; nothing where it cannot be read."""
    try:
        data = read_document(text, SOURCE).data
    except SpecError:
        return {}
    shown = {}
    for key in _keys():
        value = _at(data, key.path)
        if value is not None:
            shown[key.name] = " ".join(key.typed(value).split("\n"))  # a field has one line
    return shown


def written(given: Mapping[str, str]) -> str:
    """The job file of a form: its text, and in it each key whose field was changed. Raises SpecError.

    Text that no field changes stays as it is; otherwise it is written anew, without its comments.
    """
    text, before = given.get("text", ""), filled(given.get(WRITTEN, ""))
    changed = [key for key in _keys() if given.get(key.name, "").strip() != before.get(key.name, "").strip()]
    if WRITTEN not in given or not changed:
        return text
    data = read_document(text, SOURCE).data if text.strip() else {}
    for key in changed:
        typed = given.get(key.name, "").strip()
        data = _with(data, key.path, key.read(typed) if typed else None)
    return as_yaml(data)


def _keys() -> Iterator[Key]:
    return (key for section in sections() for key in section.keys)


def _at(data: Any, path: Path) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _with(data: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """The mapping with that value at the path; None takes the key away, and each mapping that is empty then."""
    (name, *rest) = path
    if rest:
        inner = data.get(str(name)) or {}
        if not isinstance(inner, dict):
            what = "there is nothing to set inside a value"
            raise SpecError(what, source=SOURCE, path=str(name), got=str(inner))
        value = _with(inner, tuple(rest), value) or None
    return {key: one for key, one in {**data, str(name): value}.items() if key != name or value is not None}
