"""Environment variables that a job inherits, and those that hold secrets. Standard library only."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from orchestrator.specs.command_line import Env

CHOSEN_BY_RAY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
INHERITED = (  # a trailing * stands for any end; docs/security.md has the same list
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONHASHSEED",
    "PYTHONNOUSERSITE",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
    "PYTHONUTF8",
    "PYTHONIOENCODING",
    "CUDA_*",
    "NVIDIA_*",
    "NCCL_*",
    "GLOO_*",
    "UCX_*",
    "FI_*",
    "TORCH_*",
    "PYTORCH_*",
    "TORCHINDUCTOR_*",
    "TRITON_*",
    "OMP_*",
    "MKL_*",
    "KMP_*",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "HF_XET_CACHE",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_CACHE",
    "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
)
_SECRET = re.compile(
    r"TOKEN(?!I[SZ]|S?_(PATH|FILE))|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEY|PAT|DSN)S?(_ID)?$|_KEY_"
)


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable's name is that of a secret, such as one with TOKEN or
    PASSWORD.
    """
    return _SECRET.search(name.upper()) is not None


def select_inherited(environment: Env) -> dict[str, str]:
    """Return the variables named in INHERITED, without those with secret names and proxies whose
    address has a password.
    """
    passed = select_matching(environment, INHERITED)
    return {
        name: value
        for name, value in passed.items()
        if not (name.lower().endswith("_proxy") and "@" in value)
    }


def select_matching(environment: Env, patterns: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match a pattern: a name, or a beginning with `*`. A `*`
    never matches secret names.
    """
    starts = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    names = {name for name in environment if name.startswith(starts) and not is_secret_name(name)}
    return {name: environment[name] for name in sorted((names | {*patterns}) & environment.keys())}


def make_base_variables() -> dict[str, str]:
    """Return the variables that ranks inherit. PATH also has the tools of this Python environment,
    such as ninja.
    """
    base = {
        name: value
        for name, value in select_inherited(os.environ).items()
        if name not in CHOSEN_BY_RAY
    }
    base["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])
    return base
