"""Tables of a job's plans and of its explanation: the chosen one, the frontier, and why others do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.memory.calibration.calibrate import EVEN
from orchestrator.planning.picture import Mark, Picture, Point
from orchestrator.service.terminal.expected import colour_status
from orchestrator.service.terminal.plain_tables import make_plain_grid, make_plain_table
from orchestrator.service.terminal.tables import (
    colour_picture,
    describe_guarantee,
    is_estimate_known,
    make_causes_table,
    make_peaks_table,
)
from orchestrator.service.views.records import parse_picture_view
from orchestrator.specs.attempt import PROBE_STEPS
from orchestrator.specs.job.trainer import PROBED_BY
from orchestrator.specs.profile import WITHOUT_SECONDS
from orchestrator.specs.units import format_bytes, format_probability, format_seconds

if TYPE_CHECKING:
    from orchestrator.service.commands.plan import CandidateView, JobPlans
    from orchestrator.service.views.records import ExplanationView

LESS_TRUSTED = "faster by less than predictions are off, and less trusted"
ROWS_AROUND = 5  # of the frontier, on each side of the chosen plan


def make_plan_panel(plans: JobPlans) -> RenderableType:
    """Return a panel with the chosen plan, a chart of the best plans with the memory limit, and why
    faster ones were rejected.
    """
    parts: list[RenderableType] = [
        Text(f"{plans['job']} on {plans['devices']} x {plans['device']}", style="bold"),
        Text(plans["hardware"], style="dim"),
        Text(
            f"global batch {plans['global_batch_size']}; memory of the model: {plans['profile']}",
            style="dim",
        ),
        Text(),
    ]
    chosen = plans["chosen"]
    if chosen is None:
        parts.append(Text(plans["nothing_fits"] or "no plan fits", style="red"))
        return Group(*parts, Text(), _make_frontier_table(plans, 0))
    candidate = plans["frontier"][chosen]
    if plans["nothing_fits"] is not None:
        parts += [Text(plans["nothing_fits"], style="red"), Text()]
        parts += [Text("Plans that may fit are tried anyway:", style="yellow"), Text()]
    parts.append(
        make_candidate_panel(candidate)
        if plans["probe"] is None
        else _make_probe_panel(plans["probe"])
    )
    if plans["passed_over"] is not None:
        parts += [Text(), Text(f"Taken is {plans['passed_over']}.")]
    if _has_step_time(candidate) and plans["steps"] is not None:
        parts += [Text(), _make_totals_table(plans, chosen, plans["steps"])]
    for note in (plans["experimental"], plans["unsure"]):
        if note is not None:
            parts += [Text(), Text(note, style="yellow")]
    if is_estimate_known(candidate["estimate"]):
        title = Text("Bytes by moment of a step", style="bold")
        parts += [Text(), title, make_peaks_table(candidate["estimate"], candidate["correction"])]
    if _has_step_time(candidate):
        parts += [
            Text(),
            Text("Frontier", style="bold"),
            colour_picture(_make_picture(plans, chosen)),
        ]
    parts += [
        Text(),
        Text("Frontier, fastest first", style="bold"),
        _make_frontier_table(plans, chosen),
    ]
    if chosen and plans["probe"] is None and plans["nothing_fits"] is None:
        parts += [Text(), Text("Why the faster plans were rejected", style="bold")]
        faster = plans["frontier"][max(0, chosen - ROWS_AROUND) : chosen]
        parts += [Text(f"  {plan['plan']}: {plan['rejected'] or LESS_TRUSTED}") for plan in faster]
    return Group(*parts)


def _format_amount(amount: float) -> str:
    """Return hours or money as text: `0.213`, `13.7`, `1,410`."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _make_totals_table(plans: JobPlans, chosen_index: int, steps: int) -> Table:
    """Return a table of the whole training's cost by number of devices, with the plan that would
    run on each number.
    """
    table = make_plain_table()
    table.add_column("")
    price = plans["price_per_hour"]
    columns = ["GPUS", "STEP", f"{steps:,} STEPS", "DEVICE-HOURS", "NEEDS"]
    if price is not None:
        columns.append("COST")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("PLAN (predicted)")
    for index in plans["by_devices"] or [chosen_index]:
        candidate = plans["frontier"][index]
        devices = int(candidate["settings"]["gpus"])
        total_s = steps * candidate["step_s"]
        table.add_row(
            "→" if index == chosen_index else "",
            str(devices),
            format_seconds(candidate["step_s"]),
            format_seconds(total_s),
            _format_amount(devices * total_s / 3600),
            format_bytes(candidate["needed_bytes"]),
            *([] if price is None else [_format_amount(price * devices * total_s / 3600)]),
            candidate["plan"],
        )
    return table


