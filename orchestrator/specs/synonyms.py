"""Keys in other tools' job files, each with the equivalent key of ours, from `synonyms.yaml`.

For any other unknown key, the error suggests our key that is closest in spelling, if any.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from orchestrator.specs.packaged import load_table


@lru_cache(maxsize=1)
def load_job_keys() -> Mapping[str, str]:
    """Return {key of another tool, in lower case with underscores: our job key to write instead}."""
    hints = dict[str, str]()
    for hint, keys in load_table(__package__, "synonyms").items():
        hints |= dict.fromkeys(keys, hint)
    return hints


def advise_key(key: str) -> str | None:
    """Return advice on which of our keys to write for another tool's key; None where the table
    lacks that key.
    """
    return load_job_keys().get(key.lower().replace("-", "_"))
