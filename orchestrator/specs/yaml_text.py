"""Reader of YAML (1.2 core schema, no tags) that returns plain data and the line number of each value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject

TEXT_LENGTH_MAX = 2**18
NODES_MAX = 100_000  # after aliases are followed, so that a small file cannot become a large one
DEPTH_MAX = 32
DIGITS_MAX = 4000  # of a whole number that Python reads
SIZES = f"{DEPTH_MAX} levels, {NODES_MAX} values"

Path = tuple[str | int, ...]

_STR_TAG = "tag:yaml.org,2002:str"
_PLAIN_TAGS = {_STR_TAG, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
)  # YAML 1.2: 1e-3 is a number
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}


@frozen
class Document:
    """The plain data of one file, and the line number of each path in it (0: from the command line)."""

    source: str
    data: JsonObject
    lines: Mapping[Path, int]


def read_document(text: str, source: str) -> Document:
    """Return the parsed YAML document (1.2 core schema, no tags). Raises SpecError on bad syntax or
    a repeated key.
    """
    if len(text) > TEXT_LENGTH_MAX:
        raise SpecError(
            "the file is too long", source=source, got=f"{len(text)} characters", allowed="256 KiB"
        )
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise _make_syntax_error(error, source) from None
    except yaml.YAMLError as error:
        raise SpecError(f"not readable as YAML: {error}", source=source) from None
    except RecursionError:
        raise SpecError("nested too deeply", source=source, allowed=f"{DEPTH_MAX} levels") from None
    if root is None:
        raise SpecError(
            "the file is empty", source=source, hint="`orc schema` prints what it may say"
        )
    lines: dict[Path, int] = {}
    data = _make_plain_data(root, (), source, lines)
    if not isinstance(data, dict):
        is_script = text.startswith("#!") or "\n#SBATCH" in text
        hint = (
            f"it is a script: `orc init {source} > job.yaml` writes a job file from it"
            if is_script
            else ""
        )
        raise SpecError(
            "the top level must be a mapping of `key: value`",
            source=source,
            got=text[:80],
            hint=hint,
        )
    return Document(source=source, data=data, lines=lines)


def read_value(text: str, source: str) -> Any:
    """Return plain data from the YAML text of one value, such as `{min: 1, max: 2}`. Raises
    SpecError.
    """
    return read_document(f"value: {text}", source).data["value"]


def _make_syntax_error(error: yaml.MarkedYAMLError, source: str) -> SpecError:
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
    problem = str(error.problem)
    hint = "indent with spaces, not with tabs" if "'\\t'" in problem else ""
    if "unknown escape character" in problem:
        hint = r"write regular expressions in single quotes: 'step (\d+)'"
    what = ", ".join(part for part in (error.context, error.problem) if part)
    return SpecError(f"not readable as YAML: {what}", source=where, hint=hint)


def _make_plain_data(node: yaml.Node, path: Path, source: str, lines: dict[Path, int]) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    where = f"{source}:{line}"
    if len(path) > DEPTH_MAX or len(lines) > NODES_MAX:
        raise SpecError(
            "too large or nested too deeply",
            source=where,
            path=format_key_path(path),
            allowed=SIZES,
        )
    if node.tag not in _PLAIN_TAGS:
        raise SpecError(
            "YAML tags are not read", source=where, path=format_key_path(path), got=node.tag
        )
    if isinstance(node, yaml.ScalarNode):
        return parse_plain_scalar(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [
            _make_plain_data(value, (*path, index), source, lines)
            for index, value in enumerate(node.value)
        ]
    data: JsonObject = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise SpecError(
                "a key must be a word", source=f"{source}:{line}", path=format_key_path(path)
            )
        key = key_node.value
        if key in data:
            raise SpecError(
                "the key stands here a second time",
                source=f"{source}:{line}",
                path=format_key_path((*path, key)),
                hint=f"keep one of lines {lines[(*path, key)]} and {line}",
            )
        lines[(*path, key)] = line
        data[key] = _make_plain_data(value, (*path, key), source, lines)
    return data


def parse_plain_scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar: None, a boolean, a number, or the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text) if len(text) < DIGITS_MAX else text
    return float(text) if _FLOAT.fullmatch(text) else text


def format_key_path(path: Path) -> str:
    """Return a key path as text, such as `nodes[0].device.memory`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(
        "."
    )
