"""Forecasts of the start and end of jobs, by simulating the queue without new submissions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from math import exp, inf, log, sqrt
from statistics import NormalDist, median
from types import MappingProxyType

from orchestrator.memory.calibration.calibrate import WINDOW
from orchestrator.scheduling.base.migration import estimate_lost_training_s
from orchestrator.scheduling.failures.observation import make_pace_observation
from orchestrator.scheduling.options.job_options import (
    JobOptions,
    compute_measured_step_time_factors,
    count_steps_left,
)
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.queue.wait_queue import WaitingJob
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.scheduling_pass.decide import (
    compute_device_second_price,
    make_expected_reservation,
)
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import (
    Attempt,
    AttemptStatus,
    Device,
    Evidence,
    Placement,
    RankEnd,
    list_devices_of,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.events import Event, Finished, Released, Submitted, TimerFired
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.observation import Observation
from orchestrator.specs.profile import WITHOUT_SECONDS, Source
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

FORECAST_MAX = 2000  # queued jobs, first come first: later ones are not forecast
# of them, jobs of which a range is told: twenty plays take 2.5 s (one core, 2026-11-22)
RANGED_MAX = 100
PLAYED_MAX = 2 * RANGED_MAX  # waiting jobs in a play: those behind them could only fill gaps
# plays with other lengths: of 19, the second and the last but one bound 80 % (ranks over 20)
SAMPLES = 19
# Deviation of the logarithm of an unmeasured length, and how many measured steps that is worth. An
# assumption:
# twice the worst error that Arena (EuroSys 2026) reports of its estimates, 8.3 %, rounded up; ours
# profile nothing.
SUPPOSED_SPREAD = 0.2
SUPPOSED_OUTCOMES = 4
OVERDUE_S = 60.0  # from now on, until what should have ended is expected to end
# of a job, on average, in a play: one that waits for the night is looked at every night
EVENTS_MAX = 50
DONE = Evidence(ranks=(RankEnd(rank=0, exit_code=0),))
STOPPED = Evidence(stopped=True)


@frozen
class JobForecast:
    """Expected start and end of a job (seconds since 1970), and the number of devices that it will
    use.

    The ranges hold with a probability of 80 %, if durations are as wrong as they were before. The
    forecast assumes that nothing more is submitted and nothing fails.
    """

    start_s: float
    end_s: float
    devices: int
    start_range_s: tuple[float, float] | None = None  # None: too far back in the queue
    end_range_s: tuple[float, float] | None = None
    # False: it follows from the length of a job of which nothing tells the length
    knows_start: bool = True
    knows_end: bool = True


def make_forecast(state: State) -> Mapping[str, JobForecast]:
    """Return {job id: forecast} of all running jobs and of at most FORECAST_MAX waiting ones, in
    queue order.

    The first jobs are simulated with all decisions of the scheduler, and have ranges. The others
    are placed one after another.
    """
    forecasts = dict(make_quick_forecast(state))
    near = [*forecasts][
        : sum(job.status is JobStatus.RUNNING for job in state.jobs.values()) + RANGED_MAX
    ]
    near += [
        job.id for job in state.jobs.values() if not (job.status.ended or job.id in forecasts)
    ][:RANGED_MAX]
    played = _drop_waiting_jobs_behind_first(state, forecasts)
    spreads = {
        job.id: estimate_duration_log_spread(state.observations, job)
        for job in played.jobs.values()
    }
    index = make_index(played)
    plays = [
        QueueSimulation(played, index, spreads, sample).run_until_ended(near)
        for sample in range(SAMPLES + 1)
    ]
    for job_id in near:
        samples = [play[job_id] for play in plays if job_id in play]
        if len(samples) == len(plays):
            base, *others = samples
            forecasts[job_id] = replace(
                base,
                start_range_s=_find_second_and_last_but_one([other.start_s for other in others]),
                end_range_s=_find_second_and_last_but_one([other.end_s for other in others]),
            )
    return forecasts


def add_measured_paces(state: State) -> State:
    """Return the state with the measured speeds of running attempts among its observations.

    They are added only for families without a measured speed on that kind of device. The forecast
    of queued jobs of the family then uses them. No decision reads this state.
    """
    measured = {(entry.family, entry.device) for entry in state.observations if entry.step_ratio}
    paces = []
    for job in state.jobs.values():
        if job.status is JobStatus.RUNNING and job.last is not None:
            observation = make_pace_observation(job, job.last)
            if observation and (observation.family, observation.device) not in measured:
                paces.append(observation)
    return replace(state, observations=(*state.observations, *paces)) if paces else state


def _drop_waiting_jobs_behind_first(state: State, job_ids_in_order: Iterable[str]) -> State:
    """Return the state without the waiting jobs behind the first PLAYED_MAX of this order; they
    delay no earlier job.
    """
    queued = [job.id for job in state.live_jobs if job.status is JobStatus.QUEUED]
    expected = [
        job_id for job_id in job_ids_in_order if state.jobs[job_id].status is JobStatus.QUEUED
    ]
    waiting = [*dict.fromkeys((*expected, *queued))]
    jobs = state.jobs
    for job_id in waiting[PLAYED_MAX:]:
        jobs = jobs.remove_job(job_id)
    return replace(state, jobs=jobs)


def make_quick_forecast(
    state: State, hurried_job_ids: Collection[str] = ()
) -> Mapping[str, JobForecast]:
    """Return {job id: forecast} without ranges and migrations: jobs are placed one after another.

    Jobs in `hurried_job_ids` use the option that ends first, at any cost.
    """
    return _PlacementForecast(make_index(state), hurried_job_ids).place_all()


def estimate_duration_log_spread(observations: Sequence[Observation], job: Job) -> float:
    """Return how wrong predicted durations are in the job's family: the deviation of log(true /
    predicted).

    It is the standard deviation. The assumed spread counts as SUPPOSED_OUTCOMES observations
    (Gelman et al. 2013, Bayesian Data Analysis, section 2.6).
    """
    ratios = [
        observation.step_ratio
        for observation in observations
        if observation.family == job.spec.family_name and observation.step_ratio
    ][-WINDOW:]
    centre = log(median(ratios)) if ratios else 0.0
    squares = sum((log(ratio) - centre) ** 2 for ratio in ratios)
    return sqrt(
        (SUPPOSED_OUTCOMES * SUPPOSED_SPREAD**2 + squares) / (SUPPOSED_OUTCOMES + len(ratios))
    )


def may_show_step_time(
    index: SchedulerIndex,
    job: Job,
    device: DeviceSpec,
    estimate_source: Source,
    attempt: Attempt | None,
) -> bool:
    """Return whether a job's predicted step time is good enough to be shown to a person.

    It is not on a virtual device, whose steps are the host's: a prediction was 27 times off
    (November 2026). There it is shown once the attempt has a pace, or an attempt of the family was
    measured on this kind of device. Where `estimate_source` gives no seconds, the duration was
    learned from other jobs.
    """
    if not device.kind.traits.is_virtual or job.spec.speeds or estimate_source in WITHOUT_SECONDS:
        return True
    if attempt is not None and attempt.pace is not None:
        return True
    calibrated = index.options.find_calibration(job, device.name)
    return bool(calibrated.step_factors or compute_measured_step_time_factors(job, device.name))


def _is_duration_known(index: SchedulerIndex, job: Job, attempt: Attempt) -> bool:
    """Return whether the attempt's duration follows from known step times that may be shown to a
    person.
    """
    length = index.predict_duration(job, attempt)
    pool = index.find_pool(attempt)
    if length is None or pool is None:
        return False
    return length.is_known and may_show_step_time(
        index, job, pool.group.hardware.device, attempt.estimate.source, attempt
    )


class _PlacementForecast:
    """A forecast that places the jobs of the queue one after another, each with its predicted
    duration.
    """

    def __init__(self, index: SchedulerIndex, hurried_job_ids: Collection[str]) -> None:
        self._index = index
        self._state = index.state
        self._hurried = hurried_job_ids
        self._forecasts: dict[str, JobForecast] = {}
        self._arrays = _RunningArrays()
        self._price = compute_device_second_price(index)
        self._vague = _VagueDevices(index.state.at_s)
        self._later: list[
            tuple[float, int, str]
        ] = []  # from when on jobs can start; their order and ids

    def place_all(self) -> dict[str, JobForecast]:
        """Return {job id: forecast} of all running jobs, and of at most FORECAST_MAX waiting ones."""
        self._index.clear_reservations()
        self._forecast_running_jobs()
        jobs_max = FORECAST_MAX + len(self._forecasts)
        self._place_waiting_jobs(jobs_max)
        for job_id in [*self._forecasts]:
            self._schedule_dependent_jobs(job_id)
        for waiting in self._index.waiting.values():
            if waiting.job.not_before_s > self._state.at_s:
                heappush(self._later, (waiting.job.not_before_s, waiting.job.order, waiting.job.id))
        self._place_jobs_that_start_later(jobs_max)
        return self._forecasts

    def _forecast_running_jobs(self) -> None:
        """Forecast the running jobs from their expected ends."""
        at_s = self._state.at_s
        for job in self._index.running.values():
            attempt = job.last
            end_s = at_s
            if attempt is not None and attempt.ended_at_s is None:
                end_s = self._index.estimate_end_s(job, attempt)
                launched_s = attempt.launched_at_s
                if end_s <= at_s:
                    end_s = at_s + OVERDUE_S
                self._index.set_expected_end(attempt, end_s)
                self._forecasts[job.id] = self._vague.forecast_job(
                    launched_s,
                    end_s,
                    attempt.placement,
                    is_duration_known=_is_duration_known(self._index, job, attempt)
                    and not attempt.probe,
                )
            self._arrays.add_running(job, end_s)

    def _place_waiting_jobs(self, forecasts_max: int) -> None:
        """Place the waiting jobs in the order of the queue policy; jobs whose array is full are
        kept for later.

        It ends once there are `forecasts_max` forecasts.
        """
        for waiting, by_s in self._index.policy.iterate_in_order():
            if len(self._forecasts) >= forecasts_max:
                break
            if waiting.job.id not in self._forecasts:
                if self._arrays.find_room_from_s(waiting.job) > -inf:
                    heappush(self._later, (self._state.at_s, waiting.job.order, waiting.job.id))
                else:
                    self._reserve_and_forecast_job(waiting, self._state.at_s, by_s)

    def _place_jobs_that_start_later(self, forecasts_max: int) -> None:
        """Place the jobs that cannot start yet, the first to be ready first, up to `forecasts_max`
        forecasts.
        """
        while self._later and len(self._forecasts) < forecasts_max:
            ready_s, _, job_id = heappop(self._later)
            job = self._state.jobs[job_id]
            for by_s in (inf,) if job.deadline_s is None else (job.deadline_s, inf):
                if job_id not in self._forecasts:
                    waiting = self._index.waiting.get(job_id) or self._index.make_queue_entry(job)
                    self._reserve_and_forecast_job(
                        waiting, max(ready_s, self._arrays.find_room_from_s(job)), by_s
                    )
            if job_id in self._forecasts:
                self._schedule_dependent_jobs(job_id)

    def _reserve_and_forecast_job(
        self, waiting: WaitingJob, earliest_s: float, end_by_s: float
    ) -> None:
        """Reserve the devices with which the job would start at `earliest_s` or later, and forecast
        it.

        Nothing happens where that is impossible.
        """
        job = waiting.job
        price = 0.0 if job.id in self._hurried else self._price
        reservation = make_expected_reservation(
            self._index, waiting, price, earliest_s=earliest_s, end_by_s=end_by_s
        )
        if reservation is None:
            return
        self._index.reserve((reservation,), if_any_is_idle=True)
        knows_length = True
        for profile, menu in self._index.options.find_options(waiting):
            if isinstance(menu, JobOptions):
                entry = menu.entries[0]
                device = profile.group.hardware.device
                is_known = entry.is_known and not entry.probe
                source = entry.candidate.estimate.source
                knows_length &= is_known and may_show_step_time(
                    self._index, job, device, source, None
                )
        self._forecasts[job.id] = self._vague.forecast_job(
            reservation.start_s,
            reservation.end_s,
            reservation.placement,
            is_duration_known=knows_length,
        )
        self._arrays.add_running(job, reservation.end_s)

    def _schedule_dependent_jobs(self, job_id: str) -> None:
        """Keep for later the jobs that wait for this job, if all that they wait for is forecast."""
        for follower_id in self._index.list_dependent_job_ids(job_id):
            job = self._state.jobs[follower_id]
            if job.held_by is None and all(other.job in self._forecasts for other in job.waits_for):
                ready_s = max(self._forecasts[other.job].end_s for other in job.waits_for)
                heappush(self._later, (ready_s, job.order, job.id))


class _VagueDevices:
    """Devices of which a forecast cannot say when they become free, since a job of unknown duration
    runs there.
    """

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._devices = set[Device]()

    def forecast_job(
        self, start_s: float, end_s: float, placement: Placement, *, is_duration_known: bool
    ) -> JobForecast:
        """Return the forecast of a job on these devices, with whether its start and end are known.

        If its end is not, the devices count as vague from then on.
        """
        devices = set(list_devices_of(placement))
        knows_start = start_s <= self._at_s or not devices & self._devices
        knows_end = knows_start and is_duration_known
        if not knows_end:
            self._devices |= devices
        return JobForecast(
            start_s=start_s,
            end_s=end_s,
            devices=len(devices),
            knows_start=knows_start,
            knows_end=knows_end,
        )


@dataclass(slots=True, kw_only=True)
class SimulatedAttempt:
    """An attempt in a simulation, with the times of its launch and its end in seconds since 1970."""

    job: Job
    attempt: Attempt
    launched_at_s: float
    ended_at_s: float | None = None  # None: it never ends
    is_done: bool = False  # the job succeeded with it


class QueueSimulation:
    """A simulation of the scheduler's next decisions. Each sample number gives the jobs other
    durations.

    Sample 0 has the predicted durations themselves.
    """

    def __init__(
        self,
        state: State,
        index: SchedulerIndex,
        log_spread_by_job_id: Mapping[str, float],
        sample_number: int,
        *,
        saved_step_by_job_id: Mapping[str, int | None] = MappingProxyType({}),
        list_submissions: Callable[[State], Iterable[Submitted]] = lambda state: (),  # noqa: ARG005
    ) -> None:
        """Prepare the simulation of one sample.

        `log_spread_by_job_id` says how wrong durations may be. `saved_step_by_job_id` has the steps
        that stopped jobs had saved. `list_submissions` returns further submissions after each
        event.
        """
        self._scheduler = Scheduler(state)
        self._spreads = log_spread_by_job_id
        self._sample = sample_number
        self._saved = saved_step_by_job_id
        self._more = list_submissions
        self._going = set[str]()
        self.stints: list[SimulatedAttempt] = []
        self._newest: dict[str, SimulatedAttempt] = {}  # by job
        # of this state, for all plays: what is known of lengths; nothing is measured meanwhile
        self._index = index
        self._found: dict[str, JobForecast] = {}
        self._running: dict[
            str, tuple[Attempt, float]
        ] = {}  # by job, with the end that it comes to
        self._ends: list[tuple[float, int, str]] = []
        self._longer: dict[str, float] = {}  # than expected, by job: as many times
        self._vague = _VagueDevices(state.at_s)
        for job in self._index.running.values():
            attempt = job.attempts[-1]
            if attempt.ended_at_s is None:
                self._begin_attempt(job, attempt)

    def run_until_ended(self, job_ids: Sequence[str]) -> Mapping[str, JobForecast]:
        """Run the simulation until all of these jobs have ended, and return {job id: forecast} of
        those that did.
        """
        going = self._going = {*job_ids}
        self._submit_due_jobs()
        for job in self._index.running.values():
            attempt = job.attempts[-1]
            if attempt.status is AttemptStatus.ENDED:
                self._apply_event(
                    Released(job_id=job.id, number=attempt.number, at_s=self._state.at_s)
                )
            elif attempt.status is AttemptStatus.STOPPING:
                self._stop_job(job.id)
        before = self._state.submitted - len(self._state.jobs)
        count = 0
        while (count := count + 1) <= EVENTS_MAX * (self._state.submitted - before):
            wake_s = self._scheduler.wake_at_s() if going else None
            if not going or (wake_s is None and not self._ends):
                break
            if self._ends and (wake_s is None or self._ends[0][0] <= wake_s):
                end_s, _, job_id = heappop(self._ends)
                runs, ends_s = self._running.get(job_id, (None, inf))
                if runs is not None and ends_s == end_s:
                    if not runs.probe:
                        going.discard(job_id)
                        self._found[job_id] = replace(self._found[job_id], end_s=end_s)
                        self._newest[job_id].is_done = True
                    self._end_attempt(runs, DONE, end_s)
            elif wake_s is not None:
                self._apply_event(TimerFired(at_s=wake_s))
            self._submit_due_jobs()
        return {
            job_id: outcome
            for job_id in job_ids
            if (outcome := self._found.get(job_id)) and outcome.end_s < inf
        }

    def knows_end(self, job_id: str) -> bool:
        """Return whether the job's simulated end follows from known durations."""
        return job_id in self._found and self._found[job_id].knows_end

    @property
    def _state(self) -> State:
        return self._scheduler.state

    def _submit_due_jobs(self) -> None:
        """Submit the jobs that `list_submissions` returns for the present state."""
        for event in self._more(self._state):
            self._going.add(event.job_id)
            self._apply_event(event)

    def _apply_event(self, event: Event) -> None:
        for action in self._scheduler.step(event):
            if isinstance(action, Launch):
                self._begin_attempt(action.job, action.attempt)
            elif isinstance(action, Stop):
                self._stop_job(action.job_id)

    def _begin_attempt(self, job: Job, attempt: Attempt) -> None:
        """Record that an attempt runs, with the end that this sample gives it."""
        launched_s = attempt.launched_at_s
        at_s = self._state.at_s
        length = self._index.predict_duration(job, attempt)
        length_s = self._index.estimate_end_s(job, replace(attempt, leaves_by_s=None)) - launched_s
        if job.id not in self._longer and 0 < length_s < inf and self._sample:
            share = _compute_duration_quantile(job, self._sample)
            spread = max(self._spreads[job.id], 0.0 if length is None else length.spread)
            self._longer[job.id] = (
                _compute_remaining_duration_quantile_s(length_s, at_s - launched_s, spread, share)
                / length_s
            )
        end_s = launched_s + length_s * self._longer.get(job.id, 1.0)
        end_s = min(end_s, self._index.compute_time_limit_end_s(job, attempt))
        if end_s <= at_s:
            end_s = at_s + OVERDUE_S
        expected = self._vague.forecast_job(
            launched_s,
            inf,
            attempt.placement,
            is_duration_known=length is None or _is_duration_known(self._index, job, attempt),
        )
        begun = self._found.get(job.id, expected)
        self._found[job.id] = replace(begun, knows_end=expected.knows_end)
        self._running[job.id] = attempt, end_s
        self._newest[job.id] = stint = SimulatedAttempt(
            job=job, attempt=attempt, launched_at_s=launched_s
        )
        self.stints.append(stint)
        if end_s < inf:  # its nodes are there
            heappush(self._ends, (end_s, job.order, job.id))

    def _stop_job(self, job_id: str) -> None:
        """End the attempt of a job that the scheduler stops; what it has trained so far counts as
        saved.
        """
        attempt, end_s = self._running[job_id]
        job = self._state.jobs[job_id]
        at_s = self._state.at_s
        saved = (
            self._saved[job_id]
            if job_id in self._saved
            else estimate_saved_step(self._index, job, attempt, end_s, at_s)
        )
        self._end_attempt(attempt, replace(STOPPED, checkpoint_step=saved), at_s)

    def _end_attempt(self, attempt: Attempt, evidence: Evidence, at_s: float) -> None:
        del self._running[attempt.job_id]
        self._newest[attempt.job_id].ended_at_s = at_s
        self._apply_event(
            Finished(job_id=attempt.job_id, number=attempt.number, evidence=evidence, at_s=at_s)
        )
        self._apply_event(Released(job_id=attempt.job_id, number=attempt.number, at_s=at_s))


