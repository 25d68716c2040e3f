"""Laws of the notifier: late jobs and the morning report are told once, and the whole service tells what failed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.notify.notice import make_notice
from orchestrator.backends.notify.targets import make_targets
from orchestrator.cli import main
from orchestrator.service.client.client import Client, process_is_alive, read_service_file
from orchestrator.service.client.lifecycle import start_service, stop_service
from orchestrator.service.intake.intake import read_cluster
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.notifier import Notifier
from orchestrator.specs.access import Role
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.notify import NotifySpec
from orchestrator.specs.parse import parse_job
from orchestrator.specs.replace import replace
from tests.backends.ray_jobs import until
from tests.backends.test_notify import PRIVATE_PATH, SECRET, Hook
from tests.scheduling.faulty_world import FaultyBackend
from tests.service.worlds import World

ROOT = Path(__file__).parents[2]
DAY_S = 86_400.0
SEVEN_S = 1_800_000_000.0 // DAY_S * DAY_S + 7 * 3600  # seven o'clock UTC of a day
NOTIFY = {
    "targets": [{"name": "hook", "webhook": "ORC_URL", "signed_with": "ORC_SECRET"}],
    "report_at": "07:00",
    "allow_hosts": ["localhost"],
}


@pytest.fixture
def hook() -> Iterator[Hook]:
    opened = Hook()
    yield opened
    opened.close()


class Watched:
    """A notifier over a simulated cluster, at a time of the day that the test sets."""

    def __init__(self, home: Path, now_s: float, **settings: Any) -> None:
        self.now_s = now_s
        self.spec = NotifySpec.model_validate(NOTIFY | settings)
        self.journal = Journal(f"sqlite:///{home / 'journal.sqlite'}")
        self.journal.outbox.register_receivers(["mlflow"])
        self.journal.notices.register_receivers(["hook"])
        self.backend = FaultyBackend(read_cluster(None), seed=0, hazards={}, repeat_chance=0.0)
        self.controller = Controller(self.journal, self.backend, lambda: self.now_s)
        self.controller.run_once(0.0)
        targets = make_targets(self.spec, "c", {})
        self.notifier = Notifier(
            self.spec, targets, self.journal.notices, self.controller, lambda: self.now_s, list
        )

    def pending_notices(self) -> list[tuple[str, str]]:
        self.notifier.send_due_notices()
        return [
            (notice.kind, notice.title)
            for _, notice in self.journal.notices.list_pending("hook", 99)
        ]

    def pending_kinds_at(self, now_s: float) -> list[str]:
        self.now_s = now_s
        return [kind for kind, _ in self.pending_notices()]


def test_the_report_comes_at_its_hour_once_a_day_and_not_before_the_first_one(
    tmp_path: Path,
) -> None:
    with closing((watched := Watched(tmp_path, SEVEN_S + 3 * 3600)).journal):
        assert watched.pending_notices() == [], "the hour before the first start"
        assert watched.pending_kinds_at(SEVEN_S + DAY_S - 1) == []
        assert watched.pending_kinds_at(SEVEN_S + DAY_S) == ["report"]
        assert watched.pending_kinds_at(SEVEN_S + DAY_S + 60) == ["report"], "it was told twice"
        assert watched.pending_kinds_at(SEVEN_S + 2 * DAY_S + 5) == ["report"] * 2


def test_a_report_that_was_due_while_the_service_was_down_comes_when_it_is_up_again(
    tmp_path: Path,
) -> None:
    with closing((watched := Watched(tmp_path, SEVEN_S + 60)).journal):
        assert watched.pending_notices() == []
    with closing((watched := Watched(tmp_path, SEVEN_S + DAY_S + 1800)).journal):
        assert [kind for kind, _ in watched.pending_notices()] == ["report"]
    with closing((watched := Watched(tmp_path, SEVEN_S + DAY_S + 3600)).journal):
        assert [kind for kind, _ in watched.pending_notices()] == ["report"], (
            "told again after a restart"
        )


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "UTC", "Asia/Kathmandu"])
def test_over_a_year_there_is_one_report_a_day_also_where_clocks_change(
    tmp_path: Path, zone: str
) -> None:
    with closing((watched := Watched(tmp_path, SEVEN_S, report_at=f"07:00 {zone}")).journal):
        due = {
            watched.notifier._compute_last_report_due_s(SEVEN_S + hour * 3600)
            for hour in range(365 * 24)
        }
    gaps = [later - earlier for earlier, later in zip(sorted(due), sorted(due)[1:], strict=False)]
    assert len(due) in (365, 366)
    assert {round(gap / 3600) for gap in gaps} <= {23, 24, 25}


# a step of a virtual device is told where it was measured, or declared as here
TIMED = "name: lm\ncommand: sleep 1\nglobal_batch_size: 8\nspeeds: {1: 1s}\n"


def test_a_job_that_will_miss_its_deadline_is_told_once_and_one_that_will_not_is_not(
    tmp_path: Path,
) -> None:
    with closing((watched := Watched(tmp_path, SEVEN_S)).journal):
        for steps, deadline in ((1_000_000_000, "07:01"), (2, "06:00")):
            text = f"{TIMED}steps: {steps}\ndeadline: '{deadline}'\n"
            watched.controller.submit(parse_job(text, "job.yaml"))
        watched.controller.run_once(0.0)
        assert watched.pending_notices() == [("late", "lm-1 will be late")]
        assert watched.pending_notices() == [("late", "lm-1 will be late")], "told twice"


def test_rows_that_cannot_be_read_are_told_once(tmp_path: Path) -> None:
    with closing((watched := Watched(tmp_path, SEVEN_S)).journal):
        watched.journal.set_aside.set_aside_row("jobs", 1, "{", "no JSON")
        expected = [("unreadable", "The journal has unreadable rows")]
        assert [watched.pending_notices(), watched.pending_notices()] == [expected, expected]


def test_a_driver_that_breaks_is_told_once_each_time_it_breaks(tmp_path: Path) -> None:
    def see(at_s: float, *errors: str) -> None:
        watched.now_s = at_s
        (node,) = watched.controller.state.declared
        free_bytes = tuple(0 if error else node.device.memory for error in errors)
        node = replace(node, free_bytes=free_bytes, driver_errors=errors)
        event = NodesSeen(nodes=(node,), declared=watched.controller.state.declared, at_s=at_s)
        watched.controller._apply_events([event])

    with closing((watched := Watched(tmp_path, SEVEN_S)).journal):
        see(SEVEN_S, "GPU is lost", "GPU is lost")
        assert watched.pending_kinds_at(SEVEN_S + 20) == [], "one reading that failed is no news"
        assert watched.pending_notices() == []
        first = ("driver", "virtual has devices that cannot be read")
        for later_s in (30, 50, 1000):
            see(SEVEN_S + later_s, "GPU is lost", f"failed at {later_s}")
            assert watched.pending_notices() == [first]
        see(SEVEN_S + 2000, "", "")
        assert watched.pending_notices() == [first], "that it is back is told by nothing"
        see(SEVEN_S + 3000, "", "GPU is lost")
        watched.now_s += 30
        assert watched.pending_notices() == [first, first]
        (_, message), _ = watched.journal.notices.list_pending("hook", 99)
        assert "device 0 of virtual (GPU is lost)" in message.text


def test_a_target_is_tried_by_an_operator_and_its_problem_is_told_without_its_url(
    tmp_path: Path, hook: Hook
) -> None:
    world = World(tmp_path)
    spec = NotifySpec.model_validate(NOTIFY)
    targets = make_targets(spec, "c", {"ORC_URL": hook.url, "ORC_SECRET": SECRET})
    notifier = Notifier(
        spec, targets, world.journal.notices, world.controller, lambda: SEVEN_S, list
    )
    assert notifier.send_test_notices([]) == {"hook": None}
    (_, body), *_ = hook.got
    assert json.loads(body)["type"] == "orc.test"
    hook.status = 404
    assert notifier.send_test_notices(["hook"]) == {"hook": "it answered 404"}
    with pytest.raises(SpecError, match="no such target"):
        notifier.send_test_notices(["hok"])
    assert world.by(Role.MEMBER).post("/notify/test", json={}).status_code == 403
    assert world.by(Role.OPERATOR, "ben").post("/notify/test", json={}).json() == {"problems": {}}
    world.journal.close()


def test_a_test_is_another_notice_each_time_and_waits_in_no_queue() -> None:
    first, second = (make_notice("test", key, 0.0, "t", "t", {}) for key in ("a", "b"))
    assert first.id != second.id


def send_test_notice(home: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and output of `orc notify test`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["notify", "test", "hook", "--home", str(home)])
    return ended.value.code, capsys.readouterr().out


@pytest.mark.long
def test_a_job_that_fails_while_the_hook_is_down_is_told_after_a_restart_of_the_whole_service(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hook.close()  # its port refuses from now on
    home, cluster = tmp_path / "home", tmp_path / "cluster.yaml"
    cluster_spec = yaml.safe_load((ROOT / "clusters" / "two-virtual-devices.yaml").read_text())
    cluster.write_text(yaml.safe_dump(cluster_spec | {"trackers": ["jsonl"], "notify": NOTIFY}))
    monkeypatch.setenv("ORC_URL", hook.url)
    monkeypatch.setenv("ORC_SECRET", SECRET)
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nassert not [name for name in os.environ if name in ('ORC_URL', 'ORC_SECRET')]\n1 / 0\n"
    )
    job = parse_job(
        "name: bug\ngpus: 1\nglobal_batch_size: 8\ncommand: [python, train.py]\n",
        str(tmp_path / "j.yaml"),
    )
    start_service(home, cluster, None)
    try:
        with closing(Client(home)) as client:
            bug = client.submit_job(
                job.model_copy(update={"workdir": str(tmp_path)}).model_dump(mode="json"), None
            )
            until(
                lambda: client.fetch_job_and_version(bug)[0]["status"] == "failed",
                "the job's end",
                60,
            )
        assert send_test_notice(home, capsys) == (1, "hook: Connection refused\n")
        pid = int(read_service_file(home)["pid"])
        os.kill(pid, signal.SIGTERM)
        until(lambda: not process_is_alive(pid), "the service's end", 60)
        back = Hook(port=hook.port)
        start_service(home, None, None)
        until(lambda: back.got, "the notice", 60)
        assert send_test_notice(home, capsys) == (0, "hook: delivered\n")
        back.close()
    finally:
        stop_service(home, force=True)
    (_, body), *_ = back.got
    notice = json.loads(body)
    assert (notice["type"], notice["data"]["job"], notice["data"]["status"]) == (
        "orc.failed",
        bug,
        "failed",
    )
    assert "ZeroDivisionError" in notice["data"]["reason"], notice
    for path in home.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert PRIVATE_PATH.encode() not in content, path
            assert SECRET.encode() not in content, path
