"""Laws of detectors and segmenters: what is counted from a description is what torch keeps of the same net."""

from __future__ import annotations

import pytest

from orchestrator.memory.foreign.convolutional import walked
from orchestrator.memory.foreign.convolutional_nets import ConvolutionalNet
from orchestrator.memory.foreign.convolutional_words import Branches, Each, Part
from orchestrator.memory.foreign.detectors import DETECTRON2, MMDETECTION, Library, detector
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.segmenters import HEADS, segmenter
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.errors import SpecError
from tests.memory.foreign.torch_nets import counted

SMALL = (256, 320)
DETECTOR = {"id": "d1", "framework": "detectron2", "n_gpus": "8", "micro_batch": "2", "precision": "fp32",
            "gpu": "V100", "model": "Mask R-CNN R50-FPN", "seq_len": "COCO 1333x800", "optimizer": "SGD momentum",
            "arch": "conv net"}  # fmt: skip
SEGMENTER = DETECTOR | {"framework": "mmseg DDP SyncBN", "model": "PSPNet R-50-D8", "seq_len": "512x1024 Cityscapes"}


def r50(library: Library, head: str, neck: str = "fpn") -> Part:
    return detector(library, head, neck, 50, groups=1, width=64, caffe=False)


def read(**columns: str) -> Training:
    return described_row(DETECTOR | columns).training


def net_of(training: Training) -> ConvolutionalNet:
    assert isinstance(training.shape, ConvolutionalNet)
    return training.shape


def parameters_of(net: Part) -> tuple[int, int]:
    found = walked(net, 1, SMALL, low=False, transposes=False)
    return found.parameters, found.frozen_parameters


def test_detectors_have_the_parameters_that_torchvision_counts() -> None:
    """docs.pytorch.org/vision, of 91 classes instead of 81: one score and four numbers of a box each, or a mask."""
    boxes = (10 + 4 * 11) * 1025
    assert sum(parameters_of(r50(DETECTRON2, "faster"))) + boxes == 41_755_286
    assert sum(parameters_of(r50(DETECTRON2, "mask"))) + boxes + 11 * 257 == 44_401_393


def test_what_mmdetection_counts_is_what_it_trains() -> None:
    """docs/useful_tools.md of open-mmlab/mmdetection, tools/analysis_tools/get_flops.py: 37.74 M."""
    trained, frozen = parameters_of(r50(MMDETECTION, "retinanet"))
    assert round(trained / 1e6, 2) == 37.74
    assert frozen == 225_344  # stem and first stage, torchvision's resnet50


@pytest.mark.parametrize(("head", "millions"), [("pspnet", 48.98), ("fcn", 49.5), ("deeplabv3", 68.1)])
def test_segmenters_have_the_parameters_that_are_published(head: str, millions: float) -> None:
    """PSPNet's: docs/useful_tools.md of open-mmlab/mmsegmentation, tools/get_flops.py; the others' to a tenth."""
    found = sum(parameters_of(segmenter(head, 50, 19))) / 1e6
    assert found == pytest.approx(millions, abs=0.005 if head == "pspnet" else 0.05)


NETS = {
    "faster": r50(DETECTRON2, "faster"),
    "mask, C4": r50(DETECTRON2, "mask", "c4"),
    "mask, DC5": r50(DETECTRON2, "mask", "dc5"),
    "retinanet": r50(DETECTRON2, "retinanet"),
    "cascade mask": r50(DETECTRON2, "cascade mask"),
    "mmdetection's mask": r50(MMDETECTION, "mask"),
    "mmdetection's cascade mask": r50(MMDETECTION, "cascade mask"),
    "mmdetection's retinanet": r50(MMDETECTION, "retinanet"),
    **{head: segmenter(head, 50, 19) for head in HEADS},
}


# Under a dispatch mode, as the peak is watched, torch does not sum up gradients in place (torch/csrc/autograd/
# input_buffer.cpp, can_accumulate_inplace): here they are those of the widest map, at the worst moment.
SUMS_APART = {"mask, C4": 0.1, "pspnet": 0.03, "deeplabv3": 0.02, "retinanet": 0.02}


@pytest.mark.parametrize("name", NETS)
def test_what_autograd_keeps_is_counted_to_the_byte_and_the_peak_to_a_hundredth(name: str) -> None:
    found = walked(NETS[name], 2, SMALL, low=False, transposes=False)
    parameters, buffer_bytes, saved_bytes, peak_bytes = counted(NETS[name], 2, SMALL)
    assert (found.parameters, found.buffer_bytes, found.saved_bytes) == (parameters, buffer_bytes, saved_bytes)
    assert sum(found.peak) == pytest.approx(peak_bytes, rel=SUMS_APART.get(name, 0.01))


