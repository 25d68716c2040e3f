"""Vision transformers in other people's trainings: an encoder over patches, one token each and one for the class."""

from __future__ import annotations

import re

from orchestrator.memory.foreign.architectures import Architecture

# Layers, width, heads and the usual edge of a patch: Dosovitskiy et al. 2021, arXiv:2010.11929, table 1; the small ones
# are those of Touvron et al. 2021, arXiv:2012.12877, table 1.
SIZES = {
    "ti": (12, 192, 3, 16),
    "s": (12, 384, 6, 16),
    "b": (12, 768, 12, 16),
    "l": (24, 1024, 16, 16),
    "h": (32, 1280, 16, 14),
}
_NAME = re.compile(
    r"^(?:[\w-]+/)?(?:vit|deit)[-_ ]?(tiny|ti|small|s|base|b|large|l|huge|h)(?![a-z])"
    r"(?:[-_/ ]?(?:patch|p)?(8|14|16|32)\b)?(?:[-_ ](\d{3})\b)?",
    re.I,
)
SHORT = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}


def vision_transformer(name: str, sample: str) -> tuple[Architecture, int | None] | None:
    """A ViT or DeiT by its usual name and the tokens of a sample, an image of so many pixels ("224x224", "224px").

    None where the name is another's; the tokens are None where neither name nor sample says how large an image is.
    """
    found = _NAME.match(name.strip().replace("_", "-"))
    if found is None:
        return None
    size = found[1].lower()
    layers, hidden, heads, edge = SIZES[SHORT.get(size, size)]
    edge = int(found[2] or edge)
    pixels = re.match(r"\D*(\d{2,4}) ?(?:px|x ?\d)", sample.lower())
    side = int(pixels[1]) if pixels else int(found[3] or 0)
    tokens = (side // edge) ** 2 + 1 if side else None
    shape = Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=3 * edge * edge,  # what a patch is projected from
        gated=False,
        tied=True,
        positions=tokens or 0,
        causal=False,
    )
    return shape, tokens
