"""The production controller on the simulated world: random jobs and clusters from a seed, played to their ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from orchestrator.backends.ports import EventAndDecisionText, Submission, Totals, format_decisions
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Action, Archive, Launch, Record
from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.clock import make_deadline
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec, Maintenance, NodeSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Event, RequestKey, Submitted
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.job.sections import Member
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Knob
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.policy import UNSHARED, Objective, PolicySpec
from orchestrator.specs.state import State
from tests.scheduling.faulty_world import FaultyBackend

TURNS_MAX = 20_000
EVENTS_MAX = 1000  # several times what a night of twelve jobs has
HOUR_S = 3600.0


class Killed(BaseException):
    """The service was killed at this very moment."""


@dataclass
class MemoryJournal:
    """The controller's journal in memory; `kill_before` and `kill_after` name events around which the service dies."""

    events: list[Event] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    archived: dict[str, Job] = field(default_factory=dict)  # in the order of their ends
    newest: tuple[State, int] | None = None
    kill_before: set[int] = field(default_factory=set)
    kill_after: set[int] = field(default_factory=set)

    def load_state_and_events(self) -> tuple[State | None, Sequence[EventAndDecisionText]]:
        state, count = self.newest or (None, 0)
        return state, list(zip(self.events, self.decided, strict=True))[count:]

    def confirm_ownership(self, *, may_wait: bool = True) -> None:
        pass

    def append(self, decided: Sequence[tuple[Event, Sequence[Action]]]) -> None:
        rows = range(len(self.events), len(self.events) + len(decided))
        if killed := self.kill_before.intersection(rows):
            self.kill_before -= killed
            raise Killed
        for event, actions in decided:
            assert len(self.events) < EVENTS_MAX, "events beget events"
            self.events.append(event)
            self.decided.append(format_decisions(actions))
            self.records += [action for action in actions if isinstance(action, Record)]
            for action in actions:
                if isinstance(action, Archive):
                    assert self.archived.setdefault(action.job.id, action.job) == action.job, (
                        "ended twice"
                    )
        if self.kill_after.intersection(rows):
            raise Killed

    def find_submissions(self, idempotency_keys: Sequence[str]) -> Mapping[str, Submission]:
        ids: dict[RequestKey, tuple[str, ...]] = {}
        for event in self.events:
            if (
                isinstance(event, Submitted)
                and event.request is not None
                and event.request.name in idempotency_keys
            ):
                ids[event.request] = (*ids.get(event.request, ()), event.job_id)
        return {key.name: Submission(digest=key.digest, ids=jobs) for key, jobs in ids.items()}

    def round_trip_event(self, event: Event) -> Event:
        return event

    def describe_unreadable_rows(self) -> str | None:
        return None

    def load_live_jobs(self) -> Jobs:
        return Jobs()

    def find_ended_job(self, job_id: str) -> Job | None:
        return self.archived.get(job_id)

    def list_ended_jobs(self, limit: int, before: str | None = None) -> list[Job]:
        jobs = list(self.archived.values())[::-1]
        return jobs[[job.id for job in jobs].index(before) + 1 if before else 0 :][:limit]

    def count_rows(self) -> Totals:
        return Totals(
            ended=Counter(job.status.value for job in self.archived.values()),
            undelivered={},
            notices={},
            oldest_notices_s={},
        )

    def read_first_event_at_s(self) -> float | None:
        return self.events[0].at_s if self.events else None

    def store_snapshot(self, state: State) -> None:
        self.newest = (state, len(self.events))


def device(name: str, memory: str, kind: str = "virtual") -> DeviceSpec:
    return DeviceSpec(
        name=name,
        kind=kind,
        memory=memory,
        bf16_tflops=0.05 if kind == "virtual" else 100,
        fp32_tflops=0.05 if kind == "virtual" else 50,
        memory_bandwidth="10GB/s",
        link_bandwidth="1GB/s",
    )


def cluster(*nodes: tuple[str, int, int, DeviceSpec]) -> ClusterSpec:
    """Nodes as (name, count, devices, device)."""
    return ClusterSpec(
        name="simulated",
        nodes=[
            NodeSpec(name=name, count=count, devices=devices, device=device, host_memory="64GiB")
            for name, count, devices, device in nodes
        ],
    )


