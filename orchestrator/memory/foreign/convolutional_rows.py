"""What a published row says of a convolutional classifier."""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.memory.foreign.convolutional_nets import ConvolutionalNet, convolutional_net
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.plan import ActivationCheckpointing


def net_of(row: Row) -> ConvolutionalNet | None:
    """The net that a row names; None where it names another model."""
    found = convolutional_net(row["model"], row["seq_len"])
    if found is None:
        return None
    net, is_stated = found
    if not is_stated:
        row.infer(f"images of {net.pixels[0]} pixels, as in the paper of the net")
    if net.parameters:  # of images that are large enough
        row.infer(f"{net.name} as torchvision or timm defines it, a thousand classes")
    return replace(net, transposes=_transposes(row))


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
