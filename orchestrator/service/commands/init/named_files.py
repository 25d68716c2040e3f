"""Reads settings from files named in a command: YAML, JSON, TOML, Python constants, and Hydra's folder."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.specs.json_object import JsonObject

FILE_BYTES_MAX = 2**20
SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py")
REWRITABLE = (".yaml", ".yml", ".json")  # of which an attempt gets a copy: specs/job/trainer.py


def read_settings_file(path: Path) -> JsonObject | None:
    """Return {dotted key: scalar} of a settings file; None where it cannot be read, or holds no
    mapping.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX)
        text = raw.decode()
        match path.suffix:
            case ".json":
                content = json.loads(text)
            case ".toml":
                content = tomllib.loads(text)
            case ".py":
                content = dict(_iterate_constant_names_and_values(ast.parse(text)))
            case _:
                content = yaml.safe_load(text)
    except (OSError, ValueError, SyntaxError, RecursionError, yaml.YAMLError):
        return None
    return (
        dict(_iterate_dotted_keys_and_values(content, "")) if isinstance(content, Mapping) else None
    )


def read_hydra_settings(
    folder: Path, primary_name: str, file_by_group: Mapping[str, str]
) -> JsonObject:
    """Return {dotted key: scalar} of Hydra's primary file and of its groups' files.

    `file_by_group` is {group: file} of groups that the command selects.
    """
    primary = folder / f"{primary_name.removesuffix('.yaml')}.yaml"
    try:
        content = yaml.safe_load(primary.read_bytes()[:FILE_BYTES_MAX])
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(content, Mapping):
        return {}
    groups = dict[str, str]()
    defaults = content.get("defaults", [])
    for entry in defaults if isinstance(defaults, list) else []:
        if isinstance(entry, Mapping):
            groups |= {
                str(group).split()[-1].partition("@")[0]: str(file) for group, file in entry.items()
            }
    groups |= {group: file for group, file in file_by_group.items() if (folder / group).is_dir()}
    settings = JsonObject()
    for group, file in groups.items():
        path = folder / group / f"{file.removesuffix('.yaml')}.yaml"
        is_global = (
            path.is_file()
            and "@package _global_" in path.read_text(errors="replace")[:FILE_BYTES_MAX]
        )
        prefix = "" if is_global else group.replace("/", ".") + "."
        settings |= {
            f"{prefix}{key}": value for key, value in (read_settings_file(path) or {}).items()
        }
    return settings | dict(
        _iterate_dotted_keys_and_values(
            {key: value for key, value in content.items() if key != "defaults"}, ""
        )
    )


def _iterate_dotted_keys_and_values(
    content: Mapping[Any, Any], prefix: str
) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _iterate_dotted_keys_and_values(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value


def _iterate_constant_names_and_values(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, evaluate_number(node.value)


def evaluate_number(node: ast.expr | None) -> Any:
    """Return the value of a literal, or of a product of numbers such as `5 * 8`, in code; None for
    anything else.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left = evaluate_number(node.left)
        right = evaluate_number(node.right)
        return (
            left * right
            if isinstance(left, int | float) and isinstance(right, int | float)
            else None
        )
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError, SyntaxError):
        return None
