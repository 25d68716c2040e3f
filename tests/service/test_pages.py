"""Laws of the pages: in a real browser over a real server, and of their sessions."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from orchestrator.service.commands.what_if import JOBS_MAX, compare_queues
from orchestrator.service.intake.intake import read_cluster
from orchestrator.service.pages import live
from orchestrator.service.pages.routes import PAGE_ROLES
from orchestrator.service.pages.svg import Bar, Cause, Line, draw_curves, draw_gantt, draw_waterfall
from orchestrator.service.server import forecasts
from orchestrator.service.server.access.gate import PAGES, SIGN_IN, WRONG_TOKENS
from orchestrator.service.server.access.sessions import LIFETIME_S, Sessions
from orchestrator.service.server.daemon import serve_http
from orchestrator.specs.access import Role
from orchestrator.specs.run import JobFolder
from orchestrator.specs.state import State
from orchestrator.specs.yaml_text import read_document
from tests.service.services import TOKEN
from tests.service.test_access import TEAMS
from tests.service.worlds import JOB, World, job_spec

CHROMIUM = shutil.which("chromium")
# Names of the visible regions that are wider than the window.
CUT = """[...document.querySelectorAll('.wide')]
    .filter(region => region.offsetParent && region.scrollWidth > region.clientWidth)
    .map(region => region.getAttribute('aria-label') || region.getAttribute('aria-labelledby'))"""
FIRST_PAGES = ("/overview", "/queue", "/jobs/lm-1", "/night?hours=72", "/submit")
OTHER_PAGES = (
    "/jobs/lm-1/plan",
    "/jobs/lm-1/log",
    "/jobs/lm-8",
    "/cluster",
    "/compare",
    "/compare/lm-compare-4",
    "/sweeps",
    "/teams",
    "/what-if",
    "/audit",
    "/jobs/none",
)
HOSTILE = "<script>window.attacked = true</script><img src=x onerror='window.attacked = true'>"
EVIL = "https://evil.example"
SHOWN_MS = 30_000.0
SERIOUS = ("serious", "critical")
SAME_SITE = {"Origin": "http://127.0.0.1:8000"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, TEAMS)
    yield world
    world.journal.close()


class Site:
    """A served world, and a browser that looks at it."""

    def __init__(self, world: World, port: int, browser: Any) -> None:
        self.world, self.browser, self.url = world, browser, f"http://127.0.0.1:{port}"

    def token(self, role: Role, name: str) -> str:
        self.world.accounts.set_user(name, role)
        return self.world.accounts.create_token(name, 3600.0)[0]

    def signed_in(self, token: str = TOKEN, **context: Any) -> Any:
        """A tab of a new browser profile, on the queue."""
        tab = self.browser.new_context(**context).new_page()
        tab.set_default_timeout(SHOWN_MS)
        tab.goto(f"{self.url}{PAGES}/queue")
        tab.fill("#token", token)
        tab.press("#token", "Enter")
        tab.wait_for_url(f"**{PAGES}/queue")
        return tab


def compare(world: World) -> None:
    """Three strategies of the job, of which two finish and one has no plan; their ids begin with lm-compare-4."""
    pins = (
        {"micro_batch_size": 8},
        {"micro_batch_size": 2},
        {"engine": "torch", "zero_stage": 1, "pp": 2},
    )
    jobs = [
        {
            "spec": {
                **job_spec(),
                "name": "lm-compare",
                "plan": pin,
                "degrade": {"allow": "none"},
                "member": member,
            }
        }
        for number, pin in enumerate(pins)
        for member in [{"number": number, "of": len(pins), "max_concurrent": 1, "compared": True}]
    ]
    answer = world.client.post("/jobs/batch", json={"jobs": jobs})
    assert answer.json()["ids"][0] == "lm-compare-4", answer.text
    world.turn_until("succeeded", 5)
    world.client.get(
        "/jobs/lm-compare-4/comparison"
    )  # imports mlflow, as the relay of a service does at its start


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Jobs that ended, run and wait; one has a log that means harm."""
    if CHROMIUM is None:
        pytest.skip("chromium is missing (Debian: chromium)")
    from playwright.sync_api import sync_playwright

    with ExitStack() as stack:
        world = World(tmp_path_factory.mktemp("home"), TEAMS)
        stack.callback(world.journal.close)
        for _ in range(3):
            world.submit()
        world.turn_until("succeeded")
        compare(world)
        for _ in range(3):
            world.submit()
        world.controller.run_once(1.0)
        folder = JobFolder(world.home, "lm-1").attempt(1)
        folder.path.mkdir(parents=True)
        folder.log(0).write_text(f"begins\n{HOSTILE}\nends\n")
        line = '{{"step": {}, "loss": {}, "step_s": 0.1, "peak_bytes": {}}}\n'
        folder.metrics.write_text("".join(line.format(n, 9 / n, n * 2**29) for n in range(1, 9)))
        for number, job_id in enumerate(("lm-compare-4", "lm-compare-5")):
            written = JobFolder(world.home, job_id).attempt(1)
            written.path.mkdir(parents=True)
            written.metrics.write_text(
                "".join(f'{{"step": {n}, "loss": {number / 9 + 9 / n}}}\n' for n in range(1, 9))
            )
        port = stack.enter_context(serve_http(world.app))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        stack.callback(browser.close)
        yield Site(world, port, browser)


