"""Trains as Orpheus-TTS's finetune/train.py on GPUs: transformers.Trainer in bf16, sharded as accelerate's file says.

Written for these tests after the notes in trainers.md on canopyai/Orpheus-TTS; none of its code. The model is small.
"""

import pathlib

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = yaml.safe_load(pathlib.Path("config.yaml").read_text())


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 32) % 512
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
)
arguments = TrainingArguments(
    num_train_epochs=config["epochs"],
    per_device_train_batch_size=config["batch_size"],
    logging_steps=1,
    bf16=True,
    output_dir=f"./{config['save_folder']}",
    report_to=[],
    save_strategy="no",
    remove_unused_columns=True,
    learning_rate=float(config["learning_rate"]),
)
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
assert trainer.args.device.type == "cuda", trainer.args.device
trainer.train()
if trainer.is_world_process_zero():
    folder = pathlib.Path(f"./{config['save_folder']}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "done").write_text(str(trainer.is_fsdp_enabled))
