"""Laws of probes of real scripts: what they see of a script's memory is what its training then needs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.specs.attempt import Attempt, Evidence, Heartbeat, RankEnd
from tests.scheduling.test_probe import MIB, Night, unknown
from tests.training.test_guard import run, script

CAPACITY_BYTES = 512 * MIB
PEAKS = ("optimizer", "loader", "evaluation", "activations")
TEXT = """
import sys
import torch

batch, peak, hidden, frozen, spare = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
model = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 64))
extra = torch.nn.Parameter(torch.zeros(frozen))
optimizer = torch.optim.Adam([*model.parameters(), extra], foreach=True)
for step in range(2):
    if peak == "loader":
        torch.ones(spare)
    for _ in range(2):
        loss = model(torch.randn(batch, 256, 64)).square().mean() + extra.sum()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if peak == "evaluation":
        with torch.no_grad():
            model(torch.randn(spare // 2 // hidden // 256, 256, 64))
"""


class RealNight(Night):
    """A night on which each attempt is a real process under the guard."""

    def __init__(self, folder: Path, sizes: list[str]) -> None:
        super().__init__()
        self.folder, self.sizes = folder, sizes

    def heartbeat(self, micro: int) -> Heartbeat:
        folder = self.folder / str(micro)
        folder.mkdir(parents=True, exist_ok=True)
        name = script(folder, TEXT)
        settings = {"virtual_capacity_bytes": CAPACITY_BYTES, "heartbeat_interval_s": 0.0}
        ended = run(folder, name, str(micro), *self.sizes, **settings)
        assert ended.exit_code == 0, ended.out
        beat = ended.read("heartbeat")
        fields = {name: value for name, value in beat.items() if name != "mixing"}
        return Heartbeat(**fields)

    def truth(self, attempt: Attempt) -> Evidence:
        beat = replace(self.heartbeat(attempt.plan.micro_batch_size), at_s=self.at_s)
        rank = RankEnd(rank=0, exit_code=-15)
        return Evidence(ranks=(rank,), heartbeats=(beat,), stopped=attempt.probe)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))]
)
def test_a_script_needs_what_its_probes_saw_wherever_its_peak_lies(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    peak, hidden = PEAKS[seed % len(PEAKS)], 64 * draw.randint(8, 24)
    megabyte = MIB // 4  # elements
    frozen = megabyte * (draw.randint(15, 35) if peak == "optimizer" else draw.randint(1, 4))
    sizes = [peak, str(hidden), str(frozen), str(megabyte * draw.randint(60, 200))]
    night = RealNight(tmp_path, sizes)
    night.submit(unknown())
    while night.launched[-1].probe:
        night.end()
    real = night.launched[-1]
    measured = night.heartbeat(real.plan.micro_batch_size).peak_bytes
    assert real.estimate.allocated_bytes == pytest.approx(measured, rel=0.1)
