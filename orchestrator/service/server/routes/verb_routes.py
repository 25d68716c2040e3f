"""Routes that change a job: hold, release, suspend, resume, update and retry. Senders must be of its team."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from orchestrator.scheduling.options.asks import apply_permissions
from orchestrator.service.intake.intake import check_files
from orchestrator.service.server.retry import (
    check_retry,
    choose_start,
    list_changed_files,
    make_retry_spec,
)
from orchestrator.service.server.routes.answers import ChangedAnswer, RetriedAnswer, document_answer
from orchestrator.service.server.routes.dependencies import NameObjects, Sender, Service
from orchestrator.service.server.routes.job_routes import (
    IdempotencyKey,
    find_changeable_job,
    make_request_key,
    prepare_job_and_fault,
)
from orchestrator.service.server.routes.requests import (
    JobsRequest,
    RetryRequest,
    SubmitRequest,
    UpdateRequest,
)
from orchestrator.service.server.verbs import VERBS, Change, make_update_change
from orchestrator.service.transfer.store import Uploads
from orchestrator.specs.json_object import JsonObject


def add_verb_routes(app: FastAPI, service: Service, uploads: Uploads) -> None:
    """Add the routes that change a job (hold, release, suspend, resume, update, retry) to the
    application.
    """
    controller = service.controller
    for verb, change_of in VERBS.items():
        app.post(f"/jobs/{verb}", name=verb, **document_answer(ChangedAnswer))(
            _make_verb_endpoint(service, verb, change_of)
        )

    @app.post("/jobs/{job_id}/update")
    def update_job(
        job_id: str, request: UpdateRequest, sender: Sender, name_objects: NameObjects
    ) -> ChangedAnswer:
        """Change the priority, deadline or time limit of a job that has not ended."""
        find_changeable_job(controller, job_id, sender, "update")
        settings = tuple(request.settings.items())
        name_objects(f"{key}={value}" for key, value in settings)
        return {
            "changed": controller.change_jobs(
                [job_id], make_update_change(settings, controller.state.policy)
            )
        }

    @app.post("/jobs/{job_id}/retry")
    def retry(
        job_id: str,
        request: RetryRequest,
        sender: Sender,
        name_objects: NameObjects,
        idempotency_key: IdempotencyKey = "",
    ) -> RetriedAnswer:
        """Answer a job's question, or submit an ended job again."""
        job = find_changeable_job(controller, job_id, sender, "retry")
        settings = tuple(request.settings.items())
        if job.asks and not job.status.ended and not settings:
            allowed = apply_permissions(
                job.spec, request.allow, request.global_batch_size, request.learning_rate
            )
            controller.continue_job_with_spec(job_id, allowed)
            return {"id": job_id, "continues_from": job_id, "why": "goes on with what was allowed"}
        permissions = (request.allow, request.global_batch_size, request.learning_rate)
        check_retry(job, has_allow=any(permission is not None for permission in permissions))
        source = f"the retry of {job_id}"
        data = make_retry_spec(job, settings, source).model_dump(mode="json")
        if not sender.is_owner:
            data["user"] = None  # whoever asks
        spec, _ = prepare_job_and_fault(SubmitRequest(spec=data), source, sender, uploads, service)
        check_files(spec, source)
        begin = choose_start(job, spec, [key for key, _ in settings])
        key = make_request_key(idempotency_key and f"{idempotency_key}/{job_id}", sender, request)
        new_id = controller.submit_retry(job, spec, begin, key)
        name_objects([new_id])
        newer = list_changed_files(job, spec)
        why = begin.why + (
            f"; other data than before: {', '.join(newer)} changed since" if newer else ""
        )
        return {"id": new_id, "continues_from": begin.continues_from, "why": why}


def _make_verb_endpoint(
    service: Service, verb: str, make_change: Callable[[str], Change]
) -> Callable[..., JsonObject]:
    """Return the endpoint of one verb (such as hold), which changes all jobs of a request, or none.

    `make_change` returns the change of a job for the sender's name.
    """

    def change(request: JobsRequest, sender: Sender, name_objects: NameObjects) -> JsonObject:
        name_objects(request.jobs)
        for job_id in request.jobs:
            find_changeable_job(service.controller, job_id, sender, verb)
        return {"changed": service.controller.change_jobs(request.jobs, make_change(sender.name))}

    change.__doc__ = f"{verb.capitalize()} jobs, all or none."
    return change
