"""Laws of sign in by an OpenID provider, which is a process of its own; and the attacks on it."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from orchestrator.backends.oidc import make_provider
from orchestrator.service.server.access.gate import OIDC, OIDC_BACK, PAGES, SIGN_IN, WRONG_TOKENS
from orchestrator.specs.access import Role
from orchestrator.specs.errors import SpecError
from orchestrator.specs.oidc import OidcSpec, require_safe_url
from orchestrator.specs.parse import parse_cluster
from tests.service.openid_provider import CLIENT, SECRET
from tests.service.worlds import World

ROOT = Path(__file__).parents[2]
ADA = "ada@example.org"
EVIL = "https://evil.example"
SAME_SITE = {"Origin": "http://127.0.0.1:8000"}


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.service.openid_provider"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.terminate()


class Site:
    """A service with a provider, and one browser."""

    def __init__(self, home: Path, issuer: str, **settings: Any) -> None:
        self.issuer = issuer
        fields = {
            "roles_claim": "groups",
            "roles": {"gpu-users": "member"},
            "user_claim": "email",
            **settings,
        }
        self.spec = OidcSpec(
            issuer=issuer, client_id=CLIENT, client_secret="ORC_OIDC_SECRET", **fields
        )
        self.environment = {"ORC_OIDC_SECRET": SECRET}
        self.world = World(home, provider=make_provider(self.spec, self.environment))
        self.browser = self.new_browser()
        self.wrong({})

    def new_browser(self) -> TestClient:
        return TestClient(self.world.app, base_url="http://127.0.0.1:8000", follow_redirects=False)

    def wrong(self, what: dict[str, Any]) -> None:
        httpx.post(f"{self.issuer}/next", json=what, trust_env=False).raise_for_status()

    def begin(self, came_from: str = "") -> str:
        """Return the address to which the provider sends the browser back."""
        answer = self.browser.get(f"{OIDC}?next={came_from}")
        assert answer.status_code == 303, answer.text
        there = httpx.get(answer.headers["location"], trust_env=False)
        return there.headers["location"].removeprefix("http://127.0.0.1:8000")

    def sign_in(self, came_from: str = "") -> httpx.Response:
        return self.browser.get(self.begin(came_from))

    def is_signed_in(self) -> bool:
        return self.browser.get(f"{PAGES}/queue").status_code == 200


@pytest.fixture
def site(tmp_path: Path, issuer: str) -> Iterator[Site]:
    site = Site(tmp_path, issuer)
    yield site
    site.world.journal.close()


def test_who_the_provider_names_is_signed_in_with_the_role_of_its_claim(site: Site) -> None:
    assert OIDC in site.browser.get(SIGN_IN).text
    answer = site.sign_in(f"{PAGES}/cluster")
    assert answer.status_code == 200, answer.text
    assert f"url={PAGES}/cluster" in answer.text
    cookie = answer.headers.get_list("set-cookie")[-1]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert site.is_signed_in()
    assert [(user.name, user.role) for user in site.world.accounts.list_users()] == [
        (ADA, Role.MEMBER)
    ]
    assert site.browser.get(f"{PAGES}/audit").status_code == 403


def test_a_session_ends_at_its_time_at_logout_at_revocation_and_with_its_user(site: Site) -> None:
    for end in ("time", "logout", "revocation", "user"):
        site.sign_in()
        assert site.is_signed_in()
        cookies = dict(site.browser.cookies)
        if end == "time":
            site.world.now_s += site.spec.session + 1
        elif end == "logout":
            assert site.browser.post(f"{PAGES}/logout", headers=SAME_SITE).status_code == 303
            site.browser.cookies.update(cookies)  # a stolen cookie ends, too
        elif end == "revocation":
            site.world.accounts.revoke_token(site.world.accounts.list_tokens()[-1].id)
        else:
            site.world.accounts.remove_user(ADA)
        assert not site.is_signed_in(), end
        site.browser.cookies.clear()


FORGED: dict[str, dict[str, Any]] = {
    "another audience": {"claims": {"aud": "another"}},
    "no audience": {"claims": {"aud": None}},
    "several audiences": {"claims": {"aud": [CLIENT, "another"]}},
    "another client": {"claims": {"azp": "another"}},
    "expired": {"claims": {"exp": 1_700_000_000}},
    "without end": {"claims": {"exp": None}},
    "made long ago": {"claims": {"iat": 1_700_000_000}},
    "made tomorrow": {"claims": {"iat": 4_000_000_000}},
    "another issuer": {"claims": {"iss": EVIL}},
    "another issuer answers": {"answering": EVIL},
    "another nonce": {"claims": {"nonce": "guessed"}},
    "no nonce": {"claims": {"nonce": None}},
    "no subject": {"claims": {"sub": None}},
    "no signature": {"signature": "none"},
    "another key": {"signature": "another key"},
    "the public key as a secret": {"signature": "the public key as a secret"},
    "a key of its own": {"signature": "a key of its own"},
    "an unverified address": {"claims": {"email_verified": False}},
    "an address that only looks verified": {"claims": {"email_verified": "false"}},
    "no user's name": {"claims": {"email": "<script>@x"}},
    "a list of names": {"claims": {"email": [ADA]}},
    "nobody's group": {"claims": {"groups": ["others"]}},
    "no group": {"claims": {"groups": None}},
}


@pytest.mark.parametrize("name", FORGED)
def test_whoever_the_token_does_not_prove_is_refused_and_nothing_is_kept(
    site: Site, name: str
) -> None:
    site.wrong(FORGED[name])
    answer = site.sign_in()
    assert answer.status_code == 403
    assert not [
        cookie for cookie in answer.headers.get_list("set-cookie") if cookie.startswith("orc-8000")
    ]
    assert not site.is_signed_in()
    assert not site.world.accounts.list_users()
    assert not site.world.accounts.list_tokens()


def test_a_provider_whose_discovery_is_of_another_issuer_or_leaves_tls_signs_nobody_in(
    tmp_path: Path, issuer: str
) -> None:
    for number, wrong in enumerate(
        ({"issuer": EVIL}, {"token_endpoint": "http://evil.example/token"})
    ):
        (home := tmp_path / str(number)).mkdir()
        site = Site(home, issuer)
        site.wrong(wrong)
        answer = site.browser.get(OIDC)
        if answer.status_code == 303:  # the endpoint of tokens is asked for later
            there = httpx.get(answer.headers["location"], trust_env=False)
            answer = site.browser.get(
                there.headers["location"].removeprefix("http://127.0.0.1:8000")
            )
        assert answer.status_code in (403, 502)
        assert not site.is_signed_in()
        site.world.journal.close()


def test_a_state_counts_once_in_the_browser_that_asked_and_for_ten_minutes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.wrong({"codes": "again"})  # a provider that takes a code twice
    back = site.begin()
    begun = dict(site.browser.cookies)
    assert site.new_browser().get(back).status_code == 403, "another browser"
    assert site.browser.get(f"{OIDC_BACK}?code=stolen&state=guessed").status_code == 403, (
        "another state"
    )
    assert site.browser.get(back).status_code == 200
    site.browser.cookies.clear()
    site.browser.cookies.update(begun)
    assert site.browser.get(back).status_code == 403, "replayed"
    site.browser.cookies.clear()
    back, now_s = site.begin(), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 601.0)
    assert site.browser.get(back).status_code == 403, "late"


def test_a_code_that_was_stolen_is_of_no_use_without_the_browsers_verifier(site: Site) -> None:
    stolen = parse_qs(urlsplit(site.begin()).query)["code"][0]
    site.browser.cookies.clear()
    login = parse_qs(urlsplit(site.begin()).query)
    answer = site.browser.get(f"{OIDC_BACK}?code={stolen}&state={login['state'][0]}")
    assert answer.status_code == 403
    assert not site.is_signed_in()


def test_sign_in_leads_on_to_pages_of_this_service_alone(site: Site) -> None:
    for came_from in (EVIL, "//evil.example/ui/", "/ui/..\\evil", OIDC):
        answer = site.sign_in(came_from)
        assert f'content="0;url={PAGES}/overview"' in answer.text
        assert "evil" not in answer.text
        site.browser.cookies.clear()


def test_a_user_of_orc_user_needs_no_claim_and_a_claim_overrules_it(site: Site) -> None:
    site.world.accounts.set_user(ADA, Role.OPERATOR)
    site.wrong({"claims": {"groups": []}})
    assert site.sign_in().status_code == 200
    assert site.world.accounts.list_users()[0].role is Role.OPERATOR
    site.wrong({})
    site.browser.cookies.clear()
    assert site.sign_in().status_code == 200
    assert site.world.accounts.list_users()[0].role is Role.MEMBER


def test_no_secret_no_code_and_no_token_is_in_journal_log_or_answer(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="orchestrator")
    back = site.begin()
    code = parse_qs(urlsplit(back).query)["code"][0]
    answer = site.browser.get(back)
    site.wrong(FORGED["another audience"])
    refused = site.sign_in()
    assert not site.environment, "a job would inherit it"
    stored = (site.world.home / "journal.sqlite").read_bytes() + (
        site.world.home / "journal.sqlite-wal"
    ).read_bytes()
    for text in (stored.decode(errors="replace"), caplog.text, answer.text, refused.text):
        for secret in (SECRET, code, "eyJ"):
            assert secret not in text
    assert "signed in" in caplog.text
    assert "sign in refused" in caplog.text


def test_guesses_are_counted(site: Site) -> None:
    statuses = [
        site.browser.get(f"{OIDC_BACK}?code=x&state=y").status_code
        for _ in range(WRONG_TOKENS.amount + 3)
    ]
    assert statuses == [403] * WRONG_TOKENS.amount + [429] * 3


def test_a_provider_in_the_clear_and_a_secret_in_place_of_its_name_are_refused() -> None:
    cluster = (
        "name: n\nnodes: [{name: n, devices: 1, host_memory: 1GiB, device: h100-80gb}]\noidc: {%s}"
    )
    for settings, what in (
        (
            "issuer: 'http://login.example.org', client_id: orc, user_claim: sub",
            "begins with https",
        ),
        (
            "issuer: 'https://a.example', client_id: orc, user_claim: sub, client_secret: hunter2",
            "named, not written",
        ),
    ):
        with pytest.raises(SpecError, match=what) as refused:
            parse_cluster(cluster % settings, "cluster.yaml")
        assert "hunter2" not in str(refused.value)
    spec = OidcSpec(
        issuer="https://a.example", client_id="orc", user_claim="sub", client_secret="ORC_S"
    )
    with pytest.raises(SpecError, match="variable is missing"):
        make_provider(spec, {})


UNSAFE = (
    "http://login.example.org",
    "https://",
    "https://good.example@evil.example/",
    "http://127.0.0.1@evil.example/",
    "http://127.0.0.1.evil.example/",
    "http://localhost\\@evil.example/",
    "ftp://a.example",
    "https://a.example\nHost: b",
    "",
)


def test_only_tls_and_the_loopback_are_asked() -> None:
    for text in UNSAFE:
        with pytest.raises(ValueError, match="https"):
            require_safe_url(text)
    for text in (
        "https://a.example/realms/lab?p=1",
        "http://127.0.0.1:8080/",
        "http://localhost",
        "http://[::1]:1/x",
    ):
        assert require_safe_url(text) == text
