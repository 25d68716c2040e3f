"""What a published row says of a convolutional net."""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.memory.foreign.convolutional_nets import ConvolutionalNet, as_architecture, convolutional_net
from orchestrator.memory.foreign.detectors import DETECTRON2, MMDETECTION, detector
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.foreign.segmenters import CLASSES, segmenter
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.plan import ActivationCheckpointing

_DETECTOR = re.compile(r"(faster|mask|cascade(?: mask)?) r-?cnn|(retinanet|rpn)", re.I)
_BACKBONE = re.compile(r"(?:\b|_)(?:(r)(?:es(?:net)?)?|x|resnext)-?(50|101)(?:-(\d+)x(\d+)d)?", re.I)
_SEGMENTER = re.compile(r"(fcn|pspnet|deeplabv3\+?) (?:r|resnet)-?(50|101)(b?)-?d8", re.I)
_SIZE = re.compile(r"(\d{3,4}) ?[x×] ?(\d{3,4})")


def net_of(row: Row) -> ConvolutionalNet | None:
    """The net that a row names; None where it names another model."""
    net = _classifier_of(row) or _segmenter_of(row) or _detector_of(row)
    return replace(net, transposes=_transposes(row)) if net else None


def _classifier_of(row: Row) -> ConvolutionalNet | None:
    found = convolutional_net(row["model"], row["seq_len"])
    if found is None:
        return None
    net, is_stated = found
    if not is_stated:
        row.infer(f"images of {net.pixels[0]} pixels, as in the paper of the net")
    if net.parameters:  # of images that are large enough
        row.infer(f"{net.name} as torchvision or timm defines it, a thousand classes")
    return net


def _detector_of(row: Row) -> ConvolutionalNet | None:
    """A detector of detectron2 or mmdetection by head, backbone and neck, such as "Mask R-CNN R-50-FPN caffe"."""
    head, backbone = _DETECTOR.match(row["model"]), _BACKBONE.search(row["model"])
    is_mm = "mmdet" in row.said
    if head is None or backbone is None:
        return None
    if not is_mm and "detectron2" not in row.said:
        raise row.refused("a detector of another library than detectron2 and mmdetection: its activations need a trace")
    rest = row["model"][backbone.end() :].lower()
    words = set(re.findall(r"[a-z0-9]+", rest)) - {"1x", "2x", "3x", "pytorch"}
    neck = next((each for each in ("fpn", "c4", "dc5") if each in words), "fpn")
    name = (head[1] or head[2]).lower()
    if others := words - {neck, "caffe"}:
        raise row.refused(f"a detector with {', '.join(sorted(others))}: its activations need a trace")
    if neck != "fpn" and (is_mm or name not in ("faster", "mask")):
        raise row.refused(f"a detector without a pyramid ({neck.upper()}): its activations need a trace")
    plain = backbone[1] is not None
    groups, width = (1, 64) if plain else (int(backbone[3] or 32), int(backbone[4] or 8))
    net = detector(
        MMDETECTION if is_mm else DETECTRON2,
        name,
        neck,
        int(backbone[2]),
        groups=groups,
        width=width,
        caffe=plain and (not is_mm or "caffe" in words),
    )
    size = _SIZE.search(row["seq_len"])
    edges = sorted((int(size[1]), int(size[2]))) if size else [800, 1333]
    if size is None:
        row.infer("images of 800x1333, as the framework's configurations have them")
    if neck != "c4":
        edges = [-(-edge // 32) * 32 for edge in edges]
    row.infer(f"{row['model']} as {'mmdetection' if is_mm else 'detectron2'} configures it, the largest batch of COCO")
    return as_architecture(row["model"], net, (edges[0], edges[1]))


def _segmenter_of(row: Row) -> ConvolutionalNet | None:
    """A segmenter of mmsegmentation, whose sample says size and data of a crop: "512x1024 Cityscapes"."""
    found = _SEGMENTER.fullmatch(row["model"].strip())
    if found is None or "mmseg" not in row.said:
        return None
    size = _SIZE.search(row["seq_len"])
    classes = next((count for data, count in CLASSES.items() if data in row["seq_len"].lower()), None)
    if size is None or classes is None:
        raise row.refused(
            "a segmenter: size of the crop or data, which says how many classes, are not stated: write both into the"
            ' column seq_len, like "512x1024 Cityscapes"'
        )
    row.infer(f"{row['model']} as mmsegmentation configures it")
    net = segmenter(found[1].lower(), int(found[2]), classes, plain_stem=bool(found[3]))
    return as_architecture(row["model"], net, (int(size[1]), int(size[2])))


def usual_images(row: Row) -> int | None:
    """Images of a device where a library configures them: samples_per_gpu, or SOLVER.IMS_PER_BATCH over eight."""
    if "mmseg" in row.said:
        return 2 if "cityscapes" in row["seq_len"].lower() else 4
    return 2 if re.search("mmdet|detectron2", row.said) else None


def check_net(row: Row, training: Training) -> None:
    """Raises SpecError where weights are not fp32 and trained as a whole, or something else recomputes or fuses."""
    for is_so, what in (
        (training.low_precision and not training.autocasts, "in low precision"),
        (training.adapters.rank > 0, "with adapters"),
        (training.checkpointing is not ActivationCheckpointing.NONE, "with checkpointing"),
        (training.kernels.fused, "that is compiled"),
    ):
        if is_so:
            raise row.refused(f"no closed form of a convolutional net {what}")


def _transposes(row: Row) -> bool:
    """Whether convolutions run on tensor cores over tensors whose channels are not last.

    Since Ampere also in fp32: torch.backends.cudnn.allow_tf32 is on.
    """
    early = re.search(
        r"\b(?:V100|T4|[PKM]\d{2,3}|RTX ?(?:20\d\d|[4568]000)|(?:GTX ?)?1[06]\d0)\b|titan", row["gpu"], re.I
    )
    low = "32" not in row["precision"]
    return (low or early is None) and re.search(r"channels[ _-]last|nhwc", row.said) is None
