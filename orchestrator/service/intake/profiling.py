"""Profiles (memory and compute cost) of models without a closed form: traced once in a child process, and cached.

A trace runs the model's code (training/tracing/trace.py). Its result depends on that code, its settings and the
versions of the libraries. It is cached in the home folder under a digest of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from orchestrator.backends.environment import select_inherited, select_matching
from orchestrator.memory.model_request import has_fused_loss
from orchestrator.memory.profiles import uses_autocast
from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, TracedProfile

# processor time of the child, which takes 20 s for a decoder of 70 billion parameters
TRACE_CPU_S = 600
TRACE_TIMEOUT_S = 6 * TRACE_CPU_S  # of a child that only waits
PROGRAM = "orchestrator.training.tracing.trace"
BAD_JOB_EXIT_CODE = 2  # of that program
Profiles = tuple[ModelProfile | None, ...]  # by arithmetic
Arithmetic = tuple[Precision, bool, bool]  # its precision, whether by autocast, whether as on CUDA
OWN_MODELS = "/orchestrator/training/models/"
HINT = (
    "give its costs: `profile: {parameters: ..., layers: ..., activations_per_sample: ...}`; "
    f"the trace alone: python -m {PROGRAM}"
)


@frozen
class TraceScope:
    """Which plans the trace of a model must cover: kinds of devices, whether other precisions
    count, or one plan alone.
    """

    cuda: tuple[bool, ...] = (False, True)
    plan: Plan | None = None
    numeric: bool = True  # plans in lower precision than the job's


def trace_model(
    spec: JobSpec, home: Path, job_source: str, scope: TraceScope
) -> tuple[TracedProfile, ...]:
    """Return the profiles of the job's model for the plans of `scope`, from the cache in `home` if
    present.

    Dtype settings in which the model's own code fails are left out. Raises SpecError with the
    model's own message if it fails in all; `job_source` is the job file's name in errors.
    """
    assert spec.known_model is not None, "nothing is traced of a script alone"
    arithmetics = _list_arithmetics(spec, scope)
    plan = scope.plan
    traces: list[TracedProfile] = []
    for length in _list_sequence_lengths(spec):
        request = {
            "model": dataclasses.asdict(spec.known_model),
            "training": dataclasses.asdict(spec.training),
            "family": spec.family_name,
            "sequence_length": length,
            "tensors": spec.data.tensors,
            "any_samples": spec.is_script,
            "whole_logits": not has_fused_loss(spec),
            "modes": [plan.activation_checkpointing] if plan else list(ActivationCheckpointing),
        }
        profiles = _load_or_trace(spec, request, arithmetics, home / "profiles", job_source)
        distinct: dict[
            tuple[bool, ModelProfile], TracedProfile
        ] = {}  # one entry if CUDA and CPU agree
        for (_, autocast, cuda), profile in zip(arithmetics, profiles, strict=True):
            if profile is not None:
                trace = TracedProfile(
                    sequence_length=length, autocast=autocast, cuda=cuda, profile=profile
                )
                distinct.setdefault((autocast, profile), trace)
        traces += distinct.values()
    return tuple(traces)


def _load_or_trace(
    spec: JobSpec,
    request: JsonObject,
    arithmetics: Sequence[Arithmetic],
    cache_folder: Path,
    job_source: str,
) -> Profiles:
    """Return the model's memory profile for each arithmetic (precision, autocast).

    Those that the cache folder lacks are traced and stored there.
    """
    requests = [
        {
            **request,
            "arithmetics": [dict(zip(("precision", "autocast", "cuda"), arithmetic, strict=True))],
        }
        for arithmetic in arithmetics
    ]
    files = [cache_folder / f"{_trace_digest(spec, single)}.json" for single in requests]
    stored = [_read_profiles(file) for file in files]
    missing = [index for index, profiles in enumerate(stored) if profiles is None]
    if missing:
        joint_request = {
            **request,
            "arithmetics": [way for index in missing for way in requests[index]["arithmetics"]],
        }
        project = spec.workdir if spec.is_script else None
        try:
            new_profiles = _run_trace(
                joint_request, job_source, project, select_matching(os.environ, spec.secrets)
            )
        except SpecError:
            if not any(profile for profiles in stored for profile in profiles or ()):
                raise
            new_profiles = (None,) * len(missing)  # the model's code runs in other arithmetics
        else:
            for index, profile in zip(missing, new_profiles, strict=True):
                _write_profiles(files[index], (profile,))
        for index, profile in zip(missing, new_profiles, strict=True):
            stored[index] = (profile,)
    return tuple(profile for profiles in stored for profile in profiles or ())


def _list_arithmetics(spec: JobSpec, scope: TraceScope) -> list[Arithmetic]:
    """Return (precision, autocast, as on CUDA) of each arithmetic that the plans of `scope` may
    use.
    """
    if scope.plan is not None:
        is_low_already = spec.known_model is not None and spec.known_model.weight_bytes_each == 2
        return [
            (scope.plan.precision, uses_autocast(scope.plan) and not is_low_already, cuda)
            for cuda in scope.cuda
        ]
    low = Precision.BF16 if spec.precision is Precision.FP32 else spec.precision
    cases = [(Precision.FP32, False)] if spec.precision is Precision.FP32 else []
    if scope.numeric or not cases:
        cases += [(low, True), (low, False)]
    return [(*case, cuda) for case in cases for cuda in scope.cuda]


def _list_sequence_lengths(spec: JobSpec) -> list[int]:
    """Return the sequence lengths with which the job may train, in tokens; [] for a factory, which
    has its own data.
    """
    shorter = (
        ()
        if spec.known_model is not None and spec.known_model.factory
        else spec.degrade.sequence_lengths
    )
    return list(dict.fromkeys((spec.data.sequence_length, *shorter)))


def _trace_digest(spec: JobSpec, request: JsonObject) -> str:
    """Return the digest of all inputs of the trace. A factory file's folder and the number of steps
    are not inputs.
    """
    assert spec.known_model is not None, "nothing is traced of a script alone"
    file, _, function = (spec.known_model.factory or "").rpartition(":")
    model = {**request["model"], "factory": function}
    key = {**request, "model": model, "training": request["training"]["freeze"]}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode())
    for library in ("torch", "transformers", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{library} {importlib.metadata.version(library)}\n".encode())
    sources = sorted((Path(__file__).parents[2] / "training").rglob("*.py"))
    for source in (*sources, *([Path(file)] if file else [])):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _read_profiles(file: Path) -> Profiles | None:
    try:
        return _make_profiles_adapter().validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _run_trace(
    request: JsonObject, job_source: str, import_folder: str | None, secrets: Mapping[str, str]
) -> Profiles:
    """Trace the model's memory and compute cost in a child process, and return the profiles.

    The model's file may import from the folder `import_folder`. Raises SpecError where the model's
    code fails.
    """
    key = "trains" if import_folder is not None else "model"
    if sys.stderr.isatty():
        print(
            f"tracing the memory of {request['family']}, once: seconds to minutes", file=sys.stderr
        )
    env = {
        **select_inherited(os.environ),
        **secrets,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    if import_folder is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (import_folder, env.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        request_file = Path(folder) / "request.json"
        request_file.write_text(json.dumps(request))
        try:
            child = subprocess.run(
                [sys.executable, "-m", PROGRAM, str(request_file), str(TRACE_CPU_S)],
                env=env,
                capture_output=True,
                timeout=TRACE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            what = f"tracing its memory did not finish within {TRACE_TIMEOUT_S} s"
            raise SpecError(what, source=job_source, path=key, hint=HINT) from None
    if child.returncode == -signal.SIGXCPU:
        what = f"tracing its memory did not finish within {TRACE_CPU_S} s of processor time"
        raise SpecError(what, source=job_source, path=key, hint=HINT)
    if child.returncode == BAD_JOB_EXIT_CODE:
        error = json.loads(child.stdout)
        path = re.sub(r"^model\b", key, error["path"] or "")
        raise SpecError(source=job_source, **{**error, "path": path, "hint": error["hint"] or HINT})
    if child.returncode:
        stderr = child.stderr.decode(errors="replace")
        what = (
            "there is no closed form of its memory, and tracing it failed: "
            f"{_find_last_error_line(child)}"
        )
        place = _find_transformers_line(stderr)
        hint = HINT
        if place is not None:
            what += f" ({place})"
            hint = f"see whether transformers alone trains this configuration, or write a `factory`; else {HINT}"
        raise SpecError(what, source=job_source, path=key, hint=hint)
    return _make_profiles_adapter().validate_json(child.stdout)


def _write_profiles(file: Path, profiles: Profiles) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_bytes(_make_profiles_adapter().dump_json(profiles))
    temporary.replace(file)


def _find_transformers_line(stderr: str) -> str | None:
    """Return the last line of transformers' own code in a traceback; None where our code came after
    it.

    Our recorder of operations is below every call of torch, and does not count.
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)', stderr)
    for path, line in reversed(frames):
        _, is_theirs, module = path.rpartition("/transformers/")
        if is_theirs:
            return f"transformers/{module}, line {line}"
        if OWN_MODELS in path:
            return None
    return None


def _find_last_error_line(child: subprocess.CompletedProcess[bytes]) -> str:
    """Return the line of the exception that ended the process, or its last output."""
    lines = [
        line.strip() for line in child.stderr.decode(errors="replace").splitlines() if line.strip()
    ]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (exceptions or lines or [f"exit code {child.returncode}"])[-1]


@cache
def _make_profiles_adapter() -> TypeAdapter[Profiles]:
    return TypeAdapter(Profiles)
