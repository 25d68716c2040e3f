"""The type of notes: sentences for people to read."""

from __future__ import annotations

Notes = tuple[str, ...]