def estimate_saved_step(
    index: SchedulerIndex, job: Job, attempt: Attempt, expected_end_s: float, stop_at_s: float
) -> int | None:
    """Return the last step that the job would have saved if it were stopped at `stop_at_s`; None if
    unknown.

    Steps are assumed to be spread evenly up to `expected_end_s`.
    """
    pool = index.find_pool(attempt)
    left = count_steps_left(job, attempt)
    if pool is None or left is None or job.spec.optimizer_steps is None:
        return None
    from_s = attempt.launched_at_s + pool.launch_cost_s
    kept_s = max(0.0, stop_at_s - estimate_lost_training_s(job, stop_at_s) - from_s)
    trained = kept_s / max(expected_end_s - from_s, stop_at_s - from_s, OVERDUE_S)
    return job.spec.optimizer_steps - left + int(left * trained)


class _RunningArrays:
    """For each array that limits how many jobs run at once: when its running jobs end."""

    def __init__(self) -> None:
        self._ends_s: dict[
            str, list[float]
        ] = {}  # of those that run together, the first to end first

    def find_room_from_s(self, job: Job) -> float:
        """Return when one more job of the array may run, in seconds since 1970; minus infinity for
        now.
        """
        if job.array is None or job.spec.member is None:
            return -inf
        ends_s = self._ends_s.get(job.array, [])
        return -inf if len(ends_s) < job.spec.member.max_concurrent else ends_s[0]

    def add_running(self, job: Job, end_s: float) -> None:
        """Count the job as running in its array until `end_s`."""
        if job.array is None or job.spec.member is None:
            return
        ends_s = self._ends_s.setdefault(job.array, [])
        if len(ends_s) >= job.spec.member.max_concurrent:
            heappop(ends_s)
        heappush(ends_s, end_s)


