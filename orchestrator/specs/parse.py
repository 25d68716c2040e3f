"""Parses job and cluster files from YAML text to immutable specs; one SpecError lists every
problem.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import SkipJsonSchema

from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.errors import SpecError, suggest_word
from orchestrator.specs.job.array import (
    INDEX,
    expand_array,
    fill_placeholders,
    list_placeholders,
    read_max_concurrent,
    set_array_name_as_family,
)
from orchestrator.specs.job.frameworks import take_flag_from
from orchestrator.specs.job.model import EXACT_MAX
from orchestrator.specs.job.pins import GIVEN as PLAN_SETTINGS
from orchestrator.specs.job.sections import Remedy
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.sweep import TRIALS_AT_ONCE, Sweep, Value, list_template_parts
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plain_text import VALUE_LENGTH_MAX, explain_unstorable
from orchestrator.specs.preset_file import merge_preset_file
from orchestrator.specs.replace import replace
from orchestrator.specs.spec_model import SpecModel
from orchestrator.specs.synonyms import advise_key
from orchestrator.specs.yaml_text import (
    DEPTH_MAX,
    TEXT_LENGTH_MAX,
    Document,
    Path,
    format_key_path,
    read_document,
    read_value,
)

KEY_LIKENESS = 0.66  # from which another key is offered: 1 is equal (difflib)
# Of data that no YAML file holds: four traces of a model with two towers have 214,000 values
# (gemma3 as transformers 5.24 has it, 53,490 each).
VALUES_MAX = 300_000
KEYS_MAX = 4096  # of one section
KEY_CHARACTERS_MAX = 64  # of an unknown key for which a near one is looked for
PROBLEMS_MAX = 20  # told at once
GIVEN_LENGTH_MAX = 120
BITS_SHOWN_MAX = 200
IN_NO_SCHEMA = get_args(SkipJsonSchema[object])[1]  # marks what is found out, and said in no file

Override = tuple[str, str]  # ("training.max_steps", "20")
ReadText = Callable[[str], str] | None
AnyNoun = TypeVar("AnyNoun", bound=BaseModel)

_NAME_RULE = "lower-case letters, digits and . _ -, first a letter or digit, at most 63"


def parse_job(
    text: str, source: str, overrides: Sequence[Override] = (), read_text: ReadText = None
) -> JobSpec:
    """Return the job in a job file's text, with `overrides` applied. Raises one SpecError that lists every problem.

    `read_text` reads a preset file that `trainer` names. None means that no file can be read, and no preset is allowed.
    """
    spec, *others = parse_jobs(text, source, overrides, read_text)
    if others:
        raise SpecError(
            "an array is many jobs",
            source=source,
            path="array",
            got=f"{len(others) + 1} jobs",
            hint="`orc submit` it",
        )
    if spec.trial is not None:
        raise SpecError(
            "a sweep is many jobs",
            source=source,
            path="sweep",
            got=f"{spec.trial.sweep.trials} trials",
            hint="`orc submit` it",
        )
    return spec


def parse_jobs(
    text: str, source: str, overrides: Sequence[Override] = (), read_text: ReadText = None
) -> list[JobSpec]:
    """Return all jobs in a job file's text: one, or those of its `array`. Raises SpecError as `parse_job` does."""
    document = merge_preset_file(
        _apply_override_values(read_document(text, source), overrides), read_text
    )
    for name, section in (("member", "array"), ("trial", "sweep")):
        if name in document.data:
            what = (
                f"which job of {'an' if section == 'array' else 'a'} {section} it is, is no setting"
            )
            raise SpecError(what, source=source, path=name, hint=f"say `{section}`")
    if "sweep" in document.data:
        return [_make_first_trial(document)]
    if "array" not in document.data:
        return [validate_document(JobSpec, document)]
    return [
        validate_document(JobSpec, replace(document, data=data))
        for data in expand_array(document.data, source)
    ]


def parse_cluster(text: str, source: str) -> ClusterSpec:
    """Return the cluster in a cluster file's text. Raises one SpecError that lists every problem."""
    return validate_document(ClusterSpec, read_document(text, source))


def parse_node_data(data: Mapping[str, Any], source: str) -> NodeSpec:
    """Return the NodeSpec from the output of `NodeSpec.model_dump(mode="json")`. Raises SpecError."""
    return validate_document(NodeSpec, Document(source=source, data=dict(data), lines={}))


