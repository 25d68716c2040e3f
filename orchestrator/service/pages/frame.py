"""Shared parts of all pages: templates, number formats, security headers, and error pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from orchestrator.service.server.access.gate import PAGES, SIGN_IN, STATIC
from orchestrator.service.views.columns import select_columns
from orchestrator.service.views.expected import Range
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.units import format_bytes, format_probability, format_seconds, parse_bytes

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
TITLES = {
    401: "Sign in",
    403: "Not allowed",
    404: "Not found",
    409: "Refused",
    422: "Not understood",
}
NAVIGATION = (  # path, words, and the role that it needs
    ("overview", "Overview", Role.VIEWER),
    ("queue", "Queue", Role.VIEWER),
    ("cluster", "Cluster", Role.VIEWER),
    ("night", "Night", Role.VIEWER),
    ("compare", "Compare", Role.VIEWER),
    ("sweeps", "Sweeps", Role.VIEWER),
    ("teams", "Teams", Role.VIEWER),
    ("what-if", "What if", Role.MEMBER),
    ("submit", "Submit", Role.MEMBER),
    ("audit", "Audit", Role.ADMIN),
)
TONES = {  # word of a status or an outcome -> its colour; others have the colour of failures
    "succeeded": "good",
    "finished": "good",
    "running": "busy",
    "launching": "busy",
    "stopping": "wait",
    "queued": "wait",
    "pending": "wait",
    "cancelled": "calm",
    "moved": "calm",
    "probed": "calm",
    "preempted": "calm",
}


def render_page(request: Request, template: str, *, status: int = 200, **data: Any) -> Response:
    """Return the rendered template as a response; for a request by htmx, only the template's live
    part.
    """
    principal: Principal | None = request.state.principal
    text = _ENVIRONMENT.get_template(f"{template}.html").render(
        path=request.url.path,
        address=str(request.url.path) + (f"?{request.url.query}" if request.url.query else ""),
        principal=principal,
        navigation=[
            (f"{PAGES}/{name}", title)
            for name, title, role in NAVIGATION
            if principal is not None and principal.role.includes(role)
        ],
        is_partial="hx-request" in request.headers,
        zone=time.strftime("%Z"),
        **data,
    )
    return HTMLResponse(text, status, headers={"Cache-Control": "no-store"})


def render_refusal(request: Request, status: int, message: str) -> Response:
    """Return an error page for a refused request; where nobody is signed in, it links to
    sign-in.
    """
    if status == 401:
        return _redirect_to_sign_in(request)
    return render_page(
        request,
        "error",
        status=status,
        title=TITLES.get(status, "Error"),
        message=message,
        code=status,
    )


def _redirect_to_sign_in(request: Request) -> Response:
    """Return a redirect to the sign-in form, which leads back afterwards; htmx is told to load it
    as a page.
    """
    came_from = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    address = f"{SIGN_IN}?next={quote(came_from, safe='')}" if request.method == "GET" else SIGN_IN
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"HX-Redirect": SIGN_IN})
    return RedirectResponse(address, 303)


# --------------------------------------------------------------------------------------------------- words and numbers


def format_time(at_s: float | None) -> Markup:
    """Return a time (seconds since 1970) in the service's zone as HTML, to the minute, with the day
    if it is not today.
    """
    if at_s is None:
        return Markup("–")
    there = time.localtime(at_s)
    now = time.localtime()
    text = time.strftime("%H:%M" if there[:3] == now[:3] else "%a %d %b %H:%M", there)
    return Markup('<time datetime="{}">{}</time>').format(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s)), text
    )


def format_time_range(range_s: Range | None) -> str:
    """Return an 80 % time range as text: `22:10–23:40`; "" for None or a range below a minute."""
    if range_s is None or range_s[1] - range_s[0] < 60:
        return ""
    return "–".join(time.strftime("%H:%M", time.localtime(at_s)) for at_s in range_s)


def format_duration(seconds: float | None) -> str:
    """Return a duration in seconds as text; a dash for None."""
    return "–" if seconds is None else format_seconds(max(0.0, seconds))


def format_size(size_bytes: float | None) -> str:
    """Return a number of bytes as text; a dash for None."""
    return "–" if size_bytes is None else format_bytes(size_bytes)


def check_web_address(address: str | None) -> str | None:
    """Return the address if it is an http(s) URL, else None. Operators name the tracker's address,
    and pages link to it.
    """
    return address if (address or "").startswith(("http://", "https://")) else None


def mark_commands(text: str) -> Markup:
    """Return the text as HTML, with the parts in backticks marked as code."""
    parts = text.split("`")
    marked = (
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )
    return Markup("").join(marked) if len(parts) % 2 else escape(text)


def get_colour_class(word: str) -> str:
    """Return the CSS class for the colour of a status or an outcome."""
    return TONES.get(word, "bad")


def _make_environment() -> Environment:
    made = Environment(
        loader=PackageLoader("orchestrator.service.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Mapping[str, Any] = {
        "clock": format_time,
        "band": format_time_range,
        "duration": format_duration,
        "size": format_size,
        "memory": lambda text: format_bytes(parse_bytes(text)),
        "tone": get_colour_class,
        "commands": mark_commands,
        "share": lambda share: "–" if share is None else format_probability(share),
        "segment": lambda text: quote(str(text), safe=""),
        "words": lambda text: str(text).replace("_", " "),
    }
    made.filters.update(filters)
    made.globals.update(PAGES=PAGES, STATIC=STATIC, SIGN_IN=SIGN_IN, select_columns=select_columns)
    return made


_ENVIRONMENT = _make_environment()


def load_macros(template: str, **template_globals: object) -> Any:
    """Return an object whose methods are the template's macros and return Markup; the template may
    read `template_globals`.
    """
    return _ENVIRONMENT.get_template(f"{template}.html").make_module(template_globals)


def compile_templates() -> None:
    """Compile all templates in advance: that took 36 of the 49 ms of the queue page's first request
    (2026-11).
    """
    for name in _ENVIRONMENT.list_templates(extensions=["html"]):
        _ENVIRONMENT.get_template(name)
