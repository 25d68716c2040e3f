"""The type of what a page's template shows, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TemplateData = Mapping[str, Any]