def parse_job_data(data: Mapping[str, Any], source: str) -> JobSpec:
    """Return the JobSpec from the output of `JobSpec.model_dump(mode="json")`. Raises SpecError."""
    spec = validate_document(JobSpec, Document(source=source, data=dict(data), lines={}))
    if (
        spec.known_model is not None
        and spec.known_model.factory
        and not (spec.profile or spec.traced)
    ):
        hint = "service/intake/intake.py has it traced where a job file is read; or say `profile`"
        raise SpecError(
            "the costs of the model are unknown", source=source, path="traced", hint=hint
        )
    return spec


def apply_overrides(spec: JobSpec, overrides: Sequence[Override], source: str) -> JobSpec:
    """Return the job with `--set key=value` overrides applied, parsed and validated like a job
    file. Raises SpecError.
    """
    return validate_document(
        JobSpec,
        _apply_override_values(
            Document(source=source, data=spec.model_dump(mode="json"), lines={}), overrides
        ),
    )


def apply_remedy(spec: JobSpec, remedy: Remedy) -> JobSpec:
    """Return the job with one of its `remedies` applied. Raises SpecError for a wrong key or value.

    A word KEY=VALUE or an option takes the place of an earlier one of the same name in `command`.
    """
    changed = apply_overrides(spec, remedy.set, f"the remedy {remedy.label!r}")
    if changed.command is None:
        return changed
    command = changed.command
    for word in remedy.arguments:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            _, command = take_flag_from(command, name)
        elif equals:
            command = tuple(argument for argument in command if not argument.startswith(f"{name}="))
    return changed.model_copy(update={"command": (*command, *remedy.arguments)})


class _WithSweep(SpecModel):
    """The part of a job file that declares a sweep."""

    sweep: Sweep


def _make_first_trial(document: Document) -> JobSpec:
    """Return the first trial of a sweep. Raises SpecError if the job is illegal with an extreme
    value of a parameter.
    """
    source = document.source
    data = document.data
    sweep = validate_document(_WithSweep, replace(document, data={"sweep": data["sweep"]})).sweep
    if "array" in data:
        raise SpecError(
            "a file says `array` or `sweep`",
            source=source,
            path="array",
            hint="put it in `parameters`",
        )
    rest = set_array_name_as_family(
        {key: part for key, part in data.items() if key not in ("sweep", "max_concurrent")}
    )
    names = {name for name, _ in sweep.parameters}
    if unused := sorted(names - set(list_placeholders(rest))):
        raise SpecError(
            "no part of the job says this parameter",
            source=source,
            path="sweep.parameters",
            got=unused[0],
            hint=f"write {{{unused[0]}}} where it belongs, such as in `command`",
        )
    template = list_template_parts(
        rest, lambda part: not {*names, INDEX}.isdisjoint(list_placeholders(part))
    )
    parts = [(keys, json.dumps(part)) for keys, part in template]
    specs = [
        validate_document(
            JobSpec, replace(document, data=fill_placeholders(rest, {INDEX: 0, **row}))
        )
        for row in sweep.list_parameters_to_check()
    ]
    trial = {
        "sweep": sweep,
        "max_concurrent": read_max_concurrent(data, TRIALS_AT_ONCE, source),
        "template": parts,
    }
    return validate_document(
        JobSpec, replace(document, data={**specs[0].model_dump(mode="json"), "trial": trial})
    )


def make_trial(
    first_trial: JobSpec, sweep_id: str | None, trial_number: int, parameters: Mapping[str, Value]
) -> JobSpec:
    """Return this trial of the sweep, built from its first trial. Raises SpecError for illegal
    parameters.
    """
    assert first_trial.trial is not None, first_trial.name
    data: JsonObject = first_trial.model_dump(mode="json")
    row = {INDEX: trial_number, **parameters}
    for keys, text in first_trial.trial.template:
        place = data
        for key in keys[:-1]:
            place[key] = place = dict(place.get(key) or {})
        place[keys[-1]] = fill_placeholders(json.loads(text), row)
    data["trial"] |= {"of": sweep_id, "number": trial_number, "parameters": dict(parameters)}
    return validate_document(
        JobSpec, Document(source=f"trial {trial_number} of {first_trial.name}", data=data, lines={})
    )


