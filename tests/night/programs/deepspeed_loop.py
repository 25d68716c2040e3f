"""A loop with DeepSpeed's engine, which saves a folder with a `latest` file; it is preempted once."""

import os
import time

import deepspeed
import torch
import ways


class Engine(ways.Ways):
    """A script whose steps DeepSpeed makes."""

    def build(self) -> None:
        super().build()
        config = {
            "train_micro_batch_size_per_gpu": self.args.batch_size,
            "gradient_accumulation_steps": self.args.accumulate,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            # the default buckets take 2 GiB
            "zero_optimization": {
                "stage": 1,
                "reduce_bucket_size": 2**20,
                "allgather_bucket_size": 2**20,
            },
        }
        self.engine, *_ = deepspeed.initialize(model=self.model, config=config)

    def load(self, path: str) -> None:
        self.engine.load_checkpoint(os.path.dirname(path), os.path.basename(path))
        self.step = self.engine.global_steps

    def run(self) -> None:
        while self.step < self.args.steps:
            for _ in range(self.args.accumulate):
                samples = self.batch()
                loss = (self.engine(samples) - samples[:, :1]).square().mean()
                self.engine.backward(loss)
                self.engine.step()
            self.step += 1
            print(f"step {self.step}/{self.args.steps} at {time.time():.3f}", flush=True)
            if self.step % self.args.save_every == 0:
                self.engine.save_checkpoint(self.args.output, f"global_step{self.step}")
                print(f"saved {self.step}", flush=True)
        torch.save(self.model.state_dict(), f"{self.args.output}/model.pt")

    def at_deepspeed(self) -> None:
        """Be preempted."""
        self.preempt()


Engine.start()
