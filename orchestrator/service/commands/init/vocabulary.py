"""What other programs call their settings, options and packages: the words of `vocabulary.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.specs.packaged import load_table

VOCABULARY: Final[Mapping[str, Any]] = load_table(__package__, "vocabulary")
