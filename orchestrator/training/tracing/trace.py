"""Training steps on fake tensors, counted: `python -m orchestrator.training.tracing.trace REQUEST [SECONDS]`.

REQUEST is a file with the JSON of `Request`; SECONDS limit its processor time. It prints a JSON list of one
ModelProfile per arithmetic. It runs in its own process: a model's code may do anything, and torch is patched. It
belongs to `training` and not to `memory`, since it traces the job's Recipe, with its loss and data.

Fake tensors have sizes but no memory, so a model is traced on a machine that could not hold it. An OpRecorder counts
live storages after every operation, at two micro-batch sizes, under every mode of activation checkpointing. The
optimizer's part follows from parameter counts and is not traced. Memory that bypasses torch's dispatcher (scratch
inside kernels, libraries' workspaces) is not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from orchestrator.specs.errors import SpecError
from orchestrator.specs.profile import ModelProfile
from orchestrator.specs.replace import replace
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.tracing.model_builder import (
    Arithmetic,
    Request,
    build_recipe_on_meta_device,
    read_config,
    request_from_json,
)
from orchestrator.training.tracing.repeats import (
    count_layers,
    cut_layers,
    describe_layers,
    find_repeat_pattern,
)
from orchestrator.training.tracing.step_recorder import StepRecorder
from orchestrator.training.tracing.timeline import StepsDiffer
from orchestrator.training.tracing.values import READS

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BAD_JOB_EXIT_CODE = 2
# Address space of a trace beyond that of imported torch. Fake tensors are a few hundred MB of
# Python objects (measured: a decoder of 70 billion parameters). A model that allocates real weights
# exceeds it and is stopped.
ADDRESS_SPACE_BYTES = 16 * 2**30


class Trace(NamedTuple):
    """The result of tracing a model at one dtype setting."""

    profile: ModelProfile | None  # None: the model's own code fails in it, as it would in training
    # whether a CPU and CUDA do the same apart from autocast
    is_alike_on_cuda: bool = True


def trace_arithmetics(request: Request) -> list[ModelProfile | None]:
    """Return one ModelProfile for each dtype setting of the request; None where the model's own
    code fails in the setting.

    It would fail in training, too. Raises SpecError, and any exception of the model's own code
    where it fails in every dtype setting.

    Without autocast, CUDA differs in dropout, and in attention for which a CPU makes matrices of
    scores.
    """
    traces: dict[Arithmetic, Trace] = {}
    failure: Exception | None = None
    for arithmetic in request.arithmetics:
        on_cpu = traces.get(replace(arithmetic, cuda=False))
        if on_cpu is not None and on_cpu.is_alike_on_cuda and not arithmetic.autocast:
            traces[arithmetic] = on_cpu
            continue
        try:
            traces[arithmetic] = _trace_model(request, arithmetic)
        except (
            Exception
        ) as error:  # a user's model may raise anything: other settings are still traced
            print(f"{arithmetic}: {type(error).__name__}: {error}", file=sys.stderr)
            traces[arithmetic] = Trace(None)
            failure = failure or error
    profiles = [trace.profile for trace in traces.values()]
    if failure is not None and not any(profiles):
        raise failure
    return profiles


def _trace_model(request: Request, arithmetic: Arithmetic) -> Trace:
    """Return the trace of a few layers, extended to all, where a model repeats its layers; else of
    the whole model.
    """
    config = read_config(request.model)
    whole = build_recipe_on_meta_device(request, arithmetic, config)
    length = count_layers(config)
    kinds = describe_layers(whole.layers, config, length)
    stack = find_repeat_pattern(kinds, length)
    if stack is not None:
        # A model's code may refuse what it never had; then the whole model says what is wrong, if
        # anything is.
        with contextlib.suppress(Exception):
            few_layers = cut_layers(config, stack.depth)
            few = build_recipe_on_meta_device(request, arithmetic, few_layers)
            if (
                describe_layers(few.layers, few_layers, length)
                == kinds[: stack.depth] + kinds[length:]
            ):
                recorder = StepRecorder(request, arithmetic, few)
                extended = recorder.make_model_profile(stack, stack.depth)
                extended = replace(extended, workspace_bytes=_compute_buffer_bytes(whole))
                weights = whole.module.parameters()
                if extended.parameters == sum(parameter.numel() for parameter in weights):
                    return Trace(extended, recorder.is_alike_on_cuda)
    try:
        recorder = StepRecorder(request, arithmetic, whole)
    except READS:
        again = build_recipe_on_meta_device(request, arithmetic, config)
        recorder = StepRecorder(request, arithmetic, again, reads_values=True)
    try:
        profile = recorder.make_model_profile(stack, length)
    except StepsDiffer:
        profile = recorder.make_model_profile(None, length)
    return Trace(profile, recorder.is_alike_on_cuda)


def _compute_buffer_bytes(recipe: Recipe) -> int:
    buffers = []
    for part in recipe.module.modules():
        for buffer in part._buffers.values():
            if buffer is not None:
                buffers.append(buffer)
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _limit_address_space(more_bytes: int) -> None:
    """Limit this process's address space to `more_bytes` more: an allocation fails before the kernel kills the process.

    Only on Linux: other systems do not report mapped pages.
    """
    mapped = Path("/proc/self/statm")
    if mapped.exists():
        used_bytes = int(mapped.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = used_bytes + more_bytes
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )


def main(arguments: list[str]) -> int:
    """Print the profiles of the request file, or the job's error with exit code 2; return the exit
    code.

    Output of the model's own code is redirected to standard error.
    """
    if len(arguments) > 1:  # whoever waits for the answer may be killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = request_from_json(json.loads(Path(arguments[0]).read_text()))
    _limit_address_space(ADDRESS_SPACE_BYTES)
    if len(arguments) > 1:  # seconds of processor time
        resource.setrlimit(resource.RLIMIT_CPU, (int(arguments[1]), resource.RLIM_INFINITY))
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            results = trace_arithmetics(request)
        except SpecError as error:
            problem = {
                name: getattr(error, name) for name in ("what", "path", "got", "allowed", "hint")
            }
            json.dump(problem, answer, default=str)
            return BAD_JOB_EXIT_CODE
        json.dump([entry and dataclasses.asdict(entry) for entry in results], answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
