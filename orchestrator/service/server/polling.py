"""Periodic calls in a thread that no exception ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from orchestrator.specs.errors import ServiceError


def poll_until(
    stop: threading.Event,
    call: Callable[[], None],
    interval_s: float,
    logger: logging.Logger,
    failure_message: str,
) -> None:
    """Call `call` every `interval_s` seconds until `stop` is set; an exception is logged with the
    text `failure_message`.
    """
    while not stop.wait(interval_s):
        try:
            call()
        except ServiceError as error:  # the controller meets the same, and decides what follows
            logger.error("%s", error)
        except Exception:  # jobs go on
            logger.exception(failure_message)
