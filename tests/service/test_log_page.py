"""Laws of the log page: a search is bounded and finds whole lines, and its offsets lead to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.service.pages.log import (
    MATCHES_MAX,
    SEARCH_BYTES,
    WINDOW_BYTES,
    find_line_offsets_and_texts,
    read_text_from,
)
from orchestrator.specs.access import Role
from orchestrator.specs.policy import UNSHARED, PolicySpec
from orchestrator.specs.run import JobFolder
from tests.service.test_access import TEAMS
from tests.service.worlds import World, job_spec


def reader(log: bytes, chunk_bytes: int) -> Callable[[int], bytes]:
    return lambda offset: log[offset : offset + chunk_bytes]


@given(st.lists(st.text(alphabet="aB x", max_size=9), max_size=40), st.integers(1, 50))
def test_a_search_finds_every_line_with_the_text_however_the_log_is_read(
    lines: list[str], chunk_bytes: int
) -> None:
    log = "\n".join(lines).encode()
    read = reader(log, chunk_bytes)
    matches = find_line_offsets_and_texts(read, len(log), "b")
    assert [line for _, line in matches] == [line for line in lines if "b" in line.lower()]
    for offset, line in matches:
        assert read_text_from(reader(log, len(log) + 1), offset).split("\n")[0] == line


def test_a_search_reads_a_bounded_part_and_returns_the_last_lines() -> None:
    log = b"early x\n" + b"y\n" * SEARCH_BYTES + b"late x\n" * 2 * MATCHES_MAX
    reads: list[int] = []

    def read(offset: int) -> bytes:
        reads.append(len(log[offset : offset + 2**18]))
        return log[offset : offset + 2**18]

    assert {line for _, line in find_line_offsets_and_texts(read, len(log), "x")} == {"late x"}
    assert len(find_line_offsets_and_texts(read, len(log), "x")) == MATCHES_MAX
    assert sum(reads) <= 2 * SEARCH_BYTES


def test_a_log_of_one_endless_line_is_searched_in_bounded_memory() -> None:
    log = b"z" * 2**20 + b"needle"
    assert find_line_offsets_and_texts(reader(log, 2**16), len(log), "needle")


@pytest.fixture
def logged(world: World) -> World:
    """A world with the job lm-1, whose log has 3,000 numbered lines."""
    world.submit()
    world.turn_until("running")
    folder = JobFolder(world.home, "lm-1").attempt(1)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.log(0).write_text("".join(f"line {number} of the log\n" for number in range(3000)))
    return world


def test_a_page_shows_the_end_and_follows_it_and_a_part_stays_as_it_is(logged: World) -> None:
    page = logged.client.get("/ui/jobs/lm-1/log").text
    assert "line 2999 of" in page
    assert "line 3 of" not in page
    assert "every 2s" in page
    page = logged.client.get("/ui/jobs/lm-1/log?from=0").text
    assert "line 3 of" in page
    assert "line 2999 of" not in page
    assert "hx-get" not in page
    assert f"from={WINDOW_BYTES}" in page


def test_a_found_line_leads_to_its_place(logged: World) -> None:
    page = logged.client.get("/ui/jobs/lm-1/log?find=LINE+17+of").text
    assert "1 line with" in page
    start = page.partition("from=")[2].partition('"')[0]
    assert (
        "line 17 of the log\nline 18" in logged.client.get(f"/ui/jobs/lm-1/log?from={start}").text
    )


@pytest.mark.parametrize("query", ["attempt=9", "rank=7", "attempt=0"])
def test_no_such_attempt_or_rank_is_a_page_that_says_so(logged: World, query: str) -> None:
    answer = logged.client.get(f"/ui/jobs/lm-1/log?{query}")
    assert answer.status_code == 404
    assert "there is no" in answer.text


@pytest.mark.parametrize(
    "query", ["rank=" + "9" * 5000, "from=" + "9" * 18, "from=x", "attempt=-1"]
)
def test_a_number_that_is_none_is_as_if_it_were_left_out(logged: World, query: str) -> None:
    assert logged.client.get(f"/ui/jobs/lm-1/log?{query}").status_code == 200


@pytest.mark.parametrize("policy", [TEAMS, UNSHARED], ids=["teams", "no teams"])
def test_logs_of_another_team_are_refused_as_its_output_is(
    tmp_path: Path, policy: PolicySpec
) -> None:
    """The API, a stream, the page and its search are tried; bob is of ada's team where there are teams."""
    world = World(tmp_path, policy)
    with closing(world.journal):
        ada = world.by(Role.MEMBER, "ada")
        job_id = ada.post("/jobs", json={"spec": job_spec()}).json()["id"]
        world.turn_until("running")
        folder = JobFolder(tmp_path, job_id)
        folder.output.mkdir(parents=True)
        log = folder.attempt(1).log(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("the secret of ada\n")
        of_team = 200 if policy.has_teams else 403
        readers = {
            ("ada", Role.MEMBER): 200,
            ("bob", Role.MEMBER): of_team,
            ("bob", Role.VIEWER): of_team,
            ("cyd", Role.MEMBER): 403,
            ("cyd", Role.VIEWER): 403,
            ("eve", Role.MEMBER): 403,  # of no team
            ("cyd", Role.OPERATOR): 200,
        }
        for (name, role), status in readers.items():
            reader = world.by(role, name)
            for path in (
                f"/jobs/{job_id}/attempts/1/logs",
                f"/jobs/{job_id}/attempts/1/logs?rank=0&offset=3",
                f"/jobs/{job_id}/attempts/1/logs/follow?wait_s=0",
            ):
                answer = reader.get(path)
                assert answer.status_code == status, (name, role, path, answer.text)
                assert ("secret" in answer.text) == (status == 200), (name, role, path)
            if role is not Role.VIEWER:
                assert reader.get(f"/jobs/{job_id}/output").status_code == status
            for query in ("", "?find=secret", "?from=0"):
                answer = reader.get(f"/ui/jobs/{job_id}/log{query}")
                assert ("secret of ada" in answer.text) == (status == 200), (name, role, query)
                assert ("jobs of its own team only" in answer.text) == (status == 403)
