"""Text and sound as one stream of tokens, as Orpheus-TTS trains Llama on: `python -m jobs.audio.orpheus FOLDER`.

Each sentence is its bytes, then seven tokens for every coarsest frame of three residual levels (one, two and four
numbers). Order and ranges of the seven are Orpheus' (canopyai/Orpheus-TTS, decoder.py, `turn_token_into_id`).
A job reads FOLDER/tokens.npy through `data: {tokens: ...}` with any transformers decoder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
from jobs.audio.features import Codes, Speech, codes_of, speech_of, starts

SCALES = (4, 2, 1)
PLACES = (
    (0, 0),
    (1, 0),
    (2, 0),
    (2, 1),
    (1, 1),
    (2, 2),
    (2, 3),
)  # (level, index in the level) of each of the seven
WORDS = 64
TEXT_BEGINS, TEXT_ENDS, SOUND_BEGINS, SOUND_ENDS, FIRST_SOUND = range(256, 261)  # bytes come before
VOCABULARY = FIRST_SOUND + len(PLACES) * WORDS


def stream(speech: Speech, codes: Codes) -> np.ndarray:
    """All sentences with their sounds, concatenated, int32."""
    parts: list[np.ndarray] = []
    for text, start, end in zip(speech.texts, starts(codes.ends), codes.ends, strict=True):
        parts += [
            np.array([TEXT_BEGINS, *text.encode(), TEXT_ENDS, SOUND_BEGINS]),
            seven_tokens(codes, slice(start, int(end))).ravel(),
            np.array([SOUND_ENDS]),
        ]
    return np.concatenate(parts).astype(np.int32)


def seven_tokens(codes: Codes, frames: slice) -> np.ndarray:
    """The tokens of coarsest frames, [frames, 7]; each of the seven has its own range."""
    columns = []
    for place, (level, turn) in enumerate(PLACES):
        per_frame = SCALES[0] // SCALES[level]
        numbers = codes.levels[level][frames.start * per_frame : frames.stop * per_frame]
        columns.append(FIRST_SOUND + place * WORDS + numbers.reshape(-1, per_frame)[:, turn])
    return np.stack(columns, axis=1)


def write(folder: Path, *, clips: int = 64, cache: Path | None = None) -> Path:
    """Write FOLDER/tokens.npy unless it exists; returns its path."""
    path = folder / "tokens.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        speech = speech_of(clips=clips, cache=cache)
        np.save(path, stream(speech, codes_of(speech, scales=SCALES, words=WORDS)))
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
