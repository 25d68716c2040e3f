"""Keys of other tools' job files, each with our key for the same thing: `synonyms.yaml` has them by ours.

For any other unknown key, the error suggests our key that is closest in spelling, if any.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from orchestrator.specs.packaged import load_table


@lru_cache(maxsize=1)
def load_job_keys() -> Mapping[str, str]:
    """Return {key of another tool, in lower case with underscores: what to write instead}."""
    hints = dict[str, str]()
    for hint, keys in load_table(__package__, "synonyms").items():
        hints |= dict.fromkeys(keys, hint)
    return hints


def instead_of(key: str) -> str | None:
    """Return advice on what to write instead of another tool's key; None where the key is not in the table."""
    return load_job_keys().get(key.lower().replace("-", "_"))
