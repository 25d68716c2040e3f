"""Laws of requests that a page of another site makes, or a thief of a link: none changes or opens anything."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import pytest

from orchestrator.service.pages.frame import load_macros
from orchestrator.service.pages.svg import (
    Bar,
    Cause,
    Line,
    draw_curves,
    draw_gantt,
    draw_sparkline,
    draw_waterfall,
)
from tests.service.test_access import routes
from tests.service.test_sign_in_links import browser, link
from tests.service.worlds import World, job_spec

HOSTILE = (
    {},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:8001"},
    {"Origin": "http://127.0.0.1:8000.evil.example"},
    {"Origin": "https://127.0.0.1:8000"},
    {"Referer": "http://127.0.0.1:8000/ui"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:8000"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:8000"},
)
BODIES = ("application/json", "text/plain", "application/x-www-form-urlencoded")
EVIL = ("<script>alert(1)</script>", '"><svg onload=x>', "'><a href='javascript:x'>", "&lt;b&#0;")


def test_no_route_takes_a_change_from_another_site_by_a_cookie(world: World) -> None:
    """Every route that changes something, with every form that a page may send unasked."""
    victim = browser(world)
    victim.get(link(world.client))
    job_id = world.submit()
    changing = [route for route in routes(world) if route[0] not in ("GET", "HEAD")]
    assert len(changing) > 20
    before = world.client.get("/jobs").json()["jobs"]
    users = world.client.get("/users").json()
    for method, path in changing:
        address = path.replace("{job_id}", job_id).replace("{number}", "1")
        for number, headers in enumerate(HOSTILE):
            kind = {"Content-Type": BODIES[number % len(BODIES)]}
            answer = victim.request(
                method, address, headers={**headers, **kind}, json={"spec": job_spec()}
            )
            assert answer.status_code == 403, (method, path, headers, answer.text)
    assert world.client.get("/jobs").json()["jobs"] == before
    assert world.client.get("/users").json() == users


def test_a_link_that_many_open_at_once_signs_one_of_them_in(world: World) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):  # wrong ones are counted
            path = link(world.client)
            browsers = [browser(world) for _ in range(8)]
            answers = [pool.submit(client.get, path) for client in browsers]
            statuses = [answer.result().status_code for answer in answers]
            assert sorted(statuses) == [200, *[403] * 7]


@pytest.mark.parametrize("seed", range(4))
def test_no_name_in_a_chart_is_markup(seed: int) -> None:
    draw = random.Random(seed)

    def evil() -> str:
        return "".join(draw.choices((*EVIL, "name"), k=3))

    curves = [Line(evil(), "series-0", [(0.0, 1.0), (1.0, 2.0)]) for _ in range(2)]
    bar = Bar(lane=0, from_s=0.0, until_s=9.0, tone="good", label=evil(), tooltip=evil())
    for chart in (
        draw_curves(evil(), curves),
        draw_sparkline(evil(), curves, 0.0, 1.0),
        load_macros("charts").meter(evil(), 5, 10, "good", 8),
        draw_waterfall([Cause(evil(), 5), Cause(evil(), 7)], 12, None, 20),
        draw_gantt(evil(), [evil()], [bar], 0.0, 9.0, 5.0, [(1.0, evil())]),
    ):
        for element in ElementTree.fromstring(f"<div>{chart}</div>").iter():
            assert element.tag.rpartition("}")[2] not in ("script", "a", "b"), chart
            assert not [name for name in element.attrib if name.startswith("on")], chart


def test_no_address_in_a_job_is_asked_by_the_service(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's texts, and the hub's address, name a port of the loopback that nobody may connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/config.json"
        monkeypatch.setenv("HF_ENDPOINT", url)
        for model in ({"hf": url}, {"hf": "some/model"}, {"hf": url.removeprefix("http://")}):
            for data in ({"hf": url}, {"text": [url]}, {"tokens": url}):
                spec = job_spec() | {"model": model, "data": data, "workdir": url}
                spec |= {"env": [["HF_ENDPOINT", url]], "resume": {"from": url}}
                for body in ({"spec": spec}, {"spec": job_spec() | {"model": model}}):
                    answer = world.client.post("/jobs", json=body)
                    assert answer.status_code < 500, answer.text
                    assert world.client.get("/ui/queue").status_code == 200
        with pytest.raises(BlockingIOError):
            listener.accept()
