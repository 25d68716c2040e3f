"""The application that most tests of the service ask. All share what FastAPI derives from types: 0.4 s for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from fastapi._compat import v2
from pydantic import TypeAdapter

if TYPE_CHECKING:
    from tests.service.worlds import World

_adapters: dict[tuple[Any, ...], TypeAdapter[Any]] = {}


def _shared(annotation: Any, *, config: Any = None) -> TypeAdapter[Any]:
    """The adapter of an annotated type; types with the same bounds and defaults share one."""
    kind, *metadata = get_args(annotation)
    key = (kind, repr(metadata), repr(config))
    return _adapters.setdefault(key, _adapters.get(key) or TypeAdapter(annotation, config=config))


v2.TypeAdapter = _shared  # type: ignore[misc,assignment]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return an application over a simulated cluster without teams."""
    from tests.service.worlds import World  # after the line above: it imports the application

    world = World(tmp_path)
    yield world
    world.journal.close()