def join_problems(problems: Sequence[SpecError], source: str, further_count: int = 0) -> SpecError:
    """Return one SpecError that lists all `problems`; equal lists of allowed values appear once.

    `further_count` is the number of problems beyond these.
    """
    assert problems, "an error without a problem"
    if len(problems) == 1:
        return problems[0]
    lists: set[str] = set()
    shown = []
    for problem in problems[:PROBLEMS_MAX]:
        shown.append(textwrap.indent(problem.text(with_allowed=problem.allowed not in lists), "  "))
        lists.add(problem.allowed)
    listed = "\n".join(shown)
    left = len(problems) - PROBLEMS_MAX if len(problems) > PROBLEMS_MAX else 0
    if left + further_count:
        listed += f"\n  and {left + further_count} more"
    return SpecError(f"{len(problems) + further_count} problems\n{listed}", source=source)


def _apply_override_values(document: Document, overrides: Sequence[Override]) -> Document:
    """Return a copy of the document in which each `--set key=value` has replaced the value at its
    dotted key.
    """
    data = dict(document.data)
    lines = dict(document.lines)
    for key, text in overrides:
        *sections, last = key.split(".")
        place = data
        for section in sections:
            inner = place.get(section)
            if inner is not None and not isinstance(inner, dict):
                raise SpecError(
                    "there is nothing to set inside a value", source="--set", path=key, got=text
                )
            place[section] = place = dict(inner or {})
        place[last] = read_value(text, f"--set {key}")
        lines = {
            path: line
            for path, line in lines.items()
            if format_key_path(path[: len(sections) + 1]) != key
        }
        lines[tuple(key.split("."))] = 0
    return Document(source=document.source, data=data, lines=lines)


# ----------------------------------------------------------------------------------------------- plain data to nouns


def check_storable(
    data: object,
    source: str,
    line_by_path: Mapping[Path, int] | None = None,
    text_length_max: float = inf,
) -> None:
    """Raise SpecError at the first value that a journal, a process or a path cannot hold.

    Such values are NaN and infinities, integers beyond 2**53, lone surrogates, NUL, very long texts
    and deep nesting.
    """
    left: list[tuple[Path, object]] = [((), data)]
    visited = length = 0
    while left:
        path, value = left.pop()
        visited += 1
        size = len(value) if isinstance(value, Mapping | list | tuple) else 0
        is_long = isinstance(value, Mapping) and size > KEYS_MAX
        if is_long or visited + len(left) + size > VALUES_MAX or len(path) > DEPTH_MAX:
            sizes = f"{DEPTH_MAX} levels, {VALUES_MAX} values"
            raise _make_unstorable_error(
                "too large or nested too deeply", path, None, sizes, source, line_by_path
            )
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str) or explain_unstorable(key):
                    raise _make_unstorable_error(
                        "the name of a key is no text",
                        path,
                        key,
                        "text in UTF-8",
                        source,
                        line_by_path,
                    )
            left += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [((*path, index), inner) for index, inner in enumerate(value)]
        elif isinstance(value, str) and (length := length + len(value)) > text_length_max:
            raise _make_unstorable_error(
                "too much text",
                (),
                None,
                f"{text_length_max:,} characters in all",
                source,
                line_by_path,
            )
        elif isinstance(value, str) and (why := explain_unstorable(value)):
            got = value[:GIVEN_LENGTH_MAX]
            raise _make_unstorable_error(
                why,
                path,
                got,
                f"{VALUE_LENGTH_MAX:,} characters of UTF-8, none of them NUL",
                source,
                line_by_path,
            )
        elif isinstance(value, float) and not isfinite(value):
            raise _make_unstorable_error(
                "not a finite number", path, value, "a finite number", source, line_by_path
            )
        elif isinstance(value, int) and abs(value) > EXACT_MAX:
            got = (
                str(value)
                if value.bit_length() < BITS_SHOWN_MAX
                else f"a number of {value.bit_length()} bits"
            )
            raise _make_unstorable_error(
                "the number is too large", path, got, f"at most {EXACT_MAX}", source, line_by_path
            )


def _make_unstorable_error(
    what: str,
    path: Path,
    got: object,
    allowed: str,
    source: str,
    line_by_path: Mapping[Path, int] | None,
) -> SpecError:
    where = (
        source
        if line_by_path is None
        else _describe_position(Document(source=source, data={}, lines=line_by_path), path)
    )
    return SpecError(
        what, source=where, path=escape_unprintable(format_key_path(path)), got=got, allowed=allowed
    )