@pytest.mark.parametrize("name", ["mmdetection's mask", "pspnet"])
def test_so_it_is_under_autocast_by_the_lists_of_cuda(name: str) -> None:
    found = walked(NETS[name], 2, SMALL, low=True, transposes=False)
    _, _, saved_bytes, _ = counted(NETS[name], 2, SMALL, low=True)
    assert found.saved_bytes == saved_bytes


def test_a_frozen_part_keeps_nothing_and_weights_that_maps_share_count_once() -> None:
    frozen = walked((Branches("frozen", ("conv8k3 bn relu",)), "conv4k1 end"), 1, (8, 8), low=False, transposes=False)
    assert (frozen.parameters, frozen.frozen_parameters) == (4 * 8, 8 * 3 * 9 + 2 * 8)
    assert frozen.saved_bytes == 4 * 8 * 8 * 8
    shared = ("conv4k1 put1 max2s2 put2", Each((1, 2), "conv8k3 pool1"), "end")
    assert walked(shared, 1, (8, 8), low=False, transposes=False).parameters == 4 * 3 + 8 * 4 * 9


def test_what_one_branch_returned_waits_for_the_other() -> None:
    net = ("conv8k1", Branches("sum", ("conv8k1 fbn", "conv8k1 fbn")), "end")
    found = walked(net, 2, (16, 16), low=False, transposes=False)
    assert found.peak == found.peak._replace(gradients=0)  # on the way forth
    assert sum(found.peak) == pytest.approx(counted(net, 2, (16, 16))[3], rel=0.01)


def test_an_early_torch_kept_logits_and_what_goes_into_an_activation() -> None:
    def more(net: Part, pixels: tuple[int, int] = SMALL) -> int:
        late, early = (
            walked(net, 2, pixels, low=False, transposes=False, early=early).saved_bytes for early in (False, True)
        )
        return early - late

    assert more("conv8k3 apart conv8k3 ce", (8, 8)) == 2 * 2 * 4 * 8 * 8 * 8
    maps = sum(height * width for height, width in ((64, 80), (32, 40), (16, 20), (8, 10), (4, 5)))
    heads = 2 * 256 * maps + 2 * 1024 * 1024 + 256 * 256 * (4 * 14**2 + 28**2)
    assert more(r50(DETECTRON2, "mask")) - more(r50(MMDETECTION, "mask")) == 4 * heads


def test_boxes_are_assigned_to_anchors_image_after_image() -> None:
    net = r50(DETECTRON2, "rpn")
    one, two = (walked(net, batch, (800, 1344), low=False, transposes=False).peak for batch in (1, 2))
    assert one.working == two.working == 4 * 9 * 93 * 268_569


@pytest.mark.parametrize(
    ("model", "pixels"),
    [
        ("Faster R-CNN R50-C4", (800, 1333)),
        ("Faster R-CNN X101-FPN", (800, 1344)),
        ("RetinaNet R50", (800, 1344)),
        ("Cascade Mask R-CNN R-50-FPN", (800, 1344)),
    ],
)
def test_images_are_padded_to_what_the_neck_divides(model: str, pixels: tuple[int, int]) -> None:
    assert net_of(read(model=model)).pixels == pixels


def test_style_and_library_decide_what_a_block_keeps() -> None:
    def allocated(**columns: str) -> int:
        return estimate_foreign(read(**columns)).allocated_bytes

    theirs = allocated(framework="mmdet DDP")
    assert allocated(framework="mmdet DDP", model="Mask R-CNN R-50-FPN caffe") < theirs
    assert allocated() < theirs
    assert allocated(framework="mmdet DDP", model="Mask R-CNN X-101-64x4d-FPN") > theirs


def test_classes_of_the_data_decide_how_wide_a_segmenters_logits_are() -> None:
    few, many = (described_row(SEGMENTER | {"seq_len": f"512x512 {data}"}).training for data in ("VOC12aug", "ADE20K"))
    assert estimate_foreign(many).allocated_bytes - estimate_foreign(few).allocated_bytes > 1e9


def test_images_a_device_that_a_row_leaves_open_are_those_of_the_configuration() -> None:
    def images(columns: dict[str, str]) -> int:
        return described_row(columns | {"micro_batch": ""}).training.micro_batch_size

    assert [images(each) for each in (DETECTOR, SEGMENTER, SEGMENTER | {"seq_len": "512x512 ADE20K"})] == [2, 2, 4]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"model": "Mask R-CNN R50-FPN GN"}, "a detector with gn"),
        ({"model": "Cascade R-CNN R50-C4"}, "without a pyramid"),
        ({"framework": "PyTorch"}, "another library than detectron2 and mmdetection"),
        (SEGMENTER | {"seq_len": "512x1024"}, "which says how many classes"),
        (SEGMENTER | {"model": "UPerNet R-50"}, "its activations need a trace"),
    ],
)
def test_what_is_not_one_of_them_is_refused_with_its_reason(columns: dict[str, str], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read(**columns)
