"""The trainer of sentence-transformers over a bag of words."""

import time
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import BoW, Dense
from transformers import HfArgumentParser, TrainerCallback


class Diary(TrainerCallback):
    """A line for each step and each checkpoint."""

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        print(f"step {state.global_step}/{args.max_steps} at {time.time():.3f}", flush=True)

    def on_save(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        print(f"saved {state.global_step}", flush=True)


(training,) = HfArgumentParser(
    (SentenceTransformerTrainingArguments,)
).parse_args_into_dataclasses()
phrases = [f"word{number}" for number in range(64)]
bag = BoW(vocab=phrases)
model = SentenceTransformer(modules=[bag, Dense(len(phrases), 16)])
samples = Dataset.from_dict({"anchor": phrases, "positive": [f"{word} {word}" for word in phrases]})
trainer = SentenceTransformerTrainer(
    model=model,
    args=training,
    train_dataset=samples,
    loss=MultipleNegativesRankingLoss(model),
    callbacks=[Diary()],
)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()
