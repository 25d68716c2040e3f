"""Laws of the words of other tools: each leads to a command of ours, and none hides one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.main
from fastapi.testclient import TestClient

from orchestrator.cli import app, main
from orchestrator.service.terminal.command_group import OTHERS, PANELS
from orchestrator.service.terminal.synonyms import load_our_command_by_foreign_words
from tests.service.worlds import World

GUIDE = (Path(__file__).parents[2] / "docs/guides/coming-from.md").read_text()


def test_each_word_of_another_tool_is_no_command_of_ours_and_leads_to_one() -> None:
    group = typer.main.get_command(app)
    for word, (command, _) in load_our_command_by_foreign_words().items():
        first = command.split()[0]
        assert word not in group.commands, word  # type: ignore[attr-defined]
        assert first in group.commands or first.startswith("--"), (word, command)  # type: ignore[attr-defined]


def test_each_command_is_in_one_panel_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for panel in PANELS.values() for name in panel]
    assert sorted(names) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert [panel for panel in PANELS if panel not in printed] == []
    assert OTHERS not in printed


@pytest.mark.parametrize(
    ("word", "meant"), [("squeue", "`orc queue`"), ("SBATCH", "`orc submit FILE`")]
)
def test_a_word_of_another_tool_is_answered_by_its_meaning(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word, "job.yaml"])
    assert ended.value.code == 2
    assert meant in capsys.readouterr().err


def test_an_error_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "/no/such/file.yaml", "--json"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "/no/such/file.yaml" in json.loads(printed.err)["error"]


def test_an_unknown_job_is_answered_with_the_newest_ids_of_that_name(world: World) -> None:
    ids = [world.submit() for _ in range(4)]
    client: TestClient = world.client
    assert f"did you mean {', '.join(reversed(ids[1:]))}?" in client.get("/jobs/lm").json()["error"]
    assert f"did you mean {ids[0]}" in client.get(f"/jobs/{ids[0]}x").json()["error"]
    assert "did you mean" not in client.get("/jobs/quite-another").json()["error"]


@pytest.mark.parametrize(
    ("word", "command", "tool"),
    [(word, *answer) for word, answer in load_our_command_by_foreign_words().items()],
)
def test_the_guide_for_users_of_a_tool_has_its_words_and_ours(
    word: str, command: str, tool: str
) -> None:
    section = GUIDE.partition(f"\n## {tool}\n")[2].partition("\n## ")[0]
    parts = (*word.split(), f"orc {command.split()[0]}")
    assert not section or [part for part in parts if part not in section.lower()] == []
