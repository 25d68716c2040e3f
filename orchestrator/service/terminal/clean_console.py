"""A console of rich that draws others' text without its control sequences. Loaded only where something is drawn."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

from orchestrator.service.visible import escape_controls


class CleanConsole(Console):
    """A Rich console whose only colours and cursor movements are its own: those in texts and links
    are removed.
    """

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else _clean_segment(segment) for segment in buffer
        )


def _clean_segment(segment: Segment) -> Segment:
    style = segment.style
    return Segment(
        escape_controls(segment.text), style.update_link(None) if style and style.link else style
    )
