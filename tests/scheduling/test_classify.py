"""The meaning of evidence: one row per way in which an attempt can end."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.scheduling.failures.done_steps import describe_done_steps
from orchestrator.scheduling.failures.out_of_memory import compute_oom_needed_bytes
from orchestrator.specs.attempt import (
    ErrorReport,
    Evidence,
    FailureKind,
    Heartbeat,
    OomReport,
    RankEnd,
)
from orchestrator.specs.run import OOM_EXIT_CODE, STALE_EXIT_CODE
from tests.scheduling.factories import MIB, attempt, job, script_spec

OOM = OomReport(
    rank=1,
    step=3,
    phase="backward",
    requested_bytes=8 * MIB,
    live_bytes=250 * MIB,
    capacity_bytes=256 * MIB,
    message="torch.OutOfMemoryError: Tried to allocate 8.00 MiB",
)
CAUGHT = replace(OOM, rank=0, step=5, steps_done=5)
BUG = ErrorReport(
    rank=0, step=2, phase="forward", type="KeyError", traceback="Traceback ...\nKeyError: 'labels'"
)
EARLY_BUG = replace(BUG, step=0)
UNSEEN = ("'python -I inner.py', process 7, loaded PyTorch without the guard",)
BEAT = Heartbeat(
    rank=0, step=5, steps_done=5, step_s=0.1, peak_bytes=250 * MIB, phase="forward", at_s=1.0
)
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE)"
)
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:43189"


def ends(*codes: int | None, logs: tuple[str, ...] = ()) -> tuple[RankEnd, ...]:
    return tuple(
        RankEnd(rank=rank, exit_code=code, log_tail=logs[rank] if logs else "")
        for rank, code in enumerate(codes)
    )


def met(*group_sizes: int | None) -> tuple[Heartbeat, ...]:
    return tuple(replace(BEAT, rank=rank, group_size=size) for rank, size in enumerate(group_sizes))


ROWS: list[tuple[str, FailureKind | None, Evidence]] = [
    (
        "past its virtual device",
        FailureKind.GUARD_ABSENT,
        Evidence(ranks=ends(0), unwatched=UNSEEN, virtual=True),
    ),
    ("unwatched on a real device", None, Evidence(ranks=ends(0), unwatched=UNSEEN)),
    (
        "past its virtual device, and hung",
        FailureKind.GUARD_ABSENT,
        Evidence(ranks=ends(-9), unwatched=UNSEEN, virtual=True, hung_for_s=9.0),
    ),
    (
        "a bug, past its virtual device",
        FailureKind.USER_ERROR,
        Evidence(ranks=ends(2), unwatched=UNSEEN, virtual=True),
    ),
    ("every rank exits 0", None, Evidence(ranks=ends(0, 0))),
    (
        "exits 0 with no step since it caught its last",
        FailureKind.DEVICE_OOM,
        Evidence(ranks=ends(0), caught=(CAUGHT,), heartbeats=(BEAT,), finished=True),
    ),
    (
        "exits 0 after more than a tenth was lost",
        FailureKind.DEVICE_OOM,
        Evidence(
            ranks=ends(0),
            caught=(replace(CAUGHT, count=12),),
            heartbeats=(replace(BEAT, steps_done=100),),
        ),
    ),
    (
        "exits 0 after a tenth was lost",
        None,
        Evidence(
            ranks=ends(0),
            caught=(replace(CAUGHT, count=10),),
            heartbeats=(replace(BEAT, steps_done=90),),
        ),
    ),
    (
        "exits 0 after it found a batch that fits, before its first step",
        None,
        Evidence(
            ranks=ends(0), caught=(replace(CAUGHT, steps_done=0, count=6),), heartbeats=(BEAT,)
        ),
    ),
    (
        "a bug long after a caught error",
        FailureKind.UNKNOWN,
        Evidence(
            ranks=ends(1),
            caught=(CAUGHT,),
            errors=(BUG,),
            heartbeats=(replace(BEAT, steps_done=90),),
        ),
    ),
    (
        "exits 0 without its artifact, and caught one",
        FailureKind.DEVICE_OOM,
        Evidence(
            ranks=ends(0),
            caught=(CAUGHT,),
            heartbeats=(replace(BEAT, steps_done=90),),
            missing_artifacts=("m.pt",),
        ),
    ),
    (
        "ranks that never met",
        FailureKind.USER_ERROR,
        Evidence(ranks=ends(0, 0), heartbeats=met(0, 0)),
    ),
    (
        "ranks that never met, and ran out",
        FailureKind.USER_ERROR,
        Evidence(ooms=(OOM,), heartbeats=met(0, 0)),
    ),
    ("ranks that met", None, Evidence(ranks=ends(0, 0), heartbeats=met(2, 2))),
    (
        "ranks of which one may have met others",
        None,
        Evidence(ranks=ends(0, 0), heartbeats=met(0, None)),
    ),
    ("ranks of an older guard", None, Evidence(ranks=ends(0, 0), heartbeats=met(None, None))),
    ("a rank that trains alone", None, Evidence(ranks=ends(0), heartbeats=met(0))),
    (
        "ranks of which one trains",
        None,
        Evidence(ranks=ends(0, 0), heartbeats=(met(0)[0], replace(met(0, 0)[1], steps_done=0))),
    ),
    ("launch failed", FailureKind.STARTUP, Evidence(launch_error="no placement")),
    (
        "guard reports memory",
        FailureKind.DEVICE_OOM,
        Evidence(ranks=ends(-9, OOM_EXIT_CODE), ooms=(OOM,)),
    ),
    (
        "others hold the memory",
        FailureKind.MEMORY_CONTENTION,
        Evidence(
            ranks=ends(OOM_EXIT_CODE),
            ooms=(replace(OOM, live_bytes=20 * MIB, foreign_bytes=200 * MIB),),
        ),
    ),
    (
        "others hold memory but the plan was too large all the same",
        FailureKind.DEVICE_OOM,
        Evidence(ranks=ends(OOM_EXIT_CODE), ooms=(replace(OOM, foreign_bytes=5 * MIB),)),
    ),
    (
        "memory outweighs a lost node",
        FailureKind.DEVICE_OOM,
        Evidence(ooms=(OOM,), nodes_lost=("n1",)),
    ),
    ("node lost", FailureKind.NODE_LOST, Evidence(ranks=ends(None, -9), nodes_lost=("n1",))),
    (
        "node lost after success of the rest",
        FailureKind.NODE_LOST,
        Evidence(ranks=ends(0), nodes_lost=("n1",)),
    ),
    ("hung", FailureKind.HUNG, Evidence(ranks=ends(-9, -9), hung_for_s=600.0)),
    ("nothing known", FailureKind.NODE_LOST, Evidence()),
    (
        "a bug within training",
        FailureKind.UNKNOWN,
        Evidence(ranks=ends(1, -9), errors=(BUG,), first_ended_rank=0),
    ),
    (
        "a bug",
        FailureKind.USER_ERROR,
        Evidence(ranks=ends(1, -9), errors=(EARLY_BUG,), first_ended_rank=0),
    ),
    ("a bare exit code", FailureKind.STARTUP, Evidence(ranks=ends(1, -9), first_ended_rank=0)),
    ("a bare exit code, order unknown", FailureKind.STARTUP, Evidence(ranks=ends(-15, 1))),
    (
        "a hub does not answer, by an exception that a bug would raise",
        FailureKind.STARTUP,
        Evidence(
            ranks=ends(
                1,
                logs=(
                    "Traceback (most recent call last)\nValueError: Connection error, try again",
                ),
            )
        ),
    ),
    ("wrong arguments", FailureKind.USER_ERROR, Evidence(ranks=ends(2))),
    ("a shell tells a signal from outside", FailureKind.PREEMPTED, Evidence(ranks=ends(143))),
    (
        "a shell tells that the kernel killed",
        FailureKind.HOST_OOM,
        Evidence(ranks=ends(137), host_oom_kills=1),
    ),
    (
        "a bug beside a survivor's complaint that came first",
        FailureKind.USER_ERROR,
        Evidence(ranks=ends(1, 1, logs=(GLOO, "Traceback ...\nKeyError: 1")), first_ended_rank=0),
    ),
    (
        "memory behind a watchdog that ended another rank",
        FailureKind.DEVICE_OOM,
        Evidence(
            ranks=ends(-6, 1, logs=(WATCHDOG, "RuntimeError: CUDA error: out of memory")),
            first_ended_rank=0,
        ),
    ),
    (
        "waited in vain, and was ended",
        FailureKind.HUNG,
        Evidence(ranks=ends(-6, -9, logs=(WATCHDOG, "step 12"))),
    ),
    (
        "waited in vain for a rank that the kernel had killed",
        FailureKind.HOST_OOM,
        Evidence(ranks=ends(-6, 0, logs=(WATCHDOG, "")), host_oom_kills=1),
    ),
    (
        "a launcher tells a signal",
        FailureKind.PREEMPTED,
        Evidence(ranks=ends(1, logs=("got signal: 15",))),
    ),
    (
        "a launcher tells a signal that another rank's bug had caused",
        FailureKind.USER_ERROR,
        Evidence(
            ranks=ends(
                1, 1, logs=("got signal: 15", "Traceback (most recent call last)\nKeyError: 1")
            )
        ),
    ),
    ("a launcher exits with minus a signal", FailureKind.PREEMPTED, Evidence(ranks=ends(241))),
    (
        "a launcher exits with minus a signal of the kernel's",
        FailureKind.HOST_OOM,
        Evidence(ranks=ends(247), host_oom_kills=1),
    ),
    (
        "a helper died, and the kernel had killed",
        FailureKind.HOST_OOM,
        Evidence(
            ranks=ends(1, logs=("RuntimeError: One of the subprocesses has abruptly died",)),
            host_oom_kills=1,
        ),
    ),
    (
        "a bug while the kernel killed another",
        FailureKind.USER_ERROR,
        Evidence(ranks=ends(1), errors=(EARLY_BUG,), host_oom_kills=1),
    ),
    (
        "memory behind another rank's unexplained end",
        FailureKind.DEVICE_OOM,
        Evidence(
            ranks=ends(-6, 1, logs=("step 1", "RuntimeError: CUDA error: out of memory")),
            first_ended_rank=0,
        ),
    ),
    ("only complaints", FailureKind.NODE_LOST, Evidence(ranks=ends(1, 1, logs=(GLOO, GLOO)))),
    (
        "memory named by a log only",
        FailureKind.DEVICE_OOM,
        Evidence(ranks=ends(1, logs=("RuntimeError: CUDA error: out of memory",))),
    ),
    (
        "cuDNN fails on a nearly full device",
        FailureKind.DEVICE_OOM,
        Evidence(
            ranks=ends(1, logs=("RuntimeError: CUDNN_STATUS_NOT_INITIALIZED",)), heartbeats=(BEAT,)
        ),
    ),
    (
        "cuDNN fails on an empty device",
        FailureKind.USER_ERROR,
        Evidence(
            ranks=ends(1, logs=("RuntimeError: CUDNN_STATUS_NOT_INITIALIZED",)),
            heartbeats=(replace(BEAT, peak_bytes=MIB),),
        ),
    ),
    (
        "killed by the kernel",
        FailureKind.HOST_OOM,
        Evidence(ranks=ends(-9, -15), first_ended_rank=0, host_oom_kills=1),
    ),
    ("killed by a person", FailureKind.PREEMPTED, Evidence(ranks=ends(-9, -9), first_ended_rank=0)),
    ("asked to end", FailureKind.PREEMPTED, Evidence(ranks=ends(-15, -15))),
    ("fenced", FailureKind.PREEMPTED, Evidence(ranks=ends(STALE_EXIT_CODE))),
    ("crashed", FailureKind.STARTUP, Evidence(ranks=ends(-signal.SIGSEGV, -9), first_ended_rank=0)),
    ("shared memory", FailureKind.HOST_OOM, Evidence(ranks=ends(-signal.SIGBUS))),
    (
        "disk full",
        FailureKind.DISK_FULL,
        Evidence(ranks=ends(1, logs=("OSError: [Errno 28] No space left on device",))),
    ),
    (
        "disk full on the second rank to end",
        FailureKind.DISK_FULL,
        Evidence(
            ranks=ends(3, 1, logs=("", "OSError: [Errno 28] No space left on device")),
            first_ended_rank=0,
        ),
    ),
    (
        "exits 0 without its artifact",
        FailureKind.USER_ERROR,
        Evidence(ranks=ends(0), missing_artifacts=("model.pt",)),
    ),
    (
        "exits 0 without its artifact after running out of memory",
        FailureKind.DEVICE_OOM,
        Evidence(
            ranks=ends(0, logs=("torch.OutOfMemoryError: CUDA out of memory.",)),
            missing_artifacts=("G.pth",),
        ),
    ),
]


@pytest.mark.parametrize(
    ("kind", "evidence"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_evidence_means(kind: FailureKind | None, evidence: Evidence) -> None:
    failure = classify_end(
        job(), attempt(allocated_bytes=100 * MIB), evidence, device_bytes=256 * MIB
    )
    assert (failure.kind if failure else None) == kind


def test_a_stop_that_was_asked_for_is_a_cancellation() -> None:
    stopped = Evidence(ranks=ends(-15, -15), stopped=True)
    failure = classify_end(replace(job(), cancelling=True), attempt(), stopped)
    assert failure is not None
    assert failure.kind is FailureKind.CANCELLED


def test_a_bug_shows_its_own_traceback() -> None:
    failure = classify_end(job(), attempt(), Evidence(ranks=ends(1), errors=(BUG,)))
    assert failure is not None
    assert failure.excerpt == BUG.traceback


def test_a_launchers_worker_shows_its_own_traceback_the_first_to_fail_first() -> None:
    launcher = replace(ends(1)[0], root_rank=3, root_exit_code=1)
    later = replace(BUG, rank=1, type="ValueError", traceback="Traceback ...\nValueError: 2")
    complaint = replace(BUG, type="RuntimeError", traceback=GLOO)
    failure = classify_end(
        job(),
        attempt(),
        Evidence(ranks=(launcher,), errors=(complaint, later, replace(BUG, rank=3))),
    )
    assert failure is not None
    assert (failure.kind, failure.rank, failure.excerpt) == (FailureKind.UNKNOWN, 3, BUG.traceback)


def test_a_rank_that_ended_by_itself_answers_for_itself() -> None:
    failure = classify_end(
        job(),
        attempt(),
        Evidence(ranks=ends(2, 1), errors=(replace(BUG, rank=1),), first_ended_rank=0),
    )
    assert failure is not None
    assert (failure.rank, failure.reason) == (0, "rank 0 exited with code 2")


def test_out_of_memory_says_rank_step_phase_and_bytes() -> None:
    failure = classify_end(job(), attempt(), Evidence(ranks=ends(-9, OOM_EXIT_CODE), ooms=(OOM,)))
    assert failure is not None
    for fact in ("rank 1", "step 3", "backward", "8.00 MiB", "250.00 MiB", "256.00 MiB"):
        assert fact in failure.reason


def test_a_guard_that_was_not_there_names_the_process_and_what_to_do() -> None:
    failure = classify_end(
        job(), attempt(), Evidence(ranks=ends(0), unwatched=UNSEEN, virtual=True)
    )
    assert failure is not None
    for phrase in ("python -I inner.py", "PYTHONPATH and ORC_GUARD", "-I, -E and -S"):
        assert phrase in failure.reason


def test_a_job_accepts_what_its_script_catches_unless_it_stands_still_after_it() -> None:
    accepts = job(script_spec(on_caught_oom="accept"))
    caught = Evidence(ranks=ends(0), caught=(CAUGHT,), heartbeats=(BEAT,))
    assert classify_end(accepts, attempt(), caught) is None
    stood = classify_end(accepts, attempt(), replace(caught, ranks=ends(-9), hung_for_s=600.0))
    assert stood is not None
    assert stood.kind is FailureKind.DEVICE_OOM


STOOD = Evidence(ranks=ends(-9), heartbeats=(replace(BEAT, step=20),), hung_for_s=600.0)
LEAVES = {"steps": 20, "success": {"artifacts": ["model.pt"]}}


def test_a_program_that_stays_after_its_last_step_has_finished_where_it_left_what_it_names() -> (
    None
):
    assert classify_end(job(script_spec(**LEAVES)), attempt(), STOOD) is None
    others = [
        (LEAVES, replace(STOOD, missing_artifacts=("model.pt",))),
        (LEAVES, replace(STOOD, heartbeats=(replace(BEAT, step=19),))),
        (LEAVES, replace(STOOD, heartbeats=())),
        (LEAVES, replace(STOOD, nodes_lost=("local",))),
        (LEAVES, replace(STOOD, errors=(BUG,))),
        (LEAVES, replace(STOOD, ooms=(OOM,))),
        ({"success": LEAVES["success"]}, STOOD),
        ({"steps": 20}, STOOD),
    ]
    for changes, evidence in others:
        assert classify_end(job(script_spec(**changes)), attempt(), evidence) is not None, evidence
    failure = classify_end(job(script_spec(steps=20)), attempt(), STOOD)
    assert failure is not None
    assert "success.artifacts" in failure.reason


@pytest.mark.parametrize(
    ("earlier_step", "changes", "is_finished"),
    [
        (20, {}, True),
        (19, {}, False),
        (20, {"steps_done": 1}, False),
        (20, {"backwards": 1}, False),
        (20, None, False),
    ],
)
def test_an_attempt_that_had_no_step_left_to_make_may_stay_after_its_artifacts_too(
    earlier_step: int, changes: dict[str, int] | None, is_finished: bool
) -> None:
    """The second attempt began with the last checkpoint, whose step nobody knows."""
    done = Evidence(ranks=ends(-9), heartbeats=(replace(BEAT, step=earlier_step),))
    beats = () if changes is None else (replace(BEAT, step=0, **{"steps_done": 0, **changes}),)
    first = replace(attempt(), evidence=done)
    resumed = replace(job(script_spec(**LEAVES)), attempts=(first, attempt(2)))
    failure = classify_end(resumed, attempt(2), replace(STOOD, heartbeats=beats))
    assert (failure is None) == is_finished


def test_a_script_that_resumed_at_its_last_step_has_made_all_of_its_steps() -> None:
    """A checkpoint of the last step counts for nothing, so the newest that is known is the tenth."""
    spec = script_spec(steps=20, success={"steps": "all"})
    last = replace(BEAT, step=20, torch_version="2.13")
    first = Evidence(ranks=ends(-9), heartbeats=(last,), checkpoint_step=10)
    resumed = replace(job(spec), attempts=(replace(attempt(), evidence=first), attempt(2)))
    none_left = replace(last, step=0, steps_done=0)
    ended = Evidence(ranks=ends(0), heartbeats=(none_left,))
    assert classify_end(resumed, attempt(2), ended) is None
    interrupted = replace(ended, heartbeats=(replace(none_left, signal=15),))
    assert classify_end(resumed, attempt(2), interrupted) is not None
    ran_on = replace(ended, heartbeats=(replace(last, step=5, steps_done=5),))
    assert classify_end(resumed, attempt(2), ran_on) is not None


@pytest.mark.parametrize(
    ("code", "log", "kind"),
    [
        (1, "", FailureKind.DISK_FULL),
        (1, "Loading the tokenizer\n", FailureKind.DISK_FULL),
        (-signal.SIGABRT, "", FailureKind.DISK_FULL),
        (-signal.SIGTERM, "", FailureKind.PREEMPTED),
        (1, "Traceback (most recent call last):\nKeyError: 'labels'", FailureKind.USER_ERROR),
    ],
)
def test_an_end_without_an_error_on_a_full_disk_waits_for_room(
    code: int, log: str, kind: FailureKind
) -> None:
    full = Evidence(ranks=ends(code, logs=(log,)), disk_full=True)
    failure = classify_end(job(), attempt(), full)
    assert failure is not None
    assert failure.kind is kind
    reported = replace(full, errors=(BUG,))
    failure = classify_end(job(), attempt(), reported)
    assert failure is not None
    assert failure.kind is not FailureKind.DISK_FULL, "an error of its own explains more"


def test_a_rank_that_exits_with_0_while_others_train_is_the_cause_of_their_complaints() -> None:
    complaint = replace(BUG, type="RuntimeError", traceback=GLOO)
    left = Evidence(ranks=ends(1, 0), errors=(complaint,), heartbeats=met(2, 2), first_ended_rank=0)
    failure = classify_end(job(), attempt(), left)
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.UNKNOWN, 1)
    assert "fewer batches" in failure.reason
    assert failure.ending is not None
    assert failure.ending.is_own, "its program is to be mended"
    bug = replace(left, errors=(BUG,))
    failure = classify_end(job(), attempt(), bug)
    assert failure is not None
    assert failure.rank == 0, "an error of its own explains more"


@pytest.mark.parametrize(("saved", "is_finished"), [(12, True), (11, False), (None, False)])
def test_the_steps_before_a_checkpoint_count_where_its_name_tells_them(
    saved: int | None, is_finished: bool
) -> None:
    evidence = replace(STOOD, heartbeats=(replace(BEAT, step=8),))
    first = replace(attempt(), evidence=Evidence(ranks=ends(-9), checkpoint_step=saved))
    resumed = replace(job(script_spec(**LEAVES)), attempts=(first, attempt(2)))
    assert (classify_end(resumed, attempt(2), evidence) is None) == is_finished


# optimizer steps that came before attempts 1 and 2 as their optimizers count them, the checkpoint
# that attempt 2 was given, and how many steps came before it in truth; None: unknown
RESTORED_STEPS = [
    (0, 12, "checkpoint-2", 12),
    (0, 11, "checkpoint-2", 11),
    (5000, 5012, "last.pt", 12),  # it began with the optimizer of another training
    (5000, 12, "last.pt", None),
    (0, 12, None, 12),  # it found its checkpoint by itself
    (0, 0, None, 0),  # no checkpoint was there yet
    (0, 0, "last.pt", None),  # it may have restored its weights alone
    (None, 12, "last.pt", None),
    (0, None, "last.pt", None),
]


@pytest.mark.parametrize(("first_count", "count", "resumed_from", "steps_before"), RESTORED_STEPS)
def test_the_steps_before_a_restart_count_where_the_restored_optimizer_counts_them(
    first_count: int | None, count: int | None, resumed_from: str | None, steps_before: int | None
) -> None:
    """Attempt 1 was killed; attempt 2 makes eight of 20 steps, and stays or leaves."""
    began = replace(BEAT, step=9, torch_version="2.13", restored_steps=first_count)
    first = replace(attempt(), evidence=Evidence(ranks=ends(-9), heartbeats=(began,)))
    beats = (replace(began, step=8, restored_steps=count),)
    stood = replace(STOOD, heartbeats=beats, resumed=resumed_from is not None)
    resumed = replace(job(script_spec(**LEAVES)), attempts=(first, attempt(2)))
    assert (classify_end(resumed, attempt(2), stood) is None) == (steps_before == 12)
    # a third attempt, to which the second one left no step
    second = replace(attempt(2), evidence=replace(stood, hung_for_s=None))
    third = replace(STOOD, heartbeats=(replace(BEAT, step=0, steps_done=0, backwards=0),))
    late = replace(job(script_spec(**LEAVES)), attempts=(first, second, attempt(3)))
    assert (classify_end(late, attempt(3), third) is None) == (steps_before == 12)

    wants_all = replace(resumed, spec=script_spec(steps=20, success={"steps": "all"}))
    left = replace(stood, ranks=ends(0), hung_for_s=None)
    failure = classify_end(wants_all, attempt(2), left)
    assert (failure is not None) == (steps_before in (0, 11))
    doubt = describe_done_steps(wants_all, attempt(2), left)
    assert ("nothing tells whether all of its 20 steps" in doubt) == (steps_before is None)


@pytest.mark.parametrize(
    ("code", "root_code", "is_short"),
    [(1, None, True), (0, None, True), (-9, None, False), (1, -9, False), (None, None, False)],
)
def test_nobody_knows_the_last_steps_of_an_attempt_that_a_signal_ended(
    code: int | None, root_code: int | None, is_short: bool
) -> None:
    """Ten of 20 steps were made, of which the last heartbeat told five; the next attempt made ten."""
    spec = script_spec(steps=20, success={"steps": "all"})
    beat = replace(BEAT, torch_version="2.13")
    end = RankEnd(rank=0, exit_code=code, root_rank=0, root_exit_code=root_code)
    first = replace(attempt(), evidence=Evidence(ranks=(end,), heartbeats=(beat,)))
    resumed = replace(job(spec), attempts=(first, attempt(2)))
    ended = Evidence(ranks=ends(0), heartbeats=(replace(beat, step=10),))
    assert (classify_end(resumed, attempt(2), ended) is not None) == is_short


def test_what_context_and_communicators_hold_is_no_part_of_what_a_tensor_would_have_needed() -> (
    None
):
    """Tensors have 79 GiB of a device of 80 GiB whose context holds 1 GiB."""
    report = replace(OOM, live_bytes=70 << 30, requested_bytes=2 << 30, capacity_bytes=80 << 30)
    assert compute_oom_needed_bytes(report) == (80 << 30) + 1, (
        "where nothing is known of the context"
    )
    assert compute_oom_needed_bytes(replace(report, overhead_bytes=1 << 30)) == (79 << 30) + 1
    assert compute_oom_needed_bytes(replace(report, overhead_bytes=20 << 30)) == 72 << 30, (
        "never less than it had and asked for"
    )
