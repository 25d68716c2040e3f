"""Laws of decoders that read images through a frozen tower, in other people's trainings."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from orchestrator.memory.foreign.losses import Loss
from orchestrator.memory.foreign.public_models import known
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.seeing import SEEING, WITH_TEXT
from orchestrator.memory.foreign.training import Held, Training, ends_held
from orchestrator.specs.errors import SpecError

ROW = {
    "id": "x1",
    "model": "LLaVA-v1.5-7B",
    "framework": "HF Trainer + DeepSpeed (LLaVA)",
    "n_gpus": "1",
    "micro_batch": "1",
    "seq_len": "2048",
    "precision": "bf16",
}


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


def built(name: str, hidden: int) -> int:
    """Elements of transformers' module of the tower."""
    module: torch.nn.Module
    with torch.device("meta"):
        if name.startswith("llava"):
            image = 336 if "1.5" in name else 224
            module = CLIPVisionModel(
                CLIPVisionConfig(
                    hidden_size=1024,
                    intermediate_size=4096,
                    num_hidden_layers=24,
                    num_attention_heads=16,
                    image_size=image,
                    patch_size=14,
                )
            )
        elif name.startswith("qwen2.5"):
            ffn = 3456 if "32b" in name or "72b" in name else 3420
            module = Qwen2_5_VisionTransformerPretrainedModel(
                Qwen2_5_VLVisionConfig(hidden_size=1280, intermediate_size=ffn, out_hidden_size=hidden)
            )
        else:
            module = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(hidden_size=hidden))
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", [name for name in SEEING if name != "qwen-vl"])
def test_a_tower_has_the_elements_of_its_module(name: str) -> None:
    decoder = known(SEEING[name].decoder)
    assert decoder is not None
    assert SEEING[name].tower == built(name, decoder.hidden)


def test_qwen_vl_has_what_its_paper_says() -> None:
    """Bai et al. 2023 (arXiv:2308.12966), table 1: 1.9B for images, 0.08B that join, 7.7B for words."""
    sight, decoder = SEEING["qwen-vl"], known(SEEING["qwen-vl"].decoder)
    assert decoder is not None
    assert [round(n / 1e9, 2) for n in (sight.tower, sight.projector)] == [1.86, 0.08]
    assert round(decoder.parameters / 1e9, 1) == 7.7


def beside(seeing: Training, blind: Training) -> Held:
    with_sight, without = ends_held(seeing), ends_held(blind)
    return Held(
        trained=with_sight.trained - without.trained, frozen_bytes=with_sight.frozen_bytes - without.frozen_bytes
    )


def test_the_tower_lies_there_in_low_precision_and_the_projector_is_trained() -> None:
    sight = SEEING["llava-1.5-7b"]
    for peft in ("", "LoRA r8"):
        held = beside(read(peft=peft), read(peft=peft, model="Vicuna-7B"))
        assert held == Held(trained=sight.projector, frozen_bytes=2 * sight.tower)


def test_qwen_vl_trains_what_joins_only_without_adapters() -> None:
    """QwenLM/Qwen-VL finetune.py: get_peft_model freezes attn_pool with all else."""
    sight, qwen = SEEING["qwen-vl"], {"framework": "Qwen finetune.py"}
    whole = beside(read(model="Qwen-VL", **qwen), read(model="Qwen-7B", **qwen))
    assert whole == Held(trained=sight.projector, frozen_bytes=2 * sight.tower)
    adapted = beside(read(model="Qwen-VL-Chat", peft="LoRA", **qwen), read(model="Qwen-7B", peft="LoRA", **qwen))
    assert adapted == Held(trained=0, frozen_bytes=2 * (sight.tower + sight.projector))


def test_a_tower_that_may_be_trained_is_refused() -> None:
    qwen = {"model": "Qwen2.5-VL-7B-Instruct", "peft": "LoRA r8"}
    assert read(framework="LLaMA-Factory", **qwen).shape.frozen_beside == SEEING["qwen2.5-vl-7b"].tower
    with pytest.raises(SpecError, match="kind of transformer"):
        read(framework="Unsloth", **qwen)
    with pytest.raises(SpecError, match="kind of transformer"):
        read(framework="TRL SFTTrainer")
    assert read(framework="LLaVA's train_mem.py, DeepSpeed").shape.frozen_beside == SEEING["llava-1.5-7b"].tower
    assert read(framework="TRL SFTTrainer, frozen vision tower").shape.trained_beside


def test_qwen_vl_takes_the_loss_of_low_logits() -> None:
    """modeling_qwen.py of Qwen/Qwen-VL gives CrossEntropyLoss what its head returned."""
    deepspeed = {"framework": "Qwen finetune.py (HF Trainer + DeepSpeed)", "peft": "LoRA", "precision": "fp16"}
    assert read(model="Qwen-VL-Chat", **deepspeed).loss is Loss.LOW


def test_gemma_3_has_its_tower_there_whatever_it_is_trained_on() -> None:
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    image = {"patch_size": 14, "image_size": 896, "vision_use_head": False}
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config={"hidden_size": 2560, "num_hidden_layers": 1}, vision_config=vision | image)
        )
    tower = sum(each.numel() for name, each in model.named_parameters() if "vision" in name or "projector" in name)
    assert WITH_TEXT["gemma-3-4b"].tower == tower
    row = {"model": "google/gemma-3-4b-it", "peft": "LoRA r16 all linear"}
    assert read(**row, framework="axolotl").shape.frozen_beside == tower
    assert read(**row, framework="torchtune").shape.frozen_beside == 0
    assert read(model="gemma-3-1b-it", framework="axolotl").shape.frozen_beside == 0
