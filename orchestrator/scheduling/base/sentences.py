"""The sentences on why a job waits, made of its code and facts where they are shown. Nothing reads one back.

Another table of SENTENCES is another language.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job_record import Job
from orchestrator.specs.pending import Facts, Pending

NAMED_MAX = 3  # jobs in a sentence

# By the code and the names of its facts, as the sentence has them.
SENTENCES = {
    "cluster_unseen": "waiting for the cluster to be seen",
    "array_limit array most": "waits for others of the array {array}: at most {most} run at once",
    "array_limit array first": "waits for others of the array {array}: {first} goes first",
    "foreign_memory device": "waits for memory that other processes hold on {device}",
    "unreadable places": "waits for devices that cannot be read: {places}",
    "nodes_away": "waits for nodes to come back",
    "nodes_away device": "waits for nodes with {device} to come back",
    "drain node": "waits for devices: {node} takes nothing new",
    "drain nodes": "waits for devices: {nodes} take nothing new",
    "maintenance nodes": "waits for devices: it would not end before the maintenance of {nodes}",
    "maintenance nodes bound": (
        "waits for devices: it may not end before the maintenance of {nodes}"
        " (nobody said how long it takes, and `{bound}` bounds it)"
    ),
    "too_late nodes": "it would not end before the maintenance of {nodes}",
    "too_late nodes bound": (
        "it may not end before the maintenance of {nodes}"
        " (nobody said how long it takes, and `{bound}` bounds it)"
    ),
    "start_window start window": "waits for {start} (start_window {window})",
    "devices": "waits for devices",
    "devices devices device": (
        "leaves room for shorter jobs before it takes {devices} free {device}"
    ),
    "elsewhere sentence avoided": "{sentence} but {avoided}, where it ended for no known reason",
    "dependency jobs": "waits for {jobs}",
    "dependency jobs more": "waits for {jobs} and {more} more",
    "after_always job": "{job}",
    "after_success job": "{job} to succeed",
    "asks question": "asks: {question}",
    "held user": "held by {user}",
    "suspended user": "suspended by {user}",
    "release job": "`orc release {job}` lets it start",
    "resume job": "`orc resume {job}` lets it go on",
}


def _sentence(code: str, **facts: object) -> str:
    """Return the sentence of a code and its facts; for those of another version the code itself."""
    return SENTENCES.get(" ".join((code, *facts)), code.replace("_", " ")).format(**facts)


def waiting_sentence(code: Pending, facts: Facts) -> str:
    """Return why a job waits."""
    values = dict(facts)
    avoided = values.pop("avoided", None)
    sentence = _sentence(code, **values)
    if avoided is None:
        return sentence
    return _sentence("elsewhere", sentence=sentence, avoided=avoided)


def too_late_sentence(facts: Facts) -> str:
    """Return that a job would end too late for a maintenance, as part of a sentence."""
    return _sentence("too_late", **dict(facts))


def reason_of(job: Job) -> str:
    """Return why the job waits, runs or ended: what its last event said, else the sentence of its code."""
    if job.status.ended:
        return job.reason
    if job.waits_for:
        return _dependency_sentence(job.waits_for)
    if job.asks:
        return _sentence("asks", question=job.asks)
    if job.reason or job.pending is None:
        return job.reason
    return waiting_sentence(job.pending, job.facts)


def _dependency_sentence(waits_for: Sequence[Dependency]) -> str:
    names = []
    for dependency in waits_for[:NAMED_MAX]:
        names.append(_sentence(f"after_{dependency.when}", job=dependency.job))
    more = len(waits_for) - NAMED_MAX
    if more > 0:
        return _sentence(Pending.DEPENDENCY, jobs=", ".join(names), more=more)
    return _sentence(Pending.DEPENDENCY, jobs=", ".join(names))


def shown_reason(job: Job) -> str:
    """Return `reason_of` with the job's holder and the command that releases it, where it is held."""
    if job.held_by is None or job.status.ended:
        return reason_of(job)
    command = _sentence("resume" if job.attempts else "release", job=job.id)
    return "; ".join(filter(None, (describe_holder(job), reason_of(job), command)))


def describe_holder(job: Job) -> str:
    """Return who holds the job, as text."""
    return _sentence("suspended" if job.attempts else "held", user=job.held_by)