CLUSTERS = (
    cluster(("one", 1, 1, device("small", "512MiB"))),
    cluster(("local", 1, 2, device("small", "512MiB"))),
    cluster(("node", 3, 2, device("small", "512MiB"))),
    cluster(
        ("big", 1, 4, device("large", "2GiB", "cuda")), ("node", 2, 2, device("small", "512MiB"))
    ),
)

SHARED = PolicySpec(
    half_life="10min",
    teams=[
        {"name": "vision", "shares": 2, "users": ["ada", "bob"]},
        {"name": "speech", "users": ["cyd"]},
    ],
)
OWNED = PolicySpec(
    half_life="10min",
    teams=[
        {"name": "vision", "users": ["ada", "bob"], "quota": 1},
        {"name": "speech", "users": ["cyd"], "quota": 1},
    ],
)
USERS = ("ada", "bob", "cyd", "dan", None)  # dan is in no team


def script(name: str, **fields: object) -> JobSpec:
    """A script whose declared profile needs about 180 MiB at one sample per rank."""
    return JobSpec(
        **{
            "name": name,
            "command": "python train.py",
            "global_batch_size": 8,
            "knobs": {
                "micro_batch_size": {"flag": "--batch"},
                "gradient_accumulation_steps": {"flag": "--accumulate"},
                "activation_checkpointing": {"switch": "--checkpoint"},
            },
            "profile": {
                "parameters": 8_000_000,
                "layers": 4,
                "activations_per_sample": "40MiB",
                "checkpointed_per_sample": "10MiB",
            },
            **fields,
        }
    )


def stranger(spec: JobSpec) -> JobSpec:
    """The same script, with unknown memory need."""
    knobs = spec.knobs.model_copy(update={"output_dir": Knob(flag="--output")})
    return spec.model_copy(
        update={"profile": None, "knobs": knobs, "family": f"unknown-{spec.name}"}
    )


def decoder(name: str, **fields: object) -> JobSpec:
    """A small decoder for our engines."""
    return JobSpec(
        **{
            "name": name,
            "global_batch_size": 8,
            "model": {
                "decoder": {
                    "vocab_size": 256,
                    "hidden_size": 512,
                    "intermediate_size": 1408,
                    "num_hidden_layers": 8,
                    "num_attention_heads": 8,
                }
            },
            "data": {"text": ("/corpus.txt",), "sequence_length": 256},
            **fields,
        }
    )


def too_large(name: str, **fields: object) -> JobSpec:
    """More parameters than any plan can put on our devices."""
    profile = {"parameters": 4_000_000_000, "layers": 4, "activations_per_sample": "1GiB"}
    return script(name, profile=profile, **fields)


