"""What a person can do after a failure, by its kind and by what it is about."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.specs.attempt import About, Failure, FailureKind

HELP = {  # what a person can do, by the kind of the failure
    FailureKind.DEVICE_OOM: "allow cheaper plans by `degrade`, or give it more or larger devices",
    FailureKind.HOST_OOM: "give it fewer data loader workers, less offload, or nodes with more memory and /dev/shm",
    FailureKind.MEMORY_CONTENTION: "find what else holds memory on its devices: `nvidia-smi` names it",
    FailureKind.NODE_LOST: "look at the node: its kernel log, its network, and `nvidia-smi`",
    FailureKind.PREEMPTED: "find who ended it by a signal: a batch system, a container, or a person",
    FailureKind.HUNG: "compare the logs of its ranks: one did not come; raise `hang_timeout` if it is only slow",
    FailureKind.STARTUP: "nothing explains why it did not start: read its log, then submit it again",
    FailureKind.UNKNOWN: "nothing explains its end, which may not come again: read its log, then submit it again",
    FailureKind.GUARD_ABSENT: "let the guard into its processes",
    FailureKind.DISK_FULL: "free space on the disk, then submit it again",
    FailureKind.USER_ERROR: "mend the program, then `orc retry` it",
    FailureKind.TIME_LIMIT: "`orc retry` it with a longer `time_limit`, if it needs one",
}
BY_ABOUT = {
    About.MODULE: "install what it names, in the version that the program wants, in the job's environment",
    About.DATA: "look at the data or the checkpoint that it names: it is broken, or was written in part",
    About.PATH: "look at the path that it names: no such file is there, or not on that node",
    About.PERMISSION: "give its user the permission, or the key, that it lacks",
    About.SERVICE: "look at the service, the network or the port that it names, then try again",
    About.DEVICE: "look at its device and driver, then at the program: either may crash so",
    About.NUMBERS: "mend the program or its data: the training diverged",
    About.ARGUMENTS: "write the argument that it names as this version of the program has it: in the command, or"
    " in the knob of a job file",
    About.COMMAND: "name a program that exists and may be executed",
    About.LEFT_EARLY: "look at why it left before its end, or name what it leaves by `success`",
}


def help_for(failure: Failure | None, by_kind: Mapping[FailureKind, str] = HELP) -> str:
    """Return what a person can do after a failure that ended a job, as a short text.

    A device that is named as broken comes first, then what an end without a known cause is about.
    """
    if failure is None:
        return "read its log"
    if failure.broken is not None:
        return f"have its {failure.broken.value} looked at: a driver, a restart or a new part may mend it"
    if failure.about is not None:
        return BY_ABOUT[failure.about]
    return by_kind.get(failure.kind) or HELP.get(
        failure.kind, f"ended by {failure.kind.value}: read its log"
    )
