"""The catalogue of log lines that name a cause of failure, and words by which unknown lines name
memory.

`signatures.yaml` has the patterns. An exception that matches none has no cause here: `endings.py`
decides whether the program is to blame.
"""

from __future__ import annotations

import re

from orchestrator.specs.attempt import Cause, Extent
from orchestrator.specs.packaged import load_table

_TABLE = load_table(__package__, "signatures")
TELLING: tuple[str, ...] = tuple(_TABLE["telling"])


def _find_longest_literal(pattern: str) -> str:
    """Return the longest text that every match of the pattern contains, for a fast search before
    the pattern.

    A text that `may_name_failure` accepts is preferred to longer ones.
    """
    while (
        flat := re.sub(r"\((?:[^()\\]|\\.)*\)\??", "\0", pattern)
    ) != pattern:  # innermost groups first
        pattern = flat
    pieces = re.sub(
        r"\[[^\]]*\](?:[*+?]|\{[\d,]+\})?|\\[A-Za-z](?:[*+?]|\{[\d,]+\})?|[^\\][?*]|[$^]|\0",
        "\0",
        pattern,
    ).split("\0")
    texts = [re.sub(r"\\(.)", r"\1", piece).strip("+") for piece in pieces]
    return max(texts, key=lambda text: (may_name_failure(text), len(text)))


def may_name_failure(line: str) -> bool:
    """Return whether a log line may name a cause of failure, or be part of a traceback: a fast
    first check.
    """
    return any(map(line.__contains__, TELLING))


RULES = tuple(
    (Cause(group["cause"]), re.compile(pattern))
    for group in _TABLE["catalogue"]
    for pattern in group["patterns"]
)
NEEDLES = tuple(_find_longest_literal(pattern.pattern) for _, pattern in RULES)
# an exception that points at another one, and a cause that other evidence must confirm
SUSPECTS = (Cause.DEVICE_OOM_SUSPECT, Cause.HOST_OOM_SUSPECT, Cause.DEFERRED)
COMPLAINTS = (
    Cause.TIMEOUT,
    Cause.PREEMPTED,
    Cause.SECONDARY,
)  # of ranks that another rank's end may have ended
_NODE_WIDE = re.compile(r"river|libcuda|not yet initialized|CUDA unknown error - ")


# Words by which a line says that memory was not to be had, in any library's phrase.
_ALLOCATION = re.compile(r"alloc|memory|\b[Vv]?RAM\b|\bHBM\b|\bOOM\b|显存|内存", re.IGNORECASE)
_FAILURE = re.compile(
    r"fail|\berror\b|can(?:not|'t)|could(?: not|n't)|unable|not enough|insufficient|exhaust|out of|ran out|exceed"
    r"|too (?:small|little)|不足|失败|溢出|超出",
    re.IGNORECASE,
)
_ON_DEVICE = re.compile(
    r"(?<![a-z])(?:cuda|gpu|hip|rocm|npu|xpu|mps|tpu|mlu|musa|sycl|vram|hbm)|\bdevice\b|显存|显卡",
    re.IGNORECASE,
)
_ON_HOST = re.compile(
    r"\bhost|pinned|page.?locked|\bcpu\b|\bram\b|\bswap|paging|\bfork|mmap|\barray\b|内存",
    re.IGNORECASE,
)
_NO_ALLOCATION = re.compile(  # of memory that there was, or of memory of another kind
    r"illegal memory|memory[ _](?:leak|format|address|efficient|access)|misaligned|invalid (?:device )?pointer"
    r"|shared memory|/dev/shm|\bdisk\b|No space left|1EB memory|out of resource",
    re.IGNORECASE,
)
_UNPLACED = re.compile(
    r"alloc\w*[^\n]{0,60}fail|fail\w*[^\n]{0,40}alloc|(?:out of|not enough|insufficient) memory|memory exhausted"
    r"|can(?:not|'t) allocate",
    re.IGNORECASE,
)
_ADVICE = re.compile(
    r"\b(?:if|may|might|could|would|try|avoid|reduce|prevent|helps?|when|where|whether|consider|lower|warn\w*|hint"
    r"|risks?|please|will|refer|documentation|how to)\b",
    re.IGNORECASE,
)
_CODE_2 = re.compile(  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory
    r"(?:cuda|hip)\w*[^\n]{0,60}\b(?:error|err|status|code|ret(?:urned)?)(?: code| number)?\W{0,3}2\b(?![.\d])",
    re.IGNORECASE,
)
_KILLED_FOR_MEMORY = re.compile(  # earlyoom, systemd-oomd, YARN, Kubernetes, Ray
    r"(?:kill|evict|terminat|SIGTERM|SIGKILL)[^\n]{0,200}"
    r"(?:memory (?:pressure|limit|usage)|(?:physical|virtual) memory|oom_score|out of memory|\bOOM\b)"
    r"|(?:memory (?:pressure|limits?)|out of memory|\boom)[^\n]{0,120}(?:kill|evict|terminat)"
    r"|\blow memory\b",
    re.IGNORECASE,
)
_POINTS_ELSEWHERE = re.compile(  # at the error of another process
    r"(?:see|check|look)\b[^\n]{0,80}\b(?:above|earlier|logs?|other ranks?)\b"
    r"|no longer alive|\bdied\b|abruptly|exited unexpectedly|BrokenProcessPool|EngineDeadError"
    r"|\bworkers?\b[^\n]{0,60}\b(?:crashed|exited|terminated)",
    re.IGNORECASE,
)

