"""Laws of what is computed of the speech: real, computed once, mapped, and of the shapes that the models learn."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MusicgenForCausalLM

from jobs.audio import features, orpheus, speech
from jobs.audio.codebooks import decoder_config, delayed
from jobs.audio.faces import latents_of
from jobs.audio.features import Speech
from orchestrator.specs.errors import SpecError
from orchestrator.training.contract.recipe import IGNORED_LABEL

CLIPS = 6


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return features.speech_of(clips=CLIPS, cache=tmp_path_factory.mktemp("cache"))


def pitch_of(spoken: Speech, clip: int) -> float:
    pitch = spoken.pitch_T[spoken.frames(clip)]
    return float(np.median(pitch[pitch > 0]))


def test_sentences_of_the_standard_library_are_spoken_by_several_voices(spoken: Speech) -> None:
    assert spoken.texts[:2] == (
        "Beautiful is better than ugly.",
        "Explicit is better than implicit.",
    )
    seconds = np.diff([0, *spoken.ends]) * features.HOP / speech.RATE_HZ
    rates = [len(text) / length for text, length in zip(spoken.texts, seconds, strict=True)]
    assert all(5 < rate < 30 for rate in rates), "characters a second, as people speak"
    assert 0.4 < float((spoken.pitch_T > 0).mean()) < 0.95
    assert pitch_of(spoken, 1) > 1.2 * pitch_of(spoken, 0), "the woman's is higher"
    assert spoken.descriptions[0].startswith("A man")


def test_a_sentence_always_sounds_the_same() -> None:
    texts = speech.sentences(count=4, longest=60)
    first, again = ([sound for _, sound in speech.clips(texts)] for _ in range(2))
    assert all(map(np.array_equal, first, again))


def test_cached_features_are_mapped_and_not_recomputed(
    spoken: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = features.codes_of(spoken, scales=(1, 1), words=8)
    monkeypatch.setattr(speech, "clips", lambda _: pytest.fail("spoken again"))
    monkeypatch.setattr(features, "quantised", lambda *_: pytest.fail("quantised again"))
    cached = features.speech_of(clips=CLIPS, cache=spoken.cache)
    again = features.codes_of(cached, scales=(1, 1), words=8)
    for mapped in (cached.sound, cached.mels_TM, cached.pitch_T, *again.levels):
        assert isinstance(mapped, np.memmap)
    assert np.array_equal(cached.mels_TM, spoken.mels_TM)
    assert np.array_equal(again.levels, codes.levels)


def test_ranks_that_start_together_read_the_files_of_the_first(tmp_path: Path) -> None:
    def lose_race(into: Path) -> None:
        into.rename(tmp_path / "mine")
        features.once(tmp_path, "kind", {}, lambda first: (first / "who").write_text("first"))
        (tmp_path / "mine").rename(into)
        (into / "who").write_text("second")

    assert (features.once(tmp_path, "kind", {}, lose_race) / "who").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1, "nothing is left behind"


def test_each_level_lowers_the_quantisation_error(spoken: Speech) -> None:
    frames = np.asarray(spoken.mels_TM)[: len(spoken.mels_TM) // 4 * 4].astype(np.float64)
    levels = features.quantised(frames, (4, 2, 1), 16)
    assert [len(frames) // len(level) for level in levels] == [4, 2, 1]
    left = frames - frames.mean(axis=0)
    errors = [float((left**2).mean())]
    for scale, numbers in zip((4, 2, 1), levels, strict=True):
        means = left.reshape(-1, scale, features.MELS).mean(axis=1)
        centres = np.stack(
            [means[numbers == n].mean(axis=0) if n in numbers else means[0] for n in range(16)]
        )
        left = left - np.repeat(centres[numbers], scale, axis=0)
        errors.append(float((left**2).mean()))
    assert all(after < 0.9 * before for before, after in itertools.pairwise(errors))


def test_the_delay_pattern_is_that_of_transformers() -> None:
    config = decoder_config(
        {"vocab_size": 16, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    )
    codebooks, frames = config.num_codebooks, 9
    codes_KT = np.random.default_rng(0).integers(0, config.vocab_size, (codebooks, frames))
    steps, labels = delayed(codes_KT, frames, config.pad_token_id)
    module = MusicgenForCausalLM._from_config(config)
    first = torch.full((codebooks, 1), config.pad_token_id)
    inputs = torch.cat((first, torch.from_numpy(codes_KT)), dim=1)
    _, mask = module.build_delay_pattern_mask(
        inputs, config.pad_token_id, max_length=frames + codebooks
    )
    assert np.array_equal(steps, mask[:, :-1].numpy())
    assert np.array_equal(
        np.where(labels == IGNORED_LABEL, config.pad_token_id, labels), mask[:, 1:].numpy()
    )


def test_seven_tokens_of_a_frame_have_ranges_of_their_own(spoken: Speech) -> None:
    codes = features.codes_of(spoken, scales=orpheus.SCALES, words=orpheus.WORDS)
    tokens = orpheus.seven_tokens(codes, slice(0, int(codes.ends[0])))
    assert tokens.shape == (codes.ends[0], 7)
    assert ((tokens - orpheus.FIRST_SOUND) // orpheus.WORDS == np.arange(7)).all()
    numbers = (tokens - orpheus.FIRST_SOUND) % orpheus.WORDS
    assert np.array_equal(numbers[:, [2, 3, 5, 6]].ravel(), codes.levels[2][: 4 * len(tokens)])
    assert np.array_equal(numbers[:, [1, 4]].ravel(), codes.levels[1][: 2 * len(tokens)])
    whole = orpheus.stream(spoken, codes)
    assert (whole == orpheus.SOUND_BEGINS).sum() == CLIPS
    assert whole.max() < orpheus.VOCABULARY


def test_mouths_open_as_loud_as_the_sound_is(spoken: Speech) -> None:
    latents = latents_of(spoken, frames=8, resolution=64)
    loudness = latents.sound_VNAM.mean(axis=(2, 3)).ravel()
    mouths = (
        latents.latents_VCNYX[..., 4:7, 2:6].transpose(0, 2, 1, 3, 4).reshape(len(loudness), -1)
    )
    alike = [abs(np.corrcoef(loudness, mouth)[0, 1]) for mouth in mouths.T if mouth.std() > 1e-3]
    assert max(alike) > 0.7


def test_more_sentences_than_there_are_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="too few sentences"):
        features.speech_of(clips=10**6, cache=tmp_path)
