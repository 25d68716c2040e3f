"""Laws of the journal: what was answered is there, in order, exactly, once, whatever happened to the process."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from orchestrator.backends.journal import journal as journal_module
from orchestrator.backends.journal.database import SCHEMA
from orchestrator.backends.journal.journal import Journal
from orchestrator.service.commands.replay import iterate_events, read_state
from orchestrator.specs.actions import Archive, Record
from orchestrator.specs.attempt import (
    Attempt,
    ErrorReport,
    Evidence,
    Heartbeat,
    NodeDevices,
    OomReport,
)
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceSpec, Node
from orchestrator.specs.errors import IllegalPlan, ServiceError, SpecError
from orchestrator.specs.events import Event, Finished, Submitted, TimerFired
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.report_bounds import bound_report
from orchestrator.specs.state import State
from tests.backends.postgres import Server

DEVICE = DeviceSpec(
    name="tiny",
    kind="virtual",
    memory="1GiB",
    bf16_tflops=0.1,
    fp32_tflops=1 / 3,
    memory_bandwidth="10GB/s",
    link_bandwidth="1GB/s",
)
SCRIPT = JobSpec(
    name="script",
    global_batch_size=8,
    command="python 'a b.py' --lr 1e-3",
    env={"B": "2", "A": "1"},
    secrets=("TOKEN",),
    gpus={"min": 1, "max": 4},
    knobs={
        "micro_batch_size": {"flag": "--bs", "default": 8},
        "precision": {"env": "DTYPE", "default": "float", "values": {"bf16": "bfloat16"}},
    },
    success={"artifacts": ("model.pt",)},
    profile={
        "parameters": 10**9,
        "activations_per_sample": "1.5GiB",
        "forward_flops_per_sample": 1e12,
    },
    degrade={"allow": "semantic", "sequence_lengths": (64, 32)},
    hang_timeout="16.1min",  # 966.0000000000001 seconds
    depends_on=["other-1", {"job": "other-2", "when": "always"}],
    start_window="22:00-08:00 Europe/Berlin mon-fri",
    deadline="08:00 Europe/Berlin",
    priority="high",
    user="ada",
)
DECODER = JobSpec(
    name="decoder",
    family="gpt",
    global_batch_size=4,
    model=ModelSpec(
        decoder=DecoderSpec(
            vocab_size=256,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ),
    data=DataSpec(text=("a.txt",), sequence_length=64),
    training=TrainingSpec(learning_rate=1 / 3),
)
FACTORY = JobSpec(
    name="factory",
    global_batch_size=1,
    model=ModelSpec(factory="m.py:make", config={"layers": [1, {"width": 0.1}], "name": None}),
    profile={"parameters": 0, "activations_per_sample": "0B"},
)
POLICY = PolicySpec(
    half_life="7d", teams=[{"name": "vision", "shares": 2, "quota": 4, "users": ["ada"]}]
)
ATTEMPT = Attempt(
    job_id="j",
    number=1,
    plan=Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=3), micro_batch_size=1),
    placement=(NodeDevices(node="a", devices=(0, 1, 2)),),
    device=DEVICE.name,
    estimate=MemoryEstimate(
        moment="m", by_cause=(), allocated_bytes=0, reserved_bytes=0, device_bytes=0
    ),
    correction=1.0,
    step_s=0.1,
    launched_at_s=0.0,
)


def _legal_plans() -> Iterator[Plan]:
    axes = (Engine, ZeroStage, Offload, ActivationCheckpointing, Precision, (None, 64))
    for engine, zero_stage, offload, checkpointing, precision, length in itertools.product(*axes):
        try:
            yield Plan(
                engine=engine,
                layout=ParallelLayout(dp=2),
                zero_stage=zero_stage,
                offload=offload,
                micro_batch_size=2,
                gradient_accumulation_steps=3,
                activation_checkpointing=checkpointing,
                precision=precision,
                sequence_length=length,
            )
        except IllegalPlan:
            continue


numbers = st.floats(allow_nan=False)
estimates = st.lists(st.tuples(st.text(), st.integers(0, 2**50)), max_size=3).map(
    lambda causes: MemoryEstimate(
        moment="optimizer step",
        by_cause=tuple(causes),
        allocated_bytes=sum(count for _, count in causes),
        reserved_bytes=2**52,
        device_bytes=2**53,
    )
)
st.register_type_strategy(float, numbers)
st.register_type_strategy(Plan, st.sampled_from(list(_legal_plans())))
st.register_type_strategy(MemoryEstimate, estimates)
st.register_type_strategy(JobSpec, st.sampled_from([SCRIPT, DECODER, FACTORY]))
st.register_type_strategy(DeviceSpec, st.just(DEVICE))
for report in (
    Heartbeat,
    OomReport,
    ErrorReport,
):  # what ranks report is within its bounds before it is an event
    st.register_type_strategy(report, st.builds(report).map(bound_report))
st.register_type_strategy(PolicySpec, st.just(POLICY))


def build(noun: type) -> st.SearchStrategy:
    """Instances of a frozen noun with every field drawn, defaults included."""
    return st.builds(noun, **{name: ... for name in noun.__dataclass_fields__ if name != "type"})


attempts = build(Attempt)
jobs = st.builds(
    Job,
    id=st.integers(1, 10**9).map("lm.x_y-{}".format),
    spec=...,
    order=...,
    submitted_at_s=...,
    status=...,
    reason=...,
    attempts=st.lists(attempts, max_size=2).map(tuple),
    refuted=...,
    fault=...,
)
states = st.builds(
    State,
    jobs=st.lists(jobs, max_size=2, unique_by=lambda job: job.id).map(
        lambda jobs: {job.id: job for job in jobs}
    ),
    submitted=...,
    nodes=st.lists(build(Node), max_size=2).map(tuple),
    observations=...,
    at_s=...,
)


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a journal that does not exist yet."""
    if request.param == "sqlite":
        return url(tmp_path)
    return request.getfixturevalue("postgres").new_database()