# ---------------------------------------------------------------------------------------------------- in the browser


@pytest.mark.parametrize("pages", [FIRST_PAGES, pytest.param(OTHER_PAGES, marks=pytest.mark.long)])
def test_no_page_has_a_serious_violation_in_light_and_dark_leaves_the_origin_or_scrolls_sideways_at_360_px(
    site: Site, pages: tuple[str, ...]
) -> None:
    """The pages are walked through once, since each costs two seconds."""
    from axe_playwright_python.sync_playwright import Axe

    tab = site.signed_in(
        viewport={"width": 360, "height": 740}, reduced_motion="reduce"
    )  # no colour between two
    addresses, errors = list[str](), list[str]()
    tab.on("request", lambda request: addresses.append(request.url))
    tab.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    tab.on("pageerror", lambda error: errors.append(str(error)))
    schemes = {
        "light": None,
        "dark": {"runOnly": ["color-contrast"]},
    }  # all else is the same in the dark
    for path in pages:
        tab.goto(f"{site.url}{PAGES}{path}")
        tab.get_by_text("Live.").wait_for()
        for scheme, rules in schemes.items():
            tab.emulate_media(color_scheme=scheme)
            violations = Axe().run(tab, options=rules).response["violations"]
            wrong = [violation["id"] for violation in violations if violation["impact"] in SERIOUS]
            assert not wrong, (path, scheme, wrong)
        root = "document.documentElement"
        assert tab.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), path
        # What people look for on a telephone: each figure, point and attempt without a scroll.
        if path in ("/jobs/lm-1", "/jobs/lm-8", "/compare/lm-compare-4"):
            assert tab.evaluate(CUT) == [], path
        assert tab.evaluate(f"{root}.lang") == "en"
        assert tab.title().endswith(" · orc")
    assert {urlsplit(url).netloc for url in addresses if not url.startswith("data:")} == {
        urlsplit(site.url).netloc
    }
    assert [
        text for text in errors if "404" not in text
    ] == []  # of the page that is asked for and is not there


def test_the_queue_shows_a_new_job_without_reload(site: Site) -> None:
    tab = site.signed_in()
    tab.get_by_text("Live.").wait_for()
    tab.evaluate("window.isTheSame = true")
    job_id = site.world.submit()
    tab.get_by_role("link", name=job_id, exact=True).wait_for()
    assert tab.evaluate("window.isTheSame")


def test_an_action_of_a_page_is_done_and_the_page_shows_it(site: Site) -> None:
    job_id = site.world.submit()
    tab = site.signed_in()
    tab.on("dialog", lambda dialog: dialog.accept())
    tab.get_by_role("button", name=f"Cancel {job_id}").click()
    tab.get_by_text("Done.").wait_for()
    job = site.world.controller.find_job(job_id)
    assert job is not None
    assert job.cancelling or job.status == "cancelled"


