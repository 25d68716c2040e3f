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
    """Text format of the log: a record begins with its time, and its further lines begin with
    CONTINUED.

    Control characters are escaped.
    """

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text of one line or more."""
        text = CONTROL.sub(
            lambda match: match[0].encode("unicode_escape").decode(), super().format(record)
        )
        return text.replace("\n", f"\n{CONTINUED}")


class JsonFormatter(logging.Formatter):
    """Log format in JSON: one ASCII object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the log record as a JSON line: time (RFC 3339, UTC), level, logger, message, and
        traceback if there is one.

        It also has those of FIELDS that the record has.
        """
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


def make_job_log_fields(job_id: str | None, attempt_number: int | None) -> dict[str, object]:
    """Return the fields of a log record that name a job and its attempt.

    They name no request, since one commit to the journal may hold the changes of several.
    """
    return {"job": job_id, "attempt": attempt_number, "request": None}


def configure_logging(format_name: str) -> None:
    """Log to stderr in this format (text or json), including warnings and uncaught exceptions.

    Raises SpecError for an unknown format.
    """
    if format_name not in list(LogFormat):
        raise SpecError(
            "no format of a log", source=VARIABLE, got=format_name, allowed=", ".join(LogFormat)
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format_name == LogFormat.JSON else TextFormatter())
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_thread_fault


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request"):
        record.request = REQUEST.get()
    return True


def _log_thread_fault(thread_exception: threading.ExceptHookArgs) -> None:
    """Log the exception that ended a thread, and record it as a problem of the service."""
    if thread_exception.exc_value is not None and not issubclass(
        thread_exception.exc_type, SystemExit
    ):
        FAULTS.record_fault(
            thread_exception.thread.name if thread_exception.thread else "unknown",
            thread_exception.exc_value,
        )
    _log_uncaught(
        thread_exception.exc_type, thread_exception.exc_value, thread_exception.exc_traceback
    )


def _log_uncaught(
    error_type: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is not None and not issubclass(error_type, SystemExit):
        log.critical("uncaught %s", error_type.__name__, exc_info=(error_type, error, trace))
