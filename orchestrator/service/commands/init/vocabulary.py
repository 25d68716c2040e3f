"""What other programs call their settings, options and packages: the words of `vocabulary.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from orchestrator.specs.yaml_text import read_document

_PATH = files(__package__) / "vocabulary.yaml"
VOCABULARY: Final[Mapping[str, Any]] = read_document(_PATH.read_text(), str(_PATH)).data
