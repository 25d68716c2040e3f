"""Templates of plain text, such as Markdown, which stand beside the modules that fill them."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from orchestrator.specs.units import format_bytes, format_seconds


def load_text_template(package: str, template: str, **filters: Callable[..., object]) -> Template:
    """Return the Jinja template `TEMPLATE.jinja` of a package. Nothing is escaped; an undefined
    variable raises an error.

    Its filters are `filters`, and two that format numbers: `bytes` and `seconds`. Both show None as
    `-`; `bytes` takes another text for that.
    """
    environment = Environment(
        loader=PackageLoader(package, ""),
        trim_blocks=True,
        autoescape=False,
        undefined=StrictUndefined,
    )
    environment.filters |= {"bytes": _format_bytes, "seconds": _format_seconds, **filters}
    return environment.get_template(f"{template}.jinja")


def _format_bytes(count: int | None, unknown: str = "-") -> str:
    return unknown if count is None else format_bytes(count)


def _format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
