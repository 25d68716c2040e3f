"""Saves checkpoints in the background: a training step waits only for the copy to host memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.specs.run import TrainingRun
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint import folder as checkpoint_folder
from orchestrator.training.checkpoint.checkpoint import TrainingProgress
from orchestrator.training.checkpoint.folder import WrittenFile
from orchestrator.training.checkpoint.host_copy import HostCopy
from orchestrator.training.contract.engine import State

STALE = "stale"
# lets training run first: a new thread keeps the interpreter for 5 ms (sys.getswitchinterval)
HAND_OVER_S = 0.001


class StaleAttempt(Exception):
    """A newer attempt (launch) of the job exists, so this one must not publish checkpoints."""


class CheckpointSaver:
    """Writes and publishes the checkpoints of one attempt in a background thread, at most one at a
    time.

    The thread has its own process group, so that its collectives cannot interleave with training's.
    """

    def __init__(self, run: TrainingRun, device: torch.device, group: dist.ProcessGroup) -> None:
        """Make the saver; nothing is written yet.

        `group` has all ranks, on gloo, for this saver alone. `prepare` and `save` are collective.
        """
        self._run = run
        self._device = device
        self._group = group
        self._checkpoints = Path(run.job_folder) / "checkpoints"
        self._copy: HostCopy | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def prepare(self, state: State) -> None:
        """Allocate the host memory for states with these names and shapes."""
        self._copy = HostCopy(state, self._device, self._group)

    def save(self, state: State, progress: TrainingProgress) -> None:
        """Wait for the previous save, copy the state, and start a thread that writes it. Raises the
        previous save's error.
        """
        assert self._copy, "prepare comes first"
        self.wait()
        self._copy.copy_state(state)
        self._thread = threading.Thread(
            target=self._save, args=(self._copy, progress), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the running save has failed on this rank."""
        return self._failure is not None

    def wait(self) -> None:
        """Block until no save is running. Raises StaleAttempt, on every rank, or the error of the
        write.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise self._failure

    def wait_at_most(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for the running save, and ignore its outcome."""
        if self._thread:
            self._thread.join(limit_s)

    def free_host_memory(self) -> None:
        """Wait for the running save, then free the host memory."""
        self.wait()
        if self._copy:
            self._copy.release()
        self._copy = None

    def _save(self, host_copy: HostCopy, progress: TrainingProgress) -> None:
        time.sleep(HAND_OVER_S)
        try:
            host_copy.wait()
            folder = checkpoint_folder.get_unfinished_checkpoint_path(
                self._checkpoints, self._run.epoch, progress.step
            )
            self._publish(
                folder,
                progress.step,
                checkpoint.save_state(folder, host_copy.state, progress, self._group),
            )
        except BaseException as failure:  # `wait` raises it in the training thread
            self._failure = failure
            if self._is_stale():  # the newer attempt removes what this one writes
                self._failure = StaleAttempt()

    def _is_stale(self) -> bool:
        return checkpoint_folder.has_newer_attempt(
            Path(self._run.job_folder) / "epoch", self._run.epoch
        )

    def _publish(self, folder: Path, step: int, written: dict[str, WrittenFile]) -> None:
        """Publish the checkpoint once all ranks have written; no rank returns earlier."""
        everyone: list[dict[str, WrittenFile]] = [{} for _ in range(self._group.size())]
        dist.all_gather_object(everyone, written, group=self._group)
        outcome = [""]
        failure = None
        if self._group.rank() == 0:
            try:
                checkpoint_folder.write_manifest(
                    folder, {name: file for files in everyone for name, file in files.items()}
                )
                if self._is_stale():
                    outcome = [STALE]
                else:
                    keep = self._run.training.keep_checkpoints
                    checkpoint_folder.publish_checkpoint(
                        self._checkpoints, self._run.epoch, step, keep
                    )
            except OSError as error:
                outcome = [str(error)]
                failure = error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome == [STALE]:
            raise StaleAttempt
        if failure or outcome != [""]:
            raise failure or RuntimeError(
                f"rank 0 could not publish the checkpoint of step {step}: {outcome[0]}"
            )