class MortalBackend(FaultyBackend):
    """The simulated world, where the service dies just before performing some launches, counted from 0."""

    kill_at_launches: Collection[int] = ()
    launches = 0

    def begin(self, at_s: float) -> None:
        """The world begins at this time."""
        self._now_s = at_s

    def launch(self, action: Launch) -> None:
        self.launches += 1
        if self.launches - 1 in self.kill_at_launches:
            raise Killed
        super().launch(action)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Jobs with their times, later cancels and drains, and the chances of failures."""

    cluster: ClusterSpec
    jobs: tuple[tuple[float, JobSpec, Fault | None], ...]  # submitted when, in order
    cancels: tuple[tuple[float, int], ...]  # when, which job by position
    drains: tuple[tuple[float, str, bool], ...] = ()  # when, which node, and whether it is undone
    changes: tuple[
        tuple[float, Callable[[Controller], object]], ...
    ] = ()  # when, and what people do then
    hazards: Mapping[FailureKind, float]
    repeat_chance: float
    seed: int
    begin_s: float = 0.0  # of the night, in seconds since the epoch; all other times count from it


CALM: Mapping[FailureKind, float] = {}
STORM = {
    FailureKind.HOST_OOM: 0.1,
    FailureKind.MEMORY_CONTENTION: 0.1,
    FailureKind.NODE_LOST: 0.1,
    FailureKind.PREEMPTED: 0.15,
    FailureKind.HUNG: 0.1,
    FailureKind.STARTUP: 0.1,
    FailureKind.DISK_FULL: 0.03,
    FailureKind.GUARD_ABSENT: 0.03,
    FailureKind.USER_ERROR: 0.1,
}


def with_objective(cluster: ClusterSpec, objective: Objective) -> ClusterSpec:
    """The cluster whose queue has this objective."""
    policy = cluster.policy.model_copy(update={"objective": objective})
    return cluster.model_copy(update={"policy": policy})


def aimed(scenario: Scenario) -> Scenario:
    """The scenario with an objective: every second one aims at the makespan."""
    objective = random.Random(scenario.seed).choice(tuple(Objective))
    return replace(scenario, cluster=with_objective(scenario.cluster, objective))


def random_scenario(draw: random.Random, jobs: int = 8) -> Scenario:
    """Jobs of several shapes and families within a simulated hour; every second world is stormy, or shared."""
    chosen = draw.choice(CLUSTERS)
    most = max(node.devices * node.count for node in chosen.nodes)
    submissions = sorted(
        draw.uniform(0, HOUR_S) if draw.random() < 0.7 else 0.0 for _ in range(jobs)
    )
    arrivals = [(at_s, random_job(draw, most), random_fault(draw)) for at_s in submissions]
    sharing = random.Random(repr(arrivals))
    scenario = Scenario(
        cluster=chosen.model_copy(
            update={"policy": sharing.choice((UNSHARED, UNSHARED, SHARED, OWNED))}
        ),
        jobs=tuple(
            (
                at_s,
                (stranger(spec) if index % 3 == 0 and spec.is_script else spec).model_copy(
                    update={"user": sharing.choice(USERS)}
                ),
                fault,
            )
            for index, (at_s, spec, fault) in enumerate(arrivals)
        ),
        cancels=tuple(
            (at_s + draw.uniform(0, 600), index)
            for index, at_s in enumerate(submissions)
            if draw.random() < 0.15
        ),
        hazards=draw.choice((CALM, STORM)),
        repeat_chance=draw.choice((0.0, 0.3)),
        seed=draw.randint(0, 2**32),
    )
    scenario = timed(scenario, random.Random(scenario.seed))
    cluster = maintained(draw, chosen, scenario.begin_s)
    return aimed(replace(scenario, cluster=cluster, drains=random_drains(draw, chosen)))


# An hour or two past midnight of an ordinary day, and of days on which clocks are put forward or
# back soon after
NIGHTS = {
    "UTC": (7200.0,),
    "Europe/Berlin": (1774738800.0, 1792882800.0),
    "America/New_York": (1772948700.0,),
}
HOURS = ("02:00-02:30", "02:20-03:10", "02:50-02:10", "23:00-01:00", "03:00-04:00 sun")

DEADLINES = ("01:00", "02:30", "02:45", "12:00")


def timed(scenario: Scenario, draw: random.Random) -> Scenario:
    """Return the scenario on another night; some jobs depend on others, and some start within hours only."""
    zone = draw.choice(list(NIGHTS))
    jobs: list[tuple[float, JobSpec, Fault | None]] = []
    for at_s, spec, fault in scenario.jobs:
        fields: dict[str, object] = {}
        if jobs and draw.random() < 0.25:
            number = draw.randint(1, len(jobs))
            fields["depends_on"] = (
                {
                    "job": f"{jobs[number - 1][1].name}-{number}",
                    "when": draw.choice(("success", "always")),
                },
            )
        if draw.random() < 0.25:
            fields["start_window"] = f"{draw.choice(HOURS)} {zone}"
        if draw.random() < 0.25:
            fields["deadline"] = f"{draw.choice(DEADLINES)} {zone}"
        jobs.append((at_s, JobSpec.model_validate(spec.model_dump() | fields), fault))
    if len(jobs) > 1 and draw.random() < 0.3:  # some that follow each other are an array
        first, at_most = draw.randrange(len(jobs) - 1), draw.randint(1, 2)
        count = draw.randint(2, min(4, len(jobs) - first))
        at_s, spec, _ = jobs[first]
        for number in range(count):
            member = Member(number=number, of=count, max_concurrent=at_most)
            jobs[first + number] = (
                at_s,
                spec.model_copy(update={"member": member}),
                jobs[first + number][2],
            )
    return replace(scenario, jobs=tuple(jobs), begin_s=draw.choice(NIGHTS[zone]))


def maintained(draw: random.Random, chosen: ClusterSpec, begin_s: float = 0.0) -> ClusterSpec:
    """Return the cluster, every second time with a maintenance of some nodes or of all."""
    names = [name for node in chosen.nodes for name in node.names]
    windows = []
    for _ in range(draw.choice((0, 0, 1, 3))):
        start_s = begin_s + draw.uniform(0.0, HOUR_S)
        windows.append(
            Maintenance(
                start=moment(start_s),
                end=moment(start_s + draw.uniform(60.0, HOUR_S / 2)),
                nodes=draw.choice((draw.sample(names, 1), ())),
            )
        )
    return chosen.model_copy(update={"maintenance": tuple(windows)})


def moment(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def random_drains(draw: random.Random, chosen: ClusterSpec) -> tuple[tuple[float, str, bool], ...]:
    """Return drains of some nodes, each for a while."""
    names = [name for node in chosen.nodes for name in node.names]
    drains = []
    for name in draw.sample(names, draw.choice((0, 0, 1, len(names)))):
        at_s = draw.uniform(0.0, HOUR_S)
        drains += [(at_s, name, False), (at_s + draw.uniform(0.0, HOUR_S), name, True)]
    return tuple(drains)


def random_job(draw: random.Random, devices: int) -> JobSpec:
    make = draw.choice((script, script, script, decoder, decoder, too_large))
    low = draw.choice([count for count in (1, 1, 2, 4) if count <= devices])
    return make(
        draw.choice(("red", "green", "blue")),
        priority=draw.choice((0, 0, 5)),
        gpus={"min": low, "max": draw.choice([count for count in (1, 2, 4, 8) if count >= low])},
        training={"max_steps": draw.choice((20, 500, 5000)), "checkpoint_every_steps": 10},
        retries={
            "oom": draw.choice((8, 8, 1)),
            "node": draw.choice((3, 0)),
            "preemption": draw.choice((16, 1)),
        },
    )


def random_crowd(draw: random.Random) -> Scenario:
    """Many equal jobs of a few users, who share too few devices."""
    kinds = [
        script("red", training={"max_steps": 500}),
        script("blue", gpus={"min": 1, "max": 2}, steps=2000),
    ]
    submissions = sorted(draw.uniform(0, HOUR_S / 4) for _ in range(draw.randint(8, 20)))
    users = draw.sample(USERS, 3)
    scenario = Scenario(
        cluster=draw.choice(CLUSTERS[1:3]).model_copy(
            update={"policy": draw.choice((SHARED, OWNED))}
        ),
        jobs=tuple(
            (at_s, draw.choice(kinds).model_copy(update={"user": draw.choice(users)}), None)
            for at_s in submissions
        ),
        cancels=(),
        hazards={FailureKind.PREEMPTED: 0.1},
        repeat_chance=draw.choice((0.0, 0.3)),
        seed=draw.randint(0, 2**32),
    )
    return aimed(scenario)


def random_tide(draw: random.Random) -> Scenario:
    """Long jobs that can be moved, and waves of short ones, some of a higher class, on few devices."""
    resumes = {"knobs": {"resume_from": {"flag": "--resume"}}, "resume": {"on_sigterm": True}}

    def make_job(name: str, seconds: float, **fields: object) -> JobSpec:
        speeds = {count: f"{seconds / 100 / count**0.7:.6f}s" for count in (1, 2, 4)}
        return JobSpec(
            **{"name": name, "command": "python train.py", "global_batch_size": 8, "steps": 100}
            | fields,
            speeds=speeds,
        )

    jobs = [
        (
            0.0,
            make_job(
                "long", draw.uniform(2000, 20_000), **(resumes if draw.random() < 0.8 else {})
            ),
            None,
        )
    ]
    for _ in range(draw.randint(1, 3)):
        wave_s = draw.uniform(0, 2 * HOUR_S)
        for _ in range(draw.randint(1, 5)):
            spec = make_job(
                "short",
                draw.uniform(50, 1500),
                priority=draw.choice((0, 0, 0, 5)),
                **draw.choice((resumes, {})),
            )
            jobs.append((wave_s + draw.uniform(0, 300), spec, None))
    jobs += [
        (draw.uniform(0, HOUR_S), make_job("long", draw.uniform(2000, 20_000), **resumes), None)
    ]
    chosen = draw.choice(CLUSTERS[1:3])
    scenario = Scenario(
        cluster=maintained(draw, chosen),
        jobs=tuple(sorted(jobs, key=lambda job: job[0])),
        cancels=(),
        drains=random_drains(draw, chosen),
        hazards=draw.choice((CALM, CALM, STORM)),
        repeat_chance=draw.choice((0.0, 0.3)),
        seed=draw.randint(0, 2**32),
    )
    return aimed(scenario)


def random_rush(draw: random.Random) -> Scenario:
    """Long jobs that can be moved and short ones, most of them with deadlines, on few devices."""
    tide = random_tide(draw)

    def hurried(at_s: float, spec: JobSpec) -> JobSpec:
        if draw.random() < 0.2:
            return spec
        alone_s = (spec.steps or 0) * min(step_s for _, step_s in spec.speeds)
        return spec.model_copy(
            update={"deadline": make_deadline(at_s + 100.0 + draw.uniform(1.0, 4.0) * alone_s)}
        )

    return replace(
        tide, jobs=tuple((at_s, hurried(at_s, spec), fault) for at_s, spec, fault in tide.jobs)
    )


def random_fault(draw: random.Random) -> Fault | None:
    if draw.random() < 0.9:
        return None
    return Fault(kind=draw.choice(list(FaultKind)), rank=0, step=draw.randint(0, 20))


def backend_of(scenario: Scenario) -> MortalBackend:
    backend = MortalBackend(
        scenario.cluster,
        seed=scenario.seed,
        hazards=scenario.hazards,
        repeat_chance=scenario.repeat_chance,
    )
    backend.begin(scenario.begin_s)
    return backend


def play(scenario: Scenario, journal: MemoryJournal, backend: FaultyBackend) -> State:
    """The state once every job has ended and released its devices, with all jobs in it that it has forgotten.

    After each death of the service a new one begins.
    """
    errands = sorted(
        [(scenario.begin_s + at_s, 0, index) for index, (at_s, _, _) in enumerate(scenario.jobs)]
        + [(scenario.begin_s + at_s, 1, index) for at_s, index in scenario.cancels]
        + [
            (scenario.begin_s + at_s, 2, index)
            for index, (at_s, _, _) in enumerate(scenario.drains)
        ]
        + [(scenario.begin_s + at_s, 3, index) for index, (at_s, _) in enumerate(scenario.changes)]
    )
    controller = Controller(journal, backend, backend.current_time_s)
    for _ in range(TURNS_MAX):
        try:
            while errands and errands[0][0] <= backend.current_time_s():
                run_errand(controller, scenario, *errands[0][1:])
                errands.pop(0)
            if not errands and settled(controller.state):
                return whole(controller.state, journal.archived)
            controller.run_once(errands[0][0] - backend.current_time_s() if errands else HOUR_S)
        except Killed:
            backend.close()
            controller = Controller(journal, backend, backend.current_time_s)
    waiting = [
        f"{job.id}: {job.status} ({job.reason})"
        for job in controller.state.jobs.values()
        if not job.status.ended
    ]
    raise AssertionError(f"seed {scenario.seed}: no end after {TURNS_MAX} turns: {waiting}")


def run_errand(controller: Controller, scenario: Scenario, kind: int, index: int) -> None:
    """Submit, cancel, drain or change, unless a service that died in the middle had committed it already."""
    if kind == 2:
        _, node, undo = scenario.drains[index]
        if controller.state.declared:
            controller.drain_node(node, undo=undo)
        return
    if kind == 3:
        scenario.changes[index][1](controller)
        return
    _, spec, _ = scenario.jobs[index]
    job_id = f"{spec.name}-{index + 1}"
    if kind == 0 and controller.state.submitted <= index:
        submissions = [
            job[1:] for job in scenario.jobs[index : index + (spec.member.of if spec.member else 1)]
        ]
        try:
            assert controller.submit_all(submissions)[0] == job_id
        except SpecError:  # what it comes after has failed by now
            alone = [
                (spec.model_copy(update={"depends_on": ()}), fault) for spec, fault in submissions
            ]
            assert controller.submit_all(alone)[0] == job_id
    elif (
        kind == 1
        and index < controller.state.submitted
        and not controller.find_job(job_id).status.ended
    ):
        controller.cancel_jobs([job_id])


def whole(state: State, archived: Mapping[str, Job]) -> State:
    """The state with the jobs that it has forgotten."""
    return replace(state, jobs={**archived, **state.jobs})


def settled(state: State) -> bool:
    return all(
        job.status.ended and all(attempt.released for attempt in job.attempts)
        for job in state.jobs.values()
    )
