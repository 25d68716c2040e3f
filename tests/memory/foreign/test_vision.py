"""Laws of vision transformers by name: the parameters that their publishers count, and a token for every patch."""

from __future__ import annotations

import pytest

from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training
from orchestrator.memory.foreign.vision import vision_transformer
from orchestrator.specs.errors import SpecError

ROW = {"id": "x1", "framework": "PyTorch", "n_gpus": "1", "micro_batch": "8", "precision": "amp_bf16"}


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


@pytest.mark.parametrize(
    ("written", "sample", "parameters", "tokens"),
    [  # as timm counts them without their heads' thousand classes
        ("google/vit-base-patch16-224", "", 85_798_656, 197),
        ("ViT-L/16", "224x224", 303_301_632, 197),
        ("vit_h_14", "224px", 630_764_800, 257),
        ("ViT-B/32", "384 x 384", 87_800_000, 145),
        ("deit_small_patch16_224", "", 21_665_664, 197),
    ],
)
def test_a_vision_transformer_is_known_by_its_usual_names(
    written: str, sample: str, parameters: int, tokens: int
) -> None:
    found = vision_transformer(written, sample)
    assert found is not None
    assert found[1] == tokens
    assert found[0].parameters == pytest.approx(parameters, rel=0.01)


def test_others_are_left_alone_and_an_image_without_a_size_is_refused() -> None:
    assert vision_transformer("resnet50", "224x224") is None
    assert vision_transformer("vitis", "224") is None
    with pytest.raises(SpecError, match="size of the images"):
        read(model="ViT-H", seq_len="")


def test_what_a_library_measured_is_met() -> None:
    """pytorch/ao torchao/prototype/low_bit_optim/README.md: 12.94 GB for ViT-H, eight images, AdamW, bf16 AMP."""
    training = read(model="ViT-H 630M", seq_len="224x224", optimizer="AdamW")
    assert (training.sequence_length, training.kernels.flash) == (257, True)
    assert estimate_foreign(training).allocated_bytes == pytest.approx(12.94e9, rel=0.05)
