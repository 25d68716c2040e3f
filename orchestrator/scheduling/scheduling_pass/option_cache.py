"""A cache of each job's options, valid until new observations of its family arrive."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from orchestrator.memory.calibration.calibrate import (
    UNMEASURED,
    Calibration,
    calibrate,
    get_measured_overhead,
    get_step_time_correction,
)
from orchestrator.memory.engines.overhead import MeasuredOverhead
from orchestrator.planning.frontier import Candidate
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.node_groups import NodeGroup
from orchestrator.scheduling.base.time_limits import compute_time_limit_left_s
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.scheduling.options.job_options import (
    Infeasible,
    JobOptions,
    SizeOption,
    compute_measured_step_time_factors,
    count_steps_left,
    has_unknown_step_time,
    list_job_options,
)
from orchestrator.scheduling.options.lengths import UNKNOWN_LENGTH_S, DurationHistory
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.scheduling.queue.wait_queue import OptionsByPool, WaitingJob
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.observation import Observation
from orchestrator.specs.state import RunLength

MENUS_MAX = 4096  # kept of jobs that were never tried: arrays and sweeps share theirs


class RemainingWork(NamedTuple):
    """The remaining work of a job in seconds, in device-seconds, and as a mean of both
    (`balanced_s`).
    """

    # between `duration_s` and `device_s` of the whole cluster: their geometric mean
    balanced_s: float
    duration_s: float  # with its launch
    device_s: float  # over all its devices


class OptionCache:
    """Cached options (plans and devices) of all jobs of a state, per pool (group of equal nodes)."""

    def __init__(
        self,
        pools: Sequence[AvailabilityProfile],
        observations: Sequence[Observation],
        run_lengths: Sequence[RunLength],
    ) -> None:
        self._pools = pools
        self._observations = observations
        self.lengths = DurationHistory(run_lengths)
        self._lengths_version = 0
        self._devices = sum(pool.group.devices for pool in pools)
        self._calibrated: dict[tuple[str, str], Calibration] = {}  # by family and device
        self._versions: dict[str, int] = {}  # of what is known, by family
        self._overheads = self._collect_measured_overheads()
        self._overheads_version = 0
        self._menus: dict[object, tuple[int, OptionsByPool]] = {}  # of jobs never tried
        self._entries: dict[
            str, tuple[int, int, Sequence[SizeOption]]
        ] = {}  # of running jobs: attempts, version, entries
        # of each job, with the steps that it had left and its attempts
        self._sizes: dict[str, tuple[tuple[int | None, int], RemainingWork]] = {}

    def read_observations(self, observations: Sequence[Observation]) -> set[str]:
        """Take over new measurements, and return the families of jobs whose cached options are out
        of date.
        """
        changed = {id(observation): observation for observation in self._observations}
        for observation in observations:
            if changed.pop(id(observation), None) is None:
                changed[id(observation)] = observation
        self._observations = observations
        families = {observation.family for observation in changed.values()}
        for key in [key for key in self._calibrated if key[0] in families]:
            del self._calibrated[key]
        for family in families:
            self._versions[family] = self._versions.get(family, 0) + 1
        overheads = self._collect_measured_overheads()
        if overheads != self._overheads:  # what counts for all families
            self._overheads = overheads
            self._overheads_version += 1
            self._calibrated.clear()
        return families

    def read_durations(self, run_lengths: Sequence[RunLength]) -> None:
        """Take over new durations of ended jobs; options that depend on them are then computed
        anew.
        """
        self.lengths = DurationHistory(run_lengths)
        self._lengths_version += 1

    def _collect_measured_overheads(self) -> dict[str, MeasuredOverhead]:
        devices = {pool.group.hardware.device.name for pool in self._pools}
        return {device: get_measured_overhead(self._observations, device) for device in devices}

    def _find_knowledge_version(self, job: Job) -> int:
        """Return a number that changes when more is known about the job's family or the devices."""
        learned = self._lengths_version if needs_learned_durations(job.spec) else 0
        return self._versions.get(job.spec.family_name, 0) + self._overheads_version + learned

    def forget_job(self, job_id: str) -> None:
        """Drop the cached options of a job that has ended or changed."""
        self._sizes.pop(job_id, None)
        self._entries.pop(job_id, None)

    def find_calibration(self, job: Job, device_kind: str) -> Calibration:
        """Return how to correct predictions for the job's family on this kind of device, by what
        was measured.
        """
        if not self._observations:
            return UNMEASURED
        family = job.spec.family_name
        if any(
            ran_out_of_memory(attempt) for attempt in job.attempts
        ):  # such a job is held to what it needed itself
            return calibrate(self._observations, device=device_kind, family=family, job_key=job.key)
        key = (family, device_kind)
        if key not in self._calibrated:
            self._calibrated[key] = calibrate(self._observations, device=device_kind, family=family)
        return self._calibrated[key]

    def find_options(self, waiting: WaitingJob) -> OptionsByPool:
        """Return the job's options on each pool of equal nodes; where no plan surely fits, those
        that may fit.
        """
        version = self._find_knowledge_version(waiting.job)
        if waiting.version != version:
            waiting.version, waiting.menus = (
                version,
                self._find_cached_options(waiting.job, version),
            )
        return waiting.menus

    def find_options_of_running_job(
        self, job: Job, pool: AvailabilityProfile
    ) -> Sequence[SizeOption]:
        """Return the options that a running job would have on this pool if it were launched anew."""
        version = self._find_knowledge_version(job)
        entry = self._entries.get(job.id)
        if entry is None or entry[:2] != (len(job.attempts), version):
            menu = self._list_options_on_pool(job, pool)
            entries = menu.entries if isinstance(menu, JobOptions) else ()
            entry = self._entries[job.id] = (len(job.attempts), version, entries)
        return entry[2]

    def find_remaining_work(self, job: Job) -> RemainingWork:
        """Return the remaining work of the job, predicted without any measurement."""
        key = (count_steps_left(job), len(job.attempts))
        entry = self._sizes.get(job.id)
        if entry is None or entry[0] != key:
            entry = self._sizes[job.id] = (key, self._predict_remaining_work(job, key[0]))
        return entry[1]

    def _find_cached_options(self, job: Job, knowledge_version: int) -> OptionsByPool:
        """Return the job's options on each pool, from the cache if they were made with this version
        of what is known.
        """
        if job.attempts:
            return self._list_options_of_all_pools(job)
        is_promised = job.starts_by_s is not None
        # what is rehearsed is not probed
        key = (job.spec.family_name, job.spec, job.fault is None, is_promised, job.continues_step)
        entry = self._menus.get(key)
        if entry is None or entry[0] != knowledge_version:
            if len(self._menus) >= MENUS_MAX:
                self._menus.clear()
            entry = self._menus[key] = (knowledge_version, self._list_options_of_all_pools(job))
        return entry[1]

    def _list_options_of_all_pools(self, job: Job) -> OptionsByPool:
        menus = tuple((pool, self._list_options_on_pool(job, pool)) for pool in self._pools)
        if any(isinstance(menu, JobOptions) for _, menu in menus):
            return menus
        return tuple(
            (pool, menu if isinstance(menu, JobOptions) else menu.likeliest or menu)
            for pool, menu in menus
        )

    def _list_options_on_pool(self, job: Job, pool: AvailabilityProfile) -> JobOptions | Infeasible:
        return list_job_options(
            job,
            pool.group,
            self.find_calibration(job, pool.group.hardware.device.name),
            pool.launch_cost_s,
            self.lengths,
        )

    def _predict_remaining_work(self, job: Job, steps_left: int | None) -> RemainingWork:
        sizes = [
            (
                sqrt(candidate.plan.world_size / self._devices) * seconds,
                seconds,
                candidate.plan.world_size * seconds,
            )
            for pool in self._pools
            for candidate in _list_candidates(job, pool.group)
            for seconds in [
                pool.launch_cost_s
                + _predict_duration_without_history_s(job, pool.group, candidate, steps_left)
            ]
        ]
        return RemainingWork(*min(sizes, default=(0.0, 0.0, 0.0)))


def needs_learned_durations(spec: JobSpec) -> bool:
    """Return whether only the durations of other jobs can tell how long this job takes."""
    return spec.is_script and (spec.steps is None or not spec.speeds)


def _predict_duration_without_history_s(
    job: Job, group: NodeGroup, candidate: Candidate, steps_left: int | None
) -> float:
    """Return the job's predicted seconds under this plan, without what was learned from other jobs.

    So its place in the queue does not change when other jobs end.
    """
    if steps_left is None:
        return min(UNKNOWN_LENGTH_S, compute_time_limit_left_s(job))
    if not has_unknown_step_time(job, candidate.estimate.source):
        return steps_left * candidate.step_s
    factors = compute_measured_step_time_factors(job, group.hardware.device.name)
    if not factors:
        return min(UNKNOWN_LENGTH_S, compute_time_limit_left_s(job))
    return steps_left * candidate.step_s * get_step_time_correction(candidate.plan, factors)


def _list_candidates(job: Job, group: NodeGroup) -> Sequence[Candidate]:
    try:
        return find_frontier(read_plan_request(job.spec), group.hardware).candidates
    except SpecError:
        return ()
