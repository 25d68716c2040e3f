"""Comments in a proposed job file on whether the job recovers from out-of-memory failures and restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial

from orchestrator.backends.text_templates import load_text_template
from orchestrator.scheduling.options.probe import find_probe_obstacle
from orchestrator.service.commands.init.meanings import find_quantity_and_count
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


def list_used_names(script: Script) -> set[str]:
    """Return the last parts of all names that the script's code imports, calls or reads as
    attributes.
    """
    return {
        name.rpartition(".")[2] for name in (*script.imports, *script.calls, *script.attributes)
    }


def describe_recovery(
    spec: JobSpec, script: Script, framework: Framework | None, *, states_global_batch: bool
) -> str:
    """Return comment lines for a job file: on out-of-memory failures, on restarts, and on
    unmeasured memory.

    If the job does not state its global batch, only missing knobs are named as a reason.
    """
    missing = [
        f"{PROBED_BY[name]} ({_explain_missing_knob(name, script)})"
        for name in ("micro_batch_size", "gradient_accumulation_steps")
        if getattr(spec.knobs, name) is None
    ]
    is_judged = states_global_batch or missing or spec.knobs.output_dir is None
    return _fill_template(
        "verdict",
        spec,
        framework,
        missing,
        list(_list_other_adjustable_settings(spec)),
        lambda name: _explain_missing_knob(name, script),
        _explain_missing_restart(spec, script, framework),
        find_probe_obstacle(spec) if is_judged else None,
    )


def _explain_missing_restart(spec: JobSpec, script: Script, framework: Framework | None) -> str:
    """Return why a restart may begin anew, as a keyword of the template; "" where it continues from
    a checkpoint.
    """
    if spec.knobs.resume_from is None:
        return "no knob"
    if framework in ("hf", "trl") and script.flags and not RESUMES & list_used_names(script):
        return "no use"
    if not _has_preset(framework) and spec.resume.checkpoints == DEFAULT_PATTERNS:
        return "no file"
    has_folder_knob = spec.knobs.output_dir is not None
    is_read = _list_files_by_pattern(script, has_folder_knob, is_checkpoint=True, is_guess=False)
    return "not read" if framework in SCRIPTS_SAVE and not is_read else ""


def make_resume_and_success_lines(
    spec: JobSpec, script: Script, framework: Framework | None, *, has_success: bool
) -> str:
    """Return the lines of a job file for `resume` and `success`, from the names of files that the
    script saves.

    A guess becomes a comment: no condition of success, and no pattern of checkpoints, is made from
    it.
    """
    files = partial(_list_files_by_pattern, script, spec.knobs.output_dir is not None)
    is_scripts = framework in SCRIPTS_SAVE
    text = ""
    if not _has_preset(framework) or is_scripts:
        checkpoints = files(is_checkpoint=True, is_guess=False)
        if is_scripts and set(checkpoints) <= set(spec.resume.checkpoints):
            checkpoints = {}
        step = ", step: null" if spec.resume.step is not None else ""
        guess = _find_last_pattern_and_file(files(is_checkpoint=True, is_guess=True))
        is_needed = not is_scripts and spec.knobs.resume_from is not None
        text = _fill_template("checkpoints", checkpoints, guess, step, is_needed, DEFAULT_PATTERNS)
    if has_success:
        return text
    artifacts = [
        _find_last_pattern_and_file(files(is_checkpoint=False, is_guess=is_guess))
        for is_guess in (False, True)
    ]
    return text + _fill_template("success", *artifacts)


def _find_last_pattern_and_file(files: dict[str, SavedFile]) -> tuple[str, SavedFile] | None:
    return next(reversed(files.items()), None)


def _fill_template(name: str, *values: object) -> str:
    return str(getattr(_load_templates(), name)(*values))


@cache
def _load_templates() -> object:
    return load_text_template(
        "orchestrator.service.commands.init", "recovery", quoted=_quote_pattern
    ).module


def _has_preset(framework: Framework | None) -> bool:
    return framework is not None and "resume" in load_preset(framework)


def _list_files_by_pattern(
    script: Script, has_folder_knob: bool, *, is_checkpoint: bool, is_guess: bool
) -> dict[str, SavedFile]:
    """Return {pattern below the output folder: file} for the script's saved files of this kind, in
    the order of saving.
    """
    files = dict[str, SavedFile]()
    for file in script.saves:
        pattern = file.find_pattern_below_output(has_folder_knob=has_folder_knob)
        if pattern is not None and (file.is_checkpoint, bool(file.guess)) == (
            is_checkpoint,
            is_guess,
        ):
            files.setdefault(pattern, file)
    return files


def _quote_pattern(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _explain_missing_knob(quantity: str, script: Script) -> str:
    """Return a phrase that says why plans cannot change the script's settings of this quantity."""
    if any((find_quantity_and_count(flag.name) or ("",))[0] == quantity for flag in script.flags):
        return "its flag stays as typed"
    if any(place.meaning == quantity for place in script.places):
        return "its code sets it"
    return "no source was read" if script is NO_SCRIPT else "the script has no such flag"


def _list_other_adjustable_settings(spec: JobSpec) -> Iterator[str]:
    """Yield the names of what a plan may change for the job besides the split of its batch."""
    knobs = spec.knobs
    if spec.gpus.max > spec.gpus.min and knobs.micro_batch_size is not None:
        yield "more devices"
    if knobs.activation_checkpointing is not None:
        yield "recomputation"
    if knobs.deepspeed_config is not None or knobs.zero_stage is not None:
        yield "sharding"
