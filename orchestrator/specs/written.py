"""Formats plain data as YAML that `specs.parse.read_document` reads back unchanged."""

from __future__ import annotations

from typing import Any

import yaml

from orchestrator.specs.yaml_text import parse_plain_scalar

WIDTH = 10**6  # no line is folded


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every string which our YAML 1.2 reader would take for a number, as
    `1e-3`.
    """


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if parse_plain_scalar(text) == text else "'"
    if not text.replace("\n", "").isprintable():
        style = '"'  # escapes; the emitter writes U+0085 as a line's end otherwise
    elif "\n" in text:
        style = "|"  # the emitter takes another one where this cannot say it
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)


def as_yaml(data: Any) -> str:
    """Return plain data as YAML text, with one key per line in the given order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)


def as_yaml_line(data: Any) -> str:
    """Return plain data as YAML in one line, such as `{min: 1, max: 2}`."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=WIDTH, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")
