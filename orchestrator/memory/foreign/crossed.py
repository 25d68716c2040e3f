"""Encoder-decoders in other people's trainings: shapes by name, and what layers keep that attend to another sequence.

Every value of the table stands in the `config.json` of the named repository, MusicGen's in facebookresearch/audiocraft
config/model/lm/model_scale.
"""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.public_models import gpt
from orchestrator.memory.t5 import T5Shape, t5_profile
from orchestrator.specs.plan import Precision

# Names of which `L24` counts the layers of either side.
TWO_SIDED = re.compile(r"\b(?:m|by|flan-?)?t5\b|\b(?:m|flan-?)?t5-|\bt0|\bmt0|\bbart", re.I)


def two_sided(shape: Architecture) -> Architecture:
    """An encoder and a decoder of so many layers each as one shape, of whose layers half attend twice."""
    return replace(shape, layers=2 * shape.layers, crossed=shape.layers)


def _t5(layers: int, hidden: int, heads: int, width: int, ffn: int, vocab: int, *, gated: bool) -> Architecture:
    """T5 shares one matrix between head and embeddings; from its version 1.1 on it is gated and does not."""
    return two_sided(
        Architecture(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=width,
            ffn=ffn,
            vocab=vocab,
            gated=gated,
            tied=not gated,
            dropout=True,
            flash=False,  # a learned bias of positions is added to the scores
        )
    )


def _plain(
    layers: int, hidden: int, heads: int, vocab: int, positions: int, crossed: int, *, tied: bool = True
) -> Architecture:
    return gpt(layers, hidden, heads, vocab, positions=positions, tied=tied, dropout=True, crossed=crossed)