def _compute_duration_quantile(job: Job, sample_number: int) -> float:
    """Return which quantile (0 to 1) of its possible durations the job has in this sample.

    Over all samples, a job has each quantile once: a Latin hypercube (McKay, Beckman, Conover 1979,
    Technometrics 21:239) without random numbers. SAMPLES is a prime, so multiples of a step modulo
    SAMPLES run through all quantiles.
    """
    steps = 1 + job.order % (SAMPLES - 1)
    offset = job.order // (SAMPLES - 1)
    return ((sample_number * steps + offset) % SAMPLES + 0.5) / SAMPLES


def _compute_remaining_duration_quantile_s(
    expected_s: float, ran_s: float, log_spread: float, quantile: float
) -> float:
    """Return a quantile (0 to 1) of a job's total duration, given that it has already run for
    `ran_s` seconds.

    The duration is lognormal: `expected_s` is predicted, and `log_spread` is the standard deviation
    of its logarithm.
    """
    if expected_s <= 0 or not expected_s < float("inf"):
        return expected_s
    before = 0.0 if ran_s <= 0 else NORMAL.cdf(log(ran_s / expected_s) / log_spread)
    if before > LATE:
        return ran_s  # nothing is known of what takes so much longer than expected
    return expected_s * exp(log_spread * _compute_normal_quantile(before + quantile * (1 - before)))


NORMAL = NormalDist()
LATE = 1 - 1e-9


@lru_cache(maxsize=4096)
def _compute_normal_quantile(share: float) -> float:
    return NORMAL.inv_cdf(share)


def _find_second_and_last_but_one(values: Sequence[float]) -> tuple[float, float]:
    """Return the second smallest and the second largest of the values, as a range."""
    ordered = sorted(values)
    return ordered[1], ordered[-2]