def make_candidate_panel(candidate: CandidateView) -> RenderableType:
    """Return a panel on one plan: its predicted step time, its bytes by cause, and the needed bytes
    against the device's.
    """
    head = make_plain_grid()
    head.add_row("plan", Text(candidate["plan"], style="bold"))
    if not is_estimate_known(candidate["estimate"]):
        head.add_row(
            "memory",
            "not known: the script's own micro-batch is assumed to fill a device; `profile` is more exact",
        )
        head.add_row(
            "", f"with knobs for {', '.join(PROBED_BY.values())} it would be measured first"
        )
        return head
    factor = candidate["step_factor"]
    factor_text = f", x{factor:.2f} as steps were measured" if factor != 1.0 else ""
    predicted = f"{format_seconds(candidate['step_s'])} predicted{factor_text}"
    head.add_row(
        "step", predicted if _has_step_time(candidate) else "time not known until the first attempt"
    )
    if candidate["busy_share"] is not None:
        head.add_row("busy", f"its kernels fill {candidate['busy_share']:.0%} of a step, estimated")
    head.add_row("memory", _describe_rejection(candidate))
    return Group(head, Text(), make_causes_table(candidate["estimate"]))


def _make_probe_panel(probe: CandidateView) -> RenderableType:
    """Return a panel on the probes (short measuring runs) before the training, with the reason for
    them.
    """
    head = make_plain_grid()
    head.add_row(
        "memory",
        "not known: two to four short attempts measure what a sample needs, before the training is planned",
    )
    head.add_row(
        "first", Text(f"{probe['plan']}, ended after {PROBE_STEPS} optimizer steps", style="bold")
    )
    head.add_row("second", "the same with the largest micro-batch that is sure to fit by then")
    head.add_row(
        "then",
        "the fastest plan that fits by both; nothing of them is kept. `probe: never` leaves them out",
    )
    return head


def make_explanation_panel(explanation: ExplanationView) -> RenderableType:
    """Return a panel: why a job waits, its attempts' predictions and measurements, and today's
    frontier as a chart.
    """
    job = explanation["job"]
    parts: list[RenderableType] = [
        Text(f"{job['id']} {job['status']}: {job['reason']}", style="bold")
    ]
    if job["promise"] is not None and not job["promise"]["refused"]:
        parts.append(Text(f"It {describe_guarantee(job['promise'])}."))
    parts += [Text(line) for line in explanation["sooner"]]
    for attempt, lessons in zip(job["attempts"], explanation["lessons"], strict=True):
        title = f"Attempt {attempt['number']}: {attempt['plan']} on {attempt['placement']}"
        parts += [Text(), Text(f"{title}  ", style="bold") + colour_status(attempt["outcome"])]
        if is_estimate_known(attempt["estimate"]):
            parts += [Text("Bytes by cause", style="dim"), make_causes_table(attempt["estimate"])]
            title = "Bytes by moment of a step"
            parts += [
                Text(title, style="dim"),
                make_peaks_table(attempt["estimate"], attempt["correction"]),
                Text(),
            ]
        parts.append(_make_sentences_table(lessons))
    if explanation["picture"] is not None:
        picture = parse_picture_view(explanation["picture"])
        title = f"Frontier on {picture.device}, as it is judged now; numbers are attempts"
        parts += [Text(), Text(title, style="bold"), colour_picture(picture)]
    return Group(*parts)