def test_a_jobs_page_holds_it_releases_it_and_submits_it_again_when_it_has_ended(
    site: Site,
) -> None:
    site.world.controller.drain_node("virtual", undo=False)
    job_id = site.world.submit()
    tab = site.signed_in()
    tab.on("dialog", lambda dialog: dialog.accept())
    tab.goto(f"{site.url}/ui/jobs/{job_id}")
    # Each leads to the button of the next one. Cancel is there all the time: it is clicked on the
    # page that follows the hold, since the page is drawn again under an earlier click.
    for verb in ("Hold", "Release", "Hold"):
        tab.get_by_role("button", name=f"{verb} {job_id}").click()
    tab.get_by_role("button", name=f"Release {job_id}").wait_for()
    for verb in ("Cancel", "Retry"):
        tab.get_by_role("button", name=f"{verb} {job_id}").click()
    tab.wait_for_url("**/ui/queue")
    newest = max(site.world.controller.state.jobs.values(), key=lambda job: job.order)
    assert newest.retry_of == job_id
    site.world.controller.cancel_jobs([newest.id])
    site.world.controller.drain_node("virtual", undo=True)


def test_an_ended_job_is_retried_with_settings_and_a_wrong_one_is_told(site: Site) -> None:
    tab = site.signed_in()
    tab.goto(f"{site.url}{PAGES}/jobs/lm-2")
    tab.locator("summary", has_text="Retry with other settings").click()
    tab.fill("#settings", "priorty=3")
    tab.get_by_role("button", name="Retry with these").click()
    tab.get_by_text("did you mean 'priority'").or_(tab.get_by_text("priorty")).first.wait_for()
    tab.fill("#settings", "priority = 3\n\ntraining.max_steps=7\n")
    tab.get_by_role("button", name="Retry with these").click()
    tab.wait_for_url("**/ui/queue")
    newest = max(site.world.controller.state.jobs.values(), key=lambda job: job.order)
    assert (newest.retry_of, newest.spec.priority, newest.spec.training.max_steps) == ("lm-2", 3, 7)
    site.world.controller.cancel_jobs([newest.id])


def test_a_comparison_shows_what_orc_compare_answers(site: Site) -> None:
    answer = site.world.client.get("/jobs/lm-compare-4/comparison").json()
    tab = site.signed_in()
    tab.get_by_role("link", name="Compare", exact=True).click()
    tab.get_by_role("row", name="lm-compare-4").get_by_role(
        "cell", name="3", exact=True
    ).wait_for()  # strategies
    tab.get_by_role("link", name="lm-compare-4").click()
    tab.get_by_text(answer["verdict"]).wait_for()
    rows = tab.get_by_role("region", name="Strategies").get_by_role("row").all_inner_texts()
    assert len(rows) == 1 + len(answer["rows"])
    for row, shown in zip(answer["rows"], rows[1:], strict=True):
        assert row["strategy"] in shown
        assert row["outcome"] in shown
    tab.set_viewport_size({"width": 1400, "height": 1000})
    lengthen = "link => {link.textContent = 'ZeRO-3 (FSDP2) + checkpointing + optimizer on host on 2 (micro 16x4)'}"
    tab.get_by_role("region", name="Strategies").get_by_role("link").nth(1).evaluate(lengthen)
    assert tab.get_by_role("region", name="Strategies").evaluate(
        "table => table.scrollWidth <= table.clientWidth"
    )
    assert tab.get_by_role("img", name="Memory against step time").is_visible()
    assert (
        tab.get_by_role("img", name="Memory against step time")
        .locator("text.tick[y='244']")
        .count()
        > 1
    )
    assert "1 plain on 1" in (
        tab.get_by_role("img", name="Losses").locator("desc").text_content() or ""
    )
    assert tab.get_by_role("link", name="Compare its runs in MLflow").count() == (
        answer["mlflow"] is not None
    )
    tab.get_by_role("link", name=answer["rows"][0]["strategy"]).click()
    tab.get_by_role("link", name="lm-compare-4", exact=True).wait_for()  # back from its job


