"""Decoders that read images through a frozen tower, in other people's trainings: the decoder and what is beside it.

What the tower returns is a part of the sequence, whose length a row states; what it works with is gone by then, for
nothing of it is kept for a backward pass that stops before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from orchestrator.memory.foreign.adapters import Adapters
from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.row import Row

# LLaVA's towers are frozen (haotian-liu/LLaVA llava/model/multimodal_encoder/clip_encoder.py), so is Qwen-VL's behind
# --fix_vit True (QwenLM/Qwen-VL finetune/*.sh); freeze_vision_tower and freeze_vit are on unless they are turned off in
# llamafactory/hparams/finetuning_args.py and swift/llm/argument/tuner_args.py.
FREEZES = re.compile(r"llava|qwen finetune|llama-?factory|swift|(?:frozen|freeze)[_ ]v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeing:
    """What reads images for a decoder. Elements."""

    decoder: str  # its name among the public models
    tower: int
    projector: int = 0  # what joins both and is trained with the decoder
    joins_adapters: bool = False  # the projector is trained where the decoder has adapters

    def beside(self, shape: Architecture, adapters: Adapters) -> Architecture:
        """The decoder's shape with what stands beside it."""
        trains = not adapters.rank or self.joins_adapters
        projector = self.projector if trains else 0
        return replace(shape, frozen_beside=self.tower + self.projector - projector, trained_beside=projector)


# CLIPVisionModel of openai/clip-vit-large-patch14 and -336; its widths go into the projectors (llava/model/
# multimodal_projector/builder.py: mlp2x_gelu, and linear before 1.5).
CLIP_224, CLIP_336, CLIP_WIDTH = 303_179_776, 303_507_456, 1024


def _mlp(hidden: int) -> int:
    return (CLIP_WIDTH + 1) * hidden + (hidden + 1) * hidden


def _qwen_vl(width: int = 1664, layers: int = 48, ffn: int = 8192, patch: int = 14) -> tuple[int, int]:
    """Elements of Qwen-VL's tower and of its resampler to 256 x 4096 (Qwen/Qwen-VL visual.py, config.json)."""
    layer = 4 * width * (width + 1) + (2 * width + 1) * ffn + width + 4 * width
    out, queries = 4096, 256
    resampler = queries * out * 2 + width * out + 4 * out * (out + 1) + 4 * out
    return layers * layer + 3 * patch * patch * width + queries * width + 2 * width + out * out + 2 * out, resampler


SEEING: dict[str, Seeing] = {
    "llava-7b": Seeing(decoder="llama-7b", tower=CLIP_224, projector=(CLIP_WIDTH + 1) * 4096, joins_adapters=True),
    "llava-13b": Seeing(decoder="llama-13b", tower=CLIP_224, projector=(CLIP_WIDTH + 1) * 5120, joins_adapters=True),
    "llava-1.5-7b": Seeing(decoder="llama-7b", tower=CLIP_336, projector=_mlp(4096), joins_adapters=True),
    "llava-1.5-13b": Seeing(decoder="llama-13b", tower=CLIP_336, projector=_mlp(5120), joins_adapters=True),
    "qwen-vl": Seeing(decoder="qwen-7b", tower=_qwen_vl()[0], projector=_qwen_vl()[1]),
    # Qwen/Qwen2-VL-* and Qwen/Qwen2.5-VL-* config.json; what merges patches is frozen with the rest
    "qwen2-vl-2b": Seeing(decoder="qwen2-1.5b", tower=665_271_296),
    "qwen2-vl-7b": Seeing(decoder="qwen2-7b", tower=675_759_104),
    "qwen2-vl-72b": Seeing(decoder="qwen2-72b", tower=699_356_672),
    "qwen2.5-vl-3b": Seeing(decoder="qwen2.5-3b", tower=668_684_288),
    "qwen2.5-vl-7b": Seeing(decoder="qwen2.5-7b", tower=676_550_144),
    "qwen2.5-vl-32b": Seeing(decoder="qwen2.5-32b", tower=688_841_984),
    "qwen2.5-vl-72b": Seeing(decoder="qwen2.5-72b", tower=704_573_696),
}
# What transformers makes of these for texts has the tower too, which no gradient reaches (models/auto/modeling_auto.py,
# MODEL_FOR_CAUSAL_LM_MAPPING_NAMES). SigLIP of 27 layers at 896 pixels, and the projector: google/gemma-3-* config.json
WITH_TEXT = {
    f"gemma-3-{size}": Seeing(decoder=f"gemma-3-{size}", tower=416_866_032 + 1152 * (hidden + 1))
    for size, hidden in (("4b", 2560), ("12b", 3840), ("27b", 5376))
}
LOADS_WITH_TEXT = re.compile(r"\bhf\b|transformers|\bpeft\b|\btrl\b|axolotl|llama-?factory|swift|unsloth")


def seeing(row: Row) -> Seeing | None:
    """What reads images for the row's model, by its name; None for other models, and where it may be trained."""
    name = re.sub(r"^[\w-]+/|-(?:instruct|chat|hf|it|pt)\b", "", row["model"].strip().lower().replace(" ", "-"))
    if name in WITH_TEXT and LOADS_WITH_TEXT.search(row.said):
        row.infer("what reads images is there and not trained")
        return WITH_TEXT[name]
    found = SEEING.get(re.sub(r"^llava-v(?=1\.5)|^llava-v1-", "llava-", name))
    if found is None or not FREEZES.search(row.said.replace(row["model"].lower(), "", 1)):
        return None
    row.infer("what reads images is frozen, and the length counts its tokens")
    return found