# Where a log speaks of failures and none is meant: a text in quotes, a row of a table, a dump of settings, a count of
# zero. The quoted message of an exception, or of a structured log, is meant.
_MEANT_QUOTE = re.compile(
    r"(?:(?:Error|Exception|Exit)\(|(?:[Ff]ailure|[Ee]rror)[ \w]{0,8}"
    r"|[\"'](?:msg|message|error|err|exception|exc_info|stack|event|log)[\"']: ?)\Z"
)
_TABLE_ROW = re.compile(r"\s*[|│┃║].*[|│┃║].*[|│┃║]")
_SETTING = re.compile(
    r"\s+(?!\s|exitcode|traceback|error|reason|message|what)[\"']?[a-z][\w.-]*[\"']?\s*[:=]\s"
    r"|\s*[\"']?[a-z]+_[a-z_]+[\"']?\s*[:=]\s|\s*--\w"
)
_COUNTER = re.compile(r"errors|kills|events|OOMs|count", re.IGNORECASE)
_ZERO_BEFORE = re.compile(r"(?:^|[\s=:])0\s+(?:[\w-]+\s+){0,2}\Z")
_ZERO_AFTER = re.compile(r"\w{0,12}\s?\w{0,12}\s?[:=]\s*0(?![.\d])")


def find_cause_in_catalogue(line: str) -> Cause | None:
    """Return the cause in the first row of signatures.yaml whose pattern the line matches; None
    without a match.
    """
    for needle, (cause, pattern) in zip(NEEDLES, RULES, strict=True):
        if needle in line and pattern.search(line):
            return cause
    return None


def find_memory_cause_in_line(line: str) -> Cause | None:
    """Return HOST_OOM or DEVICE_OOM if the line says that memory was lacking; else None.

    It is for lines that no rule of the catalogue knows. Lines of advice name nothing. Neither do
    lines with a `=`, unless they say that a process was killed.
    """
    if _ADVICE.search(line):
        return None
    if _KILLED_FOR_MEMORY.search(line) and not _ON_DEVICE.search(line):
        return Cause.HOST_OOM
    return None if "=" in line else find_memory_cause_in_message(line)


def find_memory_cause_in_message(message: str) -> Cause | None:
    """Return HOST_OOM or DEVICE_OOM if an exception's message says that memory was lacking; else
    None.

    Memory of no named kind is the device's, since a training has most of its memory there.
    """
    if _NO_ALLOCATION.search(message):
        return None
    if _CODE_2.search(message):
        return Cause.DEVICE_OOM
    fails = _FAILURE.search(_ALLOCATION.sub("", message)) if _ALLOCATION.search(message) else None
    if fails and _ON_DEVICE.search(message):
        return Cause.HOST_OOM if _ON_HOST.search(message) else Cause.DEVICE_OOM
    if fails and _ON_HOST.search(message):
        return Cause.HOST_OOM
    return Cause.DEVICE_OOM if _UNPLACED.search(message) else None


def mentions_device(line: str) -> bool:
    """Return whether a line mentions a GPU or another accelerator."""
    return _ON_DEVICE.search(line) is not None


def blames_other_process(message: str) -> bool:
    """Return whether an exception says that its cause is the error of another process."""
    return _POINTS_ELSEWHERE.search(message) is not None


def only_mentions_failure(line: str) -> bool:
    """Return whether a line names a failure that did not happen: quoted, in a table or settings, or
    with a count of zero.
    """
    if _TABLE_ROW.match(line) or _SETTING.match(line):
        return True
    match = _find_cause_match(line)
    if match is None:
        return False
    before = line[: match.start()]
    after = line[match.end() :]
    is_zero = _ZERO_BEFORE.search(before) or _ZERO_AFTER.match(after)
    if is_zero and _COUNTER.search(line):
        return True
    for quote in "\"'":
        opened = before.rfind(quote)
        is_open = before.count(quote) % 2 and quote in after
        # an apostrophe within a word opens nothing
        if is_open and not before[:opened][-1:].isalnum():
            return _MEANT_QUOTE.search(before[:opened]) is None
    return False


def _find_cause_match(line: str) -> re.Match[str] | None:
    """Return the match of the part of a line that names its cause; None without one."""
    for needle, (_, pattern) in zip(NEEDLES, RULES, strict=True):
        if needle in line and (match := pattern.search(line)):
            return match
    return _ALLOCATION.search(line)


def find_extent_of_hardware_error(line: str) -> Extent:
    """Return whether the hardware error in a log line concerns one device, or the whole node, as an
    error of the driver does.
    """
    return Extent.NODE if _NODE_WIDE.search(line) else Extent.DEVICE
