"""Laws of `orc report`: its span of time, its forms, and what the service answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from html.parser import HTMLParser

import pytest
from pydantic import TypeAdapter

from orchestrator.scheduling.reports.morning import MorningReport, ReportLine
from orchestrator.service.client.client import parse_answer
from orchestrator.service.server.ended import REPORT_S, REPORTS_MAX, Reports, make_report
from orchestrator.service.views.report import (
    SHOWN_MAX,
    format_html,
    format_markdown,
    make_report_sections,
    parse_since,
)
from orchestrator.specs.access import Role
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.replace import replace
from tests.service.worlds import World

NOW = datetime(2026, 11, 25, 7, 30)
HOSTILE = "<script>alert(1)</script> `x`\n# heading ![pixel](https://example.org/p.png)"


@pytest.fixture
def view(world: World) -> MorningReport:
    """The report of a service in which one job succeeded."""
    world.submit()
    world.turn_until("succeeded")
    answer = world.by(Role.VIEWER).get("/report?since_s=0")
    assert answer.status_code == 200, answer.text
    return TypeAdapter(MorningReport).validate_python(answer.json())


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("18:00", datetime(2026, 11, 24, 18)),
        ("07:30", NOW),
        ("6:15", datetime(2026, 11, 25, 6, 15)),
        ("12h", datetime(2026, 11, 24, 19, 30)),
        ("2026-11-23 18:00", datetime(2026, 11, 23, 18)),
        ("2026-11-23", datetime(2026, 11, 23)),
    ],
)
def test_since_is_the_last_such_time_a_duration_or_a_date(text: str, moment: datetime) -> None:
    assert parse_since(text, NOW.timestamp()) == moment.timestamp()


@pytest.mark.parametrize("text", ["", "25:00", "yesterday", "2027-01-01", "-3h", "9" * 400 + "h"])
def test_another_since_is_one_clear_error(text: str) -> None:
    with pytest.raises(SpecError, match="no moment in the past"):
        parse_since(text, NOW.timestamp())


def test_the_service_reports_the_job_that_succeeded_and_its_devices(view: MorningReport) -> None:
    assert [line.id for line in view.succeeded] == ["lm-1"]
    assert view.summary == "1 of 1 ended jobs succeeded."
    assert view.cost.trained_s == sum(
        len(span.devices) * (span.until_s - span.from_s) for span in view.spans
    )
    json.dumps(asdict(view))


def test_devices_were_not_idle_before_the_journal_began(world: World, view: MorningReport) -> None:
    """The service of `view` runs by a clock that begins with 0."""
    began_s = next(iter(world.journal.iterate_events())).at_s
    assert [
        world.controller.limit_report_start_s(began_s + asked_s) for asked_s in (-86400.0, 1.0)
    ] == [
        began_s,
        began_s + 1.0,
    ]
    report = make_report(world.controller, began_s - 86400.0, began_s + 60.0, ())
    lasted_s = report.until_s - report.since_s
    assert (report.since_s, lasted_s) == (began_s, 60.0)
    assert 0 < report.cost.idle_s <= sum(view.nodes.values()) * lasted_s


def test_who_asks_for_a_report_together_has_the_same_until_the_state_changes() -> None:
    made: list[float] = []

    def report(since_s: float) -> dict[str, float]:
        made.append(since_s)
        return {"since_s": since_s}

    reports = Reports(report)
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: reports.find_or_make_report(1, 100.0), range(400))]
    assert {answer["since_s"] for answer in answers} == {100.0}
    assert 1 <= len(made) <= 2  # 400 calls may stand on both sides of one boundary of REPORT_S
    for version in range(2, 50):
        reports.find_or_make_report(version, 100.0)
    assert len(made) >= 49, "a report of an earlier state is not shown"
    for number in range(10 * REPORTS_MAX):
        reports.find_or_make_report(50, number * REPORT_S)
        assert len(reports._reports) <= REPORTS_MAX


def test_an_infinite_or_negative_moment_is_refused(world: World) -> None:
    for text in ("inf", "nan", "-1", "x"):
        assert world.client.get(f"/report?since_s={text}").status_code == 422


class Tags(HTMLParser):
    """The tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        self.tags.add(tag)


def hostile(view: MorningReport) -> MorningReport:
    line = ReportLine(id=HOSTILE, name=HOSTILE, user=HOSTILE, sentence=HOSTILE)
    return replace(view, failed=(line,), to_do=(HOSTILE,), summary=HOSTILE)


def test_a_hostile_name_stays_text_in_html_and_in_markdown(view: MorningReport) -> None:
    page = Tags()
    page.feed(format_html(hostile(view)))
    assert "script" not in page.tags
    assert not page.tags & {"link", "img", "iframe", "style"}  # mail programs would drop them
    text = format_markdown(hostile(view))
    assert "\n# heading" not in text
    assert "<script" not in text.replace("`<script>", "")
    outside = [part for line in text.splitlines() for part in line.split("`")[::2]]
    assert not any("![" in part for part in outside)


def test_every_section_stands_in_both_forms_and_a_long_one_is_counted(view: MorningReport) -> None:
    many = [
        ReportLine(id=f"job-{number}", name="", user="", sentence="x")
        for number in range(SHOWN_MAX + 5)
    ]
    long = replace(view, waiting=tuple(many))
    for heading, _ in make_report_sections(long):
        assert f"## {heading}\n" in format_markdown(long)
        assert f"<h2>{heading} (" in format_html(long)
    assert "`...`: 5 more" in format_markdown(long)


def test_a_report_of_another_form_is_one_error_that_names_the_place(view: MorningReport) -> None:
    answer = asdict(view)
    assert parse_answer(MorningReport, answer) == view
    answer["cost"]["idle_s"] = "\x1b[2J"
    with pytest.raises(ServiceError, match=r"does not read: cost\.idle_s: ") as refused:
        parse_answer(MorningReport, answer)
    assert "\x1b" not in str(refused.value)