def test_a_page_says_that_nothing_was_compared_yet(world: World) -> None:
    assert "Nothing was compared yet." in world.client.get(f"{PAGES}/compare").text


def test_a_page_says_what_is_wrong_around_the_service_while_it_is(world: World) -> None:
    problems: list[str | None] = ["Ray cannot be reached since noon", None]
    world.controller.health.register_source(lambda: problems[0])
    assert problems[0] in world.client.get(f"{PAGES}/queue").text
    problems.pop(0)
    assert "Ray cannot be reached" not in world.client.get(f"{PAGES}/queue").text


def test_a_viewer_sees_no_action_and_is_refused_it(site: Site) -> None:
    job_id = site.world.submit()
    tab = site.signed_in(site.token(Role.VIEWER, "eve"))
    for path in ("/queue", f"/jobs/{job_id}", "/cluster"):
        tab.goto(f"{site.url}{PAGES}{path}")
        assert [
            button.inner_text() for button in tab.get_by_role("main").get_by_role("button").all()
        ] in (
            [],
            ["Filter"],
        )
    assert tab.get_by_role("link", name="Submit", exact=True).count() == 0
    assert tab.get_by_role("link", name="Audit", exact=True).count() == 0
    assert tab.goto(f"{site.url}{PAGES}/submit").status == 403
    ask = """async ([path, body]) => (await fetch(path, {method: "POST", body: JSON.stringify(body),
        headers: {"Content-Type": "application/json"}})).status"""
    assert tab.evaluate(ask, ["/jobs/cancel", {"jobs": [job_id]}]) == 403
    assert tab.evaluate(ask, ["/nodes/virtual/drain", {}]) == 403


def test_what_others_wrote_is_shown_as_text(site: Site) -> None:
    tab = site.signed_in()
    for path in ("/jobs/lm-1/log", f"/queue?name={HOSTILE}", f"/jobs/{HOSTILE}"):
        tab.goto(f"{site.url}{PAGES}{path}")
        assert tab.evaluate("window.attacked === undefined"), path
    tab.goto(f"{site.url}{PAGES}/jobs/lm-1/log")
    assert HOSTILE in tab.locator("#log").inner_text()
    refused = site.world.client.post("/jobs", json={"spec": {**job_spec(), "name": "<script>"}})
    assert refused.status_code == 422


def test_a_member_sees_actions_on_jobs_of_its_own_team_only(world: World) -> None:
    ids = {
        name: world.by(Role.MEMBER, name).post("/jobs", json={"spec": job_spec()}).json()["id"]
        for name in ("bob", "cyd")
    }
    page = world.by(Role.MEMBER, "ada").get(f"{PAGES}/queue").text
    assert [f"Cancel {ids[name]}" in page for name in ("bob", "cyd")] == [True, False]


