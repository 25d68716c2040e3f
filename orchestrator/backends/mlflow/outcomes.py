"""Imports outcomes that other homes recorded in MLflow, as observations (predicted and measured values)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from orchestrator.backends.mlflow.contact import EXPERIMENT
from orchestrator.backends.mlflow.content import OUTCOME_TAG
from orchestrator.memory.calibration.calibrate import select_observations_to_keep
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.observation import Observation

PAGE = 500  # runs per request
REQUEST_TIMEOUT_S = 30
SERVERS = ("http://", "https://")
SQLITE = "sqlite:///"

log = logging.getLogger(__name__)


def read_outcomes(tracking_uri: str) -> tuple[Observation, ...]:
    """Return the usable observations (predicted and measured values) of attempts that another home
    recorded, oldest first.

    Raises ServiceError where MLflow does not answer. Raises SpecError where no attempt was
    recorded, or no MLflow store exists, since the client would create one.
    """
    if not tracking_uri.startswith(SERVERS) and not _get_sqlite_path(tracking_uri).is_file():
        raise SpecError(
            "no MLflow is there",
            path="--from-mlflow",
            got=tracking_uri,
            allowed=f"http://HOST:PORT, or {SQLITE}FILE of a file that is there",
        )
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_TIMEOUT_S))
    from mlflow import MlflowClient  # 2 s of imports
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri)
    texts = []
    try:
        record = client.get_experiment_by_name(EXPERIMENT)
        if record is None:
            raise SpecError(
                f"no home has recorded there: it has no experiment {EXPERIMENT!r}",
                path="--from-mlflow",
                got=tracking_uri,
            )
        token = None
        while True:
            page = client.search_runs(
                [record.experiment_id],
                f"tags.`{OUTCOME_TAG}` LIKE '{{%'",
                max_results=PAGE,
                page_token=token,
            )
            texts += [run.data.tags[OUTCOME_TAG] for run in page]
            if not (token := page.token):
                break
    except MlflowException as error:
        message = str(error).partition(" with exception")[0][:300]
        raise ServiceError(f"MLflow at {tracking_uri} does not answer: {message}") from None
    return select_observations_to_keep(
        outcome for text in texts if (outcome := _parse_observation(text)) is not None
    )


def _get_sqlite_path(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE) if uri.startswith(SQLITE) else "")


def _parse_observation(observation_json: str) -> Observation | None:
    """Return the observation from its JSON; None where another version of the orchestrator wrote
    it.
    """
    try:
        return TypeAdapter(Observation).validate_json(observation_json)
    except ValidationError:
        log.warning("an outcome cannot be read and is left out: %s", observation_json[:200])
        return None
