"""Builds a script's working directory, and the copy of its config file with the plan's values."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.backends.attempts.durable import write_durably
from orchestrator.specs.errors import OrchestratorError
from orchestrator.specs.job.paths import change_paths
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.run import JobFolder, find_upload

NO_SECTION = "knob key {key!r}: there is nothing to set inside a value of the config file"


def rewrite_config(config_text: str, value_by_key: Mapping[str, str], *, is_json: bool) -> str:
    """Return a config file's text with new values at dotted keys (`optim.lr`); all other values
    stay.

    YAML is changed in its own syntax tree: a number keeps its digits and an interpolation its
    braces; only comments are lost. JSON is parsed as JSON, since YAML 1.1 reads its 1e-3 as text.
    Raises OrchestratorError where a key leads through a value, or where a file does not have the
    format of its name.
    """
    if is_json:
        return json.dumps(_replace_json_values(config_text, value_by_key), indent=2)
    root = yaml.compose(config_text, Loader=yaml.SafeLoader)
    if root is None:
        root = yaml.MappingNode("tag:yaml.org,2002:map", [])
    for key, word in value_by_key.items():
        *sections, last = key.split(".")
        place = root
        for section in sections:
            place = _find_entry(place, section, key) or _set_entry(
                place, section, yaml.MappingNode("tag:yaml.org,2002:map", [])
            )
        value = yaml.compose(word, Loader=yaml.SafeLoader) or yaml.ScalarNode(
            "tag:yaml.org,2002:str", word, style="'"
        )
        if not isinstance(value, yaml.ScalarNode):  # a path may look like a list
            value = yaml.ScalarNode("tag:yaml.org,2002:str", word, style="'")
        _find_entry(place, last, key)
        _set_entry(place, last, value)
    return str(yaml.serialize(root, Dumper=yaml.SafeDumper))


def _replace_json_values(config_text: str, value_by_key: Mapping[str, str]) -> Any:
    try:
        root = json.loads(config_text)
    except ValueError as error:
        raise OrchestratorError(f"the config file is no JSON: {error}") from None
    for key, word in value_by_key.items():
        *sections, last = key.split(".")
        place = root
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise OrchestratorError(NO_SECTION.format(key=key))
        value = yaml.safe_load(word)
        place[last] = word if isinstance(value, dict | list) or value is None else value
    return root


def _find_entry(mapping: yaml.Node, name: str, dotted_key: str) -> yaml.Node | None:
    if not isinstance(mapping, yaml.MappingNode):
        raise OrchestratorError(NO_SECTION.format(key=dotted_key))
    return next((value for word, value in mapping.value if word.value == name), None)


def _set_entry(mapping: yaml.Node, name: str, value: yaml.Node) -> yaml.Node:
    assert isinstance(mapping, yaml.MappingNode), "_at has looked"
    others = [(word, value_node) for word, value_node in mapping.value if word.value != name]
    mapping.value = [*others, (yaml.ScalarNode("tag:yaml.org,2002:str", name), value)]
    return value


def link_all_except(source: Path, excluded_file: str, target: Path) -> Path:
    """Fill `target` with links to everything in `source` except `excluded_file`; return the path where that
    file's copy belongs.

    Folders on the way to the file are real ones. The function is idempotent.
    """
    *folders, name = Path(excluded_file).parts
    for folder in (*folders, name):
        target.mkdir(parents=True, exist_ok=True)
        for entry in source.iterdir():
            link = target / entry.name
            if entry.name != folder and not link.is_symlink():
                link.symlink_to(entry)
        source = source / folder
        target = target / folder
    return target


def relocate_uploads(job: Job, home: Path) -> Job:
    """Return the job with paths that point to its own copy of an uploaded working directory, and to
    other uploads in this home.
    """

    def locate(key: str, path: str) -> str:
        upload = find_upload(home, path)
        if upload is None:
            return path
        root = JobFolder(home, job.id).workdir if key == "workdir" else upload[0]
        return str(root / upload[1])

    return replace(job, spec=change_paths(job.spec, locate))


def copy_upload(job: Job, home: Path) -> None:
    """Copy the job's uploaded working directory into the job's folder; an existing copy stays.
    Raises OSError.
    """
    upload = find_upload(home, job.spec.workdir or "")
    folder = JobFolder(home, job.id)
    target = folder.workdir
    if upload is None or target.exists():
        return
    paths = [str(path.relative_to(upload[0])) for path in upload[0].rglob("*") if not path.is_dir()]
    write_durably(folder.uploaded, json.dumps(paths))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(upload[0], temporary, symlinks=True)
    temporary.rename(target)
