"""Laws of connections: a client that sends or reads too slowly loses its connection, and delays no other client."""

from __future__ import annotations

import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from orchestrator.service.server import connections
from orchestrator.service.server.connections import WINDOW_S, Awaited
from orchestrator.service.server.daemon import serve_http
from orchestrator.specs.run import get_uploads_folder
from tests.service.services import TOKEN
from tests.service.test_transfer import pack_folder
from tests.service.worlds import World

DESCRIPTORS, CROWD = 1024, 1100
# The bar is 1 s on a quiet machine, which the long tests hold; beside other tests an answer takes longer.
# Without a bound it takes 5 s, until the window of the headers ends.
ANSWER_S_MAX, BUSY_S_MAX = 1.0, 3.0
HALF_SENT = {
    "nothing": b"",
    "half a line": b"GET /jo",
    "half of the headers": b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX-A: ",
    "no body": b"POST /ui/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\ntoken=",
    "no body after its refusal": (
        b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n{"
    ),
    "half a TLS handshake": b"\x16\x03\x01\x02\x00\x01",
}


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The ports of a service that may open DESCRIPTORS files: on the loopback, and under TLS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    home = tmp_path_factory.mktemp("exposed")
    command = [sys.executable, "-m", "tests.service.exposed", str(home), str(DESCRIPTORS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first, second = process.stdout.readline().split()
        yield int(first), int(second)
        process.communicate("", timeout=30)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(sent)
    return connection


def ask(port: int, *, over_tls: bool) -> float:
    """Return the seconds until a request with a good token is answered."""
    begun_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        if over_tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = context.wrap_socket(connection)
        connection.sendall(
            b"GET /whoami HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        connection.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return time.monotonic() - begun_s


@pytest.mark.long
@pytest.mark.parametrize("over_tls", [False, True], ids=["loopback", "tls"])
@pytest.mark.parametrize("kind", HALF_SENT)
def test_a_crowd_of_half_sent_requests_takes_no_answer_away(
    ports: tuple[int, int], kind: str, over_tls: bool
) -> None:
    assert slowest_answer_s(ports, kind, over_tls=over_tls) < ANSWER_S_MAX


@pytest.mark.parametrize(
    ("kind", "over_tls"), [("half a line", False), ("half a TLS handshake", True)]
)
def test_a_crowd_beside_other_tests_takes_no_answer_away(
    ports: tuple[int, int], kind: str, over_tls: bool
) -> None:
    assert slowest_answer_s(ports, kind, over_tls=over_tls) < BUSY_S_MAX


def slowest_answer_s(ports: tuple[int, int], kind: str, *, over_tls: bool) -> float:
    """Return the seconds of the slowest answer to good tokens, amid a crowd and after it."""
    port, answers_s = ports[over_tls], list[float]()
    ask(port, over_tls=over_tls)
    with ExitStack() as stack:
        for number in range(CROWD):
            try:
                stack.enter_context(connect(port, HALF_SENT[kind]))
            except ConnectionError:  # it was the oldest already
                continue
            if number % 200 == 199:
                answers_s.append(ask(port, over_tls=over_tls))
        answers_s.append(ask(port, over_tls=over_tls))
        answers_s.append(ask(ports[not over_tls], over_tls=not over_tls))
    return max(answers_s)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "home").mkdir()
    world = World(tmp_path / "home")
    yield world
    world.journal.close()


def ends_within(connection: socket.socket, limit_s: float, drip: bytes = b"") -> bool:
    """Return whether the other side closes the connection, to which `drip` is sent without end."""
    connection.settimeout(0.05)
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        try:
            connection.sendall(drip)
            if not connection.recv(65536):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize("drip", [b"", b"a"], ids=["silent", "dripping"])
@pytest.mark.parametrize("kind", HALF_SENT)
def test_a_half_sent_request_ends_at_its_time(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, drip: bytes
) -> None:
    monkeypatch.setitem(WINDOW_S, Awaited.HEADERS, 0.3)
    monkeypatch.setitem(WINDOW_S, Awaited.BODY, 0.3)
    with serve_http(world.app) as port, connect(port, HALF_SENT[kind]) as connection:
        assert ends_within(connection, 3.0, drip)


def upload(digest: str, length: int) -> bytes:
    return (
        f"PUT /uploads/{digest} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {TOKEN}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_a_slow_upload_goes_on_while_it_makes_progress(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WINDOW_S, Awaited.BODY, 0.12)
    monkeypatch.setattr(connections, "BODY_WINDOW_BYTES", 1)
    (tmp_path / "sent").mkdir()
    digest, data = pack_folder(tmp_path / "sent")
    pieces = [data[start : start + 4] for start in range(0, len(data), 4)]
    with serve_http(world.app) as port, connect(port, upload(digest, len(data))) as connection:
        begun_s = time.monotonic()
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.05)  # what is tested: a slow client
        assert time.monotonic() - begun_s > 2 * WINDOW_S[Awaited.BODY]
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("open_uploads", [8, 60])
def test_slow_uploads_lock_no_other_out(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_uploads: int
) -> None:
    """The honest upload is answered long before the windows of the slow ones end."""
    monkeypatch.setitem(WINDOW_S, Awaited.BODY, 120.0)
    (tmp_path / "sent").mkdir()
    digest, data = pack_folder(tmp_path / "sent")
    with ExitStack() as stack:
        port = stack.enter_context(serve_http(world.app))
        for _ in range(open_uploads):
            stack.enter_context(connect(port, upload("0" * 64, 10**6) + b"a"))
        honest = stack.enter_context(connect(port, upload(digest, len(data)) + data))
        honest.settimeout(WINDOW_S[Awaited.BODY] / 4)
        assert honest.recv(4096).startswith(b"HTTP/1.1 200")


def wait_until_stored(home: Path, count: int) -> None:
    """Return once the upload that arrives has at least `count` bytes; fail after 30 s."""
    until_s = time.monotonic() + 30.0
    stored = 0
    while stored < count:
        assert time.monotonic() < until_s, f"{stored} of {count} bytes are stored"
        time.sleep(0.001)
        stored = sum(file.stat().st_size for file in get_uploads_folder(home).glob(".*.gz"))


def test_an_upload_that_goes_on_outlives_a_crowd(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload has no full request for longest, but its sender is admitted and sends."""
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 8)
    (tmp_path / "sent").mkdir()
    digest, data = pack_folder(tmp_path / "sent")
    with ExitStack() as stack:
        port = stack.enter_context(serve_http(world.app))
        honest = stack.enter_context(connect(port, upload(digest, len(data)) + data[:1]))
        for number in range(1, len(data) - 1):
            # A busy service may accept a crowd before it reads a byte of the upload.
            wait_until_stored(world.home, number)
            stack.enter_context(connect(port, b"GET / HT"))
            honest.sendall(data[number : number + 1])
        honest.sendall(data[-1:])
        assert honest.recv(4096).startswith(b"HTTP/1.1 200")


def test_whoever_does_not_read_an_answer_ends_at_its_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WINDOW_S, Awaited.ANSWER, 0.2)
    request = b"GET /ui/static/htmx.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serve_http(world.app) as port, connect(port) as connection:
        connection.settimeout(0.05)
        connection.sendall(request * 500)
        until_s, ended = time.monotonic() + 10.0, False
        while not ended and time.monotonic() < until_s:
            try:
                connection.sendall(b"G")
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
            time.sleep(0.05)
        assert ended
