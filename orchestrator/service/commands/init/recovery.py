"""Comments in a proposed job file on whether the job recovers from out-of-memory failures and restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator

from orchestrator.scheduling.options.probe import unmeasured_reason
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


def verdict(
    spec: JobSpec, script: Script, framework: Framework | None, *, is_whole: bool
) -> Iterator[str]:
    """Yield comments on out-of-memory failures, on restarts, and on unmeasured memory.

    `is_whole` is whether the job states its global batch. Without it, only missing knobs are a reason.
    """
    knobs = spec.knobs
    missing = [
        name
        for name in ("micro_batch_size", "gradient_accumulation_steps")
        if getattr(knobs, name) is None
    ]
    if missing:
        absences = " and ".join(f"{PROBED_BY[name]} ({_absence(name, script)})" for name in missing)
        ways = list(_other_ways(spec))
        result = f"recovers only with {' or '.join(ways)} from" if ways else "does not recover from"
        yield f"# {CHECK}{result} an out-of-memory failure: no knob for {absences}."
    else:
        yield "# An out-of-memory failure: it goes on with a smaller micro-batch and more accumulation."
    yield _restart_verdict(spec, script, framework)
    reason = unmeasured_reason(spec) if is_whole or missing or knobs.output_dir is None else None
    if reason is None:
        yield "# Its memory is not known: two short attempts measure it first."
    else:
        yield f"# {CHECK}its memory is not measured: {reason}. Its own micro-batch is assumed to fill a device."


def _restart_verdict(spec: JobSpec, script: Script, framework: Framework | None) -> str:
    patterns = ", ".join(spec.resume.checkpoints)
    if spec.knobs.resume_from is None:
        return f"# {CHECK}a restart begins anew: no knob for resume_from ({_absence('resume_from', script)})."
    if framework in ("hf", "trl") and script.flags and not RESUMES & used_names(script):
        return f"# {CHECK}a restart begins anew: nothing in it uses resume_from_checkpoint."
    if not _has_preset(framework) and spec.resume.checkpoints == DEFAULT_PATTERNS:
        return f"# {CHECK}a restart begins anew: no file name of the script matches {patterns}."
    has_folder_knob = spec.knobs.output_dir is not None
    if framework in SCRIPTS_SAVE and not _files(
        script, has_folder_knob, is_checkpoint=True, is_guess=False
    ):
        return f"# {CHECK}a restart goes on only if the script names its checkpoints {patterns}: none was read."
    return f"# A restart: it goes on from the newest checkpoint, {patterns}."


def results(
    spec: JobSpec, script: Script, framework: Framework | None, *, has_success: bool
) -> Iterator[str]:
    """Yield lines for `resume` and `success` from the names of saved files, marked as read from the script.

    A guess is a comment: no condition of success, and no pattern of checkpoints, comes from it.
    """
    has_folder_knob = spec.knobs.output_dir is not None
    is_scripts = framework in SCRIPTS_SAVE
    if not _has_preset(framework) or is_scripts:
        checkpoints = _files(script, has_folder_knob, is_checkpoint=True, is_guess=False)
        if checkpoints and not (is_scripts and set(checkpoints) <= set(spec.resume.checkpoints)):
            patterns = list(checkpoints)
            value = (
                _quoted(patterns[0])
                if len(patterns) == 1
                else f"[{', '.join(map(_quoted, patterns))}]"
            )
            step = ", step: null" if spec.resume.step is not None else ""
            yield f"resume: {{checkpoints: {value}{step}}} # {CHECK}read from {checkpoints[patterns[0]].where}"
        elif not is_scripts and spec.knobs.resume_from is not None:
            patterns_text = ", ".join(map(_quoted, DEFAULT_PATTERNS))
            yield f"resume: {{checkpoints: [{patterns_text}]}} # {CHECK}not read from the script: write its own names"
            guesses = _files(script, has_folder_knob, is_checkpoint=True, is_guess=True)
            for name, file in list(guesses.items())[-1:]:
                yield f"# {CHECK}guessed, {_origin(file)}: resume: {{checkpoints: {_quoted(name)}}}"
    if has_success:
        return
    artifacts = _files(script, has_folder_knob, is_checkpoint=False, is_guess=False)
    guesses = _files(script, has_folder_knob, is_checkpoint=False, is_guess=True)
    if artifacts:
        name, file = next(reversed(artifacts.items()))
        yield f"success: {{artifacts: [{_quoted(name)}]}} # {CHECK}read from {file.where}"
    elif guesses:
        name, file = next(reversed(guesses.items()))
        yield f"# {CHECK}guessed, {_origin(file)}: success: {{artifacts: [{_quoted(name)}]}}"
    else:
        yield "# Not known: the files that it writes on success. success: {artifacts: [model.pt]}"


def _has_preset(framework: Framework | None) -> bool:
    return framework is not None and "resume" in load_preset(framework)


def _origin(file: SavedFile) -> str:
    return f"since {file.where} saves it {file.guess}"


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
