"""Whether an exception that no rule of the catalogue knows is the program's fault: by type, errno
and message.

In doubt nobody is to blame, and the attempt is repeated a bounded number of times.
"""

from __future__ import annotations

import re

from orchestrator.scheduling.failures.exit_codes import find_exit_signal
from orchestrator.specs.attempt import FaultSubject
from orchestrator.specs.packaged import load_table

_TABLE = load_table(__package__, "program_faults")
# Types that a mistake in code or arguments raises, wherever it is raised.
PROGRAM_TYPES = frozenset(_TABLE["program_types"])
# Words in the names of their subclasses in libraries, and of errors of broken files.
_PROGRAM_NAME = re.compile(
    r"(?:Validation|Decod|Pars(?:e|ing|er)|Syntax|Config|Usage|Argument|Invalid|Unsupported|NotImplemented|Attribute"
    r"|Unpickling|Safetensor|BadZip|Unidentified|Instantiation|Interpolation|Missing|Schema|Cast|Shape|Dimension"
    r"|CompilerFailed|Generation|Key)\w*\Z"
)
# What a library says of a mistake or of a broken file by an exception of any type.
_PROGRAM_WORDS = re.compile(
    r"unsupported|not (?:supported|implemented|configured|installed)|invalid (?:usage|argument|option|choice|load key)"
    r"|is truncated|truncated file|cannot identify image|broken data stream|zip archive|corrupt|deserializ"
    r"|unexpected (?:key|keyword|type)|missing (?:key|required)|failed to (?:import|parse)|no module named"
    r"|failed to find C compiler|is not in \[|out of (?:range|bounds)|size mismatch|not found!? .{0,20}check"
    r"|unknown (?:option|argument|model|dataset)|expected [^\n]{1,80} but (?:got|found)|incompatible"
    r"|EOF when reading a line|inappropriate ioctl|not a (?:tty|terminal)\b",  # it asks a person
    re.IGNORECASE,
)
# What a network, a service or a device says while it is away.
_MAY_PASS_WORDS = re.compile(
    r"connect|network|time[sd]? ?out|unavailable|temporar|try again|retr(?:y|ies)\b|\bbusy\b|refused|\breset\b"
    r"|broken pipe|\bsocket\b|address already in use|\b(?:429|50[0234])\b|rate limit|input/output error|stale file",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(  # of a ValueError, say
    r"Connection error|(?:Cannot|Could not|Couldn't) (?:connect|reach)"
)
_DEVICE_WORDS = re.compile(r"\bcuda\b|\bgpus?\b|nvidia|nvml|\bdriver\b|\bnccl\b", re.IGNORECASE)
_DEVICE_ERROR = re.compile(r"CUDA|\bcu[A-Z]\w+|\bCU[A-Z]+_|HIP|hip[A-Z]|NCCL|nccl")
# Exceptions that name what the operating system, a network or a service refused: the same may succeed later.
_REFUSED = re.compile(
    r"Connect|Network|Http|HTTP|URL|SSL|Timeout|TimedOut|Socket|BrokenPipe|Retr|RateLimit|Unavailable|Comm|Chunked"
    r"|\A(?:Interrupted|BlockingIO|gai|h)[Ee]rror\Z"
)
_SYSTEM_TYPES = ("OSError", "IOError", "EnvironmentError")
_ERRNO = re.compile(r"\[(?:Errno|WinError) (\d+)\]|\berrno[:= ]+(\d+)")
# Of Linux: EINTR, EIO, EAGAIN, EBUSY, EPIPE, ENOLCK; EADDRINUSE to ENOBUFS; ENOTCONN, ETIMEDOUT, ECONNREFUSED,
# EHOSTDOWN, EHOSTUNREACH; ESTALE, EREMOTEIO.
PASSING_ERRNOS = frozenset(
    (4, 5, 11, 16, 32, 37, *range(98, 106), 107, 110, 111, 112, 113, 116, 121)
)


def may_be_temporary_refusal(exception_type: str, message: str) -> bool:
    """Return whether an exception may be a passing refusal by a network, a service or the operating
    system.

    An errno in the message decides. An OSError without an errno may pass unless its words are known
    to blame the program.
    """
    number = _ERRNO.search(message)
    if number is not None:
        return int(number[1] or number[2]) in PASSING_ERRNOS
    if exception_type in PROGRAM_TYPES:
        return _NO_ANSWER.match(message) is not None
    if _REFUSED.search(exception_type) or _MAY_PASS_WORDS.search(message):
        return True
    return exception_type in _SYSTEM_TYPES and _PROGRAM_WORDS.search(message) is None


def is_program_fault(exception_type: str, message: str) -> bool:
    """Return whether an exception's type or message shows a fault of the program, its settings or
    its data.

    An assertion about devices does not, since the device may be gone.
    """
    if may_be_temporary_refusal(exception_type, message):
        return False
    if exception_type != "AssertionError" and (
        exception_type in PROGRAM_TYPES or _PROGRAM_NAME.search(exception_type)
    ):
        return True
    if is_device_error(f"{exception_type}: {message}"):
        return False
    return exception_type == "AssertionError" or _PROGRAM_WORDS.search(message) is not None


def is_device_error(exception_text: str) -> bool:
    """Return whether the exception's text names an error of a device, its driver or NCCL, or fails
    an assertion about devices.
    """
    if exception_text.startswith("AssertionError") and _DEVICE_WORDS.search(exception_text):
        return True
    return _DEVICE_ERROR.search(exception_text) is not None


# By type and words, the first that fits.
_ABOUT = tuple((FaultSubject(row["about"]), re.compile(row["pattern"])) for row in _TABLE["about"])
_ABOUT_CODES = {
    0: FaultSubject.LEFT_EARLY,
    2: FaultSubject.ARGUMENTS,
    126: FaultSubject.COMMAND,
    127: FaultSubject.COMMAND,
}


def find_faulty_thing(exception_text: str) -> FaultSubject | None:
    """Return what an exception names as wrong (arguments, a file, a device); None where it names
    nothing.

    `exception_text` is the exception's type and message.
    """
    return next((about for about, pattern in _ABOUT if pattern.search(exception_text)), None)


def find_faulty_thing_of_exit(exit_code: int | None) -> FaultSubject | None:
    """Return what an exit code shows to be wrong, such as the arguments; None where it shows
    nothing.

    A crash by a signal counts as the device's.
    """
    number = find_exit_signal(exit_code)
    return _ABOUT_CODES.get(exit_code or 0) if number is None else FaultSubject.DEVICE