def test_a_page_leads_to_sign_in_once_its_token_is_revoked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open page too, without a click."""
    monkeypatch.setattr(live, "WAIT_S", 0.2)
    tab = site.signed_in(site.token(Role.VIEWER, "mia"))
    tab.get_by_text("Live.").wait_for()
    site.world.accounts.revoke_token(site.world.accounts.list_tokens()[-1].id)
    tab.wait_for_url(f"**{SIGN_IN}**")
    assert tab.get_by_text("Live.").count() == 0


def test_a_page_is_used_by_keyboard(site: Site) -> None:
    tab = site.signed_in()
    tab.goto(f"{site.url}{PAGES}/queue")
    tab.keyboard.press("Tab")
    focused = "document.activeElement"
    assert tab.evaluate(f"{focused}.className") == "skip"
    assert tab.evaluate(f"{focused}.getBoundingClientRect().left >= 0")
    tab.keyboard.press("Enter")
    assert tab.evaluate(f"{focused}.id") == "main"
    tab.keyboard.press("Tab")
    assert tab.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"


def test_a_pasted_job_is_planned_and_then_submitted(site: Site) -> None:
    tab = site.signed_in()
    tab.goto(f"{site.url}{PAGES}/submit")
    tab.fill("#text", JOB.replace("/proc/version", "words.txt"))
    tab.get_by_role("button", name="Show the plan").click()
    tab.get_by_text("not an absolute path").wait_for()
    tab.fill("#text", JOB.replace("name: lm", "name: pasted"))
    tab.get_by_role("button", name="Show the plan").click()
    tab.get_by_text("taken", exact=True).wait_for()
    tab.get_by_role("button", name="Submit 1 job").click()
    tab.get_by_role("link", name="pasted-").wait_for()
    assert [job.spec.name for job in site.world.controller.state.jobs.values()].count("pasted") == 1


def test_an_uploaded_file_and_a_command_begin_a_job(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("name: lm", "name: uploaded"))
    tab = site.signed_in()
    tab.goto(f"{site.url}{PAGES}/submit")
    tab.set_input_files("#file", file)
    tab.get_by_text("job.yaml is in the text below.").wait_for()
    tab.get_by_role("button", name="Show the plan").click()
    tab.get_by_text("taken", exact=True).wait_for()
    (tmp_path / "train.py").write_text(
        "import torch\ntorch.zeros(1, requires_grad=True).backward()\n"
    )
    tab.get_by_label("Begin with a command", exact=True).get_by_role("textbox").first.fill(
        "python train.py"
    )
    tab.get_by_label("in the folder").fill(str(tmp_path))
    tab.get_by_role("button", name="Propose a job file").click()
    tab.get_by_text("global_batch_size").first.wait_for()
    assert f"workdir: {tmp_path}" in tab.input_value("#text")


@pytest.mark.parametrize(
    "form",
    [
        {"text": "name: [", "written": ""},
        {"text": JOB.replace("gpus: 1", "gpus: many"), "written": JOB},
        {"text": JOB.replace("/proc/version", "words.txt"), "written": JOB},
        {"text": "", "written": ""},
        {"command": "ls -l", "folder": "/tmp"},
        {"command": "python train.py", "folder": "relative"},
        {"command": "python train.py"},
        {"command": "python /none/train.py", "folder": "/"},
    ],
)
def test_a_bad_input_is_told_and_stores_nothing(world: World, form: dict[str, str]) -> None:
    before = set(world.home.rglob("*"))
    page = world.client.post(f"{PAGES}/submit", data=form).text
    assert 'role="alert"' in page
    assert "Submit 1 job" not in page
    assert set(world.home.rglob("*")) == before
    assert world.controller.state.submitted == 0


def test_fields_of_the_form_write_the_job_file_that_is_planned(site: Site) -> None:
    tab = site.signed_in()
    tab.goto(f"{site.url}{PAGES}/submit")
    tab.fill("#text", JOB)
    tab.get_by_role("button", name="Show the plan").click()
    tab.get_by_text("taken", exact=True).wait_for()
    tab.get_by_label("name required").first.fill("typed")
    tab.locator("summary", has_text=re.compile("^degrade$")).click()
    tab.get_by_label("allow").select_option("numeric")
    tab.get_by_label("env").fill("{A: [}")
    tab.keyboard.press("Enter")
    tab.get_by_text("not readable as YAML").wait_for()
    assert tab.get_by_label("env").input_value() == "{A: [}", "what was typed is not lost"
    tab.get_by_label("env").fill("")
    tab.keyboard.press("Enter")
    tab.get_by_role("button", name="Submit 1 job").wait_for()
    data = read_document(tab.input_value("#text"), "").data
    assert data == read_document(JOB, "").data | {"name": "typed", "degrade": {"allow": "numeric"}}
    assert tab.get_by_label("allow").input_value() == "numeric"


CLUSTER = """\
name: larger
nodes:
  - {name: virtual, devices: 8, host_memory: 8GiB, device: {name: virtual-256MiB, kind: virtual, memory: 256MiB,
     bf16_tflops: 0.02, fp32_tflops: 0.05, memory_bandwidth: 8GB/s, link_bandwidth: 1GB/s}}
