"""MusicGen's decoder (arXiv:2306.05284): transformers' own module over codebooks with the delay pattern.

Names are those of `MusicgenForConditionalGeneration`, so that `weights: FOLDER` loads its `save_pretrained` output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import MusicgenDecoderConfig, MusicgenForCausalLM

sys.path.append(str(Path(__file__).parents[2]))  # a rank knows this file alone
from jobs.audio.codebooks import CodedSpeech, decoder_config, loss_sum, states_of
from jobs.audio.features import codes_of, speech_of
from jobs.audio.weights import read_weights
from orchestrator.training.contract.recipe import Batch, Recipe


class Musicgen(nn.Module):
    """Codebook tokens and text states to logits [B, K, S, V]."""

    def __init__(self, config: MusicgenDecoderConfig, text_width: int) -> None:
        super().__init__()
        self.decoder = MusicgenForCausalLM._from_config(config, attn_implementation="sdpa")
        self.enc_to_dec_proj = nn.Linear(text_width, config.hidden_size)

    def forward(self, tokens_BKS: Tensor, states_BLD: Tensor) -> Tensor:
        logits = self.decoder(
            input_ids=tokens_BKS.flatten(0, 1),
            encoder_hidden_states=self.enc_to_dec_proj(states_BLD),
            use_cache=False,
        ).logits
        return logits.unflatten(0, tokens_BKS.shape[:2])


def build(config: dict[str, Any]) -> Recipe:
    """The decoder of `config["decoder"]`, trained on pieces of `segment_frames` frames.

    `weights` names a folder. `text_states` names a .npy file [clips, L, D] of a text encoder's states; default: made.
    """
    decoder = decoder_config(config["decoder"])
    speech = speech_of(clips=config["clips"], cache=config.get("cache"))
    codes = codes_of(speech, scales=(1,) * decoder.num_codebooks, words=decoder.vocab_size)
    texts = states_of(config, speech.texts, speech.cache)
    module = Musicgen(decoder, texts.shape[-1])
    if "weights" in config:
        read_weights(module, config["weights"])
    return Recipe(
        module=module,
        loss_sum=_loss_sum,
        dataset=CodedSpeech(
            speech, codes, words=decoder.vocab_size, frames=config["segment_frames"], texts=texts
        ),
        layers=tuple(module.decoder.model.decoder.layers),
    )


def _loss_sum(module: nn.Module, batch: Batch) -> Tensor:
    tokens_BKS, labels_BKS, states_BLD, _ = batch
    return loss_sum(module(tokens_BKS, states_BLD), labels_BKS)
