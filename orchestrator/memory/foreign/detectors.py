"""Detectors as detectron2 and mmdetection configure them for COCO, in the words of convolutional_words.py.

Facts: facebookresearch/detectron2 configs/Base-*.yaml, detectron2/config/defaults.py and detectron2/modeling;
open-mmlab/mmdetection v2 configs/_base_/models and mmdet/models. Both train two images a device, whose shorter edge has
800 pixels at most and the longer one 1333, those of one orientation together, and print torch's maximum over all of the
training: what is counted is the largest batch, and the most objects in an image.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.memory.foreign.convolutional_nets import resnet_stages
from orchestrator.memory.foreign.convolutional_words import Branches, Each, Part, Regions

CLASSES = 80
# Regions of an image that a head sees, and how many of them are objects at most (BATCH_SIZE_PER_IMAGE and
# POSITIVE_FRACTION of ROI_HEADS; rcnn.sampler's num and pos_fraction).
REGIONS, OBJECTS = 512, 128
DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_PYRAMID = (22, 23, 24, 25)  # its maps, by the logarithm of their stride


@dataclass(frozen=True, slots=True)
class Library:
    """What two libraries do differently: norms of the backbone, activations of heads and the loss of dense ones."""

    norm: str
    relu: str
    focal: str
    every: bool  # of the heads of a cascade has a mask


DETECTRON2 = Library(norm="fbn", relu="apart", focal="focals", every=False)
MMDETECTION = Library(norm="bn", relu="relu", focal="focal", every=True)


def detector(library: Library, head: str, neck: str, depth: int, *, groups: int, width: int, caffe: bool) -> Part:
    """A detector by its head ("faster", "mask", "cascade", "cascade mask", "retinanet", "rpn") and neck.

    Stem and first stage are not trained. `caffe`: as in `resnet_stages`.
    """
    stem, *stages = resnet_stages(
        DEPTHS[depth], groups=groups, width=width, norm=library.norm, dilated=int(neck == "dc5"), caffe=caffe
    )
    backbone: list[Part] = [Branches("frozen", ((stem, stages[0]),)), "put2", stages[1], "put3", stages[2], "put4"]
    relu, mask = library.relu, "mask" in head
    if neck == "c4":
        return (*backbone, *_proposals((4,), 1024, 15, relu), *_on_stage(stages[3], relu, mask=mask))
    backbone += [stages[3], "put5"]
    if neck == "dc5":
        return (*backbone, *_proposals((5,), 2048, 15, relu), *_heads((5,), relu, mask=mask))
    if head == "retinanet":
        return (*backbone, *_pyramid(3), *_dense(library))
    pyramid = (*backbone, *_pyramid(2), "get25 max1s2 put26", *_proposals((*_PYRAMID, 26), 256, 3, relu))
    if head == "rpn":
        return pyramid
    return (
        *pyramid,
        *(_cascade(library, mask=mask) if head.startswith("cascade") else _heads(_PYRAMID, relu, mask=mask)),
    )


def _pyramid(lowest: int) -> tuple[Part, ...]:
    """Lin et al. 2017, arXiv:1612.03144, figure 3."""
    levels = (f"get{n} conv256k1b put9 get{n + 11} up2 add9 put{n + 10} conv256k3b put{n + 20}" for n in (4, 3, 2))
    return ("conv256k1b put15 conv256k3b put25", *list(levels)[: 5 - lowest])


def _proposals(maps: tuple[int, ...], channels: int, anchors: int, relu: str) -> tuple[Part, ...]:
    """Ren et al. 2015, arXiv:1506.01497, figure 3: what an anchor is worth, and where its box is."""
    head = f"anchors{anchors} conv{channels}k3b {relu} put90 conv{anchors}k1b end get90 conv{4 * anchors}k1b end"
    return (Each(maps, head), "assign")


def _boxes(numbers: int) -> str:
    return f"put90 fc{CLASSES + 1} ce get90 fc{numbers} end"


def _heads(maps: tuple[int, ...], relu: str, *, mask: bool) -> tuple[Part, ...]:
    found: tuple[Part, ...] = (Regions(maps, REGIONS, 7), f"flat fc1024 {relu} fc1024 {relu}", _boxes(4 * CLASSES))
    return (*found, *_masks(maps, relu)) if mask else found


def _masks(maps: tuple[int, ...], relu: str) -> tuple[Part, ...]:
    """He et al. 2017, arXiv:1703.06870, figure 4, right."""
    return (Regions(maps, OBJECTS, 14), f"conv256k3b {relu} " * 4 + f"deconv256k2s2b {relu} conv{CLASSES}k1b end")


def _on_stage(stage: Part, relu: str, *, mask: bool) -> tuple[Part, ...]:
    """The last stage of the backbone sees every region; the same figure, left."""
    found: tuple[Part, ...] = (Regions((4,), REGIONS, 14), stage, "put8 pool1 flat", _boxes(4 * CLASSES))
    return (*found, f"get8 take{OBJECTS} deconv256k2s2b {relu} conv{CLASSES}k1b end") if mask else found


def _cascade(library: Library, *, mask: bool) -> tuple[Part, ...]:
    """Cai and Vasconcelos 2018, arXiv:1712.00726, figure 3d: three heads."""
    relu = library.relu
    head: tuple[Part, ...] = (Regions(_PYRAMID, REGIONS, 7), f"flat fc1024 {relu} fc1024 {relu}", _boxes(4))
    masks = _masks(_PYRAMID, relu) if mask else ()
    return (*head, *masks) * 3 if library.every else (*head * 3, *masks)


def _dense(library: Library) -> tuple[Part, ...]:
    """Lin et al. 2017, arXiv:1708.02002, figure 3: nine anchors at every pixel, every class of them."""
    maps, tower = (23, 24, 25, 26, 27), f"conv256k3b {library.relu} " * 4
    boxes = Each(maps, f"anchors9 {tower}conv36k3b end")
    classes = Each(maps, f"{tower}conv{9 * CLASSES}k3b rows{CLASSES}")
    between = "relu " if library is DETECTRON2 else ""
    return (f"get5 conv256k3s2b put26 {between}conv256k3s2b put27", boxes, "assign", classes, library.focal)