"""


def test_the_live_queue_is_played_on_another_cluster_with_another_job_before_anything_is_submitted(
    site: Site,
) -> None:
    submitted = site.world.controller.state.submitted
    tab = site.signed_in(site.token(Role.MEMBER, "ivy"))
    tab.goto(f"{site.url}{PAGES}/what-if")
    tab.fill("#cluster", CLUSTER)
    tab.fill("#job", JOB.replace("name: lm", "name: another"))
    tab.select_option("#order", "fifo")
    tab.get_by_role("button", name="Play both").click()
    tab.get_by_role("heading", name="Now and then").wait_for()
    both = tab.get_by_role("region", name="Now and then")
    assert both.get_by_role("row", name="Devices 2 8").is_visible()
    assert both.get_by_role("row", name="Order adaptive fifo").is_visible()
    live = [job.id for job in site.world.controller.state.jobs.values() if not job.status.ended]
    jobs = tab.get_by_role("region", name="Each job").get_by_role("row").all_inner_texts()[1:]
    assert len(jobs) == len(live) + 1
    assert "not submitted" in jobs[-1]
    assert site.world.controller.state.submitted == submitted
    tab.fill("#cluster", "")
    tab.select_option("#more", "2")
    tab.get_by_role("button", name="Play both").click()
    both.get_by_role("row", name="Devices 2 4").wait_for()
    tab.fill("#cluster", "name: <b>wrong")
    tab.get_by_role("button", name="Play both").click()
    assert "the cluster file" in tab.get_by_role("alert").inner_text()


def test_a_play_is_bounded_and_its_late_jobs_are_counted(world: World) -> None:
    refused = world.client.post(f"{PAGES}/what-if", data={"order": "fifo"})
    assert "no job runs or waits" in refused.text
    slow = {
        "training": {**job_spec()["training"], "max_steps": 100_000_000},
        "deadline": "23:59 UTC",
    }
    assert world.client.post("/jobs", json={"spec": job_spec() | slow}).status_code == 200
    outcome = compare_queues(
        world.controller.state, cluster := read_cluster(None), cluster, [], {}, world.home
    )
    assert (outcome.late_now, outcome.late_then) == (1, 1)
    jobs = {"jobs": [{"spec": job_spec()}] * JOBS_MAX}
    assert world.client.post("/jobs/batch", json=jobs).status_code == 200
    assert (
        "too many jobs for a page"
        in world.client.post(f"{PAGES}/what-if", data={"order": "fifo"}).text
    )


# ------------------------------------------------------------------------------------------------- sessions and gate


def signed_in(world: World, token: str) -> TestClient:
    client = TestClient(world.app, base_url="http://127.0.0.1:8000", follow_redirects=False)
    answer = client.post(SIGN_IN, data={"token": token}, headers=SAME_SITE)
    assert answer.status_code == 303, answer.text
    return client


def _become(client: TestClient, cookie: str | None) -> None:
    name = next(iter(client.cookies))
    client.cookies.clear()
    client.cookies.set(name, cookie or "")


def filled(path: str) -> str:
    return path.replace("{job_id}", "lm-1")


def test_every_page_leads_a_stranger_to_sign_in_and_says_nothing(world: World) -> None:
    for method, path in PAGE_ROLES:
        answer = world.stranger.request(method, filled(path), follow_redirects=False)
        assert (answer.status_code, answer.text) == (303, ""), path
        assert answer.headers["location"].startswith(SIGN_IN)


def test_every_page_is_of_its_role_and_has_the_headers_that_keep_foreign_code_out(
    world: World,
) -> None:
    world.submit()
    clients = {role: signed_in(world, _token(world, role)) for role in Role}
    for (method, path), needed in PAGE_ROLES.items():
        if path.endswith(("/events", "/logout")):
            continue
        for role, client in clients.items():
            answer = client.request(method, filled(path), headers=SAME_SITE)
            assert (answer.status_code == 403) == (not role.includes(needed)), (role, path)
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "style=" not in answer.text
            assert "<script>" not in answer.text


def test_the_cookie_is_no_token_and_no_script_or_other_site_gets_it(world: World) -> None:
    secret = _token(world, Role.VIEWER)
    for base, is_secure in (("http://127.0.0.1:8000", False), ("https://127.0.0.1:8000", True)):
        client = TestClient(world.app, base_url=base, follow_redirects=False)
        cookie = client.post(SIGN_IN, data={"token": secret}, headers={"Origin": base}).headers[
            "set-cookie"
        ]
        assert secret not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert ("Secure" in cookie) == is_secure


@pytest.mark.parametrize(
    "ends", ["expiry", "revocation", "removal of the user", "its own end", "forgery"]
)
def test_a_session_ends(world: World, ends: str) -> None:
    client = signed_in(world, _token(world, Role.VIEWER))
    assert client.get(f"{PAGES}/queue").status_code == 200
    if ends == "expiry":
        world.now_s += 3600.0
    elif ends == "revocation":
        world.accounts.revoke_token(world.accounts.list_tokens()[-1].id)
    elif ends == "removal of the user":
        world.accounts.remove_user("ada")
    elif ends == "its own end":
        old = Sessions(
            owner_token=TOKEN,
            owner="x",
            accounts=world.accounts,
            clock=lambda: time.time() - LIFETIME_S,
        )
        _become(client, old.make_session_cookie(_token(world, Role.VIEWER)))
    else:
        _become(client, next(iter(client.cookies.values())).replace("1.", "0.", 1))
    assert client.get(f"{PAGES}/queue").status_code == 303


def test_a_change_by_cookie_needs_the_same_origin(world: World) -> None:
    client = signed_in(world, _token(world, Role.OPERATOR))
    job_id = world.submit()
    body = {"jobs": [job_id]}
    for headers in ({}, {"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert client.post("/jobs/cancel", json=body, headers=headers).status_code == 403, headers
    assert client.post("/jobs/cancel", json=body, headers=SAME_SITE).status_code == 200
    assert (
        world.stranger.post(SIGN_IN, data={"token": TOKEN}, headers={"Origin": EVIL}).status_code
        == 403
    )


def test_wrong_tokens_are_counted_where_they_are_typed(world: World) -> None:
    def typed() -> int:
        return int(
            world.stranger.post(SIGN_IN, data={"token": "orc_wrong"}, headers=SAME_SITE).status_code
        )

    assert [typed() for _ in range(WRONG_TOKENS.amount + 2)] == [401] * WRONG_TOKENS.amount + [
        429
    ] * 2


def test_sign_in_leads_back_to_pages_of_this_service_alone(world: World) -> None:
    destinations = {
        f"{PAGES}/jobs/lm-1": f"{PAGES}/jobs/lm-1",
        EVIL: f"{PAGES}/overview",
        "//evil.example/ui/": f"{PAGES}/overview",
        f"{PAGES}/..\\evil": f"{PAGES}/overview",
    }
    for came_from, leads_to in destinations.items():
        answer = world.stranger.post(
            SIGN_IN,
            data={"token": TOKEN, "next": came_from},
            headers=SAME_SITE,
            follow_redirects=False,
        )
        assert answer.headers["location"] == leads_to


def test_a_stream_that_resumes_hears_at_once_of_what_it_missed(world: World) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with serve_http(world.app) as port:
        url = f"http://127.0.0.1:{port}{PAGES}/events"
        world.submit()
        version = world.controller.wait_for_change(-1, 0.0)
        with httpx.stream(
            "GET", url, headers={**headers, "Last-Event-ID": str(version - 1)}, trust_env=False
        ) as stream:
            first_id = next(line for line in stream.iter_lines() if line.startswith("id:"))
    assert first_id == f"id: {version}"


def test_a_stream_hears_of_a_change_as_it_happens(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WAIT_S", 3600.0)  # it looks by itself once an hour
    headers = {"Authorization": f"Bearer {TOKEN}"}
    version = world.controller.wait_for_change(-1, 0.0)
    with serve_http(world.app) as port:
        url = f"http://127.0.0.1:{port}{PAGES}/events?seen={version}"
        with httpx.stream("GET", url, headers=headers, trust_env=False, timeout=10.0) as stream:
            lines = stream.iter_lines()
            next(lines)
            world.submit()
            assert next(line for line in lines if line.startswith("id:")) == f"id: {version + 1}"


# ------------------------------------------------------------------------------------------------------------ charts


def test_a_chart_says_what_it_shows_to_those_who_cannot_see_it() -> None:
    curve = draw_curves("Loss", [Line("attempt <1>", "series-0", [(1.0, 4.0), (2.0, 3.0)])])
    assert 'role="img"' in curve
    assert "attempt &lt;1&gt;: 4 at step 1 to 3 at step 2" in curve
    bars = draw_waterfall(
        [Cause("weights", 2**20), Cause("gradients", 2**21)], 3 * 2**20, None, None
    )
    assert "weights 1.00 MiB; gradients 2.00 MiB; predicted peak 3.00 MiB" in bars


def test_ticks_of_steps_are_integers() -> None:
    for last in (2, 3, 13, 15, 130):
        chart = draw_curves("Loss", [Line("one", "series-0", [(1.0, 4.0), (float(last), 3.0)])])
        assert all(
            tick.isdecimal() for tick in re.findall(r'text-anchor="middle">([^<]*)<', chart)
        ), last


def test_a_bar_shows_what_others_wrote_as_text() -> None:
    bar = Bar(lane=0, from_s=0.0, until_s=9.0, tone="good", tooltip=HOSTILE, label="<b>")
    chart = draw_gantt("Ran", ["a"], [bar], 0.0, 9.0, 9.0, [])
    assert "&lt;b&gt;" in chart
    assert "<script" not in chart


def test_a_job_shows_the_memory_of_its_steps(site: Site) -> None:
    page = site.world.client.get(f"{PAGES}/jobs/lm-1").text
    assert "attempt 1: 0.5 GiB at step 1 to 4 GiB at step 8" in page
    assert "512.00 MiB" in page, "as a table, too"


def test_a_chart_of_nothing_is_nothing_and_a_flat_curve_is_drawn() -> None:
    assert draw_curves("Loss", [Line("attempt 1", "series-0", [])]) == ""
    for points in (
        [(5.0, 0.0)],
        [(1.0, 2.0), (9.0, 2.0)],
        [(float(n), float(n)) for n in range(5000)],
    ):
        assert "nan" not in draw_curves("Loss", [Line("one", "series-0", points)])


@pytest.mark.long
def test_a_page_of_a_queue_of_5000_is_there_within_300_ms_while_its_forecast_is_reckoned(
    world: World,
) -> None:
    for _ in range(10):
        answer = world.client.post("/jobs/batch", json={"jobs": [{"spec": job_spec()}] * 500})
        assert answer.status_code == 200, answer.text
    took_s = []
    for number in range(1, 12):
        began_s = time.perf_counter()
        page = world.client.get(f"{PAGES}/queue?page={number}")
        took_s.append(time.perf_counter() - began_s)
        assert page.text.count('href="/ui/jobs/') == 50
    print(f"pages of 5,000 jobs took {[f'{1000 * page_s:.0f} ms' for page_s in took_s]}")
    assert sorted(took_s)[len(took_s) // 2] < 0.3


def test_no_page_waits_for_a_forecast_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second page finds what is known, and the first one is not held up for long."""
    is_over = threading.Event()
    monkeypatch.setattr(forecasts, "list_expected_jobs", lambda *_, **__: is_over.wait(60.0) and [])
    newest = forecasts.Forecasts(State)
    try:
        began_s = time.perf_counter()
        assert [newest.find_newest_forecast() for _ in range(200)] == [{}] * 200
        assert time.perf_counter() - began_s < 20 * forecasts.PATIENCE_S
    finally:
        is_over.set()


def _token(world: World, role: Role) -> str:
    name = "ada" if role is Role.VIEWER else role.value
    world.accounts.set_user(name, role)
    return world.accounts.create_token(name, 3600.0)[0]
