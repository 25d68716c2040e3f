"""The service's log, as text or as JSON. Untrusted text in a record cannot forge another record."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType

from orchestrator.backends.threads import FAULTS
from orchestrator.specs.errors import SpecError

VARIABLE = "ORC_LOG_FORMAT"
FIELDS = ("job", "attempt", "request")  # of a record, where known
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONTINUED = "  | "  # begins every further line of a record
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]"
)  # all but the tab and the end of a line

REQUEST: ContextVar[str | None] = ContextVar(
    "REQUEST", default=None
)  # id of the HTTP request that is answered

log = logging.getLogger(__name__)


class LogFormat(StrEnum):
    """Format of the service's log."""

    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """Text log format: a record begins with its time, further lines with CONTINUED; control characters are escaped."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record, of one line or more."""
        text = CONTROL.sub(
            lambda match: match[0].encode("unicode_escape").decode(), super().format(record)
        )
        return text.replace("\n", f"\n{CONTINUED}")


class JsonFormatter(logging.Formatter):
    """Log format in JSON: one ASCII object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time (RFC 3339, UTC), level, logger, message, the known FIELDS, and an exception's traceback."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        line |= {"logger": record.name, "message": record.getMessage()}
        line |= {
            name: value for name in FIELDS if (value := getattr(record, name, None)) is not None
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def about(job: str | None = None, attempt: int | None = None) -> dict[str, object]:
    """Return log fields about a job for records outside a request, since one commit may serve several."""
    return {"job": job, "attempt": attempt, "request": None}


def configure(name: str) -> None:
    """Log to stderr in this format, warnings and uncaught exceptions too. Raises SpecError for an unknown format."""
    if name not in list(LogFormat):
        raise SpecError(
            "no format of a log", source=VARIABLE, got=name, allowed=", ".join(LogFormat)
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if name == LogFormat.JSON else TextFormatter())
    handler.addFilter(_with_request)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _note_thread


def _with_request(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request"):
        record.request = REQUEST.get()
    return True


def _note_thread(ended: threading.ExceptHookArgs) -> None:
    """Log an exception that ended a thread, and name the thread to people."""
    if ended.exc_value is not None and not issubclass(ended.exc_type, SystemExit):
        FAULTS.record_fault(ended.thread.name if ended.thread else "unknown", ended.exc_value)
    _uncaught(ended.exc_type, ended.exc_value, ended.exc_traceback)


def _uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is not None and not issubclass(kind, SystemExit):
        log.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))