V1_1 = {  # google/t5-v1_1-*, and with another vocabulary google/mt5-*
    "small": (8, 512, 6, 64, 1024),
    "base": (12, 768, 12, 64, 2048),
    "large": (24, 1024, 16, 64, 2816),
    "xl": (24, 2048, 32, 64, 5120),
    "xxl": (24, 4096, 64, 64, 10240),
}
KNOWN = {
    "t5-small": _t5(6, 512, 8, 64, 2048, 32128, gated=False),  # google-t5/t5-*
    "t5-base": _t5(12, 768, 12, 64, 3072, 32128, gated=False),
    "t5-large": _t5(24, 1024, 16, 64, 4096, 32128, gated=False),
    "t5-3b": _t5(24, 1024, 32, 128, 16384, 32128, gated=False),
    "t5-11b": _t5(24, 1024, 128, 128, 65536, 32128, gated=False),
    "bart-base": _plain(12, 768, 12, 50265, 2 * 1026, 6),  # facebook/bart-*
    "bart-large": _plain(24, 1024, 16, 50265, 2 * 1026, 12),
    # the next five, and ByT5 below: known by heart; their counts of parameters are the published ones
    "distilbart-12-6": _plain(18, 1024, 16, 50264, 2 * 1026, 6),  # sshleifer/distilbart-cnn-12-6
    "distilbart-12-3": _plain(15, 1024, 16, 50264, 2 * 1026, 3),  # sshleifer/distilbart-xsum-12-3
    "mbart-large": _plain(24, 1024, 16, 250054, 2 * 1026, 12),  # facebook/mbart-large-50
    "pegasus-large": _plain(32, 1024, 16, 96103, 0, 16),  # google/pegasus-large
    "ul2": replace(_t5(32, 4096, 16, 256, 16384, 32128, gated=True), tied=True),  # google/ul2
    # every layer attends to the text; four tables and four heads for 2,048 codes each
    "musicgen-small": _plain(24, 1024, 16, 4 * 2048, 0, 24, tied=False),
    "musicgen-medium": _plain(48, 1536, 24, 4 * 2048, 0, 48, tied=False),
    "musicgen-large": _plain(48, 2048, 32, 4 * 2048, 0, 48, tied=False),
}
KNOWN |= {f"t5-v1.1-{size}": _t5(*sizes, 32128, gated=True) for size, sizes in V1_1.items()}
# google/byt5-*: layers of both sides, and three times as many read as write
BYT5 = {
    "small": (16, 1472, 6, 64, 3584),
    "base": (24, 1536, 12, 64, 3968),
    "large": (48, 1536, 16, 64, 3840),
    "xl": (48, 2560, 32, 64, 6720),
    "xxl": (48, 4672, 64, 64, 12352),
}
KNOWN |= {
    f"byt5-{size}": replace(_t5(*sizes, 384, gated=True), layers=sizes[0], crossed=sizes[0] // 4)
    for size, sizes in BYT5.items()
}
KNOWN |= {f"mt5-{size}": _t5(*sizes, 250112, gated=True) for size, sizes in V1_1.items()}

_SPELLINGS = (
    (re.compile(r"^.*/"), ""),
    (re.compile(r"[\s_]+"), "-"),
    (re.compile(r"^t5-v1-1"), "t5-v1.1"),
    (re.compile(r"^codet5-"), "t5-"),  # Salesforce/codet5-small, -base and -large
    (re.compile(r"^flan-?t5-3b$"), "t5-v1.1-xl"),
    (re.compile(r"^flan-?t5-11b$"), "t5-v1.1-xxl"),
    (re.compile(r"^flan-ul2"), "ul2"),  # google/flan-ul2 goes on from ul2
    (re.compile(r"^ul2-20b$"), "ul2"),
    (re.compile(r"^distilbart-(?:cnn|xsum)-"), "distilbart-"),
    (re.compile(r"^mbart-?(?:large-?)?(?:50|cc25)?(?:-many.*|-one.*)?$"), "mbart-large"),
    (re.compile(r"^pegasus-(?:xsum|cnn-dailymail|multi-news|large)$"), "pegasus-large"),
    (re.compile(r"^flan-?t5"), "t5-v1.1"),  # google/flan-t5-* go on from t5-v1_1-*
    (re.compile(r"^t0-?3b$"), "t5-v1.1-xl"),  # bigscience/T0_3B and T0pp from google/t5-xl-lm-adapt and its larger one
    (re.compile(r"^t0(?:pp?)?$"), "t5-v1.1-xxl"),
    (re.compile(r"^mt0"), "mt5"),  # bigscience/mt0-* from google/mt5-*
    (re.compile(r"^(?:musicgen|mbd-musicgen)-?(?:stereo|melody)?-?(?=small|medium|large)"), "musicgen-"),
    (re.compile(r"-(?:cnn|xsum|mnli|lm-adapt|mt|p3|finetuned.*)$"), ""),
)


def known_crossed(name: str) -> Architecture | None:
    """The shape of a public encoder-decoder by a name as people write it; None where the table has none such."""
    said = name.strip().lower()
    for pattern, instead in _SPELLINGS:
        said = pattern.sub(instead, said)
    return KNOWN.get(said)


def t5_layer_bytes(shape: Architecture, lengths: tuple[int, int], *, low: bool, autocasts: bool) -> int:
    """What a layer of transformers' T5 keeps of a sample, in the mean of both sides (memory/t5.py, on CUDA).

    `lengths`: of source and target. The closed form has one for both: what is longer or shorter of the source are keys,
    values and scores of the attention to it.

    That has the memory-efficient kernel of attention. Before transformers 5 there were scores, of which are kept the
    softmax, taken in fp32, the mask of its dropout in bytes, and what goes into the product with the values; a bias is
    added to them, and kept by nobody.
    """
    decoders = shape.crossed
    encoders = shape.layers - decoders
    sizes = T5Shape(
        vocab_size=shape.vocab,
        hidden=shape.hidden,
        query=shape.query,
        heads=shape.heads,
        feed_forward=shape.ffn,
        gated=shape.gated,
        encoder_layers=encoders,
        decoder_layers=decoders,
        buckets=32,
    )
    precision, width = (Precision.BF16, 2) if low else (Precision.FP32, 4)
    encoder, decoder = (
        t5_profile(sizes, "foreign", precision, length, autocast=autocasts, cuda=True).segments[at].saved_bytes
        for length, at in zip(lengths, (1, 3), strict=True)
    )

    def scores(rows: int, columns: int) -> int:
        return shape.heads * rows * ((4 + 1 + width) * columns - 4)  # less a number for each row

    source, target = lengths
    encoder += scores(source, source) - width * shape.heads * source**2
    decoder += scores(target, target) - width * shape.heads * target**2 + scores(target, source)
    decoder += (source - target) * width * 2 * shape.query
    return (encoders * encoder + decoders * decoder) // shape.layers
