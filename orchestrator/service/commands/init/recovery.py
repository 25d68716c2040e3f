"""Comments in a proposed job file on whether the job recovers from out-of-memory failures and restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial

from orchestrator.backends.text_templates import load_text_template
from orchestrator.scheduling.options.probe import why_not_probed
from orchestrator.service.commands.init.meanings import meaning_of
from orchestrator.service.commands.init.saved_files import SavedFile
from orchestrator.service.commands.init.script_flags import NO_SCRIPT, Script
from orchestrator.specs.job.frameworks import Framework, load_preset
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import PROBED_BY, Resume

CHECK = "CHECK: "
DEFAULT_PATTERNS = Resume().checkpoints
SCRIPTS_SAVE = (
    "accelerate",
    "diffusers",
)  # frameworks whose scripts themselves name what they save
RESUMES = {
    "resume_from_checkpoint",
    "get_last_checkpoint",
}  # names of transformers of which one is used to resume


def used_names(script: Script) -> set[str]:
    """Return the last part of each name that the code imports, calls or reads."""
    return {
        name.rpartition(".")[2] for name in (*script.imports, *script.calls, *script.attributes)
    }


def verdict(spec: JobSpec, script: Script, framework: Framework | None, *, is_whole: bool) -> str:
    """Return comments on out-of-memory failures, on restarts, and on unmeasured memory, as lines.

    `is_whole` is whether the job states its global batch. Without it, only missing knobs are a reason.
    """
    missing = [
        f"{PROBED_BY[name]} ({_absence(name, script)})"
        for name in ("micro_batch_size", "gradient_accumulation_steps")
        if getattr(spec.knobs, name) is None
    ]
    is_judged = is_whole or missing or spec.knobs.output_dir is None
    return _write(
        "verdict",
        spec,
        framework,
        missing,
        list(_other_ways(spec)),
        lambda name: _absence(name, script),
        _why_no_restart(spec, script, framework),
        why_not_probed(spec) if is_judged else None,
    )


def _why_no_restart(spec: JobSpec, script: Script, framework: Framework | None) -> str:
    """Return why a restart may begin anew, as a word of the template; "" where it goes on."""
    if spec.knobs.resume_from is None:
        return "no knob"
    if framework in ("hf", "trl") and script.flags and not RESUMES & used_names(script):
        return "no use"
    if not _has_preset(framework) and spec.resume.checkpoints == DEFAULT_PATTERNS:
        return "no file"
    has_folder_knob = spec.knobs.output_dir is not None
    is_read = _files(script, has_folder_knob, is_checkpoint=True, is_guess=False)
    return "not read" if framework in SCRIPTS_SAVE and not is_read else ""


def results(
    spec: JobSpec, script: Script, framework: Framework | None, *, has_success: bool
) -> str:
    """Return lines for `resume` and `success` from the names of saved files, marked as read from the script.

    A guess is a comment: no condition of success, and no pattern of checkpoints, comes from it.
    """
    files = partial(_files, script, spec.knobs.output_dir is not None)
    is_scripts = framework in SCRIPTS_SAVE
    text = ""
    if not _has_preset(framework) or is_scripts:
        checkpoints = files(is_checkpoint=True, is_guess=False)
        if is_scripts and set(checkpoints) <= set(spec.resume.checkpoints):
            checkpoints = {}
        step = ", step: null" if spec.resume.step is not None else ""
        guess = _last(files(is_checkpoint=True, is_guess=True))
        is_needed = not is_scripts and spec.knobs.resume_from is not None
        text = _write("checkpoints", checkpoints, guess, step, is_needed, DEFAULT_PATTERNS)
    if has_success:
        return text
    artifacts = [_last(files(is_checkpoint=False, is_guess=is_guess)) for is_guess in (False, True)]
    return text + _write("success", *artifacts)


def _last(files: dict[str, SavedFile]) -> tuple[str, SavedFile] | None:
    return next(reversed(files.items()), None)


def _write(name: str, *values: object) -> str:
    return str(getattr(_templates(), name)(*values))


@cache
def _templates() -> object:
    return load_text_template(
        "orchestrator.service.commands.init", "recovery", quoted=_quoted
    ).module


def _has_preset(framework: Framework | None) -> bool:
    return framework is not None and "resume" in load_preset(framework)


def _files(
    script: Script, has_folder_knob: bool, *, is_checkpoint: bool, is_guess: bool
) -> dict[str, SavedFile]:
    """Return the files of this kind by their patterns below the output folder, the last saved at the end."""
    files = dict[str, SavedFile]()
    for file in script.saves:
        pattern = file.below(has_folder_knob=has_folder_knob)
        if pattern is not None and (file.is_checkpoint, bool(file.guess)) == (
            is_checkpoint,
            is_guess,
        ):
            files.setdefault(pattern, file)
    return files


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _absence(name: str, script: Script) -> str:
    """Return why a setting is no knob, in words."""
    if any((meaning_of(flag.name) or ("",))[0] == name for flag in script.flags):
        return "its flag stays as typed"
    if any(place.meaning == name for place in script.places):
        return "its code sets it"
    return "no source was read" if script is NO_SCRIPT else "the script has no such flag"


def _other_ways(spec: JobSpec) -> Iterator[str]:
    """Yield the settings, other than the batch split, that a plan may change for the job."""
    knobs = spec.knobs
    if spec.gpus.max > spec.gpus.min and knobs.micro_batch_size is not None:
        yield "more devices"
    if knobs.activation_checkpointing is not None:
        yield "recomputation"
    if knobs.deepspeed_config is not None or knobs.zero_stage is not None:
        yield "sharding"