@pytest.fixture
def journal(address: str) -> Iterator[Journal]:
    with closing(Journal(address)) as opened:
        yield opened


@pytest.fixture
def file_journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(url(tmp_path))) as opened:
        yield opened


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/journal.db"


@hypothesis_settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    event=st.one_of([build(noun) for noun in Event.__args__]),
    job=jobs,
    attempt=st.none() | attempts,
    state=states,
)
def test_every_event_record_and_state_comes_back_equal(
    journal: Journal, event: Event, job: Job, attempt: Attempt | None, state: State
) -> None:
    if (
        isinstance(event, Submitted) and event.request is not None
    ):  # one journal sees all cases, and a key once
        event = replace(event, request=replace(event.request, name=uuid4().hex))
    record = Record(job=job, attempt=attempt)
    journal.append([(event, [record])])
    *_, last = journal.iterate_events()
    ((row, stored),) = journal.outbox.list_pending("mlflow", 10)
    journal.outbox.mark_delivered("mlflow", [row])
    journal.store_snapshot(state)

    assert last == event
    assert stored == record
    assert journal.load_state_and_events() == (state, ())
    assert hash(stored.job.spec) == hash(record.job.spec)


def test_a_loss_that_is_not_a_number_stays_one(journal: Journal) -> None:
    event = Finished(job_id="a", number=1, at_s=float("nan"), evidence=Evidence())
    journal.append([(event, ())])
    (stored,) = journal.iterate_events()
    assert stored.at_s != stored.at_s


def test_load_gives_the_newest_snapshot_and_only_the_events_after_it(journal: Journal) -> None:
    assert journal.load_state_and_events() == (None, ())
    for at_s in range(4):
        journal.append([(TimerFired(at_s=at_s), ())])
        if at_s < 3:
            journal.store_snapshot(State(at_s=at_s))
            journal.store_snapshot(State(at_s=at_s + 0.5))
    assert journal.load_state_and_events() == (State(at_s=2.5), ((TimerFired(at_s=3), ""),))
    assert [event.at_s for event in journal.iterate_events()] == [0, 1, 2, 3]


def test_snapshots_are_bounded(file_journal: Journal) -> None:
    for at_s in range(9):
        file_journal.append([(TimerFired(at_s=at_s), ())])
        file_journal.store_snapshot(State(at_s=at_s))
    with closing(sqlite3.connect(file_journal.name)) as other:
        assert other.execute("SELECT count(*) FROM snapshots").fetchone() == (1,)


def job(number: int, **fields: object) -> Job:
    return Job(
        **{"id": f"j-{number}", "spec": SCRIPT, "order": number, "submitted_at_s": number, **fields}
    )


