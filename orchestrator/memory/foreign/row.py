"""One row of published trainings: what its author wrote, in which words, and what a reader had to infer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from orchestrator.specs.errors import SpecError

COLUMNS = (
    "id", "model", "arch", "gpu", "n_gpus", "framework", "dp_or_fsdp", "tp", "pp", "cp", "ep", "sharding",
    "micro_batch", "grad_accum", "global_batch", "seq_len", "precision", "act_ckpt", "optimizer", "peft", "offload",
    "compile_or_other", "note",
)  # fmt: skip
# What a method of torchtune's README table has on top of the one before (pytorch/torchtune README.md, "Optimization
# flags"), in its order.
CUMULATIVE = ("baseline", "packed", "compile", "chunked ce", "activation checkpointing", "opt in bwd",
              "activation offload", "8-bit adamw")  # fmt: skip


class Row:
    """The columns of one row by name, all its words in lower case, and notes on what is inferred from them."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = {name: (columns.get(name) or "").strip() for name in COLUMNS}
        self.inferred: list[str] = []
        self.is_lower_bound = False  # batch or length was not stated: the least was taken
        self.said = " ".join(value for name, value in self._columns.items() if name != "note").lower()
        self.other = self._switched_on()
        # Thunder's benchmark trains litgpt's models in a loop of its own (Lightning-AI/lightning-thunder,
        # thunder/benchmarks/benchmark_litgpt.py).
        self.has_litgpt_model = re.search("lit-?gpt|thunder", self.said) is not None
        self.is_litgpt = self.has_litgpt_model and "thunder" not in self.said
        # src/megatron/bridge/perf_recipes of NVIDIA-NeMo/Megatron-Bridge: what its summaries are measured with. A row
        # that departs from their allocator is not taken to follow them elsewhere.
        self.is_bridge = "bridge" in self.said and "default allocator" not in self.said

    def __getitem__(self, name: str) -> str:
        return self._columns[name]

    def infer(self, what: str) -> None:
        self.inferred.append(what)

    def refused(self, reason: str) -> SpecError:
        return SpecError(reason, path=self["id"])

    def number(self, name: str, default: int = 0) -> int:
        """The first number in a column, or the default; of devices, nodes times devices where both are said."""
        said = self[name].replace(",", "")
        if name == "n_gpus" and (nodes := re.search(r"(\d+) ?(?:nodes?)? ?[x×*] ?(\d+)", said)):
            return int(nodes[1]) * int(nodes[2])
        found = re.search(r"\d+", said)
        return int(found[0]) if found else default

    def _switched_on(self) -> str:
        """What was switched on beside the columns, in lower case; of a cumulative table, all that came before too."""
        said = self["compile_or_other"].lower()
        if said.startswith("cumulative:"):
            last = next((at for at, step in enumerate(CUMULATIVE) if step in said), None)
            if last == 0:
                return said
            if last is not None and "+" in said:
                return " ".join(CUMULATIVE[1 : last + 1])
            if "lora" in said:
                self.infer("all optimisations of the table but the optimizer's")
                return " ".join(CUMULATIVE[1:5]) + " activation offload " + said
        return said
