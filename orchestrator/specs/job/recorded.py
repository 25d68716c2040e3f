"""The settings of a plan that a run's record may state as facts, since they are known to have been
used.
"""

from __future__ import annotations

from orchestrator.specs.choices import Precision
from orchestrator.specs.job.pins import KNOB_OF
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import SETTINGS, Setting, format_settings


def list_recorded_settings(spec: JobSpec, plan: Plan) -> dict[str, str]:
    """Return {setting: text} of the plan; for a script, only settings that the job file or a knob
    sets.

    A script decides all other settings itself, so the plan's values for them are only defaults.
    """
    if not spec.is_script:
        return format_settings(plan)
    unknown = {setting.name for setting in SETTINGS if not _is_setting_known(spec, plan, setting)}
    return {name: value for name, value in format_settings(plan).items() if name not in unknown}


def find_recorded_precision(spec: JobSpec) -> dict[str, str]:
    """Return {name: precision} of the job; {} for a script whose precision is a default without a
    knob.
    """
    is_known = (
        not spec.is_script or _has_knob(spec, "precision") or spec.precision is not Precision.FP32
    )
    return {"precision": spec.precision} if is_known else {}


def _is_setting_known(spec: JobSpec, plan: Plan, setting: Setting) -> bool:
    """Return whether a script's setting is known: a knob sets it, `plan:` pins it, or the plan
    changes it.
    """
    is_planned = setting.name != "micro_batch_size" and getattr(plan, setting.name) != setting.usual
    return is_planned or _has_knob(spec, setting.name)


def _has_knob(spec: JobSpec, name: str) -> bool:
    knob = KNOB_OF.get("offload" if name == "offload_target" else name)
    return name in dict(spec.plan) or (knob is not None and getattr(spec.knobs, knob) is not None)