def escape_unprintable(text: str) -> str:
    """Return the text with each unprintable character replaced by its escape, such as `\\x1b`."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )


def validate_document(spec_class: type[AnyNoun], document: Document) -> AnyNoun:
    """Return an object of the class `spec_class` from a document. Raises one SpecError that lists
    every problem.
    """
    check_storable(document.data, document.source, document.lines, TEXT_LENGTH_MAX)
    try:
        return spec_class.model_validate(document.data)
    except ValidationError as error:
        problems: dict[tuple[str, str], SpecError] = {}
        places = _KeyPaths(spec_class)
        details = error.errors(include_url=False)
        for number, detail in enumerate(details):
            if len(problems) == PROBLEMS_MAX:  # each explanation takes a millisecond
                raise join_problems(
                    list(problems.values()), document.source, len(details) - number
                ) from None
            problem = _make_problem(spec_class, detail, document, places)
            problems.setdefault((problem.path, problem.what), problem)
        raise join_problems(list(problems.values()), document.source) from None


class _KeyPaths:
    """All key paths that a file of a class may have, listed when the first unknown key asks for
    them.
    """

    def __init__(self, spec_class: type[BaseModel]) -> None:
        self._noun = spec_class
        self._paths: tuple[Path, ...] = ()

    def list_paths(self) -> tuple[Path, ...]:
        """Return every key path, the shortest first."""
        self._paths = self._paths or tuple(_list_key_paths(self._noun))
        return self._paths


def _make_problem(
    spec_class: type[BaseModel], pydantic_error: Any, document: Document, key_paths: _KeyPaths
) -> SpecError:
    kind = pydantic_error["type"]
    got = pydantic_error["input"]
    context = pydantic_error.get("ctx", {})
    path, place = _find_key_path_and_class(spec_class, pydantic_error["loc"], document.data)
    source = _describe_position(document, path)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _make_unknown_key_error(key_paths.list_paths(), place, path, source)
    if kind in ("missing", "missing_keyword_only_argument", "missing_argument"):
        return SpecError(
            "this key is required, and missing", source=source, path=format_key_path(path)
        )
    cause = context.get("error")
    if isinstance(cause, SpecError):
        inner = tuple(part for part in cause.path.split(".") if part)
        return SpecError(
            cause.what,
            source=_describe_position(document, (*path, *inner)),
            path=format_key_path((*path, *inner)),
            got=cause.got,
            allowed=cause.allowed,
            hint=cause.hint,
        )
    if isinstance(got, (Mapping, list)) and (
        kind == "value_error" or len(repr(got)) > GIVEN_LENGTH_MAX
    ):
        got = None  # the message names the parts; the whole section would hide them
    what, allowed = (
        (str(cause), "")
        if kind == "value_error"
        else _describe_problem_and_allowed(kind, pydantic_error["msg"], context)
    )
    return SpecError(
        what,
        source=source,
        path=format_key_path(path),
        got=got,
        allowed=allowed,
        hint=_make_hint(kind, got, context),
    )


def _describe_position(document: Document, path: Path) -> str:
    """Return the position of the nearest key in the file, such as `job.yaml:12`."""
    while path and path not in document.lines:
        path = path[:-1]
    line = document.lines.get(path)
    if line is None:
        return document.source
    return f"{document.source}:{line}" if line else f"{document.source} with --set"


def _describe_problem_and_allowed(
    kind: str, message: str, context: Mapping[str, Any]
) -> tuple[str, str]:
    if kind == "none_required" or kind.endswith(("_parsing", "_type")):
        section = kind in ("model_type", "dataclass_type", "dict_type", "model_attributes_type")
        allowed = (
            "a section of `key: value`" if section else message.removeprefix("Input should be ")
        )
        return "the value is of the wrong kind", allowed.split(", unable")[0]
    if kind in ("enum", "literal_error"):
        return "not one of the possible values", str(context["expected"])
    if kind == "string_too_long":
        return "the text is too long", f"at most {context['max_length']} characters"
    if kind == "string_pattern_mismatch":
        return "the name has a form that is not allowed", _NAME_RULE
    if kind.startswith(("greater_than", "less_than", "too_", "int_from_float")):
        return "the value is out of range", message.removeprefix("Input should be ")
    return message, ""


def _make_hint(kind: str, got: object, context: Mapping[str, Any]) -> str:
    if kind in ("enum", "literal_error") and isinstance(got, str):
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return suggest_word(got, choices)
    if kind == "string_type" and isinstance(got, (int, float, bool)):
        return f'write it in quotes: "{got}"'
    if got is None and kind != "value_error":
        return "nothing stands behind the key: give it a value or remove it"
    return ""


def _make_unknown_key_error(
    key_paths: Sequence[Path], section_class: type, path: Path, source: str
) -> SpecError:
    key = str(path[-1])
    fields = _list_keys_of(section_class)
    if section_class is JobSpec:
        fields |= {
            "array": str,
            "sweep": str,
            "max_concurrent": str,
        }  # a file's, which is many jobs
    by_name = {
        str(where[-1]): where for where in reversed(key_paths)
    }  # of equal names the shortest path stays
    elsewhere = by_name.get(key)
    is_short = len(key) <= KEY_CHARACTERS_MAX
    matches = difflib.get_close_matches(key, fields, n=1, cutoff=KEY_LIKENESS) if is_short else []
    near = matches[0] if matches else next((name for name in fields if key in name), None)
    distant = None
    if is_short and elsewhere is None and near is None:
        distant = next(iter(difflib.get_close_matches(key, by_name, n=1, cutoff=0.8)), None)
    if section_class is JobSpec and key in PLAN_SETTINGS:
        hint = f"`plan: {{{key}: ...}}` or `--plan {key}=...` pins it; without, orc chooses it"
    elif section_class is JobSpec and key == "max_concurrent":
        hint = "it belongs to an `array` or a `sweep`, and this file has none"
    elif section_class is JobSpec and (instead := advise_key(key)):
        hint = f"instead write {instead}"
    elif elsewhere:
        section = format_key_path(elsewhere[:-1])
        hint = (
            f"did you mean to put it under `{section}:`?"
            if section
            else "did you mean to put it at the top level?"
        )
    elif near:
        hint = f"did you mean {near!r}?"
    elif distant:
        hint = f"did you mean `{format_key_path(by_name[distant])}`?"
    else:
        hint = ""
    return SpecError(
        "unknown key",
        source=source,
        path=format_key_path(path),
        got=key,
        allowed=", ".join(fields),
        hint=hint,
    )


# ------------------------------------------------------------------------------------------------ the tree of nouns


def _find_key_path_and_class(
    spec_class: type, error_location: Sequence[str | int], data: Any
) -> tuple[Path, type]:
    """Return (key path in the file, class that has the path's last key) for a location in
    pydantic's error.
    """
    path: list[str | int] = []
    place = spec_class
    kind = spec_class
    for part in error_location:
        fields = _list_keys_of(kind)
        if isinstance(part, int) and isinstance(
            data, dict
        ):  # words are validated as pairs: this one by its number
            keys = [*data]
            return (*path, *keys[part : part + 1]), place
        if isinstance(part, str) and not fields:
            break  # inside a value: the rest names members of a union
        path.append(part)
        if isinstance(part, str):
            place = kind
            kind = fields.get(part, str)
            data = data.get(part) if isinstance(data, dict) else None
        else:
            data = data[part] if isinstance(data, list) and part < len(data) else None
    return tuple(path), place


def _list_key_paths(
    spec_class: type, path: Path = (), outer_classes: tuple[type, ...] = ()
) -> Iterator[Path]:
    """Yield every key path that a file of this class may have, shortest first; a recursive class is
    listed once.
    """
    fields = {
        name: kind
        for name, kind in _list_keys_of(spec_class).items()
        if kind not in (*outer_classes, spec_class)
    }
    yield from ((*path, name) for name in fields)
    for name, kind in fields.items():
        yield from _list_key_paths(kind, (*path, name), (*outer_classes, spec_class))


def _list_keys_of(spec_class: type) -> dict[str, type]:
    """Return {key: type} of the keys that a file may have for a class; {} for a type without keys."""
    if issubclass(spec_class, BaseModel):
        fields = {
            field.alias or name: field
            for name, field in spec_class.model_fields.items()
            if IN_NO_SCHEMA not in field.metadata
        }
        return {name: _get_class_inside(field.annotation) for name, field in fields.items()}
    if dataclasses.is_dataclass(spec_class):
        hints = get_type_hints(spec_class)
        return {
            field.name: _get_class_inside(hints[field.name])
            for field in dataclasses.fields(spec_class)
        }
    return {}


def _get_class_inside(annotation: Any) -> type:
    """Return the class inside `Annotated`, `X | None` or `tuple[X, ...]`; str where there is none."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType, tuple):
        inner = (_get_class_inside(part) for part in get_args(annotation) if part is not Ellipsis)
        return next((noun for noun in inner if _is_spec_class(noun)), str)
    return annotation if isinstance(annotation, type) and _is_spec_class(annotation) else str


def _is_spec_class(kind: type) -> bool:
    return issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)
