"""Starts the ranks of an attempt through its existing launchers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from orchestrator.backends.attempts.durable import Fence, write_durably
from orchestrator.backends.attempts.identity import (
    find_identity,
    hand_files_to_user,
    make_file_access,
)
from orchestrator.backends.attempts.launch_request import (
    LaunchNode,
    LaunchRequest,
    build_launch_request,
)
from orchestrator.backends.attempts.ports import LauncherGroup
from orchestrator.backends.attempts.script_output import (
    FileAccess,
    find_newest_checkpoint,
    get_output_folder,
)
from orchestrator.backends.attempts.workdir import link_all_except
from orchestrator.backends.environment import select_matching
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import UserSpec
from orchestrator.specs.errors import OrchestratorError, SpecError
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import AttemptFolder, JobFolder
from orchestrator.training.checkpoint.folder import (
    find_latest_complete,
    get_complete_checkpoint_path,
    get_unfinished_checkpoint_path,
    read_step_of_checkpoint,
)


class StartFailed(Exception):
    """A launcher could not start its ranks; with `no_program`, a retry would fail the same way."""

    def __init__(self, reason: str, *, no_program: bool) -> None:
        super().__init__(reason)
        self.no_program = no_program


def start_ranks(
    job: Job,
    attempt: Attempt,
    launchers: LauncherGroup,
    nodes: Mapping[str, LaunchNode],
    home: Path,
    python: str,
    fence: Fence | None,
    inherit_env: Sequence[str] = (),
    users: Mapping[str, UserSpec] = MappingProxyType({}),
) -> None:
    """Start every rank through the attempt's launchers. A launcher that has already started its
    ranks changes nothing.

    Ranks get the service's variables whose names match `inherit_env`. They run under the uid that
    `users` has for the job's user. Raises OrchestratorError for a missing secret, OSError where
    preparation fails, StartFailed where a launcher cannot start.
    """
    missing = [name for name in job.spec.secrets if name not in os.environ]
    if missing:
        raise OrchestratorError(f"secret {missing[0]} is not in the environment of the service")
    try:
        identity = find_identity(job.user, users, job.id)
    except SpecError as error:
        raise StartFailed(str(error), no_program=True) from None
    folder = JobFolder(home, job.id).attempt(attempt.number)
    if job.continues_from is not None and not attempt.probe:
        link_source_checkpoint(job, home)
    port = _choose_master_port(folder, launchers, attempt.placement[0].node)
    request = prepare_request(
        job, attempt, home, nodes, port, python, make_file_access(job, users, python)
    )
    handed = {
        **select_matching(os.environ, inherit_env),
        **{name: os.environ[name] for name in request.secrets},
    }
    write_request_files(request)
    final: dict[str, str] = {}
    if identity is not None:
        hand_files_to_user(identity, home, job, attempt.number, request)
        handed = {**identity.make_default_variables(home), **handed}
        final = identity.make_final_variables(home)
    if request.before is not None:
        first, (rank, *_) = request.ranks[0]
        code = launchers.run_before(
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
    for status in launchers.start(ranks, counts, request.workdir, fence):
        if status["error"] and not status["pids"]:
            raise StartFailed(status["error"], no_program=status["no_program"])


def _choose_master_port(folder: AttemptFolder, launchers: LauncherGroup, first_node: str) -> int:
    """Return the TCP port of the process group. It is stored in the attempt's folder, so that a
    repeated launch finds it.
    """
    path = folder.path / "master_port"
    if not path.exists():
        write_durably(path, str(launchers.free_port(first_node)))
    return int(path.read_text())


def prepare_request(
    job: Job,
    attempt: Attempt,
    home: Path,
    nodes: Mapping[str, LaunchNode],
    master_port: int,
    python: str,
    file_access: FileAccess,
) -> LaunchRequest:
    """Return the request that starts `attempt`. Reads the script's config file, and finds its
    newest checkpoint.
    """
    spec = job.spec
    output = get_output_folder(job.spec, JobFolder(home, job.id))
    resume_from = None
    if spec.is_script and not attempt.probe:
        resume_from = find_newest_checkpoint(spec, output, file_access)
        if (
            resume_from is None and job.continues_from is not None
        ):  # that of another job is read, never copied
            earlier = JobFolder(home, job.continues_from)
            resume_from = find_newest_checkpoint(
                spec, get_output_folder(spec, earlier), file_access
            )
    config = (
        ""
        if spec.config is None
        else (Path(spec.workdir or ".") / spec.config.file).read_text(encoding="utf-8")
    )
    return build_launch_request(
        job,
        attempt,
        home,
        nodes,
        master_port=master_port,
        python=python,
        resume_from=resume_from,
        config_text=config,
    )


def link_source_checkpoint(job: Job, home: Path) -> None:
    """Link the newest checkpoint of the job that this one continues into this job's folder; only
    for jobs of our engines.

    A job with a checkpoint of its own keeps that. Nothing is linked where the source was removed
    meanwhile.
    """
    assert job.continues_from is not None, job.id
    checkpoints = JobFolder(home, job.id).checkpoints
    newest = find_latest_complete(JobFolder(home, job.continues_from).checkpoints)
    if job.spec.is_script or newest is None or find_latest_complete(checkpoints) is not None:
        return
    unfinished = get_unfinished_checkpoint_path(checkpoints, 0, read_step_of_checkpoint(newest))
    shutil.rmtree(unfinished, ignore_errors=True)
    checkpoints.mkdir(parents=True, exist_ok=True)
    shutil.copytree(newest, unfinished, copy_function=_link_or_copy)
    unfinished.rename(get_complete_checkpoint_path(checkpoints, read_step_of_checkpoint(newest)))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def write_request_files(request: LaunchRequest) -> None:
    """Write the files that the request names, and fill its working directory with links."""
    if request.linked is not None:
        link_all_except(Path(request.linked[0]), request.linked[1], Path(request.workdir))
    for path, text in request.files:
        write_durably(Path(path), text)
