"""Starts the ranks of an attempt through its existing launchers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from orchestrator.backends.attempts.durable import Fence, write_durably
from orchestrator.backends.attempts.identity import access_of, hand_over, identity_of
from orchestrator.backends.attempts.launch_request import LaunchNode, LaunchRequest, launch_request
from orchestrator.backends.attempts.ports import LauncherGroup
from orchestrator.backends.attempts.script_output import (
    OWN_ACCESS,
    FileAccess,
    newest_checkpoint,
    output_folder,
)
from orchestrator.backends.attempts.workdir import link_all_but
from orchestrator.backends.environment import matching
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import UserSpec
from orchestrator.specs.errors import OrchestratorError, SpecError
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.checkpoint.folder import (
    complete_checkpoint_path,
    find_latest_complete,
    step_of_checkpoint,
    unfinished_checkpoint_path,
)


class StartFailed(Exception):
    """A launcher could not start its ranks; with `no_program`, a retry would fail the same way."""

    def __init__(self, why: str, *, no_program: bool) -> None:
        super().__init__(why)
        self.no_program = no_program


def start_ranks(
    job: Job,
    attempt: Attempt,
    group: LauncherGroup,
    nodes: Mapping[str, LaunchNode],
    home: Path,
    python: str,
    fence: Fence | None,
    inherit_env: Sequence[str] = (),
    users: Mapping[str, UserSpec] = MappingProxyType({}),
) -> None:
    """Start every rank. Launchers that already started theirs change nothing.

    Ranks get the service's variables that `inherit_env` matches, and run under the uid that `users` has for the job's
    user. Raises OrchestratorError for a missing secret, OSError where preparation fails, StartFailed.
    """
    missing = [name for name in job.spec.secrets if name not in os.environ]
    if missing:
        raise OrchestratorError(f"secret {missing[0]} is not in the environment of the service")
    try:
        identity = identity_of(job.user, users, job.id)
    except SpecError as error:
        raise StartFailed(str(error), no_program=True) from None
    folder = JobFolder(home, job.id).attempt(attempt.number)
    if job.continues_from is not None and not attempt.probe:
        take_over_checkpoint(job, home)
    port = _master_port(folder, group, attempt.placement[0].node)
    request = request_of(job, attempt, home, nodes, port, python, access_of(job, users, python))
    handed = {
        **matching(os.environ, inherit_env),
        **{name: os.environ[name] for name in request.secrets},
    }
    write_files(request)
    final: dict[str, str] = {}
    if identity is not None:
        hand_over(identity, home, job, attempt.number, request)
        handed = {**identity.variables(home), **handed}
        final = identity.final_variables(home)
    if request.before is not None:
        first, (rank, *_) = request.ranks[0]
        code = group.run_before(
            first, request.before, {**handed, **dict(rank.env), **final}, request.workdir
        )
        if code != 0:
            raise OSError(f"what goes before a restart ended with {code}: see {folder.before}")
    ranks = {
        node: [
            (process.rank, process.argv, {**handed, **dict(process.env), **final})
            for process in processes
        ]
        for node, processes in request.ranks
    }
    counts = {part.node: len(part.devices) // len(ranks[part.node]) for part in attempt.placement}
    for status in group.start(ranks, counts, request.workdir, fence):
        if status["error"] and not status["pids"]:
            raise StartFailed(status["error"], no_program=status["no_program"])


def _master_port(folder: AttemptFolder, group: LauncherGroup, first: str) -> int:
    """The port of the process group, kept in the attempt's folder for a launch that is taken up again."""
    path = folder.path / "master_port"
    if not path.exists():
        write_durably(path, str(group.free_port(first)))
    return int(path.read_text())


def request_of(
    job: Job,
    attempt: Attempt,
    home: Path,
    nodes: Mapping[str, LaunchNode],
    master_port: int,
    python: str,
    access: FileAccess = OWN_ACCESS,
) -> LaunchRequest:
    """Return the request that starts `attempt`. Reads the script's config file and finds its newest checkpoint."""
    spec = job.spec
    output = output_folder(job.spec, JobFolder(home, job.id))
    resume_from = None
    if spec.is_script and not attempt.probe:
        resume_from = newest_checkpoint(spec, output, access)
        if (
            resume_from is None and job.continues_from is not None
        ):  # that of another job is read, never copied
            earlier = JobFolder(home, job.continues_from)
            resume_from = newest_checkpoint(spec, output_folder(spec, earlier), access)
    config = (
        ""
        if spec.config is None
        else (Path(spec.workdir or ".") / spec.config.file).read_text(encoding="utf-8")
    )
    return launch_request(
        job,
        attempt,
        home,
        nodes,
        master_port=master_port,
        python=python,
        resume_from=resume_from,
        config_text=config,
    )


def take_over_checkpoint(job: Job, home: Path) -> None:
    """Link the newest checkpoint of the job that this one continues, for jobs of our engines.

    A job with its own checkpoint keeps it. Nothing is linked where the source was removed meanwhile.
    """
    assert job.continues_from is not None, job.id
    checkpoints = JobFolder(home, job.id).checkpoints
    newest = find_latest_complete(JobFolder(home, job.continues_from).checkpoints)
    if job.spec.is_script or newest is None or find_latest_complete(checkpoints) is not None:
        return
    unfinished = unfinished_checkpoint_path(checkpoints, 0, step_of_checkpoint(newest))
    shutil.rmtree(unfinished, ignore_errors=True)
    checkpoints.mkdir(parents=True, exist_ok=True)
    shutil.copytree(newest, unfinished, copy_function=_link)
    unfinished.rename(complete_checkpoint_path(checkpoints, step_of_checkpoint(newest)))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def write_files(request: LaunchRequest) -> None:
    """Write the files of the request, and link its working directory."""
    if request.linked is not None:
        link_all_but(Path(request.linked[0]), request.linked[1], Path(request.workdir))
    for path, text in request.files:
        write_durably(Path(path), text)
