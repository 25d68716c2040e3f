"""Laws of convolutional classifiers: what is counted from a description is what torch keeps of the same net."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.foreign.convolutional import walked
from orchestrator.memory.foreign.convolutional_nets import NETS, SMALL_INCEPTION, convolutional_net
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.errors import SpecError
from tests.memory.foreign.torch_nets import counted

# As torchvision's documentation states them for its weights (docs.pytorch.org/vision, models), and timm for Xception.
PARAMETERS = {
    "alexnet": 61_100_840,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "resnext101_64x4d": 83_455_272,
    "wide_resnet50_2": 68_883_240,
    "wide_resnet101_2": 126_886_696,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "mobilenet_v2": 3_504_872,
    "mnasnet1_0": 4_383_312,
    "mobilenet_v3_large": 5_483_032,
    "mobilenet_v3_small": 2_542_856,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_b6": 43_040_704,
    "efficientnet_b7": 66_347_960,
    "convnext_tiny": 28_589_128,
    "convnext_small": 50_223_688,
    "convnext_base": 88_591_464,
    "convnext_large": 197_767_336,
    "inception_v3": 27_161_264,
    SMALL_INCEPTION: 23_834_568,
    "xception": 22_855_952,
}
# One of every family, with all of its words.
FAMILIES = ("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "densenet121", "mobilenet_v2", "mobilenet_v3_small",
            "efficientnet_b0", "convnext_tiny", "inception_v3", "xception")  # fmt: skip
ROW = {"id": "x1", "framework": "PyTorch", "n_gpus": "1", "micro_batch": "32", "precision": "fp32", "gpu": "A100 40GB",
       "model": "resnet50", "seq_len": "224x224", "optimizer": "Adam"}  # fmt: skip


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


def square(side: int) -> tuple[int, int]:
    return side, side


def side_of(net: str) -> int:
    return 299 if net == "inception_v3" else 224


@pytest.mark.parametrize("net", NETS)
def test_every_net_has_the_parameters_that_its_publisher_counts(net: str) -> None:
    assert walked(NETS[net], 1, square(side_of(net)), low=False, transposes=False).parameters == PARAMETERS[net]


@pytest.mark.parametrize("net", FAMILIES)
def test_what_autograd_keeps_is_counted_to_the_byte_and_the_peak_to_a_hundredth(net: str) -> None:
    found = walked(NETS[net], 2, square(side_of(net)), low=False, transposes=False)
    parameters, buffer_bytes, saved_bytes, peak_bytes = counted(NETS[net], 2, square(side_of(net)))
    assert (found.parameters, found.buffer_bytes, found.saved_bytes) == (parameters, buffer_bytes, saved_bytes)
    assert sum(found.peak) == pytest.approx(peak_bytes, rel=0.01)


@pytest.mark.parametrize("net", ["vgg11_bn", "resnet18", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny"])
def test_so_it_is_under_autocast_by_the_lists_of_cuda(net: str) -> None:
    found = walked(NETS[net], 2, square(224), low=True, transposes=False)
    _, _, saved_bytes, peak_bytes = counted(NETS[net], 2, square(224), low=True)
    assert found.saved_bytes == saved_bytes
    assert sum(found.peak) == pytest.approx(peak_bytes, rel=0.01)


def test_images_keep_in_proportion_and_weights_do_not() -> None:
    one, two, three = (
        walked(NETS["resnet50"], batch, square(224), low=True, transposes=True).saved_bytes for batch in (1, 2, 3)
    )
    assert three - two == two - one < one


def test_gradients_of_earlier_batches_and_what_tensor_cores_work_in_come_on_top() -> None:
    net = NETS["resnet50"]
    alone = walked(net, 8, square(224), low=False, transposes=False)
    assert sum(walked(net, 8, square(224), low=False, transposes=True).peak) > sum(alone.peak)
    accumulated = walked(net, 8, square(224), low=False, transposes=False, accumulates=True).peak
    assert accumulated.gradients == 4 * alone.parameters
    assert sum(accumulated) > sum(alone.peak)


@pytest.mark.parametrize(
    ("written", "net"),
    [
        ("ResNet-50", "resnet50"),
        ("microsoft/resnet-50", "resnet50"),
        ("timm/resnet50.a1_in1k", "resnet50"),
        ("Wide ResNet-50-2", "wide_resnet50_2"),
        ("ConvNeXt-Tiny 86x86", "convnext_tiny"),
        ("ConvNeXt-T", "convnext_tiny"),
        ("VGG16-BN", "vgg16_bn"),
        ("efficientnet", "efficientnet_b0"),
        ("tf_efficientnet_b0.aa_in1k", "efficientnet_b0"),
        ("mobilenetv3_large_100", "mobilenet_v3_large"),
        ("torchvision.models.resnet50", "resnet50"),
    ],
)
def test_a_net_is_known_by_its_usual_names(written: str, net: str) -> None:
    found = convolutional_net(written, "")
    assert found is not None
    assert found[0].name == net
    assert found[0].parameters == PARAMETERS[net]


@pytest.mark.parametrize("written", ["Faster R-CNN R-50-FPN", "resnet50d", "DeepLabV3+ R-50-D8", "resnet50 UNet"])
def test_what_is_not_one_of_them_is_refused_as_before(written: str) -> None:
    with pytest.raises(SpecError, match="its activations need a trace"):
        read(model=written, arch="conv net")


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"seq_len": "16x16", "model": "alexnet"}, "images of 16 pixels are too small"),
        ({"framework": "DeepSpeed"}, "no model of a convolutional net under"),
        ({"precision": "pure bf16"}, "in low precision"),
        ({"act_ckpt": "full"}, "with checkpointing"),
        ({"compile_or_other": "torch.compile"}, "that is compiled"),
    ],
)
def test_what_no_walk_covers_is_refused_with_its_reason(columns: dict[str, str], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read(**columns)


def test_a_bare_number_is_how_wide_images_are() -> None:
    assert read(seq_len="160") == read(seq_len="160x160") != read(seq_len="224")


def test_a_row_says_precision_device_and_layout() -> None:
    assert not read().low_precision
    assert read(precision="amp_fp16").autocasts
    found = convolutional_net("resnet50", "224")
    assert found is not None
    plain, transposing = found[0], replace(found[0], transposes=True)
    assert [read(gpu=gpu).shape == transposing for gpu in ("A100", "V100", "T4", "RTX 3060")] == [
        True,
        False,
        False,
        True,
    ]
    assert read(compile_or_other="channels_last").shape == plain
    assert read(gpu="V100", precision="amp_fp16").shape == transposing


def test_an_estimate_names_what_a_training_needs_by_cause() -> None:
    causes = dict(estimate_foreign(read()).by_cause)
    assert causes["parameters"] == 4 * 25_557_032 + 8 * 26_560 + 8 * 53
    assert causes["optimizer states"] == 8 * 25_557_032
    assert causes["saved activations"] > 2.4 * 2**30
    assert estimate_foreign(read(n_gpus="8", sharding="DDP")).allocated_bytes > estimate_foreign(read()).allocated_bytes