def test_a_snapshot_writes_the_jobs_that_changed_and_forgets_those_that_left(
    file_journal: Journal,
) -> None:
    state = State(jobs={str(number): job(number) for number in range(1000)})
    file_journal.append([(TimerFired(at_s=0), ())])
    file_journal.store_snapshot(state)
    with closing(sqlite3.connect(file_journal.name)) as other:
        other.execute("CREATE TABLE written (id TEXT)")
        for change in ("INSERT", "UPDATE"):
            other.execute(
                f"CREATE TRIGGER {change}_seen AFTER {change} ON live BEGIN INSERT INTO written VALUES (new.id); END"
            )
        other.commit()
        changed = (
            state.jobs.replace_job(job(7, reason="waits")).remove_job("j-9").replace_job(job(1000))
        )
        file_journal.store_snapshot(replace(state, jobs=changed))
        assert other.execute("SELECT id FROM written ORDER BY id").fetchall() == [
            ("j-1000",),
            ("j-7",),
        ]
    assert file_journal.load_state_and_events()[0] == replace(state, jobs=changed)


def test_an_ended_job_is_kept_with_its_event_and_found_by_id_and_by_age(journal: Journal) -> None:
    ended = [job(number, status=JobStatus.SUCCEEDED) for number in (3, 1, 2, 5, 4)]
    journal.append([(TimerFired(at_s=job.order), [Archive(job=job)]) for job in ended])
    assert journal.find_ended_job("j-2") == ended[2]
    assert journal.find_ended_job("j-9") is None
    assert journal.list_ended_jobs(2) == [ended[4], ended[3]]
    assert journal.list_ended_jobs(2, before_job_id="j-5") == [ended[2], ended[1]]
    assert journal.list_ended_jobs(2, before_job_id="j-3") == []
    with pytest.raises(ServiceError, match=r"(?i)unique"):
        journal.append([(TimerFired(at_s=9), [Archive(job=ended[0])])])
    assert len(list(journal.iterate_events())) == 5, "the event of a refused archive was kept"


def records_of(*orders: int) -> list[Record]:
    return [
        Record(job=Job(id=str(order), spec=SCRIPT, order=order, submitted_at_s=0))
        for order in orders
    ]


def waiting(journal: Journal, tracker: str) -> list[int]:
    return [record.job.order for _, record in journal.outbox.list_pending(tracker, 99)]


def test_the_outbox_is_oldest_first_bounded_and_forgets_what_was_delivered(
    journal: Journal,
) -> None:
    journal.append([(TimerFired(at_s=0), records_of(0, 1))])
    journal.append([(TimerFired(at_s=1), records_of(2, 3, 4))])
    first = journal.outbox.list_pending("mlflow", 3)
    assert [record for _, record in first] == records_of(0, 1, 2)
    journal.outbox.mark_delivered("mlflow", [number for number, _ in first])
    assert waiting(journal, "mlflow") == [3, 4]
    journal.outbox.mark_delivered(
        "mlflow", [number for number, _ in journal.outbox.list_pending("mlflow", 99)]
    )
    journal.append([(TimerFired(at_s=2), records_of(0))])
    assert journal.outbox.list_pending("mlflow", 99)[0][0] > 5, "a row's number was given twice"


def test_each_tracker_gets_every_row_and_a_row_stays_until_all_have_it(journal: Journal) -> None:
    journal.outbox.register_receivers(["mlflow", "jsonl"])
    journal.append([(TimerFired(at_s=0), records_of(0, 1, 2))])
    rows = [number for number, _ in journal.outbox.list_pending("mlflow", 99)]
    journal.outbox.mark_delivered("jsonl", rows)
    assert (waiting(journal, "mlflow"), waiting(journal, "jsonl")) == ([0, 1, 2], [])
    journal.outbox.mark_delivered("mlflow", rows[:1])
    assert (waiting(journal, "mlflow"), waiting(journal, "jsonl")) == ([1, 2], [])
    assert kept_rows(journal) == rows[1:], "rows that every tracker has are removed, and no other"


