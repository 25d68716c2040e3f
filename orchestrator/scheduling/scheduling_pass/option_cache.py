"""What could each job run as, by what is known today? Remembered until reality says more of its family."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from orchestrator.memory.calibration.calibrate import UNMEASURED, Calibration, calibration, overhead_of
from orchestrator.memory.engines.overhead import Overhead
from orchestrator.planning.frontier import Candidate
from orchestrator.planning.search import frontier
from orchestrator.scheduling.base.node_groups import Group
from orchestrator.scheduling.failures.observation import ran_out
from orchestrator.scheduling.options.job_options import (
    Infeasible,
    JobOptions,
    SizeOption,
    job_options,
    steps_left,
    unknown_length_s,
)
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.scheduling.queue.wait_queue import OptionsByProfile, Waiting
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job_record import Job
from orchestrator.specs.observation import Observation

MENUS_MAX = 4096  # kept of jobs that were never tried: arrays and sweeps share theirs


class Size(NamedTuple):
    """What a job still needs on the number of devices that is best for it and for the others."""

    balanced_s: float  # between `duration_s` and `device_s` of the whole cluster: their geometric mean
    duration_s: float  # with its launch
    device_s: float  # over all its devices


class OptionCache:
    """Of the jobs of one state, on its pools."""

    def __init__(self, pools: Sequence[AvailabilityProfile], observations: Sequence[Observation]) -> None:
        self._pools, self._observations = pools, observations
        self._devices = sum(pool.group.devices for pool in pools)
        self._calibrated: dict[tuple[str, str], Calibration] = {}  # by family and device
        self._versions: dict[str, int] = {}  # of what is known, by family
        self._overheads = self._measured_overheads()
        self._overheads_version = 0
        self._menus: dict[object, tuple[int, OptionsByProfile]] = {}  # of jobs never tried
        self._entries: dict[
            str, tuple[int, int, Sequence[SizeOption]]
        ] = {}  # of running jobs: attempts, version, entries
        self._sizes: dict[str, tuple[int | None, Size]] = {}  # of each job, with the steps that it had left

    def observe(self, observations: Sequence[Observation]) -> set[str]:
        """Reality has said more of the families that come back: what their jobs run as is asked anew."""
        changed = {id(seen): seen for seen in self._observations}
        for seen in observations:
            if changed.pop(id(seen), None) is None:
                changed[id(seen)] = seen
        self._observations = observations
        families = {seen.family for seen in changed.values()}
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

    def _measured_overheads(self) -> dict[str, Overhead]:
        devices = {pool.group.hardware.device.name for pool in self._pools}
        return {device: overhead_of(self._observations, device) for device in devices}

    def _version(self, job: Job) -> int:
        """Another one as soon as more is known of the job's family or of the devices."""
        return self._versions.get(job.spec.family_name, 0) + self._overheads_version

    def forget(self, job_id: str) -> None:
        """It has ended."""
        self._sizes.pop(job_id, None)
        self._entries.pop(job_id, None)

    def calibrated(self, job: Job, device: str) -> Calibration:
        """What reality has taught of the job's family on this kind of device."""
        if not self._observations:
            return UNMEASURED
        family = job.spec.family_name
        if any(ran_out(attempt) for attempt in job.attempts):  # such a job is held to what it needed itself
            return calibration(self._observations, device=device, family=family, job=job.key)
        key = (family, device)
        if key not in self._calibrated:
            self._calibrated[key] = calibration(self._observations, device=device, family=family)
        return self._calibrated[key]

    def options_of(self, waiting: Waiting) -> OptionsByProfile:
        """What the job could run as on each pool; where nothing surely fits any, what may."""
        version = self._version(waiting.job)
        if waiting.version != version:
            waiting.version, waiting.menus = version, self._menus_at(waiting.job, version)
        return waiting.menus

    def entries_of(self, job: Job, pool: AvailabilityProfile) -> Sequence[SizeOption]:
        """What a running job could run as, were it launched anew."""
        version = self._version(job)
        known = self._entries.get(job.id)
        if known is None or known[:2] != (len(job.attempts), version):
            found = self._menu(job, pool)
            entries = found.entries if isinstance(found, JobOptions) else ()
            known = self._entries[job.id] = (len(job.attempts), version, entries)
        return known[2]

    def size_of(self, job: Job) -> Size:
        """What the job still needs, as predicted before any measurement."""
        left = steps_left(job)
        known = self._sizes.get(job.id)
        if known is None or known[0] != left:
            known = self._sizes[job.id] = (left, self._size(job, left))
        return known[1]

    def _menus_at(self, job: Job, version: int) -> OptionsByProfile:
        if job.attempts:
            return self._menus_on_all(job)
        is_promised = job.starts_by_s is not None
        # what is rehearsed is not probed
        key = (job.spec.family_name, job.spec, job.fault is None, is_promised, job.continues_step)
        known = self._menus.get(key)
        if known is None or known[0] != version:
            if len(self._menus) >= MENUS_MAX:
                self._menus.clear()
            known = self._menus[key] = (version, self._menus_on_all(job))
        return known[1]

    def _menus_on_all(self, job: Job) -> OptionsByProfile:
        menus = tuple((pool, self._menu(job, pool)) for pool in self._pools)
        if any(isinstance(one, JobOptions) for _, one in menus):
            return menus
        return tuple((pool, one if isinstance(one, JobOptions) else one.likeliest or one) for pool, one in menus)

    def _menu(self, job: Job, pool: AvailabilityProfile) -> JobOptions | Infeasible:
        return job_options(job, pool.group, self.calibrated(job, pool.group.hardware.device.name), pool.launch_cost_s)

    def _size(self, job: Job, left: int | None) -> Size:
        found = [
            (sqrt(one.plan.world_size / self._devices) * seconds, seconds, one.plan.world_size * seconds)
            for pool in self._pools
            for one in _candidates(job, pool.group)
            for seconds in [pool.launch_cost_s + (unknown_length_s(job) if left is None else left * one.step_s)]
        ]
        return Size(*min(found, default=(0.0, 0.0, 0.0)))


def _candidates(job: Job, group: Group) -> Sequence[Candidate]:
    try:
        return frontier(job.spec, group.hardware).candidates
    except SpecError:
        return ()
