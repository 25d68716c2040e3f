"""Laws of notifications: each comes at least once, signed, with one id, and to no address that is not public."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from orchestrator.backends import outbox_relay
from orchestrator.backends.journal import outbox
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.notify import addresses, targets, webhook
from orchestrator.backends.notify.addresses import is_public_address
from orchestrator.backends.notify.notice import Notice, derive_notices, make_notice
from orchestrator.backends.notify.targets import Target, make_targets
from orchestrator.backends.outbox_relay import OutboxRelay
from orchestrator.specs.actions import Record
from orchestrator.specs.attempt import AttemptStatus, Evidence, Failure, FailureKind
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Event, Finished, TimerFired
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.notify import NotifySpec
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.replace import replace
from tests.backends.relays import wait_delivered
from tests.backends.test_mlflow_tracker import attempt, end_attempt

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PRIVATE_PATH = "/services/T000/very-private"
SPEC = JobSpec(name="lm", global_batch_size=8, command="python train.py")
PATIENCE_S = 30


class Hook:
    """A real receiver on the loopback, on a port that it keeps while it is down."""

    def __init__(
        self, port: int = 0, status: int = 204, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.paths: list[str] = []
        self.status = status
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                hook.got.append(
                    ({name.lower(): value for name, value in self.headers.items()}, body)
                )
                hook.paths.append(self.path)
                self.send_response(hook.status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = int(self.server.server_address[1])
        self._thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}{PRIVATE_PATH}"

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.got]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    opened = Hook()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_relay, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(outbox_relay, "RETRY_MAX_S", 0.05)


def spec_of(*names: str, allow: Sequence[str] = ("localhost",), **settings: Any) -> NotifySpec:
    hooks = [
        {"name": name, "webhook": f"URL_{name.upper()}", "signed_with": "SECRET", **settings}
        for name in names
    ]
    return NotifySpec.model_validate({"targets": hooks, "allow_hosts": allow})


def hooks_of(
    urls: dict[str, str], allow: Sequence[str] = ("localhost",), **settings: Any
) -> dict[str, Target]:
    environment = {f"URL_{name.upper()}": url for name, url in urls.items()} | {"SECRET": SECRET}
    return make_targets(spec_of(*urls, allow=allow, **settings), "c", environment)


def trial(key: str = "a", at_s: float | None = None) -> Notice:
    return make_notice(
        "failed", key, time.time() if at_s is None else at_s, "a title", "a text", {"job": "lm-1"}
    )


def refusal(url: str, allow: Sequence[str] = ()) -> str:
    with pytest.raises(ConnectionError) as refused:
        hooks_of({"a": url}, allow=allow)["a"].deliver([trial()])
    assert "very-private" not in str(refused.value)
    return str(refused.value)


# ----------------------------------------------------------------------------------------------------- what is told


def lost_node(budget_is_left: bool) -> tuple[Event, list[Record]]:
    failure = Failure(kind=FailureKind.NODE_LOST, reason="its node is gone")
    over = replace(
        attempt("lm-1", 1),
        status=AttemptStatus.ENDED,
        ended_at_s=9.0,
        evidence=Evidence(),
        failure=failure,
    )
    status = JobStatus.QUEUED if budget_is_left else JobStatus.FAILED
    job = Job(
        id="lm-1",
        spec=SPEC,
        order=1,
        submitted_at_s=0,
        attempts=(over,),
        status=status,
        reason="node_lost",
    )
    event = Finished(job_id="lm-1", number=1, evidence=Evidence(), at_s=9.0)
    return event, [Record(job=job, attempt=over)]


@pytest.mark.parametrize(
    ("is_left", "kinds"), [(True, ["node_lost"]), (False, ["node_lost", "failed"])]
)
def test_a_lost_node_and_a_final_failure_are_told_and_the_same_decision_gives_the_same_ids(
    is_left: bool, kinds: list[str]
) -> None:
    decided = [lost_node(is_left)]
    first, again = [*derive_notices(decided)], [*derive_notices(decided)]
    assert [notice.kind for notice in first] == kinds
    assert [notice.id for notice in first] == [notice.id for notice in again]
    assert len({notice.id for notice in first}) == len(kinds)


def test_a_success_and_a_restart_are_not_told() -> None:
    done = Job(
        id="a", spec=SPEC, order=1, submitted_at_s=0, attempts=(end_attempt(attempt("a", 1)),)
    )
    event = Finished(job_id="a", number=1, evidence=Evidence(), at_s=9.0)
    assert [*derive_notices([(event, [Record(job=done, attempt=done.last)])])] == []


def test_a_notice_shows_no_value_of_the_jobs_secrets_and_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKEN", "hush-hush")
    spec = SPEC.model_copy(update={"secrets": ("TOKEN",), "env": (("URL", "my-variable"),)})
    failed = Job(
        id="a",
        spec=spec,
        order=1,
        submitted_at_s=0,
        status=JobStatus.FAILED,
        reason="hush-hush my-variable",
    )
    (notice,) = derive_notices([(TimerFired(at_s=1.0), [Record(job=failed)])])
    assert "hush-hush" not in repr(notice)
    assert "my-variable" not in repr(notice)
    assert "[TOKEN] [URL]" in notice.text


# ------------------------------------------------------------------------------------------------------ the journal


@contextmanager
def open_journal(path: Path, *names: str) -> Iterator[Journal]:
    with closing(Journal(f"sqlite:///{path}/journal.db")) as journal:
        journal.outbox.register_receivers(["mlflow"])
        journal.notices.register_receivers(names)
        yield journal


def fail(journal: Journal, *job_ids: str) -> None:
    jobs = [
        Job(
            id=job_id,
            spec=SPEC,
            order=1,
            submitted_at_s=0,
            status=JobStatus.FAILED,
            reason="user_error",
        )
        for job_id in job_ids
    ]
    journal.append([(TimerFired(at_s=time.time()), [Record(job=job) for job in jobs])])


@contextmanager
def relay_notices(
    journal: Journal, targets: dict[str, Target]
) -> Iterator[list[OutboxRelay[Notice]]]:
    relays = [OutboxRelay(name, target, journal.notices) for name, target in targets.items()]
    for relay in relays:
        relay.start()
    try:
        yield relays
    finally:
        for relay in relays:
            relay.stop()


def test_the_same_thing_is_told_once_also_after_it_was_delivered_and_after_a_restart(
    tmp_path: Path,
) -> None:
    with open_journal(tmp_path, "a") as journal:
        fail(journal, "lm-1")
        ((row, _),) = journal.notices.list_pending("a", 9)
        journal.notices.mark_delivered("a", [row])
        fail(journal, "lm-1")
        assert journal.notices.list_pending("a", 9) == []
    with open_journal(tmp_path, "a") as journal:
        fail(journal, "lm-1", "lm-2")
        assert [notice.data["job"] for _, notice in journal.notices.list_pending("a", 9)] == [
            "lm-2"
        ]


def test_nothing_is_kept_without_a_target_and_only_so_much_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "NOTICES_MAX", 3)
    with open_journal(tmp_path) as journal:
        fail(journal, "a")
        journal.notices.register_receivers(["hook"])
        fail(journal, "b", "c", "d")
        fail(journal, "e")
        assert [notice.data["job"] for _, notice in journal.notices.list_pending("hook", 9)] == [
            "c",
            "d",
            "e",
        ]
        journal.notices.register_receivers([])
        journal.notices.register_receivers(["hook"])
        assert journal.notices.list_pending("hook", 9) == []


def test_a_hook_that_was_down_gets_everything_also_after_a_restart_of_the_service_in_between(
    tmp_path: Path,
) -> None:
    hook = Hook()
    hook.close()  # its port refuses from now on
    with open_journal(tmp_path, "a") as journal:
        with relay_notices(journal, hooks_of({"a": hook.url})) as (relay,):
            fail(journal, "lm-1", "lm-2")
            until(lambda: relay.problem is not None)
            assert "very-private" not in str(relay.problem)
        assert len(journal.notices.list_pending("a", 9)) == 2
    with (
        open_journal(tmp_path, "a") as journal,
        relay_notices(journal, hooks_of({"a": hook.url})) as (relay,),
    ):
        fail(journal, "lm-3")
        until(lambda: relay.problem is not None)
        back = Hook(port=hook.port)
        try:
            assert wait_delivered(relay, PATIENCE_S)
        finally:
            back.close()
    job_ids = [json.loads(body)["data"]["job"] for _, body in back.got]
    assert job_ids == ["lm-1", "lm-2", "lm-3"]
    assert len(set(back.ids)) == 3


def test_a_notice_that_is_sent_again_has_the_same_id_and_body(tmp_path: Path, hook: Hook) -> None:
    hook.status = 503  # it has the notice, and its answer says that it has not
    with open_journal(tmp_path, "a") as journal:
        fail(journal, "lm-1")
        with relay_notices(journal, hooks_of({"a": hook.url})) as (relay,):
            until(lambda: len(hook.got) >= 2)
            hook.status = 200
            assert wait_delivered(relay, PATIENCE_S)
    assert len(set(hook.ids)) == 1
    assert len({body for _, body in hook.got}) == 1


@pytest.mark.parametrize(
    "url", ["http://localhost:1/", "no url at all", "", "http://10.255.255.1/"]
)
def test_a_broken_target_stops_no_other(tmp_path: Path, hook: Hook, url: str) -> None:
    targets = hooks_of({"good": hook.url, "bad": url})
    with (
        open_journal(tmp_path, *targets) as journal,
        relay_notices(journal, targets) as (good, bad),
    ):
        fail(journal, "lm-1", "lm-2")
        assert wait_delivered(good, PATIENCE_S)
        until(lambda: bad.problem is not None)
        assert len(journal.notices.list_pending("bad", 9)) == 2
    assert len(hook.got) == 2


def test_a_target_without_its_variable_is_a_problem_before_any_notice() -> None:
    for environment, missing in (
        ({}, "URL_A"),
        ({"URL_A": "https://h/"}, "SECRET"),
        ({"SECRET": "s"}, "URL_A"),
    ):
        problem = make_targets(spec_of("a"), "c", dict(environment))["a"].problem
        assert (
            problem
            == f"no notice reaches a: the service was started without the variable {missing}"
        )
    assert (
        make_targets(spec_of("a"), "c", {"URL_A": "https://h/", "SECRET": "s"})["a"].problem is None
    )


def test_a_notice_that_a_target_could_not_be_given_for_days_is_dropped(hook: Hook) -> None:
    target = hooks_of({"a": hook.url})["a"]
    target.send([(1, trial("old", time.time() - targets.EXPIRES_S - 60)), (2, trial("new"))])
    assert hook.ids == [trial("new").id]


def test_a_target_gets_only_the_kinds_that_it_names(hook: Hook) -> None:
    hooks_of({"a": hook.url}, kinds=["late"])["a"].send([(1, trial())])
    assert hook.got == []


# ------------------------------------------------------------------------------------------------- the signed webhook


def test_a_webhook_is_one_that_the_standards_own_library_verifies(hook: Hook) -> None:
    hooks_of({"a": hook.url})["a"].deliver([trial()])
    ((headers, body),) = hook.got
    payload = Webhook(SECRET).verify(body, headers)
    assert (payload["type"], payload["data"]["job"], payload["data"]["cluster"]) == (
        "orc.failed",
        "lm-1",
        "c",
    )
    assert hook.paths == [PRIVATE_PATH]
    for planted in (body + b" ", body.replace(b"lm-1", b"lm-2")):
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(planted, headers)
    for name, value in (
        ("webhook-id", "msg_other"),
        ("webhook-timestamp", str(int(time.time()) - 1)),
    ):
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(body, headers | {name: value})


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_c2hvcnQ=", "whsec_ not base64 very-private"]
)
def test_a_signing_secret_that_is_none_is_refused_and_not_repeated(hook: Hook, secret: str) -> None:
    target = make_targets(spec_of("a"), "c", {"URL_A": hook.url, "SECRET": secret})["a"]
    with pytest.raises(ConnectionError) as refused:
        target.deliver([trial()])
    assert "very-private" not in str(refused.value)
    assert hook.got == []


# ---------------------------------------------------------------------------------------------- addresses of webhooks


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "::1", "::"),  # loopback, this machine
        *(
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "fd00::1",
            "fc00::1",
        ),  # private, shared
        *("169.254.0.1", "fe80::1", "fe80::1%eth0"),  # link-local
        *(
            "169.254.169.254",
            "fd00:ec2::254",
            "100.100.100.200",
            "168.63.129.16",
        ),  # metadata of clouds
        *(
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "::ffff:10.0.0.1",
        ),
        *(
            "224.0.0.1",
            "ff02::1",
            "255.255.255.255",
            "240.0.0.1",
            "192.0.2.1",
        ),  # for many, for none
    ],
)
def test_an_address_that_is_not_public_is_denied(address: str) -> None:
    assert not is_public_address(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"]
)
def test_a_public_address_is_allowed(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]"),
        *("2130706433", "0x7f000001", "0177.0.0.1", "127.1"),  # other spellings of 127.0.0.1
        *("169.254.169.254", "10.1.2.3", "192.168.0.1", "[fe80::1]", "[fd00::1]"),
    ],
)
def test_a_hook_at_a_private_address_is_denied_and_nothing_connects(hook: Hook, host: str) -> None:
    message = refusal(f"https://{host}:{hook.port}/very-private")
    assert "not public" in message or "not known" in message
    assert hook.got == []


def test_a_host_is_allowed_by_its_name_alone(hook: Hook) -> None:
    assert "not public" in refusal(f"https://127.0.0.1:{hook.port}/", allow=("localhost",))
    assert "without TLS" in refusal(f"http://127.0.0.1:{hook.port}/", allow=("localhost",))
    hooks_of({"a": hook.url}, allow=("LOCALHOST",))["a"].deliver([trial()])
    assert len(hook.got) == 1


def test_without_tls_nothing_is_sent_to_a_host_that_is_not_allowed() -> None:
    assert "without TLS" in refusal("http://example.com/very-private")


def test_a_name_is_resolved_once_and_the_address_that_was_checked_is_the_one_connected_to(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name servers of an attacker answer a public address first, and the loopback ever after."""
    real, hosts = socket.getaddrinfo, list[str]()

    def rebinding(host: str, port: int, *rest: Any, **more: Any) -> Any:
        if host != "rebind.example":
            return real(host, port, *rest, **more)
        hosts.append(host)
        address = "203.0.114.1" if len(hosts) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.5)
    refusal(f"https://rebind.example:{hook.port}/very-private")
    assert hosts == ["rebind.example"]
    assert hook.got == []
    assert "not public" in refusal(f"https://rebind.example:{hook.port}/very-private"), (
        "now it is the loopback"
    )


