"""What a person can do after a failure, by its kind and by what its reason names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from orchestrator.specs.attempt import Failure, FailureKind

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
# What the reason of an unexplained end names, and what helps; the first that fits.
_BY_REASON = tuple(
    (re.compile(pattern), advice)
    for pattern, advice in (
        (
            r"raised (?:ModuleNotFound|Import)Error|undefined symbol|C compiler|triton installation",
            "install what it names, in the version that the program wants, in the job's environment",
        ),
        (
            r"(?i)raised \w*(?:Arrow|Unpickling|Safetensor|BadZip|Unidentified|JSONDecode|UnicodeDecode|Generation)\w*"
            r"|truncated|corrupt|zip archive|deserializ|cannot identify image",
            "look at the data or the checkpoint that it names: it is broken, or was written in part",
        ),
        (
            r"raised (?:FileNotFound|IsADirectory|NotADirectory)Error|No such file|NoSuch(?:Key|Bucket)",
            "look at the path that it names: no such file is there, or not on that node",
        ),
        (
            r"raised PermissionError|AccessDenied|\b40[13] Client Error|gated repo|api_key|\bUsageError",
            "give its user the permission, or the key, that it lacks",
        ),
        (
            r"raised \w*(?:Connect|HTTP|Timeout|Network|Socket|URL|SSL)\w*|[Cc]onnection|\b(?:429|50[234])\b",
            "look at the service or the network that it names, then try again",
        ),
        (r"(?i)address already in use", "find what holds the port that it names"),
        (
            r"CUDA error|cu[A-Z]\w+ error|NCCL|\bHIP\b|SIGSEGV|SIGABRT|SIGILL|SIGBUS",
            "look at its device and driver, then at the program: either may crash so",
        ),
        (
            r"(?i)\bnan\b|not finite|gradients are inconsistent",
            "mend the program or its data: the training diverged",
        ),
        (r"exited with code 2\b", "mend the program's arguments: it refused them"),
        (r"exited with code 12[67]\b", "name a program that exists and may be executed"),
        (r"exited 0 ", "look at why it left before its end, or name what it leaves by `success`"),
    )
)


def help_for(failure: Failure | None, by_kind: Mapping[FailureKind, str] = HELP) -> str:
    """Return what a person can do after a failure that ended a job, as a short text.

    A device that its reason names as broken comes first, then what an end without a known cause names.
    """
    if failure is None:
        return "read its log"
    if failure.broken is not None:
        return f"have its {failure.broken.value} looked at: a driver, a restart or a new part may mend it"
    if failure.kind in (FailureKind.USER_ERROR, FailureKind.STARTUP, FailureKind.UNKNOWN):
        for pattern, advice in _BY_REASON:
            if pattern.search(failure.reason):
                return advice
    return by_kind.get(failure.kind) or HELP.get(
        failure.kind, f"ended by {failure.kind.value}: read its log"
    )