def _make_sentences_table(sentences: Sequence[str]) -> Table:
    """Return a table with a row per sentence; the first word of each has a column of its own."""
    table = make_plain_grid()
    table.add_column(no_wrap=True)
    table.add_column()
    for sentence in sentences:
        word, _, rest = sentence.partition(": ")
        table.add_row(Text(f"  {word}", style="bold"), rest)
    return table


def _make_frontier_table(plans: JobPlans, centre_index: int) -> Table:
    low = max(0, centre_index - ROWS_AROUND)
    shown = plans["frontier"][low : centre_index + ROWS_AROUND + 1]
    table = make_plain_table()
    table.add_column("")
    table.add_column("PLAN")
    for column in ("GPUS", "STEP", "NEEDS", "FITS"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    above = len(plans["frontier"][:low])
    if above:
        table.add_row("", f"... {above} faster")
    chosen = plans["chosen"] if plans["probe"] is None else None
    fitting = (
        index for index, candidate in enumerate(plans["frontier"]) if candidate["rejected"] is None
    )
    first_fitting = None if chosen is None else next(fitting, None)
    for index, candidate in enumerate(shown, start=low):
        if index == first_fitting and index > 0 and plans["nothing_fits"] is None:
            limit = format_bytes(candidate["capacity_bytes"])
            table.add_row("", Text(f"──── memory ends here: {limit} ────", style="yellow"))
        mark = Text("→", style="bold green") if index == chosen else Text("")
        style = "" if candidate["rejected"] is None else "dim"
        kind = "" if candidate["degradation"] == "exact" else candidate["degradation"]
        has_bytes = is_estimate_known(candidate["estimate"])
        step = format_seconds(candidate["step_s"]) if _has_step_time(candidate) else "-"
        needed = format_bytes(candidate["needed_bytes"]) if has_bytes else "-"
        share = "-" if candidate["band_bytes"] is None else "not measured"
        if candidate["fit_probability"] is not None:
            share = format_probability(candidate["fit_probability"])
        table.add_row(
            mark,
            Text(candidate["plan"], style=style),
            candidate["settings"]["gpus"],
            step,
            needed,
            share,
            kind,
        )
    below = len(plans["frontier"]) - low - len(shown)
    if below:
        table.add_row("", f"... {below} slower")
    return table


def _describe_rejection(candidate: CandidateView) -> Text:
    needed = format_bytes(candidate["needed_bytes"])
    capacity = format_bytes(candidate["capacity_bytes"])
    probability = candidate["fit_probability"]
    share = "" if probability is None else f" with {format_probability(probability)}"
    band = candidate["band_bytes"]
    if candidate["rejected"] is None and band is not None:
        least, most = map(format_bytes, band)
        odds = format_probability(candidate["reported_fit_probability"] or 0.0)
        text = f"not measured: about {least} to {most} of {capacity}, fits with {odds}"
        return Text(text, style="yellow")
    if candidate["rejected"] is None:
        verdict = Text(f"fits{share}", style="green")
    elif candidate["needed_bytes"] <= candidate["capacity_bytes"]:
        verdict = Text(candidate["rejected"], style="red")
    elif (probability or 0.0) >= EVEN:
        verdict = Text(f"may fit{share}", style="yellow")
    else:
        verdict = Text(
            f"does not fit ({format_probability(probability or 0.0)} that it would)", style="red"
        )
    return Text(f"{needed} of {capacity} with margin: ") + verdict


def _choose_mark(candidate: CandidateView) -> Mark:
    return Mark.FITS if candidate["rejected"] is None else Mark.TOO_BIG


def _make_picture(plans: JobPlans, chosen_index: int) -> Picture:
    points = [
        Point(
            step_s=candidate["step_s"],
            needed_bytes=candidate["needed_bytes"],
            mark=Mark.CHOSEN if index == chosen_index else _choose_mark(candidate),
        )
        for index, candidate in enumerate(plans["frontier"])
    ]
    capacity_bytes = plans["frontier"][chosen_index]["capacity_bytes"]
    return Picture(device=plans["device"], capacity_bytes=capacity_bytes, points=tuple(points))


def _has_step_time(candidate: CandidateView) -> bool:
    return candidate["estimate"]["source"] not in WITHOUT_SECONDS or candidate["step_factor"] != 1.0