def test_a_new_tracker_begins_at_the_rows_that_are_there_and_one_taken_out_holds_none(
    journal: Journal,
) -> None:
    journal.append([(TimerFired(at_s=0), records_of(0, 1, 2))])
    rows = [number for number, _ in journal.outbox.list_pending("mlflow", 99)]
    journal.outbox.mark_delivered("mlflow", rows[:1])
    journal.outbox.register_receivers(["mlflow", "jsonl"])
    assert waiting(journal, "jsonl") == [1, 2]
    journal.outbox.mark_delivered("jsonl", rows[1:])
    journal.outbox.register_receivers(
        ["jsonl", "mlflow"]
    )  # as at every start: cursors stand where they stood
    assert (waiting(journal, "mlflow"), waiting(journal, "jsonl")) == ([1, 2], [])
    journal.outbox.register_receivers(["jsonl"])
    assert kept_rows(journal) == [], "a tracker that was taken out still holds rows"
    journal.append([(TimerFired(at_s=1), records_of(3))])
    journal.outbox.register_receivers(["jsonl", "mlflow"])
    assert waiting(journal, "mlflow") == [3]


def test_what_ran_comes_first_and_a_cursor_stands_before_the_oldest_row_that_a_tracker_lacks(
    journal: Journal,
) -> None:
    ran = [
        replace(record, job=replace(record.job, attempts=(ATTEMPT,))) for record in records_of(2, 3)
    ]
    journal.append([(TimerFired(at_s=0), [*records_of(0, 1), *ran])])
    rows = [number for number, _ in journal.outbox.list_pending("mlflow", 99)]
    assert waiting(journal, "mlflow") == [2, 3, 0, 1]
    journal.outbox.mark_delivered("mlflow", [rows[0], rows[3]])
    assert waiting(journal, "mlflow") == [3, 0]
    assert journal.count_rows().undelivered == {"mlflow": 2}
    assert len(kept_rows(journal)) == 4, "a row that a tracker may be sent again is gone"
    journal.outbox.mark_delivered("mlflow", [rows[2]])
    assert (waiting(journal, "mlflow"), kept_rows(journal)) == ([3], [rows[1]])


def kept_rows(journal: Journal) -> list[int]:
    with journal.database.transaction() as connection:
        return [
            row.id
            for row in connection.execute(sqlalchemy.text("SELECT id FROM outbox ORDER BY id"))
        ]


