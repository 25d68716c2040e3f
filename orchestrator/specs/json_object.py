"""The type of an object in JSON, as the API, files of a home folder and `--json` have it."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
