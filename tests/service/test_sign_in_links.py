"""Laws of sign-in links: each signs one browser in, as its user, once, within five minutes."""

from __future__ import annotations

from fastapi.testclient import TestClient

from orchestrator.service.server.access import gate
from orchestrator.service.server.access.sign_in_links import LIFETIME_S, LINKS_MAX, SignInLinks
from orchestrator.specs.access import Role
from tests.service.worlds import World


def browser(world: World) -> TestClient:
    return TestClient(world.app, base_url="http://127.0.0.1:8000")


def link(client: TestClient) -> str:
    return str(client.post("/sign-in-links").json()["path"])


def test_a_link_signs_one_browser_in_and_no_second_one(world: World) -> None:
    job_id, path = world.submit(), link(world.client)
    first, second = browser(world), browser(world)
    answer = first.get(path, params={"next": f"/ui/jobs/{job_id}"})
    assert answer.status_code == 200
    assert f"url=/ui/jobs/{job_id}" in answer.text
    assert first.get(f"/ui/jobs/{job_id}").status_code == 200
    refused = second.get(path)
    assert (refused.status_code, "`orc open` makes another" in refused.text) == (403, True)
    assert "Sign in" in second.get("/ui/queue").text


def test_a_link_leads_to_no_other_site(world: World) -> None:
    answer = browser(world).get(link(world.client), params={"next": "https://elsewhere.example/"})
    assert "elsewhere.example" not in answer.text


def test_a_link_gives_the_role_of_its_sender_and_ends_with_the_senders_token(world: World) -> None:
    path, looking = link(world.by(Role.VIEWER)), browser(world)
    looking.get(path)
    assert looking.get("/ui/queue").status_code == 200
    assert looking.get("/ui/audit").status_code == 403
    world.accounts.remove_user("ada")
    assert "Sign in" in looking.get("/ui/queue").text


def test_a_browsers_session_gives_no_link(world: World) -> None:
    signed_in = browser(world)
    signed_in.get(link(world.client))
    answer = signed_in.post("/sign-in-links", headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 409


def test_guesses_of_one_address_are_bounded(world: World) -> None:
    guessing = browser(world)
    for number in range(gate.WRONG_TOKENS.amount + 1):
        assert guessing.get(f"{gate.LINK}{number}").status_code == 403
    assert guessing.get(link(world.client)).status_code == 403


def test_a_link_ends_after_its_lifetime_and_the_oldest_of_too_many_goes() -> None:
    now_s = [0.0]
    links = SignInLinks(clock=lambda: now_s[0])
    first, late = links.add_session_and_make_code("first"), links.add_session_and_make_code("late")
    assert links.claim_session_cookie(first) == "first"
    now_s[0] = LIFETIME_S
    assert links.claim_session_cookie(late) is None
    codes = [links.add_session_and_make_code(str(number)) for number in range(LINKS_MAX + 1)]
    assert [links.claim_session_cookie(code) for code in (codes[0], codes[1], codes[-1])] == [
        None,
        "1",
        str(LINKS_MAX),
    ]
