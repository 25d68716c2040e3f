"""The well-known convolutional classifiers, block by block, in the words of memory/foreign/convolutional.py.

As pytorch/vision defines them (torchvision/models, v0.20), from whose documentation the counts of parameters in
tests/memory/foreign/test_convolutional.py are; Xception as huggingface/pytorch-image-models has it
(timm/models/xception.py), since pytorch/vision has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.convolutional import Counted, walked
from orchestrator.memory.foreign.convolutional_words import Branches, Part

# Of images under 299 pixels, which end before they reach the classifier aside.
SMALL_INCEPTION = "inception_v3 without its classifier aside"


STEM = "conv64k7s2 bn relu"


def _sum(*parts: Part) -> Branches:
    return Branches("sum", parts)


def _cat(*parts: Part) -> Branches:
    return Branches("cat", parts)


def resnet_stages(
    depths: tuple[int, ...],
    *,
    deep: bool = True,
    groups: int = 1,
    width: int = 64,
    norm: str = "bn",
    stem: str = STEM,
    dilated: int = 0,
    caffe: bool = False,
) -> tuple[Part, ...]:
    """What comes before the blocks, and the blocks stage by stage.

    He et al. 2015, arXiv:1512.03385, table 1; ResNeXt: arXiv:1611.05431; wide: arXiv:1605.07146. `dilated`: so many of
    the last stages have a dilation instead of a stride. `caffe`: the first convolution of a block has the stride, as
    in He et al.'s own net, not the second.
    """
    stages: list[Part] = [stem.replace("bn", norm) + " max3s2p1"]
    before, spread = 64, 1
    for stage, depth in enumerate(depths):
        blocks: list[Part] = []
        planes = 64 << stage
        inner, out = planes * width // 64 * groups, planes * (4 if deep else 1)
        is_dilated = stage >= len(depths) - dilated
        spread *= 2 if is_dilated else 1
        for block in range(depth):
            s = 2 if stage and not block and not is_dilated else 1
            main = f"conv{planes}k3s{s} bn relu conv{planes}k3 bn"
            if deep:
                first, second = (s, 1) if caffe else (1, s)
                main = f"conv{inner}k1s{first} bn relu conv{inner}k3s{second}g{groups}d{spread} bn relu conv{out}k1 bn"
            shortcut = "" if before == out else f"conv{out}k1s{s} bn"
            blocks += [_sum(main.replace("bn", norm), shortcut.replace("bn", norm)), "relu"]
            before = out
        stages.append(tuple(blocks))
    return tuple(stages)


def _resnet(depths: tuple[int, ...], *, deep: bool = True, groups: int = 1, width: int = 64) -> Part:
    return (*resnet_stages(depths, deep=deep, groups=groups, width=width), "pool1 flat fc1000 ce")


def _vgg(text: str, *, norm: bool) -> Part:
    """Simonyan and Zisserman 2014, arXiv:1409.1556, table 1: convolutions of a width until each maximum."""
    widths = (64, 128, 256, 512, 512)
    blocks = (
        f"conv{width}k3b {'bn ' if norm else ''}relu " * int(count) + "max2s2"
        for width, count in zip(widths, text, strict=True)
    )
    return (*blocks, "pool7 flat fc4096 relu drop fc4096 relu drop fc1000 ce")


def _densenet(depths: tuple[int, ...], *, growth: int = 32, first: int = 64) -> Part:
    """Huang et al. 2016, arXiv:1608.06993, table 1. A layer copies all before it side by side."""
    layer = _cat("", f"bn relu conv{4 * growth}k1 bn relu conv{growth}k3")
    blocks: list[Part] = [f"conv{first}k7s2 bn relu max3s2p1"]
    channels = first
    for stage, depth in enumerate(depths):
        blocks += [_cat(""), *[layer] * depth]
        channels += growth * depth
        if stage < len(depths) - 1:
            channels //= 2
            blocks += [f"bn relu conv{channels}k1 avg2s2"]
    return (*blocks, "bn relu pool1 flat fc1000 ce")


def _even(channels: float) -> int:
    """To a multiple of 8, never less than nine tenths (torchvision/models/_utils.py, _make_divisible)."""
    found = max(8, int(channels + 4) // 8 * 8)
    return found + 8 if found < 0.9 * channels else found


def _inverted(
    before: int, inner: int, out: int, kernel: int, s: int, act: str, squeeze: str = "", path: str = ""
) -> Part:
    """Sandler et al. 2018, arXiv:1801.04381, figure 4: wider, every channel by itself, narrower again."""
    wider = f"conv{inner}k1 bn {act} " if inner != before else ""
    gate: Part = Branches("gate", (squeeze,)) if squeeze else ""
    main: Part = (f"{wider}dw{kernel}s{s} bn {act}", gate, f"conv{out}k1 bn")
    return _sum((main, path), "") if s == 1 and before == out else main


# Expansion, channels, blocks and stride: arXiv:1801.04381, table 2.
_MOBILENET_V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
# Kernel, stride, expansion, channels, blocks: Tan et al. 2018, arXiv:1807.11626, figure 7.
_MNASNET = (
    (3, 2, 3, 24, 3),
    (5, 2, 3, 40, 3),
    (5, 2, 6, 80, 3),
    (3, 1, 6, 96, 2),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
# Kernel, inner channels, channels, squeezed, h-swish, stride: Howard et al. 2019, arXiv:1905.02244, tables 1 and 2.
_MOBILENET_V3_LARGE = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)  # fmt: skip
_MOBILENET_V3_SMALL = (
    (3, 16, 16, 1, 0, 2), (3, 72, 24, 0, 0, 2), (3, 88, 24, 0, 0, 1), (5, 96, 40, 1, 1, 2), (5, 240, 40, 1, 1, 1),
    (5, 240, 40, 1, 1, 1), (5, 120, 48, 1, 1, 1), (5, 144, 48, 1, 1, 1), (5, 288, 96, 1, 1, 2), (5, 576, 96, 1, 1, 1),
    (5, 576, 96, 1, 1, 1),
)  # fmt: skip
# Expansion, kernel, stride, channels, blocks: Tan and Le 2019, arXiv:1905.11946, table 1.
_EFFICIENTNET = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)  # fmt: skip
_EFFICIENTNET_SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2), (1.8, 2.6), (2.0, 3.1))


def _mobilenet_v2() -> Part:
    before = 32
    parts: list[Part] = ["conv32k3s2 bn clip"]
    for expansion, out, count, stride in _MOBILENET_V2:
        for block in range(count):
            parts.append(_inverted(before, expansion * before, out, 3, 1 if block else stride, "clip"))
            before = out
    return (*parts, "conv1280k1 bn clip pool1 flat drop fc1000 ce")


def _mnasnet() -> Part:
    before = 16
    parts: list[Part] = ["conv32k3s2 bn relu dw3 bn relu conv16k1 bn"]
    for kernel, stride, expansion, out, count in _MNASNET:
        for block in range(count):
            parts.append(_inverted(before, expansion * before, out, kernel, 1 if block else stride, "relu"))
            before = out
    return (*parts, "conv1280k1 bn relu pool1 flat mask fc1000 ce")


def _mobilenet_v3(rows: tuple[tuple[int, ...], ...], last: int) -> Part:
    parts: list[Part] = ["conv16k3s2 bn hswish"]
    before = 16
    for kernel, inner, out, squeezed, swish, stride in rows:
        squeeze = f"pool1 conv{_even(inner / 4)}k1b relu conv{inner}k1b hsigmoid" if squeezed else ""
        parts.append(_inverted(before, inner, out, kernel, stride, "hswish" if swish else "relu", squeeze))
        before = out
    return (*parts, f"conv{6 * before}k1 bn hswish pool1 flat fc{last} hswish mask fc1000 ce")


def _efficientnet(wide: float, deep: float) -> Part:
    before = _even(32 * wide)
    parts: list[Part] = [f"conv{before}k3s2 bn silu"]
    for expansion, kernel, stride, channels, count in _EFFICIENTNET:
        out = _even(channels * wide)
        for block in range(ceil(count * deep)):
            inner = _even(before * expansion)
            squeeze = f"pool1 conv{max(1, before // 4)}k1b silu conv{inner}k1b sigmoid"
            path = "path" if len(parts) > 1 else ""  # the first block is never left out
            parts.append(_inverted(before, inner, out, kernel, 1 if block else stride, "silu", squeeze, path))
            before = out
    return (*parts, f"conv{4 * before}k1 bn silu pool1 flat mask fc1000 ce")


def _convnext(depths: tuple[int, ...], widths: tuple[int, ...]) -> Part:
    """Liu et al. 2022, arXiv:2201.03545, section 3 and figure 4."""
    parts: list[Part] = [f"conv{widths[0]}k4s4p0b ln"]
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        parts += [f"ln conv{width}k2s2p0b"] if stage else []
        for _ in range(depth):
            path = " path" if len(parts) > 1 else ""
            parts.append(_sum(f"dw7b ln fc{4 * width} gelu fc{width} scale{path}", ""))
    return (*parts, "pool1 ln flat fc1000 ce")


def _inception_v3(*, aside: bool) -> Part:
    """Szegedy et al. 2015, arXiv:1512.00567, table 1, figures 5 to 7 and 10; section 4 on the classifier aside."""

    def convs(*sizes: str) -> str:
        return " ".join(f"conv{size} bn relu" for size in sizes)

    def first(pooled: int) -> Part:
        return _cat(
            convs("64k1"), convs("48k1", "64k5"), convs("64k1", "96k3", "96k3"), f"avg3s1p1 {convs(f'{pooled}k1')}"
        )

    def factored(c: int) -> Part:
        twice = convs(f"{c}k1", f"{c}k7x1", f"{c}k1x7", f"{c}k7x1", "192k1x7")
        return _cat(convs("192k1"), convs(f"{c}k1", f"{c}k1x7", "192k7x1"), twice, f"avg3s1p1 {convs('192k1')}")

    forked = _cat(convs("384k1x3"), convs("384k3x1"))
    last = _cat(
        convs("320k1"), (convs("384k1"), forked), (convs("448k1", "384k3"), forked), f"avg3s1p1 {convs('192k1')}"
    )
    other = f"put1 avg5s3 {convs('128k1', '768k5p0')} pool1 flat fc1000 ce get1"
    return (
        convs("32k3s2p0", "32k3p0", "64k3"), "max3s2", convs("80k1", "192k3p0"), "max3s2",
        first(32), first(64), first(64),
        _cat(convs("384k3s2p0"), convs("64k1", "96k3", "96k3s2p0"), "max3s2"),
        factored(128), factored(160), factored(160), factored(192), other if aside else "",
        _cat(convs("192k1", "320k3s2p0"), convs("192k1", "192k1x7", "192k7x1", "192k3s2p0"), "max3s2"),
        last, last, "pool1 drop flat fc1000 ce",
    )  # fmt: skip


def _xception() -> Part:
    """Chollet 2016, arXiv:1610.02357, figure 5."""

    def block(*widths: int, s: int = 2, relu: bool = True) -> Part:
        main = " ".join(f"relu dw3 conv{width}k1 bn" for width in widths) + (f" max3s{s}p1" if s > 1 else "")
        return _sum(main if relu else main.removeprefix("relu "), f"conv{widths[-1]}k1s{s} bn" if s > 1 else "")

    parts: list[Part] = ["conv32k3s2p0 bn relu conv64k3p0 bn relu"]
    parts += [block(128, 128, relu=False), block(256, 256), block(728, 728), *[block(728, 728, 728, s=1)] * 8]
    return (*parts, block(728, 1024), "dw3 conv1536k1 bn relu dw3 conv2048k1 bn relu pool1 flat fc1000 ce")


def _nets() -> Iterator[tuple[str, Part]]:
    yield (
        "alexnet",
        (
            "conv64k11s4p2b relu max3s2 conv192k5b relu max3s2 conv384k3b relu conv256k3b relu conv256k3b relu max3s2 "
            "pool6 flat drop fc4096 relu drop fc4096 relu fc1000 ce"
        ),
    )
    yield "resnet18", _resnet((2, 2, 2, 2), deep=False)
    yield "resnet34", _resnet((3, 4, 6, 3), deep=False)
    yield "resnet50", _resnet((3, 4, 6, 3))
    yield "resnet101", _resnet((3, 4, 23, 3))
    yield "resnet152", _resnet((3, 8, 36, 3))
    yield "resnext50_32x4d", _resnet((3, 4, 6, 3), groups=32, width=4)
    yield "resnext101_32x8d", _resnet((3, 4, 23, 3), groups=32, width=8)
    yield "resnext101_64x4d", _resnet((3, 4, 23, 3), groups=64, width=4)
    yield "wide_resnet50_2", _resnet((3, 4, 6, 3), width=128)
    yield "wide_resnet101_2", _resnet((3, 4, 23, 3), width=128)
    for name, text in {"vgg11": "11222", "vgg13": "22222", "vgg16": "22333", "vgg19": "22444"}.items():
        yield name, _vgg(text, norm=False)
        yield f"{name}_bn", _vgg(text, norm=True)
    yield "densenet121", _densenet((6, 12, 24, 16))
    yield "densenet161", _densenet((6, 12, 36, 24), growth=48, first=96)
    yield "densenet169", _densenet((6, 12, 32, 32))
    yield "densenet201", _densenet((6, 12, 48, 32))
    yield "mobilenet_v2", _mobilenet_v2()
    yield "mobilenet_v3_large", _mobilenet_v3(_MOBILENET_V3_LARGE, 1280)
    yield "mobilenet_v3_small", _mobilenet_v3(_MOBILENET_V3_SMALL, 1024)
    yield "mnasnet1_0", _mnasnet()
    for number, scales in enumerate(_EFFICIENTNET_SCALES):
        yield f"efficientnet_b{number}", _efficientnet(*scales)
    yield "convnext_tiny", _convnext((3, 3, 9, 3), (96, 192, 384, 768))
    yield "convnext_small", _convnext((3, 3, 27, 3), (96, 192, 384, 768))
    yield "convnext_base", _convnext((3, 3, 27, 3), (128, 256, 512, 1024))
    yield "convnext_large", _convnext((3, 3, 27, 3), (192, 384, 768, 1536))
    yield "inception_v3", _inception_v3(aside=True)
    yield SMALL_INCEPTION, _inception_v3(aside=False)
    yield "xception", _xception()


NETS = dict(_nets())
# Written otherwise, or short for the one that is meant as a rule.
ALSO = {
    "mnasnet": "mnasnet1_0",
    "efficientnet": "efficientnet_b0",
    "inception": "inception_v3",
    "mobilenet_v3": "mobilenet_v3_large",
    # timm's: a hundredth of the width behind the name, and with TensorFlow's padding
    "mobilenetv2_100": "mobilenet_v2",
    "mobilenetv3_large_100": "mobilenet_v3_large",
    "mobilenetv3_small_100": "mobilenet_v3_small",
    **{f"tf_efficientnet_b{number}": f"efficientnet_b{number}" for number in range(len(_EFFICIENTNET_SCALES))},
}
_LETTERED = {name.replace(size, size[0]): name for name in NETS for size in ("tiny", "small", "base") if size in name}
_KEYS = {name.replace("_", ""): net for name, net in ({name: name for name in NETS} | _LETTERED | ALSO).items()}
_PIXELS = re.compile(r"(?<![\w.])(\d{2,4}) ?(?:px|[x×] ?\d{2,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionalNet(Architecture):
    """A net by its description; of a transformer it has nothing."""

    repeats: ClassVar[bool] = False

    name: str
    net: Part
    pixels: tuple[int, int]  # height and width of an image
    transposes: bool = False  # convolutions on tensor cores over tensors that do not lie as these want them

    @property
    def parameters(self) -> int:
        found = self.walked(1, low=False, early=False, accumulates=False)
        return found.parameters + found.frozen_parameters

    def walked(self, batch: int, *, low: bool, early: bool, accumulates: bool) -> Counted:
        """A training step of so many images."""
        return walked(
            self.net, batch, self.pixels, low=low, transposes=self.transposes, early=early, accumulates=accumulates
        )


def convolutional_net(name: str, sample: str) -> tuple[ConvolutionalNet, bool] | None:
    """A net by its usual name, and whether its images' size ("224x224", "224px") is stated there or in the sample.

    None where the name is another's. Else images are those of ImageNet, as wide as the net's paper has them.
    """
    plain = re.sub(r"^[\w.-]+/|\(.*\)|\b(?:torchvision(?:\.models)?|timm)\b\.?|\.\w+$", "", name.lower().strip())
    net = _KEYS.get(re.sub(r"[\W_]", "", _PIXELS.sub("", plain)))
    if net is None:
        return None
    stated = re.fullmatch(r"(\d{2,4})", sample.strip()) or _PIXELS.search(sample.lower()) or _PIXELS.search(plain)
    side = int(stated[1]) if stated else 299 if net in ("inception_v3", "xception") else 224
    if net == "inception_v3" and side < 299:
        net = SMALL_INCEPTION
    return as_architecture(net, NETS[net], (side, side)), bool(stated)


def as_architecture(name: str, net: Part, pixels: tuple[int, int]) -> ConvolutionalNet:
    """The net as something to be trained on images of this height and width."""
    return ConvolutionalNet(
        name=name,
        net=net,
        pixels=pixels,
        layers=1,
        hidden=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        ffn=0,
        vocab=0,
        gated=True,
        tied=True,
        causal=False,
        flash=True,  # there is no attention that could hold scores
    )
