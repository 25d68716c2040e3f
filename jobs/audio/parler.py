"""Parler-TTS' decoder (arXiv:2402.01912): MusicGen's, with the text as a prefix and attention to a description.

Samples are whole clips, so a batch is as wide as its longest. Names are those of `ParlerTTSForConditionalGeneration`,
so that `weights: FOLDER` loads a folder that it saved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MusicgenDecoderConfig, MusicgenForCausalLM
from transformers.models.musicgen.modeling_musicgen import MusicgenSinusoidalPositionalEmbedding

sys.path.append(str(Path(__file__).parents[2]))  # a rank knows this file alone
from jobs.audio.codebooks import BYTES, CodedSpeech, decoder_config, loss_sum, states_of
from jobs.audio.features import codes_of, speech_of
from jobs.audio.weights import read_weights
from orchestrator.training.contract.recipe import Batch, Recipe


class Positions(MusicgenSinusoidalPositionalEmbedding):
    """Positions of embeddings: MusicGen's decoder asks with the last feature of each, [B, S, 1]."""

    def forward(self, last_BS1: Tensor, past_key_values_length: int = 0) -> Tensor:
        return super().forward(last_BS1.transpose(1, 2), past_key_values_length)


class Parler(nn.Module):
    """Prompt bytes, codebook tokens and description states to logits [B, K, S, V]."""

    def __init__(self, config: MusicgenDecoderConfig, text_width: int) -> None:
        super().__init__()
        self.embed_prompts = nn.Embedding(BYTES, config.hidden_size)
        self.decoder = MusicgenForCausalLM._from_config(config, attn_implementation="sdpa")
        self.decoder.model.decoder.embed_positions = Positions(
            config.max_position_embeddings, config.hidden_size
        )
        self.enc_to_dec_proj = nn.Linear(text_width, config.hidden_size)

    def forward(self, prompts_BP: Tensor, tokens_BKS: Tensor, states_BLD: Tensor) -> Tensor:
        embeddings = self.decoder.model.decoder.embed_tokens
        sound = sum(embed(tokens_BKS[:, number]) for number, embed in enumerate(embeddings))
        logits = self.decoder(
            inputs_embeds=torch.cat((self.embed_prompts(prompts_BP), sound), dim=1),
            encoder_hidden_states=self.enc_to_dec_proj(states_BLD),
            use_cache=False,
        ).logits
        return logits.unflatten(0, tokens_BKS.shape[:2])[:, :, prompts_BP.shape[1] :]


def build(config: dict[str, Any]) -> Recipe:
    """The decoder of `config["decoder"]`, trained on clips of sentences of up to `longest` characters.

    `weights` names a folder. `text_states` names a .npy file [clips, L, D] of a text encoder's states; default: made.
    """
    decoder = decoder_config(config["decoder"])
    speech = speech_of(clips=config["clips"], longest=config["longest"], cache=config.get("cache"))
    codes = codes_of(speech, scales=(1,) * decoder.num_codebooks, words=decoder.vocab_size)
    texts = states_of(config, speech.descriptions, speech.cache)
    module = Parler(decoder, texts.shape[-1])
    if "weights" in config:
        read_weights(module, config["weights"])
    return Recipe(
        module=module,
        loss_sum=_loss_sum,
        dataset=CodedSpeech(speech, codes, words=decoder.vocab_size, frames=None, texts=texts),
        layers=tuple(module.decoder.model.decoder.layers),
    )


def _loss_sum(module: nn.Module, batch: Batch) -> Tensor:
    tokens_BKS, labels_BKS, states_BLD, prompts_BP = batch
    return loss_sum(module(prompts_BP, tokens_BKS, states_BLD), labels_BKS)
