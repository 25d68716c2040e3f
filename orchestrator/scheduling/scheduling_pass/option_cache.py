"""A cache of each job's options, valid until new observations of its family arrive."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from orchestrator.memory.calibration.calibrate import (
    UNMEASURED,
    Calibration,
    calibrate,
    measured_overhead_of,
    step_time_correction_of,
)
from orchestrator.memory.engines.overhead import MeasuredOverhead
from orchestrator.planning.frontier import Candidate
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.node_groups import NodeGroup
from orchestrator.scheduling.base.time_limits import time_limit_left_s
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.scheduling.options.job_options import (
    Infeasible,
    JobOptions,
    SizeOption,
    has_unknown_step_time,
    list_job_options,
    own_step_factors,
    steps_left,
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
    """The remaining work of a job: its seconds, its device-seconds, and a mean of both."""

    # between `duration_s` and `device_s` of the whole cluster: their geometric mean
    balanced_s: float
    duration_s: float  # with its launch
    device_s: float  # over all its devices


class OptionCache:
    """Cached options (plans and devices) of all jobs of a state, per pool of devices."""

    def __init__(
        self,
        pools: Sequence[AvailabilityProfile],
        observations: Sequence[Observation],
        runs: Sequence[RunLength],
    ) -> None:
        self._pools = pools
        self._observations = observations
        self.lengths = DurationHistory(runs)
        self._lengths_version = 0
        self._devices = sum(pool.group.devices for pool in pools)
        self._calibrated: dict[tuple[str, str], Calibration] = {}  # by family and device
        self._versions: dict[str, int] = {}  # of what is known, by family
        self._overheads = self._measured_overheads()
        self._overheads_version = 0
        self._menus: dict[object, tuple[int, OptionsByPool]] = {}  # of jobs never tried
        self._entries: dict[
            str, tuple[int, int, Sequence[SizeOption]]
        ] = {}  # of running jobs: attempts, version, entries
        # of each job, with the steps that it had left and its attempts
        self._sizes: dict[str, tuple[tuple[int | None, int], RemainingWork]] = {}

    def read_observations(self, observations: Sequence[Observation]) -> set[str]:
        """Read new observations, and return the families whose cached options are out of date."""
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
        overheads = self._measured_overheads()
        if overheads != self._overheads:  # what counts for all families
            self._overheads = overheads
            self._overheads_version += 1
            self._calibrated.clear()
        return families

    def read_durations(self, runs: Sequence[RunLength]) -> None:
        """Read new durations of ended jobs; options that depend on them are then computed anew."""
        self.lengths = DurationHistory(runs)
        self._lengths_version += 1

    def _measured_overheads(self) -> dict[str, MeasuredOverhead]:
        devices = {pool.group.hardware.device.name for pool in self._pools}
        return {device: measured_overhead_of(self._observations, device) for device in devices}

    def _knowledge_version(self, job: Job) -> int:
        """Return a number that changes when more is known about the job's family or the devices."""
        learned = self._lengths_version if needs_learned_durations(job.spec) else 0
        return self._versions.get(job.spec.family_name, 0) + self._overheads_version + learned

    def forget_job(self, job_id: str) -> None:
        """Drop what is cached for a job that has ended or changed."""
        self._sizes.pop(job_id, None)
        self._entries.pop(job_id, None)

    def calibration_of(self, job: Job, device: str) -> Calibration:
        """Return the calibration of the job's family on this kind of device."""
        if not self._observations:
            return UNMEASURED
        family = job.spec.family_name
        if any(
            ran_out_of_memory(attempt) for attempt in job.attempts
        ):  # such a job is held to what it needed itself
            return calibrate(self._observations, device=device, family=family, job_key=job.key)
        key = (family, device)
        if key not in self._calibrated:
            self._calibrated[key] = calibrate(self._observations, device=device, family=family)
        return self._calibrated[key]

    def options_of(self, waiting: WaitingJob) -> OptionsByPool:
        """Return the job's options per pool; where no plan surely fits, those that may fit."""
        version = self._knowledge_version(waiting.job)
        if waiting.version != version:
            waiting.version, waiting.menus = version, self._menus_at(waiting.job, version)
        return waiting.menus

    def options_of_running(self, job: Job, pool: AvailabilityProfile) -> Sequence[SizeOption]:
        """Return the options that a running job would have on this pool if it were launched anew."""
        version = self._knowledge_version(job)
        entry = self._entries.get(job.id)
        if entry is None or entry[:2] != (len(job.attempts), version):
            menu = self._options_on_pool(job, pool)
            entries = menu.entries if isinstance(menu, JobOptions) else ()
            entry = self._entries[job.id] = (len(job.attempts), version, entries)
        return entry[2]

    def remaining_work_of(self, job: Job) -> RemainingWork:
        """Return the remaining work of the job, predicted without any measurement."""
        key = (steps_left(job), len(job.attempts))
        entry = self._sizes.get(job.id)
        if entry is None or entry[0] != key:
            entry = self._sizes[job.id] = (key, self._predict_remaining_work(job, key[0]))
        return entry[1]

    def _menus_at(self, job: Job, version: int) -> OptionsByPool:
        if job.attempts:
            return self._menus_on_all(job)
        is_promised = job.starts_by_s is not None
        # what is rehearsed is not probed
        key = (job.spec.family_name, job.spec, job.fault is None, is_promised, job.continues_step)
        entry = self._menus.get(key)
        if entry is None or entry[0] != version:
            if len(self._menus) >= MENUS_MAX:
                self._menus.clear()
            entry = self._menus[key] = (version, self._menus_on_all(job))
        return entry[1]

    def _menus_on_all(self, job: Job) -> OptionsByPool:
        menus = tuple((pool, self._options_on_pool(job, pool)) for pool in self._pools)
        if any(isinstance(menu, JobOptions) for _, menu in menus):
            return menus
        return tuple(
            (pool, menu if isinstance(menu, JobOptions) else menu.likeliest or menu)
            for pool, menu in menus
        )

    def _options_on_pool(self, job: Job, pool: AvailabilityProfile) -> JobOptions | Infeasible:
        return list_job_options(
            job,
            pool.group,
            self.calibration_of(job, pool.group.hardware.device.name),
            pool.launch_cost_s,
            self.lengths,
        )

    def _predict_remaining_work(self, job: Job, left: int | None) -> RemainingWork:
        sizes = [
            (
                sqrt(candidate.plan.world_size / self._devices) * seconds,
                seconds,
                candidate.plan.world_size * seconds,
            )
            for pool in self._pools
            for candidate in _list_candidates(job, pool.group)
            for seconds in [pool.launch_cost_s + _duration_s(job, pool.group, candidate, left)]
        ]
        return RemainingWork(*min(sizes, default=(0.0, 0.0, 0.0)))


def needs_learned_durations(spec: JobSpec) -> bool:
    """Return whether the job's duration can follow only from those of other jobs."""
    return spec.is_script and (spec.steps is None or not spec.speeds)


def _duration_s(job: Job, group: NodeGroup, candidate: Candidate, left: int | None) -> float:
    """Return the job's predicted seconds under this plan, without what other jobs teach.

    So its place in the queue does not change when other jobs end.
    """
    if left is None:
        return min(UNKNOWN_LENGTH_S, time_limit_left_s(job))
    if not has_unknown_step_time(job, candidate.estimate.source):
        return left * candidate.step_s
    factors = own_step_factors(job, group.hardware.device.name)
    if not factors:
        return min(UNKNOWN_LENGTH_S, time_limit_left_s(job))
    return left * candidate.step_s * step_time_correction_of(candidate.plan, factors)


def _list_candidates(job: Job, group: NodeGroup) -> Sequence[Candidate]:
    try:
        return find_frontier(read_plan_request(job.spec), group.hardware).candidates
    except SpecError:
        return ()
