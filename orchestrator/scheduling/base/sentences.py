"""Sentences for people on why a job waits, made from a stored code and its facts when they are
shown.

The texts are the table SENTENCES, so another table would give another language. No code parses a
sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job_record import Job
from orchestrator.specs.packaged import load_table
from orchestrator.specs.pending import Facts, Pending

NAMED_MAX = 3  # jobs in a sentence

# By the code and the names of its facts, as the sentence has them.
SENTENCES: Mapping[str, str] = load_table(__package__, "sentences")


def _fill_sentence(code: str, **facts: object) -> str:
    """Return the sentence for a code, with these facts filled in; the code as words where the table
    has no sentence.
    """
    return SENTENCES.get(" ".join((code, *facts)), code.replace("_", " ")).format(**facts)


def format_waiting_sentence(code: Pending, facts: Facts) -> str:
    """Return the sentence that tells why a job waits, made from the stored code of the reason and
    its facts.
    """
    values = dict(facts)
    avoided = values.pop("avoided", None)
    sentence = _fill_sentence(code, **values)
    if avoided is None:
        return sentence
    return _fill_sentence("elsewhere", sentence=sentence, avoided=avoided)


def format_too_late_for_maintenance(facts: Facts) -> str:
    """Return a clause that says that a job would end too late for a node's maintenance."""
    return _fill_sentence("too_late", **dict(facts))


def describe_status(job: Job) -> str:
    """Return why the job waits, runs or ended, as text; "" where no reason is stored."""
    if job.status.ended:
        return job.reason
    if job.waits_for:
        return _format_dependency_sentence(job.waits_for)
    if job.asks:
        return _fill_sentence("asks", question=job.asks)
    if job.reason or job.pending is None:
        return job.reason
    return format_waiting_sentence(job.pending, job.facts)


def _format_dependency_sentence(waits_for: Sequence[Dependency]) -> str:
    """Return the sentence that names the jobs for whose ends a job waits, at most NAMED_MAX of
    them.
    """
    names = []
    for dependency in waits_for[:NAMED_MAX]:
        names.append(_fill_sentence(f"after_{dependency.when}", job=dependency.job))
    more = len(waits_for) - NAMED_MAX
    if more > 0:
        return _fill_sentence(Pending.DEPENDENCY, jobs=", ".join(names), more=more)
    return _fill_sentence(Pending.DEPENDENCY, jobs=", ".join(names))


def describe_status_with_holder(job: Job) -> str:
    """Return why the job waits, runs or ended, as `describe_status`.

    For a job on hold the text also says who holds it, and which command releases it.
    """
    if job.held_by is None or job.status.ended:
        return describe_status(job)
    command = _fill_sentence("resume" if job.attempts else "release", job=job.id)
    return "; ".join(filter(None, (describe_holder(job), describe_status(job), command)))


def describe_holder(job: Job) -> str:
    """Return text that says which user put the job on hold."""
    return _fill_sentence("suspended" if job.attempts else "held", user=job.held_by)
