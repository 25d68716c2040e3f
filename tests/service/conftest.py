"""Applications of the tests' services share what FastAPI derives from types, which takes 0.4 s for each."""

from __future__ import annotations

from typing import Any, get_args

from fastapi._compat import v2
from pydantic import TypeAdapter

_adapters: dict[tuple[Any, ...], TypeAdapter[Any]] = {}


def _shared(annotation: Any, *, config: Any = None) -> TypeAdapter[Any]:
    """The adapter of an annotated type; types with the same bounds and defaults share one."""
    kind, *metadata = get_args(annotation)
    key = (kind, repr(metadata), repr(config))
    return _adapters.setdefault(key, _adapters.get(key) or TypeAdapter(annotation, config=config))


v2.TypeAdapter = _shared  # type: ignore[misc,assignment]
