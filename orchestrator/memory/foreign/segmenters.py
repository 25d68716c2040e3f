"""Semantic segmenters as mmsegmentation configures them, in the words of convolutional_words.py.

Facts: open-mmlab/mmsegmentation v0 configs/_base_/models and mmseg/models/decode_heads.
"""

from __future__ import annotations

from orchestrator.memory.foreign.convolutional_nets import STEM, resnet_stages
from orchestrator.memory.foreign.convolutional_words import Branches, Part
from orchestrator.memory.foreign.detectors import DEPTHS

# configs/_base_/datasets, and how many classes mmseg/datasets has of each.
CLASSES = {"cityscapes": 19, "ade20k": 150, "voc12": 21, "pascal voc": 21, "pascal context": 60}
HEADS = ("fcn", "pspnet", "deeplabv3", "deeplabv3+")
_DEEP_STEM = "conv32k3s2 bn relu conv32k3 bn relu conv64k3 bn relu"


def segmenter(head: str, depth: int, classes: int, *, plain_stem: bool = False) -> Part:
    """A segmenter by its head, on a ResNet whose last two stages are dilated, with an auxiliary head on the third."""
    first, *stages = resnet_stages(DEPTHS[depth], dilated=2, stem=STEM if plain_stem else _DEEP_STEM)
    top = f"dropmap conv{classes}k1b like0 ce"
    return (
        (first, stages[0], "put2", *stages[1:3], "put4", stages[3], "put5"),
        *_decoded(head),
        top,
        f"get4 {_conv(256)}",
        top,
    )


def _conv(channels: int, size: str = "k3") -> str:
    return f"conv{channels}{size} bn relu"


def _separable(size: str = "") -> str:
    return f"dw3{size} bn relu conv512k1 bn relu"


def _decoded(head: str) -> tuple[Part, ...]:
    if head == "fcn":  # Long et al. 2015, arXiv:1411.4038
        return (Branches("cat", ("", f"{_conv(512)} {_conv(512)}")), _conv(512))
    if head == "pspnet":  # Zhao et al. 2017, arXiv:1612.01105, figure 3
        pooled = (f"pool{side} {_conv(512, 'k1')} like5" for side in (1, 2, 3, 6))
        return (Branches("cat", ("", *pooled)), _conv(512))
    separable = head.endswith("+")
    wide = [_separable(f"d{d}") if separable else _conv(512, f"k3d{d}") for d in (12, 24, 36)]
    # Chen et al. 2017, arXiv:1706.05587, figure 5
    spread = Branches("cat", (f"pool1 {_conv(512, 'k1')} like5", _conv(512, "k1"), *wide))
    if not separable:
        return (spread, _conv(512))
    # Chen et al. 2018, arXiv:1802.02611, figure 2
    joined = Branches("cat", ("like2", f"get2 {_conv(48, 'k1')}"))
    return (spread, _conv(512), joined, f"{_separable()} {_separable()}")
