"""Single decisions: the effect of each event on a job, and the actions that follow."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.scheduling.reports.waiting import WaitExplainer
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.step import step
from orchestrator.specs.actions import Action, Archive, Launch, Record, Stop
from orchestrator.specs.attempt import (
    Attempt,
    ErrorReport,
    Evidence,
    FailureKind,
    Heartbeat,
    OomReport,
    RankEnd,
)
from orchestrator.specs.events import (
    CancelRequested,
    Event,
    Finished,
    NodesSeen,
    Observed,
    Released,
    Started,
    Submitted,
    TimerFired,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.run import OOM_EXIT_CODE
from orchestrator.specs.state import State
from tests.scheduling.factories import DEVICE, MIB, decoder_spec, node, observation, script_spec
from tests.scheduling.world import whole

NODES = NodesSeen(nodes=(node(),), at_s=0.0)


def run(*events: Event, state: State | None = None) -> tuple[State, list[Action]]:
    """The state after all events, with every job that it has forgotten, and the actions of the last."""
    state = state or State()
    actions: tuple[Action, ...] = ()
    archived: dict[str, Job] = {}
    for event in events:
        state, actions = step(state, event)
        archived |= {action.job.id: action.job for action in actions if isinstance(action, Archive)}
    return whole(state, archived), [action for action in actions if not isinstance(action, Archive)]


def submitted(spec: JobSpec | None = None, job_id: str = "lm-1", at_s: float = 1.0) -> Submitted:
    return Submitted(
        job_id=job_id, order=int(job_id.rpartition("-")[2]), spec=spec or decoder_spec(), at_s=at_s
    )


def launches(actions: list[Action]) -> list[Attempt]:
    return [action.attempt for action in actions if isinstance(action, Launch)]


def finished(
    evidence: Evidence, number: int = 1, job_id: str = "lm-1", at_s: float = 10.0
) -> Finished:
    return Finished(job_id=job_id, number=number, evidence=evidence, at_s=at_s)


def released(number: int = 1, job_id: str = "lm-1", at_s: float = 11.0) -> Released:
    return Released(job_id=job_id, number=number, at_s=at_s)


def oom(live_bytes: int = 250 * MIB, injected: bool = False) -> Evidence:
    report = OomReport(
        rank=0,
        step=2,
        phase="backward",
        requested_bytes=8 * MIB,
        live_bytes=live_bytes,
        capacity_bytes=256 * MIB,
        injected=injected,
    )
    return Evidence(ranks=(RankEnd(rank=0, exit_code=OOM_EXIT_CODE),), ooms=(report,))


LOST = Evidence(nodes_lost=("local",))
BUG = Evidence(
    ranks=(RankEnd(rank=0, exit_code=1),),
    errors=(
        ErrorReport(
            rank=0, step=0, phase="forward", type="KeyError", traceback="KeyError: 'labels'"
        ),
    ),
)
SUCCESS = Evidence(
    ranks=(RankEnd(rank=0, exit_code=0),),
    heartbeats=(
        Heartbeat(
            rank=0, step=9, steps_done=9, step_s=0.1, peak_bytes=90 * MIB, phase="forward", at_s=9.0
        ),
    ),
)


def only_job(state: State) -> Job:
    (job,) = state.jobs.values()
    return job


def test_starts_the_fastest_plan_that_fits() -> None:
    state, actions = run(NODES, submitted())
    (attempt,) = launches(actions)
    assert attempt.number == 1
    assert fits_device(attempt)
    assert only_job(state).status is JobStatus.RUNNING


def fits_device(attempt: Attempt) -> bool:
    return attempt.estimate.device_bytes <= DEVICE.memory


def test_waits_until_the_cluster_was_seen() -> None:
    state, actions = run(submitted())
    assert launches(actions) == []
    _, actions = run(NODES, state=state)
    assert len(launches(actions)) == 1


def test_refuses_before_anything_starts_what_no_plan_fits() -> None:
    state, actions = run(NODES, submitted(decoder_spec(global_batch_size=8, gpus=1, profile=HUGE)))
    assert launches(actions) == []
    job = only_job(state)
    assert job.status is JobStatus.REFUSED
    assert "closest" in job.reason
    assert "would fit" in job.reason


HUGE = {"parameters": 10**9, "activations_per_sample": "1GiB"}


SMALL = {
    "parameters": 10**6,
    "activations_per_sample": "1KiB",
}  # and nothing to cut it by but its batch


def test_refuses_a_batch_that_cannot_be_cut() -> None:
    state, _ = run(NODES, submitted(decoder_spec(global_batch_size=3, gpus=2, profile=SMALL)))
    assert only_job(state).status is JobStatus.REFUSED
    assert "global_batch_size" in only_job(state).reason


def test_a_gang_larger_than_the_whole_cluster_is_refused() -> None:
    state, _ = run(NODES, submitted(decoder_spec(gpus=8)))
    assert only_job(state).status is JobStatus.REFUSED
    assert "8 devices" in only_job(state).reason


def test_a_gang_that_only_the_whole_cluster_holds_waits_for_absent_nodes() -> None:
    whole = tuple(node(name) for name in ("a", "b", "c", "d"))
    state, _ = run(
        NodesSeen(nodes=whole[:1], declared=whole, at_s=0.0), submitted(decoder_spec(gpus=8))
    )
    assert only_job(state).status is JobStatus.QUEUED
    _, actions = run(NodesSeen(nodes=whole, declared=whole, at_s=5.0), state=state)
    assert len(launches(actions)) == 1


def test_a_plan_that_ran_is_judged_by_its_own_peak() -> None:
    """Later lessons of the family do not take a running plan from a preempted job."""
    state, actions = run(NODES, submitted())
    first = launches(actions)[0]
    preempted = replace(SUCCESS, ranks=(RankEnd(rank=0, exit_code=-15),))
    state, actions = run(
        finished(preempted), state=replace(state, observations=(observation(correction=100.0),))
    )
    _, actions = run(released(), state=state)
    assert [attempt.plan for attempt in launches(actions)] == [first.plan]


def test_out_of_memory_restarts_below_the_refuted_peak() -> None:
    state, actions = run(NODES, submitted())
    first = launches(actions)[0]
    state, actions = run(finished(oom()), state=state)
    assert launches(actions) == [], "its devices are not free yet"
    state, actions = run(released(), state=state)
    (second,) = launches(actions)
    assert second.plan != first.plan
    assert second.estimate.device_bytes < first.estimate.device_bytes
    assert second.plan.global_batch_size == first.plan.global_batch_size
    assert second.correction > 1.0
    assert second.change
    assert "rank 0" in second.change_reason


def test_an_injected_failure_degrades_but_teaches_nothing() -> None:
    state, _ = run(NODES, submitted(), finished(oom(injected=True)))
    assert state.observations == ()
    _, actions = run(released(), state=state)
    assert launches(actions)[0].correction == 1.0


def test_the_budget_for_memory_is_bounded() -> None:
    state, actions = run(NODES, submitted(decoder_spec(retries={"oom": 1})))
    for number in (1, 2):
        state, actions = run(finished(oom(), number=number), released(number=number), state=state)
    assert launches(actions) == []
    assert only_job(state).status is JobStatus.FAILED
    assert "retries.oom" in only_job(state).reason


def test_never_retries_a_bug() -> None:
    state, actions = run(NODES, submitted(), finished(BUG), released())
    assert launches(actions) == []
    job = only_job(state)
    assert job.status is JobStatus.FAILED
    assert job.last is not None
    assert job.last.failure is not None
    assert job.last.failure.excerpt == "KeyError: 'labels'"


def test_past_its_virtual_device_a_job_has_failed_and_unwatched_on_a_real_one_it_ends_with_a_warning() -> (
    None
):
    unseen = replace(SUCCESS, unwatched=("'python -I train.py' has no guard",))
    for virtual, status in ((True, JobStatus.FAILED), (False, JobStatus.SUCCEEDED)):
        state, actions = run(
            NODES, submitted(), finished(replace(unseen, virtual=virtual)), released()
        )
        assert launches(actions) == []
        assert only_job(state).status is status
        assert "'python -I train.py' has no guard" in only_job(state).reason
        assert state.observations == ()


def test_a_lost_node_restarts_the_same_plan_after_a_pause() -> None:
    state, actions = run(NODES, submitted())
    first = launches(actions)[0]
    state, actions = run(finished(LOST, at_s=10.0), released(at_s=10.0), state=state)
    assert launches(actions) == []
    at_s = Scheduler(state).wake_at_s()
    assert at_s is not None
    assert at_s > 10.0
    state, actions = run(TimerFired(at_s=at_s), state=state)
    assert launches(actions)[0].plan == first.plan


def test_a_job_on_a_full_disk_frees_its_devices_and_is_launched_again_later_and_longer() -> None:
    log = "OSError: [Errno 28] No space left on device"
    full = Evidence(ranks=(RankEnd(rank=0, exit_code=1, log_tail=log),))
    state, actions = run(NODES, submitted(), submitted(job_id="lm-2", at_s=2.0))
    state, actions = run(finished(full, at_s=10.0), released(at_s=10.0), state=state)
    assert [other.job_id for other in launches(actions)] == ["lm-2"]
    state, actions = run(
        TimerFired(at_s=69.0), state=run(NODES, submitted(), finished(full), released())[0]
    )
    assert launches(actions) == []
    state, actions = run(TimerFired(at_s=70.0), state=state)
    assert [again.number for again in launches(actions)] == [2]
    state, _ = run(finished(full, number=2, at_s=80.0), released(number=2, at_s=80.0), state=state)
    assert (only_job(state).status, only_job(state).not_before_s) == (JobStatus.QUEUED, 200.0)


def test_a_restart_says_what_is_done_again_where_nothing_was_saved() -> None:
    for saved, ending in ((None, "; no checkpoint: 9 steps are done again"), (5, "")):
        evidence = replace(SUCCESS, ranks=(), nodes_lost=("local",), checkpoint_step=saved)
        state, _ = run(NODES, submitted(), finished(evidence))
        assert only_job(state).reason.partition("local")[2].endswith(ending), only_job(state).reason
        assert ("done again" in only_job(state).reason) == bool(ending)
    evidence = replace(SUCCESS, ranks=(), nodes_lost=("local",))
    state, _ = run(NODES, submitted(script_spec()), finished(evidence))
    assert (
        "; no checkpoint of a known step (`resume.step` is not set): at most 9 steps"
        in only_job(state).reason
    )


def test_a_restart_says_what_lies_in_the_output_where_no_file_is_a_checkpoint() -> None:
    evidence = replace(
        SUCCESS, ranks=(), nodes_lost=("local",), unmatched=("ckpt_20.pt", "ckpt_40.pt")
    )
    state, _ = run(NODES, submitted(), finished(evidence))
    output = "no file matches checkpoint*, step-*; the output has ckpt_20.pt, ckpt_40.pt"
    ending = f"; no checkpoint: 9 steps are done again ({output}: set `resume.checkpoints` and `resume.step`)"
    assert only_job(state).reason.endswith(ending)


def test_a_lost_node_does_not_use_up_the_budget_for_memory() -> None:
    spec = decoder_spec(retries={"oom": 1, "node": 1})
    state, _ = run(
        NODES, submitted(spec), finished(LOST, at_s=1.0), released(at_s=1.0), TimerFired(at_s=500.0)
    )
    state, actions = run(
        finished(oom(), number=2, at_s=600.0), released(number=2, at_s=600.0), state=state
    )
    assert len(launches(actions)) == 1


def test_success_ends_the_job_and_is_recorded() -> None:
    state, actions = run(NODES, submitted(), finished(SUCCESS))
    assert only_job(state).status is JobStatus.SUCCEEDED
    assert [type(action) for action in actions] == [Record]
    assert state.observations[-1].measured_bytes == 90 * MIB


def test_what_a_family_ran_out_of_memory_with_is_not_begun_by_another_job_of_it() -> None:
    """Even where several kinder outcomes say that nothing needs correcting."""
    state, actions = run(NODES, submitted())
    refuted = launches(actions)[0].plan
    state, _ = run(finished(oom()), released(), state=state)
    kind = tuple(observation(number=number, at_s=20.0 + number) for number in range(40))
    state, _ = run(Observed(observations=kind, at_s=80.0), state=state)
    _, actions = run(submitted(job_id="lm-2", at_s=90.0), state=replace(state, jobs={}))
    (attempt,) = launches(actions)
    assert attempt.correction == 1.0, "forty outcomes outvote one"
    assert attempt.plan != refuted


def test_a_job_that_recovered_begins_the_next_night_with_the_plan_that_ended_it() -> None:
    """However wrong its profile is: what it keeps of a sample is about twenty times what was declared."""
    spec = script_spec(
        profile={"parameters": "100000", "activations_per_sample": "512KiB"},
        knobs={
            "micro_batch_size": {"flag": "--batch-size", "default": 32},
            "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
        },
    )
    state, actions = run(NODES, submitted(spec), finished(oom()))
    assert launches(actions) == []
    state, actions = run(released(), state=state)
    (second,) = launches(actions)
    assert second.plan.micro_batch_size < 32
    took_bytes = second.estimate.allocated_bytes + 11 * second.plan.micro_batch_size * MIB
    ended = replace(
        SUCCESS,
        heartbeats=tuple(replace(beat, peak_bytes=took_bytes) for beat in SUCCESS.heartbeats),
    )
    state, _ = run(finished(ended, number=2), released(number=2), state=state)
    _, actions = run(submitted(spec, job_id="lm-2", at_s=90.0), state=state)
    (attempt,) = launches(actions)
    assert attempt.plan == second.plan
    assert attempt.needed_bytes is not None
    assert took_bytes < attempt.needed_bytes <= 256 * MIB


def test_a_smaller_batch_is_tried_where_weights_alone_were_predicted_to_be_the_peak() -> None:
    """The prediction has the optimizer step need more than any batch; the failure proves it wrong."""
    knobs = {
        "micro_batch_size": {"flag": "--batch-size", "default": 8},
        "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
    }
    profile = {"parameters": "3500000", "activations_per_sample": "64KiB"}
    state, actions = run(
        NODES, submitted(script_spec(profile=profile, knobs=knobs, global_batch_size=8))
    )
    tried = [attempt.plan.micro_batch_size for attempt in launches(actions)]
    _, actions = run(finished(oom()), released(), state=state)
    tried += [attempt.plan.micro_batch_size for attempt in launches(actions)]
    first, second = tried
    assert second < first == 8


def test_a_job_that_ran_out_is_held_to_what_it_needed_itself() -> None:
    kind = tuple(observation(number=number, at_s=float(number)) for number in range(10))
    state, _ = run(NODES, Observed(observations=kind, at_s=0.5), submitted(), finished(oom()))
    _, actions = run(released(), state=state)
    assert launches(actions)[0].correction > 1.0


def test_outcomes_are_taken_in_once_however_often_they_are_told() -> None:
    event = Observed(observations=(observation(), observation(number=2, at_s=2.0)), at_s=3.0)
    state, actions = run(event)
    again, _ = run(event, replace(event, observations=event.observations[::-1]), state=state)
    assert len(state.observations) == 2
    assert (again.observations, actions) == (state.observations, [])


def test_a_launch_says_what_it_needs_and_how_surely_it_fits() -> None:
    _, actions = run(NODES, submitted())
    (attempt,) = launches(actions)
    assert attempt.fit_probability is not None
    assert attempt.fit_probability >= 0.99
    assert attempt.needed_bytes is not None
    assert attempt.estimate.device_bytes < attempt.needed_bytes <= 256 * MIB


def test_an_end_is_final() -> None:
    state, _ = run(NODES, submitted(), finished(SUCCESS), released())
    again, actions = run(
        finished(BUG), CancelRequested(job_id="lm-1", at_s=20.0), submitted(), state=state
    )
    assert actions == []
    assert replace(again, at_s=state.at_s) == state


def test_cancelling_a_running_job_stops_it_and_waits_for_the_end() -> None:
    state, actions = run(NODES, submitted(), CancelRequested(job_id="lm-1", at_s=5.0))
    assert [type(action) for action in actions] == [Stop]
    stopped = Evidence(ranks=(RankEnd(rank=0, exit_code=-15),), stopped=True)
    state, actions = run(finished(stopped), released(), state=state)
    assert only_job(state).status is JobStatus.CANCELLED
    assert launches(actions) == []


def test_cancelling_a_waiting_job_ends_it_at_once() -> None:
    state, actions = run(submitted(), CancelRequested(job_id="lm-1", at_s=5.0))
    assert only_job(state).status is JobStatus.CANCELLED
    assert [type(action) for action in actions] == [Record]


def test_priority_goes_before_submission() -> None:
    low = submitted(decoder_spec(gpus=2), job_id="low-1")
    high = submitted(decoder_spec(gpus=2, priority=5), job_id="high-2")
    _, actions = run(low, high, NODES)
    assert [attempt.job_id for attempt in launches(actions)] == ["high-2"]


def test_no_job_behind_takes_the_devices_that_one_ahead_waits_for() -> None:
    narrow = submitted(decoder_spec(gpus=1), job_id="one-1")
    gang = submitted(decoder_spec(gpus=2), job_id="gang-2")
    later = submitted(decoder_spec(gpus=1, training={"max_steps": 2000}), job_id="later-3")
    state, actions = run(NODES, narrow, gang, later)
    assert launches(actions) == []
    assert "2 free" in WaitExplainer(state).explain_wait(state.jobs["gang-2"])
    state, actions = run(finished(SUCCESS, job_id="one-1"), released(job_id="one-1"), state=state)
    assert [attempt.job_id for attempt in launches(actions)] == ["gang-2"]


def test_devices_stay_taken_until_their_memory_is_free() -> None:
    first = submitted(decoder_spec(gpus=2), job_id="a-1")
    second = submitted(decoder_spec(gpus=2), job_id="b-2")
    state, actions = run(NODES, first, second, finished(SUCCESS, job_id="a-1"))
    assert launches(actions) == []
    _, actions = run(released(job_id="a-1"), state=state)
    assert [attempt.job_id for attempt in launches(actions)] == ["b-2"]


def test_plans_with_the_memory_that_is_free_now() -> None:
    crowded = NodesSeen(nodes=(node(free_bytes=40 * MIB),), at_s=0.0)
    _, roomy = run(NODES, submitted())
    state, actions = run(crowded, submitted())
    if actions and launches(actions):
        assert launches(actions)[0].estimate.device_bytes < launches(roomy)[0].estimate.device_bytes
        assert launches(actions)[0].estimate.device_bytes <= 40 * MIB
    else:
        assert "other processes" in only_job(state).reason


def test_a_script_of_unknown_memory_starts_with_its_own_batch_and_halves_it() -> None:
    knobs = {
        "micro_batch_size": {"flag": "--batch-size", "default": 32},
        "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
    }
    state, actions = run(NODES, submitted(script_spec(knobs=knobs), job_id="script-1"))
    assert launches(actions)[0].plan.micro_batch_size == 32
    _, actions = run(finished(oom(), job_id="script-1"), released(job_id="script-1"), state=state)
    plan = launches(actions)[0].plan
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (16, 2)


def test_a_start_is_told_once() -> None:
    state, _ = run(NODES, submitted())
    state, actions = run(Started(job_id="lm-1", number=1, at_s=3.0), state=state)
    assert [type(action) for action in actions] == [Record]
    _, actions = run(Started(job_id="lm-1", number=1, at_s=4.0), state=state)
    assert actions == []


def test_host_memory_failure_moves_to_a_plan_that_needs_less_of_it() -> None:
    killed = Evidence(ranks=(RankEnd(rank=0, exit_code=-9),), first_ended_rank=0, host_oom_kills=1)
    state, actions = run(NODES, submitted())
    first = launches(actions)[0]
    state, actions = run(finished(killed), released(), state=state)
    job = only_job(state)
    assert job.attempts[0].failure is not None
    assert job.attempts[0].failure.kind is FailureKind.HOST_OOM
    assert all(a.estimate.device_bytes < first.estimate.device_bytes for a in launches(actions))


def test_a_job_that_has_no_plan_left_after_a_host_memory_failure_names_the_host() -> None:
    killed = Evidence(ranks=(RankEnd(rank=0, exit_code=-9),), first_ended_rank=0, host_oom_kills=1)
    knobs = {"micro_batch_size": {"flag": "--batch-size", "default": 1}}
    state, _ = run(NODES, submitted(script_spec(knobs=knobs, global_batch_size=1), job_id="s-1"))
    for number in range(1, 6):
        if only_job(state).status is JobStatus.FAILED:
            break
        events = (
            finished(killed, job_id="s-1", number=number),
            released(job_id="s-1", number=number),
        )
        state, _ = run(*events, state=state)
    job = only_job(state)
    assert job.status is JobStatus.FAILED
    assert job.reason.startswith("host_oom: rank 0 was killed by the kernel")
    assert "MiB" not in job.reason
