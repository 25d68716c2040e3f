"""The commands' HTTP client: on the loopback with the home folder's token, or by TLS with a login."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from orchestrator.service.client.logins import Login
from orchestrator.service.transfer.archive import Limits, unpack_and_hash_archive
from orchestrator.service.visible import escape_controls
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.json_object import JsonObject

if TYPE_CHECKING:  # most commands need none of what these load
    from orchestrator.scheduling.reports.morning import MorningReport
    from orchestrator.scheduling.reports.sweep import SweepReport
    from orchestrator.service.views.comparison import ComparisonView
    from orchestrator.service.views.expected import ExpectedJob
    from orchestrator.service.views.records import BatchAnswer, ExplanationView, JobView
    from orchestrator.service.views.teams import TeamView
    from orchestrator.specs.observation import Observation
    from orchestrator.specs.parse import Override

OBSERVATIONS_SENT = 500  # per request: about 0.5 MB
ENDED_SHOWN = 100
TIMEOUT_S = 30.0
LONG_POLL_S = 2.0
KEY = "Idempotency-Key"
AGAIN_S = (
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
)  # before a submission without an answer is sent again: longer than a failover
UPLOAD_TIMEOUT_S = PURGE_TIMEOUT_S = 600.0
Noun = TypeVar("Noun")


class Client:
    """HTTP client of a service. Its methods raise ServiceError where the service does not answer or
    refuses.
    """

    def __init__(self, service: Path | Login) -> None:
        """Connect to the service of a home folder, or to the service of a stored login."""
        if isinstance(service, Login):
            url = service.url
            token = service.token
            context = ssl.create_default_context(cadata=service.certificate)
            # a pinned certificate need not sign itself
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        else:
            url = _read_local_url(service)
            token = _read_token(service)
            context = None
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
            verify=context or True,
            trust_env=False,  # a proxy would see the token
        )
        # elsewhere the token says who submits
        self._home = None if isinstance(service, Login) else service

    def submit_job(
        self,
        job_data: JsonObject,
        fault: JsonObject | None = None,
        idempotency_key: str | None = None,
    ) -> str:
        """Submit a job, and return its id once it is in the queue. `fault` is a planned failure for
        tests.

        A submission without a response is sent again, without making a second job. With an
        `idempotency_key` (at most 64 characters), the caller may also repeat it, to any service of
        the same journal.
        """
        body = {"spec": self._add_submitter(job_data), "fault": fault}
        return (
            self._post_submission("/jobs", body)
            if idempotency_key is None
            else self._request_json("POST", "/jobs", body, idempotency_key)
        )["id"]

    def submit_jobs(self, jobs_data: Sequence[JsonObject]) -> BatchAnswer:
        """Submit all of these jobs or none, and return their ids once they are in the journal.

        If one job is invalid, none is submitted. Further fields of the answer say by job id which
        jobs are expected to be late, which guarantees are kept, and which jobs are refused.
        """
        jobs = [{"spec": self._add_submitter(spec)} for spec in jobs_data]
        return self._post_submission("/jobs/batch", {"jobs": jobs})

    def whoami(self) -> dict[str, str]:
        """Return the name and role of the user that this client's token identifies."""
        return self._request_json("GET", "/whoami")

    def create_sign_in_url(self, job_id: str | None) -> str:
        """Return a URL that signs a browser in once, and leads to the job's page; with None, to the
        first page.
        """
        path = self._request_json("POST", "/sign-in-links")["path"]
        next_page = f"?next={quote(f'/ui/jobs/{job_id}', safe='')}" if job_id else ""
        return f"{str(self._http.base_url).rstrip('/')}{path}{next_page}"

    def list_users(self) -> list[JsonObject]:
        """Return the record of every user: name and role."""
        return self._request_json("GET", "/users")["users"]

    def set_user(self, user_name: str, role: str) -> None:
        """Add a user, or change the role of an existing one."""
        self._request_json("PUT", _make_route_path("users", user_name), {"role": role})

    def remove_user(self, user_name: str) -> None:
        """Remove a user with all tokens."""
        self._request_json("DELETE", _make_route_path("users", user_name))

    def list_tokens(self) -> list[JsonObject]:
        """Return every token's record: user, creation, expiry and last use."""
        return self._request_json("GET", "/tokens")["tokens"]

    def create_token(self, user: str, lifetime_s: float | None) -> tuple[str, JsonObject]:
        """Return (new token, its record in the service)."""
        answer = self._request_json("POST", "/tokens", {"user": user, "lifetime_s": lifetime_s})
        return answer["secret"], answer["token"]

    def revoke_token(self, token_number: int) -> None:
        """Revoke a token."""
        self._request_json("DELETE", f"/tokens/{token_number}")

    def list_audit_rows(self, rows_max: int) -> list[JsonObject]:
        """Return at most `rows_max` rows of the audit log, newest first."""
        return self._request_json("GET", f"/audit?limit={rows_max}")["rows"]

    def list_unreadable_rows(self) -> list[JsonObject]:
        """Return the journal's rows that cannot be read, each with its table, key and reason."""
        return self._request_json("GET", "/journal/unreadable")["rows"]

    def delete_unreadable_row(self, table_name: str, row_key: str) -> None:
        """Delete a row of the journal that cannot be read, for good."""
        self._request_json("DELETE", _make_route_path("journal", "unreadable", table_name, row_key))

    def list_jobs(self, ended_max: int = ENDED_SHOWN) -> list[JobView]:
        """Return every live job, in queue order, and at most `ended_max` jobs that ended last."""
        answer = self._request_json("GET", f"/jobs?ended={ended_max}")
        jobs: dict[str, JobView] = {job["id"]: job for job in answer["jobs"]}
        while (after := answer["next"]) is not None:  # each page begins behind the last one
            answer = self._request_json("GET", f"/jobs?after={quote(after)}")
            jobs |= {job["id"]: job for job in answer["jobs"]}
        return [*jobs.values()]

    def fetch_job_and_version(
        self, job_id: str, known_version: int | None = None, wait_s: float = LONG_POLL_S
    ) -> tuple[JobView, int]:
        """Return (job, version of the service's state in which it was read).

        With `known_version`, wait at most `wait_s` seconds for a newer version.
        """
        query = "" if known_version is None else f"?seen={known_version}&wait_s={wait_s}"
        answer = self._request_json("GET", f"/jobs/{quote(job_id, safe='')}{query}")
        return answer["job"], answer["version"]

    def list_missing_uploads(self, digests: Sequence[str]) -> list[str]:
        """Return those of these digests whose archives the service lacks.

        It keeps the archives of the others for at least an hour.
        """
        return self._request_json("POST", "/uploads/missing", {"digests": list(digests)})["missing"]

    def upload(self, digest: str, archive_chunks: Iterable[bytes], size_bytes: int) -> None:
        """Send a compressed archive of `size_bytes` bytes; `digest` is the SHA-256 of its unpacked
        content.
        """
        try:
            answer = self._http.put(
                f"/uploads/{digest}",
                content=archive_chunks,
                headers={"Content-Length": str(size_bytes)},
                timeout=UPLOAD_TIMEOUT_S,
            )
        except httpx.HTTPError as error:
            raise ServiceError(f"the upload was cut off ({error}): submit again") from None
        _raise_for_error(answer)

    def download_output_and_count(self, job_id: str, target_folder: Path) -> tuple[int, int]:
        """Download a job's output to a new folder, all or nothing; return (bytes, number of entries
        left out).

        Links that lead out of the folder are left out. Raises ServiceError where the transfer is
        cut off or too large.
        """
        from orchestrator.service.transfer.outputs import ENTRIES_MAX

        if target_folder.is_dir() and not any(target_folder.iterdir()):
            target_folder.rmdir()
        if os.path.lexists(target_folder):
            raise SpecError(
                "exists already", source=str(target_folder), hint="name another folder with `--to`"
            )
        try:
            with self._http.stream("GET", _make_route_path("jobs", job_id, "output")) as answer:
                if not answer.is_success:
                    answer.read()
                    _raise_for_error(answer)
                size_bytes, left_out = (
                    int(answer.headers[f"x-output-{name}"]) for name in ("bytes", "left-out")
                )
                target_folder.parent.mkdir(parents=True, exist_ok=True)
                free_bytes = shutil.disk_usage(target_folder.parent).free
                if size_bytes > free_bytes:
                    raise ServiceError(
                        f"the output has {size_bytes} bytes; {target_folder.parent} has {free_bytes} bytes free"
                    )
                limits = Limits(entries=ENTRIES_MAX, total_bytes=size_bytes)
                try:
                    unpack_and_hash_archive(
                        _Reader(answer.iter_bytes()).read, target_folder, limits
                    )
                except SpecError as error:
                    raise ServiceError(f"the output did not arrive whole: {error}") from None
        except httpx.HTTPError as error:
            raise ServiceError(f"the output was cut off ({error}): fetch it again") from None
        except OSError as error:
            raise ServiceError(
                f"{target_folder} cannot be written: {error.strerror or error}"
            ) from None
        return size_bytes, left_out

    def fetch_explanation(self, job_id: str) -> ExplanationView:
        """Return a job's predictions and measurements, and the corrections learned from them."""
        return self._request_json("GET", _make_route_path("jobs", job_id, "explanation"))

    def fetch_comparison(self, job_id: str) -> ComparisonView:
        """Return the comparison of strategies to which this job belongs."""
        return self._request_json("GET", _make_route_path("jobs", job_id, "comparison"))

    def list_sweeps(self) -> list[SweepReport]:
        """Return the most recent sweeps, newest first."""
        from orchestrator.scheduling.reports.sweep import SweepReport

        return TypeAdapter(list[SweepReport]).validate_python(
            self._request_json("GET", "/sweeps")["sweeps"]
        )

    def fetch_sweep(self, sweep_id: str) -> SweepReport:
        """Return a sweep with its trials."""
        from orchestrator.scheduling.reports.sweep import SweepReport

        answer = self._request_json("GET", _make_route_path("sweeps", sweep_id))
        return parse_answer(SweepReport, answer)

    def send_test_notices(self, target_names: Sequence[str]) -> dict[str, str | None]:
        """Send a test notice to these notification targets, or to all if none is named.

        Returns {target's name: error text, or None for success}.
        """
        return self._request_json("POST", "/notify/test", {"targets": list(target_names)})[
            "problems"
        ]

    def send_and_count_new_observations(self, observations: Sequence[Observation]) -> int:
        """Send observations (predicted and measured values) of another home; return how many were
        new to the service.
        """
        from orchestrator.service.views.records import make_observations_view

        parts = [
            observations[first : first + OBSERVATIONS_SENT]
            for first in range(0, len(observations), OBSERVATIONS_SENT)
        ]
        return sum(
            self._request_json(
                "POST", "/observations", {"observations": make_observations_view(part)}
            )["count"]
            for part in parts
        )

    def cancel_jobs(self, job_ids: Sequence[str], *, whole_arrays: bool) -> list[str]:
        """Cancel these jobs, and with `whole_arrays` all jobs of their arrays; return the ids of
        the jobs that end.

        The call returns once the request is durable.
        """
        return self._request_json(
            "POST", "/jobs/cancel", {"jobs": job_ids, "whole_arrays": whole_arrays}
        )["cancelled"]

    def retry_job(
        self,
        job_id: str,
        new_values: Sequence[Override],
        *,
        allow: str | None = None,
        global_batch_size: int | None = None,
        learning_rate: str | None = None,
    ) -> JsonObject:
        """Answer a job's question, or submit an ended job again; return a JSON object with the id
        of the job that continues.

        `allow` is a class of degradation. `learning_rate` is the rule by which the learning rate
        follows a smaller batch.
        """
        body = {
            "allow": allow,
            "global_batch_size": global_batch_size,
            "learning_rate": learning_rate,
            "settings": dict(new_values),
        }
        return self._post_submission(_make_route_path("jobs", job_id, "retry"), body)

    def change_jobs(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        """Apply a verb (hold, release, suspend or resume) to jobs; return the ids of the jobs that
        changed.
        """
        return self._request_json("POST", f"/jobs/{verb}", {"jobs": job_ids})["changed"]

    def update_job(self, job_id: str, new_values: Sequence[Override]) -> bool:
        """Give a job new values of its priority, deadline or time limit; return whether any value
        changed.
        """
        body = {"settings": dict(new_values)}
        return bool(
            self._request_json("POST", _make_route_path("jobs", job_id, "update"), body)["changed"]
        )

    def purge_files(self, *, dry_run: bool) -> JsonObject:
        """Remove files of ended jobs as the cluster file's `keep` says, and return what was
        removed; `dry_run` only lists it.
        """
        return self._request_json("POST", "/purge", {"dry_run": dry_run}, timeout_s=PURGE_TIMEOUT_S)

    def drain_node(self, node_name: str, *, undo: bool) -> None:
        """Let a node take no new jobs (a drain); with `undo`, let it take jobs again. Returns once
        the request is durable.
        """
        self._request_json("POST", _make_route_path("nodes", node_name, "drain"), {"undo": undo})

    def fetch_join_information(self) -> JsonObject:
        """Return what a joining machine needs: Ray's address, and the versions and settings that
        must equal the service's.
        """
        return self._request_json("GET", "/join")

    def add_node(self, node_data: JsonObject, machine_address: str) -> None:
        """Register the machine at this address as a node of the service; one that is registered
        already is no error.
        """
        self._request_json("POST", "/nodes", {"node": node_data, "address": machine_address})

    def remove_node(self, node_name: str) -> None:
        """Remove a node whose machine has left from the service's list of nodes."""
        self._request_json("DELETE", _make_route_path("nodes", node_name))

    def read_log_and_offset(
        self, job_id: str, attempt_number: int, rank: int, offset: int
    ) -> tuple[bytes, int]:
        """Return (bytes of a rank's log from `offset` on, offset after them); b"" if there are none
        yet.
        """
        path = f"/jobs/{quote(job_id, safe='')}/attempts/{attempt_number}/logs?rank={rank}&offset={offset}"
        answer = self._send_request("GET", path)
        return answer.content, int(answer.headers["x-next-offset"])

    def follow_log(
        self, job_id: str, attempt_number: int, rank: int, offset: int
    ) -> Iterator[bytes]:
        """Yield the bytes of a rank's log from `offset` as they are written, until the attempt ends
        or some seconds pass.
        """
        path = f"/jobs/{quote(job_id, safe='')}/attempts/{attempt_number}/logs/follow?rank={rank}&offset={offset}"
        try:
            with self._http.stream("GET", path) as answer:
                if not answer.is_success:
                    answer.read()
                    _raise_for_error(answer)
                yield from answer.iter_raw()
        except httpx.HTTPError as error:
            raise _make_no_answer_error(error) from None

    def list_teams(self) -> list[TeamView]:
        """Return the teams and users of a shared cluster, the next in turn first; [] where the
        cluster has no teams.
        """
        return self._request_json("GET", "/teams")["teams"]

    def fetch_morning_report(self, since_s: float) -> MorningReport:
        """Return the morning report on the jobs since `since_s` (seconds since 1970)."""
        from orchestrator.scheduling.reports.morning import MorningReport

        answer = self._request_json("GET", f"/report?since_s={since_s!r}")
        return parse_answer(MorningReport, answer)

    def fetch_forecast(self) -> list[ExpectedJob]:
        """Return the expected start and end of each live job, the earliest start first."""
        return self._request_json("GET", "/forecast")["jobs"]

    def fetch_cluster(self) -> JsonObject:
        """Return the cluster as a JSON object: name, live nodes (`views.NodeView`), drained nodes,
        and its services' addresses.
        """
        return self._request_json("GET", "/cluster")

    def shut_down(self, force: bool, timeout_s: float = TIMEOUT_S) -> None:
        """Shut the service down. Without `force`, it refuses while jobs run."""
        self._request_json("POST", "/shutdown", {"force": force}, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _add_submitter(self, job_data: JsonObject) -> JsonObject:
        """Return the job's data with its user; that is the submitter if the job names none."""
        return (
            job_data
            if job_data.get("user") or self._home is None
            else {**job_data, "user": get_user_name()}
        )

    def _post_submission(self, path: str, body: JsonObject) -> Any:
        """Send a submission, and return the service's answer. If no answer comes, send it again
        under the same key.
        """
        key = secrets.token_hex(16)
        why = ""
        for pause_s in (0.0, *AGAIN_S):
            time.sleep(pause_s)
            try:
                if why:
                    self._update_port()
                answer = self._http.post(path, json=body, headers={KEY: key})
            except (httpx.HTTPError, ServiceError) as error:
                if not why and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    raise _make_no_answer_error(error) from None  # it was not sent
                why = str(error)
                continue
            if "retry-after" in answer.headers or (
                why and answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
            ):
                why = _format_error(answer)
                continue
            _raise_for_error(answer)
            return answer.json()
        raise ServiceError(
            f"no service answered ({why}). `orc queue` shows whether anything was submitted"
        )

    def _update_port(self) -> None:
        """Read the port of the home's service again, since a restarted service has another port.
        Raises ServiceError.
        """
        if self._home is not None:
            self._http.base_url = _read_local_url(self._home)

    def _request_json(
        self,
        method: str,
        path: str,
        body: Any = None,
        idempotency_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """Send a request, and return its JSON answer. Raises SpecError or ServiceError as the
        service says.
        """
        return escape_controls(
            self._send_request(method, path, body, idempotency_key, timeout_s).json()
        )

    def _send_request(
        self,
        method: str,
        path: str,
        body: Any = None,
        idempotency_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> httpx.Response:
        headers = {KEY: idempotency_key} if idempotency_key else None
        try:
            answer = self._http.request(method, path, json=body, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise _make_no_answer_error(error) from None
        _raise_for_error(answer)
        return answer


class _Reader:
    """File object that reads from an iterator of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size_max: int) -> bytes:
        """Return at most `size_max` bytes; b"" at the end."""
        if not self._rest:
            self._rest = next(self._chunks, b"")
        read = self._rest[:size_max]
        self._rest = self._rest[size_max:]
        return read


def _make_no_answer_error(error: httpx.HTTPError) -> ServiceError:
    """Return the error for a service that did not answer the request."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return ServiceError(
            "the service shows a certificate that is not trusted here: none was pinned, or another one. Compare its "
            "fingerprint with the one that an administrator tells, then `orc login URL --fingerprint ...`"
        )
    return ServiceError(f"the service does not answer ({error}). `orc up` starts it again")


def _raise_for_error(answer: httpx.Response) -> None:
    """Raise SpecError or ServiceError if the answer is an error."""
    if answer.is_success:
        return
    message = _format_error(answer)
    if answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
        raise SpecError(message)
    raise ServiceError(message)


def _make_route_path(*parts: str) -> str:
    """Return the URL path made of these parts, each quoted."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def _read_local_url(home: Path) -> str:
    return f"http://127.0.0.1:{read_service_file(home)['port']}"


def read_service_file(home: Path) -> JsonObject:
    """Return {"pid": ..., "port": ...} of the home's service. Raises ServiceError if none was
    started in this home.
    """
    try:
        return dict(json.loads((home / "service.json").read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise ServiceError(f"no service is up in {home}. `orc up` starts one") from None
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"{home / 'service.json'} cannot be read ({error}). `orc up` writes it anew"
        ) from None


def is_up(home: Path, timeout_s: float = TIMEOUT_S) -> bool:
    """Return whether the service of this home answers within `timeout_s` and accepts the home's
    token.
    """
    try:
        client = Client(home)
    except ServiceError:
        return False
    try:
        client._request_json("GET", "/cluster", timeout_s=timeout_s)
    except ServiceError:
        return False
    finally:
        client.close()
    return True


def process_is_alive(pid: int) -> bool:
    """Return whether a process with this id exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except PermissionError:
        return True
    except (ProcessLookupError, OSError):
        return False


def get_user_name() -> str:
    """Return the operating system's name of this process's user, or the user id if it has no name."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _read_token(home: Path) -> str:
    try:
        return (home / "token").read_text().strip()
    except OSError as error:
        raise ServiceError(f"the token {home / 'token'} cannot be read: {error.strerror}") from None


def parse_answer(answer_type: type[Noun], answer: object) -> Noun:
    """Return the object of this type in a service's JSON answer.

    Raises ServiceError for JSON of another form, which a much older service may send.
    """
    try:
        return TypeAdapter(answer_type).validate_python(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ServiceError(
            f"the service answers in a form that this version does not read: {place}: {first['msg']}"
        ) from None


def _format_error(answer: httpx.Response) -> str:
    """Return the reason in a service's error answer, as text."""
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered {answer.status_code}: {answer.text[:200]}"
