"""Periodic calls in a thread that no exception ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from orchestrator.specs.errors import ServiceError


def poll_until(
    stop: threading.Event,
    call: Callable[[], None],
    every_s: float,
    log: logging.Logger,
    failure_message: str,
) -> None:
    """Call `call` every `every_s` seconds until `stop` is set; an exception is logged with the text
    `failure_message`.
    """
    while not stop.wait(every_s):
        try:
            call()
        except ServiceError as error:  # the controller meets the same, and decides what follows
            log.error("%s", error)
        except Exception:  # jobs go on
            log.exception(failure_message)
