"""Bounds on connections: how many are open, and how long a client may keep a request or an answer back."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Awaited(Enum):
    """What a connection waits for: a request's headers, the rest of its body, or the service's
    answer.
    """

    HEADERS = "the headers of a request"  # also where the last one is answered, or was none
    BODY = "the rest of its body"
    ANSWER = "the answer of the service"


# seconds, after each of which the client must have done its part
WINDOW_S = {Awaited.HEADERS: 5.0, Awaited.BODY: 10.0, Awaited.ANSWER: 60.0}
# that come of a body in a window; the rate is that of Apache's mod_reqtimeout 2.4
BODY_WINDOW_BYTES = 5000
# of a body; and of the end of an answer, while the next headers are awaited
WINDOWS_MAX = {Awaited.BODY: 100, Awaited.HEADERS: 12}
CONNECTIONS_MAX = 4096  # of one address
QUEUE = 2048  # connections that wait in the kernel

log = logging.getLogger(__name__)


def raise_limit_of_open_files() -> None:
    """Raise this process's limit of open files to the hard limit; where that is refused, the limit
    stays as it is.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Listener(socket.socket):
    """A listening socket with a bound on its open connections.

    At the bound, the connection that has waited longest without a full request is closed.
    Connections with a full request are not closed, and may exceed the bound. Only the thread of the
    event loop may use the socket once it listens.
    """

    def __init__(self, family: int) -> None:
        # asyncio sets TCP_NODELAY where the protocol is named: without it each answer waits 40 ms for
        # the client's ACK
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # a quarter of the open files, since a service has two listeners
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections_max = min(CONNECTIONS_MAX, soft // 4)
        # before the event loop reads what came: whoever sent a full request is not ended for it
        self.accepted_at_once = self._connections_max // 8
        self._open: dict[int, socket.socket] = {}
        # by descriptor, oldest first: how to end a connection without a full request
        self._waiting: dict[int, Callable[[], None]] = {}
        self._is_logged = False

    def listen(self, _backlog: int = QUEUE) -> None:
        """Listen with a queue of QUEUE connections; the given length is ignored, since asyncio
        passes a short one.
        """
        super().listen(QUEUE)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return (connection, its address). Raises BlockingIOError where asyncio must call it
        again.
        """
        if len(self._open) >= self._connections_max:
            self._close_oldest()
        connection, address = super().accept()
        number = connection.fileno()
        silent = partial(_shut_down, connection)
        self._open[number] = connection
        self.mark_waiting(number, silent)
        # TLS says nothing of a handshake that never ends
        loop = asyncio.get_running_loop()
        loop.call_later(WINDOW_S[Awaited.HEADERS], self._close_if_waiting, number, silent)
        return connection, address

    def mark_waiting(self, descriptor: int, close_connection: Callable[[], None]) -> None:
        """Record that a connection waits for a full request from now on; calling `close_connection` closes the
        connection.
        """
        self.mark_served(descriptor)
        self._waiting[descriptor] = close_connection

    def mark_served(self, descriptor: int) -> None:
        """Record that a connection has sent its whole request, or is closed. A crowd of new
        connections no longer closes it.
        """
        self._waiting.pop(descriptor, None)

    def _close_oldest(self) -> None:
        self._open = {
            number: connection
            for number, connection in self._open.items()
            if connection.fileno() == number
        }
        if len(self._open) < self._connections_max or not self._waiting:
            return
        if not self._is_logged:
            log.warning(
                "%d connections are open: the oldest without a full request end", len(self._open)
            )
            self._is_logged = True
        self._waiting.pop(next(iter(self._waiting)))()
        raise BlockingIOError

    def _close_if_waiting(self, descriptor: int, close_connection: Callable[[], None]) -> None:
        if self._waiting.get(descriptor) is close_connection:
            close_connection()


class BoundedConnection(H11Protocol):
    """An HTTP connection that is closed if its client sends a request, or reads an answer, too
    slowly.
    """

    def __init__(self, listener: Listener, **parts: Any) -> None:
        super().__init__(**parts)
        self._listener = listener
        self._number = -1
        self._awaited = Awaited.ANSWER
        self._windows = self._progress_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request; asyncio calls this."""
        super().connection_made(transport)
        self._number = transport.get_extra_info("socket").fileno()
        self._update_awaited()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the listener's count; asyncio calls this."""
        super().connection_lost(exc)
        self._listener.mark_served(self._number)
        self._end_progress_window()

    def data_received(self, data: bytes) -> None:
        """Process bytes of a request, and count them as progress; asyncio calls this."""
        if self._awaited is Awaited.BODY:
            # whoever is admitted and goes on sending is not the oldest
            self._progress_bytes += len(data)
            self._listener.mark_waiting(self._number, self.transport.abort)
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._begin_progress_window()
        super().data_received(data)

    def handle_events(self) -> None:
        """Process the received HTTP events, and update what the connection waits for."""
        super().handle_events()
        self._update_awaited()

    def on_response_complete(self) -> None:
        """Update what the connection waits for: the next request."""
        super().on_response_complete()
        self._update_awaited()

    def resume_writing(self) -> None:
        """Count as progress that the client has read most of what was written; asyncio calls
        this.
        """
        super().resume_writing()
        self._progress_bytes += 1

    def _update_awaited(self) -> None:
        """Begin to wait anew if the connection now waits for something else than before."""
        awaited = Awaited.HEADERS
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            is_sending = self.conn.their_state is h11.SEND_BODY
            awaited = Awaited.BODY if is_sending else Awaited.ANSWER
        if awaited is self._awaited:
            return
        self._awaited = awaited
        self._windows = 0
        self._listener.mark_waiting(self._number, self.transport.abort)
        if awaited is Awaited.ANSWER:
            self._listener.mark_served(self._number)
        self._begin_progress_window()

    def _begin_progress_window(self) -> None:
        self._end_progress_window()
        self._progress_bytes = 0
        self._timer = self.loop.call_later(WINDOW_S[self._awaited], self._check_progress)

    def _end_progress_window(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_progress(self) -> None:
        """Close the connection if its client is too slow; else begin the next time window."""
        self._windows += 1
        if self._awaited is Awaited.BODY:
            is_late = self._progress_bytes < BODY_WINDOW_BYTES and not (
                self.flow.read_paused or self.cycle.waiting_for_100_continue
            )
        elif self._awaited is Awaited.ANSWER:
            is_late = self.flow.write_paused and not self._progress_bytes
        else:
            is_late = not self.transport.get_write_buffer_size()
        if is_late or self._windows == WINDOWS_MAX.get(self._awaited):
            self.transport.abort()
        else:
            self._begin_progress_window()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the client was faster
        connection.shutdown(socket.SHUT_RDWR)
