"""A loop with accelerate, which saves a folder by `save_state`; it is preempted once."""

import os

import ways
from accelerate import Accelerator


class Accelerated(ways.Ways):
    """A script whose model and optimizer accelerate has prepared."""

    def build(self) -> None:
        super().build()
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def save(self) -> None:
        self.accelerator.save_state(f"{self.args.output}/checkpoint-{self.step}")
        print(f"saved {self.step}", flush=True)

    def load(self, path: str) -> None:
        self.accelerator.load_state(path)
        self.step = int(os.path.basename(path).split("-")[1])

    def at_accelerate(self) -> None:
        """Be preempted."""
        self.preempt()


Accelerated.start()
