"""The SFTTrainer of trl over the tiny model beside it."""

import time

from datasets import Dataset
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

(training,) = HfArgumentParser((SFTConfig,)).parse_args_into_dataclasses()
talks = Dataset.from_list(
    [{"text": f"{number} and {number} is {2 * number}."} for number in range(64)]
)
trainer = SFTTrainer(model="model", args=training, train_dataset=talks)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()
print(f"step {trainer.state.global_step} at {time.time():.3f}", flush=True)
