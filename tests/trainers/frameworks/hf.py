"""A user's script with transformers' Trainer and no code of ours: a tiny Llama on random tokens."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


@dataclass
class DataArguments:
    """The training data."""

    samples: int = field(default=64)
    block_size: int = field(default=128)
    die_at: int = field(
        default=0, metadata={"help": "Step after which a run that began at 0 is killed."}
    )


class Mortal(TrainerCallback):  # type: ignore[misc]
    """Ends as a preempted process does, unless it goes on from a checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self._step and not args.resume_from_checkpoint:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    data, training = HfArgumentParser(
        (DataArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    tokens = torch.randint(0, 2048, (data.samples, data.block_size))
    samples = [{"input_ids": line, "labels": line} for line in tokens]
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=training,
        train_dataset=samples,
        callbacks=[Mortal(data.die_at)],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    print(f"trained {trainer.state.global_step} steps of {training.train_batch_size} samples")


if __name__ == "__main__":
    main()
