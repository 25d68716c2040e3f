"""The Trainer of transformers over a tiny Llama with random weights."""

import time
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


class Diary(TrainerCallback):
    """A line for each step and each checkpoint."""

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        print(f"step {state.global_step}/{args.max_steps} at {time.time():.3f}", flush=True)

    def on_save(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        print(f"saved {state.global_step}", flush=True)


(training,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
samples = [{"input_ids": line, "labels": line} for line in torch.randint(0, 256, (64, 32))]
trainer = Trainer(model=model, args=training, train_dataset=samples, callbacks=[Diary()])
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()
