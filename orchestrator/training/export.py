"""Export of a fine-tuned model, or its adapters, in transformers' own format to the job's output folder.

It is read from the newest complete checkpoint into host memory, a few tensors at a time. No device holds the model.

output/config.json, model-<n>-of-<m>.safetensors, model.safetensors.index.json    a whole model
output/adapter_config.json, adapter_model.safetensors                             adapters, as peft reads them
output/tokenizer.json, ...                                                        the tokenizer, if there is one
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from orchestrator.specs.run import TrainingRun
from orchestrator.training.checkpoint import folder as checkpoint_folder
from orchestrator.training.data.tokenised import find_tokenizer_source, read_tokenizer
from orchestrator.training.models.hf_adapters import make_lora_config
from orchestrator.training.models.hf_model import BuiltModule, build_module, read_config
from orchestrator.training.models.hf_weights import find_file

SHARD_BYTES = 4 * 2**30  # of a file of weights; at most this much is in host memory at a time
ADAPTER = ".default"  # peft's name of the only adapter; its files omit it


def export_model(run: TrainingRun) -> None:
    """Write the trained transformers model, or its adapters, to the job's output folder,
    atomically; do nothing if that exists.

    One process calls it.
    """
    output = Path(run.job_folder) / "output"
    saved = checkpoint_folder.find_latest_complete(Path(run.job_folder) / "checkpoints")
    assert saved is not None, "a finished training has a checkpoint"
    if output.is_dir() and any(output.iterdir()):
        return
    writing = output.with_name(f".output-{os.getpid()}")
    writing.mkdir()
    if run.model.lora is not None:
        _write_adapters(writing, run, saved)
    else:
        _write_model(writing, run, saved)
    tokenizer = find_tokenizer_source(run)
    if tokenizer is not None and not run.data.tokens:
        read_tokenizer(tokenizer).save_pretrained(writing)
    writing.replace(output)


def _write_adapters(folder: Path, run: TrainingRun, checkpoint_folder: Path) -> None:
    lora = run.model.lora
    hf = run.model.hf
    assert lora is not None, "called for adapters only"
    assert hf is not None, "adapters stand beside a transformers model"
    stored = FileSystemReader(checkpoint_folder).read_metadata().state_dict_metadata
    sizes = {
        name.removeprefix("model."): about.size
        for name, about in stored.items()
        if name.startswith("model.")
        and ".lora_" in name
        and isinstance(about, TensorStorageMetadata)
    }
    values = _fill_from_checkpoint(
        checkpoint_folder, {name: torch.empty(size) for name, size in sizes.items()}
    )
    files = {
        f"base_model.model.{name.replace(ADAPTER, '')}": tensor for name, tensor in values.items()
    }
    save_file(files, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = make_lora_config(
        lora,
        is_encoder_decoder=read_config(hf).is_encoder_decoder,
        base_model_name=hf if isinstance(hf, str) else None,
    )
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _write_model(folder: Path, run: TrainingRun, checkpoint_folder: Path) -> None:
    built = build_module(run)
    config = built.module.config
    config.dtype = built.stored_dtype
    config.architectures = [type(built.module).__name__]
    config.save_pretrained(folder)
    shards = list(_group_into_shards(built))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            _load_shard_values(shard, built, checkpoint_folder),
            folder / file,
            metadata={"format": "pt"},
        )
        places |= dict.fromkeys(shard, file)
    total = (
        sum(tensor.numel() for shard in shards for tensor in shard.values())
        * built.stored_dtype.itemsize
    )
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    generation = (
        find_file(run.model.hf, "generation_config.json") if isinstance(run.model.hf, str) else None
    )
    if generation is not None:
        shutil.copyfile(generation, folder / "generation_config.json")


def _group_into_shards(built: BuiltModule) -> Iterator[dict[str, Tensor]]:
    """Yield {name: parameter or stored buffer} in groups of at most SHARD_BYTES, or of one tensor.

    Shared tensors appear once.
    """
    written: set[int] = set()
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in built.module.state_dict(keep_vars=True).items():
        if id(tensor) in written:
            continue
        written.add(id(tensor))
        if shard and size + 4 * tensor.numel() > SHARD_BYTES:
            yield shard
            shard = {}
            size = 0
        shard[name] = tensor
        size += 4 * tensor.numel()
    yield shard


def _load_shard_values(
    shard: Mapping[str, Tensor], built: BuiltModule, checkpoint_folder: Path
) -> dict[str, Tensor]:
    """Return the values of a shard: trained ones from the checkpoint, untrained ones from the
    model's source.
    """
    stored = FileSystemReader(checkpoint_folder).read_metadata().state_dict_metadata
    values = {
        name: torch.empty(tensor.shape)
        for name, tensor in shard.items()
        if f"model.{name}" in stored
    }
    _fill_from_checkpoint(checkpoint_folder, values)
    for name, tensor in shard.items():
        if name not in values:
            values[name] = torch.empty(tensor.shape)
            built.initialise(name, values[name])
    return {name: tensor.to(built.stored_dtype).contiguous() for name, tensor in values.items()}


def _fill_from_checkpoint(
    checkpoint_folder: Path, values: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Fill these tensors, by whole-model name, from a checkpoint in place, and return them; not
    collective.
    """
    tree = {f"model.{name}": tensor for name, tensor in values.items()}
    state_dict_loader.load(tree, storage_reader=FileSystemReader(checkpoint_folder), no_dist=True)
    return values
