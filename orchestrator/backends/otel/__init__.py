"""OpenTelemetry: the extra `otel`, imported where the environment names a receiver."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from orchestrator.specs.errors import SpecError

if TYPE_CHECKING:
    from orchestrator.backends.otel.spans import Spans

RECEIVERS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SECRETS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")  # keys of a receiver


def spans_of(environment: MutableMapping[str, str]) -> Spans | None:
    """Return the sender of spans by the usual variables; None if they name no receiver, or OTEL_SDK_DISABLED is true.

    Headers leave the environment, so that no job inherits a receiver's key. Raises SpecError without the extra.
    """
    if not any(environment.get(name) for name in RECEIVERS) or environment.get("OTEL_SDK_DISABLED", "") == "true":
        return None
    if find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise SpecError("the exporter is missing", path=RECEIVERS[-1], hint="pip install 'orchestrator[otel]'")
    from orchestrator.backends.otel.spans import Spans

    spans = Spans()
    for name in SECRETS:
        environment.pop(name, None)
    return spans
