"""The settings of a plan that a run's record may state as facts."""

from __future__ import annotations

from orchestrator.specs.choices import Precision
from orchestrator.specs.job.pins import KNOB_OF
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import SETTINGS, Setting, settings


def recorded_settings(spec: JobSpec, plan: Plan) -> dict[str, str]:
    """Return the plan's settings as text by name. For a script, only those that the job file or a knob sets.

    A script decides all other settings itself, so the plan's values for them are only defaults.
    """
    if not spec.is_script:
        return settings(plan)
    unknown = {setting.name for setting in SETTINGS if not _is_known(spec, plan, setting)}
    return {name: value for name, value in settings(plan).items() if name not in unknown}


def recorded_precision(spec: JobSpec) -> dict[str, str]:
    """Return {name: precision} of the job; {} for a script with the default precision and no knob for it."""
    is_known = (
        not spec.is_script or _sets(spec, "precision") or spec.precision is not Precision.FP32
    )
    return {"precision": spec.precision} if is_known else {}


def _is_known(spec: JobSpec, plan: Plan, setting: Setting) -> bool:
    """Return whether a knob sets a script's setting, `plan:` pins it, or it differs from where plans start."""
    is_planned = setting.name != "micro_batch_size" and getattr(plan, setting.name) != setting.usual
    return is_planned or _sets(spec, setting.name)


def _sets(spec: JobSpec, name: str) -> bool:
    knob = KNOB_OF.get("offload" if name == "offload_target" else name)
    return name in dict(spec.plan) or (knob is not None and getattr(spec.knobs, knob) is not None)