def test_more_events_than_one_page_come_back_in_order(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PAGE", 3)
    for at_s in range(7):
        journal.append([(TimerFired(at_s=at_s), ())])
    assert [event.at_s for event in journal.iterate_events()] == list(range(7))


def test_a_closed_journal_refuses_instead_of_writing_beside_its_next_owner(address: str) -> None:
    first = Journal(address)
    first.close()
    with pytest.raises(ServiceError, match="closed"):
        first.append([(TimerFired(at_s=1), ())])


def test_threads_append_without_losing_or_mixing(journal: Journal) -> None:
    def append(thread: int) -> None:
        for number in range(20):
            at_s = 100 * thread + number
            journal.append(
                [
                    (
                        TimerFired(at_s=at_s),
                        [Record(job=Job(id="j", spec=SCRIPT, order=at_s, submitted_at_s=0))],
                    )
                ]
            )

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    times = [event.at_s for event in journal.iterate_events()]
    assert sorted(times) == [100 * thread + number for thread in range(4) for number in range(20)]
    assert [record.job.order for _, record in journal.outbox.list_pending("mlflow", 99)] == times


def test_a_second_opener_is_told_who_has_the_journal(file_journal: Journal) -> None:
    with pytest.raises(ServiceError, match=rf"in use by process {os.getpid()}.*orc down"):
        Journal(f"sqlite:///{file_journal.name}")


def test_a_closed_journal_opens_again_quickly_with_everything(tmp_path: Path) -> None:
    with closing(Journal(url(tmp_path))) as first:
        first.append([(TimerFired(at_s=1), ())])
    began = time.monotonic()
    with closing(Journal(url(tmp_path))) as again:
        took_s = time.monotonic() - began
        assert again.load_state_and_events() == (None, ((TimerFired(at_s=1), ""),))
    assert took_s < 4, "0.014 s on an idle machine; a lock that stays is waited for 5 s"
    assert (tmp_path / "journal.db").stat().st_mode & 0o077 == 0, (
        "others may read the jobs' environments"
    )


def test_a_journal_of_a_newer_version_is_refused_unchanged(tmp_path: Path) -> None:
    Journal(url(tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as other, other:
        other.execute("UPDATE alembic_version SET version_num = '9999'")
    for _ in range(2):  # the refusal lets go of the file
        with pytest.raises(ServiceError, match="schema 9999"):
            Journal(url(tmp_path))


@pytest.mark.parametrize(
    "bad", ["sqlite://", "sqlite:///:memory:", "postgresql://u:hidden@h/d", "u:hidden@h"]
)
def test_other_databases_are_refused_without_showing_a_password(bad: str) -> None:
    with pytest.raises(SpecError) as raised:
        Journal(bad)
    assert "hidden" not in str(raised.value)


def test_a_postgresql_journal_is_read_while_its_service_has_it_and_never_written(
    postgres: Server,
) -> None:
    address = postgres.new_database()
    with pytest.raises(ServiceError, match="no tables"):
        Journal(address, reads_only=True)
    event = TimerFired(at_s=1.0)
    with closing(Journal(address)) as service:
        service.append([(event, ())])
        assert [stored for stored, _ in iterate_events(address)] == [event]
        assert read_state(address).at_s == 1.0
        with (
            closing(Journal(address, reads_only=True)) as reader,
            pytest.raises(ServiceError, match="read-only"),
        ):
            reader.append([(event, ())])
        service.append([(TimerFired(at_s=2.0), ())])  # it has never lost its lease
        assert len(list(service.iterate_events())) == 2


def test_the_newest_revision_is_the_one_the_journal_asks_for() -> None:
    config = Config()
    config.set_main_option(
        "script_location", str(Path(journal_module.__file__).with_name("migrations"))
    )
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA]


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.backends.journal_writer"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield process
        process.stdin.close()


def test_kill_9_loses_no_answered_append_and_leaves_none_half_written(
    tmp_path: Path, writers: subprocess.Popen[str]
) -> None:
    moments = random.Random(0)
    answered = tmp_path / "answered"
    answered.touch()
    for kill in range(25):
        size = answered.stat().st_size
        writers.stdin.write(f"append {tmp_path}\n")
        pid = int(writers.stdout.readline())
        if (
            kill >= 10
        ):  # the first ten die in the first open or soon after, the others while they append
            more, deadline_s = moments.randint(1, 60), time.monotonic() + 10
            while answered.stat().st_size < size + more and time.monotonic() < deadline_s:
                time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.03 if kill < 10 else 0.005))  # the moment to kill
        os.kill(pid, signal.SIGKILL)
        assert writers.stdout.readline() == "-9\n", "the writer had ended by itself"

        with closing(Journal(url(tmp_path))) as journal:
            times = [event.at_s for event in journal.iterate_events()]
            orders = [
                record.job.order for _, record in journal.outbox.list_pending("mlflow", 100_000)
            ]
            state, tail = journal.load_state_and_events()
        assert times == list(range(len(times)))
        assert orders == times, "an event without its outbox row, or the other way round"
        assert [event.at_s for event, _ in tail] == times[len(times) - len(tail) :]
        assert (state.at_s + 1 if state else 0) == len(times) - len(tail)
        assert {int(line) for line in answered.read_text().split()} <= set(times)
    assert len(times) > 15, "the writers were killed before they appended anything worth a test"


def test_a_full_disk_refuses_the_whole_append_and_keeps_what_was_there(
    tmp_path: Path, writers: subprocess.Popen[str]
) -> None:
    writers.stdin.write(f"fill {tmp_path}\n")
    assert int(writers.stdout.readline())
    assert writers.stdout.readline() == "0\n"
    number, message = (tmp_path / "refused").read_text().split(" ", 1)
    assert int(number) > 0
    assert "Free the disk" in message
    with closing(Journal(url(tmp_path))) as journal:
        assert [event.at_s for event in journal.iterate_events()] == list(range(int(number)))
        assert len(journal.outbox.list_pending("mlflow", 1000)) == int(number)


def test_placements_keep_their_order(journal: Journal) -> None:
    placement = (NodeDevices(node="b", devices=(1, 0)), NodeDevices(node="a", devices=(3,)))
    attempt = replace(ATTEMPT, placement=placement)
    journal.append(
        [
            (
                TimerFired(at_s=0),
                [Record(job=Job(id="j", spec=SCRIPT, order=0, submitted_at_s=0), attempt=attempt)],
            )
        ]
    )
    assert journal.outbox.list_pending("mlflow", 1)[0][1].attempt.placement == placement
