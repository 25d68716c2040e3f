"""The sentences on why a job waits, made of its code and facts where they are shown. Nothing reads one back.

Another table of SENTENCES is another language.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job_record import Job
from orchestrator.specs.pending import Facts, Pending

NAMED_MAX = 3  # jobs in a sentence

# By the code, and by the names of its facts.
SENTENCES: dict[tuple[str, ...], str] = {
    (Pending.CLUSTER_UNSEEN,): "waiting for the cluster to be seen",
    (Pending.ARRAY_LIMIT, "array", "most"): (
        "waits for others of the array {array}: at most {most} run at once"
    ),
    (Pending.ARRAY_LIMIT, "array", "first"): (
        "waits for others of the array {array}: {first} goes first"
    ),
    (Pending.FOREIGN_MEMORY, "device"): "waits for memory that other processes hold on {device}",
    (Pending.UNREADABLE, "places"): "waits for devices that cannot be read: {places}",
    (Pending.NODES_AWAY,): "waits for nodes to come back",
    (Pending.NODES_AWAY, "device"): "waits for nodes with {device} to come back",
    (Pending.DRAIN, "node"): "waits for devices: {node} takes nothing new",
    (Pending.DRAIN, "nodes"): "waits for devices: {nodes} take nothing new",
    (Pending.MAINTENANCE, "nodes"): (
        "waits for devices: it would not end before the maintenance of {nodes}"
    ),
    (Pending.MAINTENANCE, "nodes", "supposed"): (
        "waits for devices: it would not end before the maintenance of {nodes}"
        " (without `steps` {supposed} is supposed)"
    ),
    (Pending.START_WINDOW, "start", "window"): "waits for {start} (start_window {window})",
    (Pending.DEVICES,): "waits for devices",
    (Pending.DEVICES, "devices", "device"): (
        "leaves room for shorter jobs before it takes {devices} free {device}"
    ),
    ("elsewhere", "sentence", "avoided"): (
        "{sentence} but {avoided}, where it ended for no known reason"
    ),
    (Pending.DEPENDENCY, "jobs"): "waits for {jobs}",
    (Pending.DEPENDENCY, "jobs", "more"): "waits for {jobs} and {more} more",
    ("after always", "job"): "{job}",
    ("after success", "job"): "{job} to succeed",
    ("asks", "question"): "asks: {question}",
    ("held", "user"): "held by {user}",
    ("suspended", "user"): "suspended by {user}",
    ("release", "job"): "`orc release {job}` lets it start",
    ("resume", "job"): "`orc resume {job}` lets it go on",
}


def _sentence(code: str, **facts: object) -> str:
    """Return the sentence of a code and its facts; for those of another version the code itself."""
    return SENTENCES.get((code, *facts), code.replace("_", " ")).format(**facts)


def waiting_sentence(code: Pending, facts: Facts) -> str:
    """Return why a job waits."""
    values = dict(facts)
    avoided = values.pop("avoided", None)
    sentence = _sentence(code, **values)
    if avoided is None:
        return sentence
    return _sentence("elsewhere", sentence=sentence, avoided=avoided)


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
        names.append(_sentence(f"after {dependency.when}", job=dependency.job))
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