def test_a_host_with_one_private_address_among_public_ones_is_denied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443))
        for address in ("1.1.1.1", "10.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(addresses.AddressRefused):
        addresses.resolve_host("two.example", 443, ())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(hook: Hook, status: int) -> None:
    sly = Hook(status=status, headers=[("Location", hook.url)])
    try:
        message = refusal(sly.url, allow=("localhost",))
    finally:
        sly.close()
    assert f"{status}, a redirect" in message
    assert hook.got == []


def test_a_receiver_that_never_ends_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "TOTAL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        began_s = time.monotonic()
        try:
            refusal(f"http://localhost:{listener.getsockname()[1]}/", allow=("localhost",))
        finally:
            stop.set()
            thread.join()
        assert time.monotonic() - began_s < webhook.TIMEOUT_S


# ------------------------------------------------------------------------------------------------------- the secrets


def test_no_url_and_no_secret_is_in_journal_log_or_problem(
    tmp_path: Path, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hook.status = 500
    environment = {"URL_A": hook.url, "SECRET": SECRET}
    targets = make_targets(spec_of("a"), "c", environment)
    assert environment == {}, "a job would inherit it"
    with open_journal(tmp_path, "a") as journal:
        fail(journal, "lm-1")
        with relay_notices(journal, targets) as (relay,):
            until(lambda: relay.problem is not None)
            problem = str(relay.problem)
    assert "it answered 500" in problem
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for secret in ("very-private", SECRET, SECRET.removeprefix("whsec_")):
        assert secret not in problem + caplog.text
        assert secret.encode() not in stored


@pytest.mark.parametrize("key", ["webhook", "apprise", "signed_with"])
def test_an_address_in_the_cluster_file_in_place_of_a_name_is_refused_and_not_repeated(
    key: str,
) -> None:
    target = {
        "name": "a",
        "webhook": "URL",
        "signed_with": "SECRET",
        key: "https://x.example/very-private",
    }
    text = json.dumps({"name": "c", "nodes": [], "notify": {"targets": [target]}})
    with pytest.raises(SpecError) as refused:
        parse_cluster(text, "cluster.yaml")
    assert "a secret is named" in str(refused.value)
    assert "very-private" not in str(refused.value)


# ----------------------------------------------------------------------------------------------------------- apprise


class Mailbox:
    """Keeps what aiosmtpd is given."""

    def __init__(self) -> None:
        self.mails: list[bytes] = []

    async def handle_DATA(self, _server: object, _session: object, envelope: Any) -> str:
        self.mails.append(envelope.content)
        return "250 OK"


def test_apprise_delivers_a_mail_and_notices_that_wait_together_share_one(tmp_path: Path) -> None:
    from aiosmtpd.controller import Controller

    from tests.service.test_reach import free_port

    box = Mailbox()
    port = free_port()
    smtp = Controller(box, hostname="127.0.0.1", port=port)
    smtp.start()
    try:
        url = f"mailto://127.0.0.1:{port}?from=orc@example.org&to=team@example.org&mode=insecure"
        spec = NotifySpec.model_validate({"targets": [{"name": "mail", "apprise": "MAIL"}]})
        targets = make_targets(spec, "night", {"MAIL": url})
        with open_journal(tmp_path, "mail") as journal:
            fail(journal, "lm-1", "lm-2", "lm-3")
            with relay_notices(journal, targets) as (relay,):
                assert wait_delivered(relay, PATIENCE_S), relay.problem
    finally:
        smtp.stop()
    (mail,) = box.mails
    read = message_from_bytes(mail)
    text = "".join(
        part.get_payload(decode=True).decode() for part in read.walk() if not part.is_multipart()
    )  # type: ignore[union-attr]
    assert "[night] 3 notices" in str(read["Subject"])
    assert all(f"lm-{number} failed" in text for number in (1, 2, 3))
    assert text.count("id: msg_") >= 3


@pytest.mark.parametrize(
    "url", ["nothing://known", "mailto://127.0.0.1:1?from=a@example.org&to=b@example.org"]
)
def test_an_apprise_target_that_cannot_be_reached_says_so_without_its_url(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    spec = NotifySpec.model_validate({"targets": [{"name": "mail", "apprise": "MAIL"}]})
    with pytest.raises(ConnectionError) as refused:
        make_targets(spec, "c", {"MAIL": url})["mail"].deliver([trial()])
    assert url not in str(refused.value) + caplog.text
    assert "example.org" not in str(refused.value) + caplog.text


def until(what: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)
