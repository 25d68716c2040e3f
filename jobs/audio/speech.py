"""Real speech, made on this machine: eSpeak NG reads sentences of the standard library.

The extra `audio` brings eSpeak NG's shared library and voices as a wheel (espeakng-loader). It is driven through its C
interface (espeak-ng/src/include/espeak-ng/speak_lib.h).
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import ctypes
import importlib.util
import io
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrator.specs.errors import SpecError

RATE_HZ = 22050  # what espeak_Initialize answers for every voice used here
SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: espeak_Synth returns when all sound was handed over
RATE_OF_WORDS = 1  # espeakRATE, words per minute
UTF8 = 1  # espeakCHARS_UTF8
# of a voice's noise: eSpeak NG's default is the time, so that every machine would have another
# sound
SEED = 0
READ = (
    "argparse",
    "json",
    "dataclasses",
    "typing",
    "inspect",
    "textwrap",
    "statistics",
    "fractions",
    "queue",
)
WAVE_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """One of eSpeak NG's voices at a speed, and how a person would describe it."""

    voice: str
    words_per_minute: int
    description: str


SPEAKERS = (
    Speaker(
        voice="en-us+m3", words_per_minute=175, description="A man speaks at a moderate speed."
    ),
    Speaker(
        voice="en-us+f3", words_per_minute=175, description="A woman speaks at a moderate speed."
    ),
    Speaker(voice="en-gb-scotland+m7", words_per_minute=240, description="A man speaks fast."),
    Speaker(voice="en-gb-scotland+f2", words_per_minute=130, description="A woman speaks slowly."),
)


def sentences(count: int, longest: int) -> list[str]:
    """The first `count` sentences of at most `longest` characters: the Zen of Python, then docstrings."""
    found = [sentence for text in _texts() for sentence in re.split(r"(?<=[.!?])\s+", text)]
    fitting = [
        sentence
        for sentence in found
        if len(sentence) <= longest and re.search(r"[a-z]{3}", sentence)
    ]
    distinct = list(dict.fromkeys(fitting))
    if len(distinct) < count:
        raise SpecError(
            "the standard library has too few sentences",
            path="clips",
            got=count,
            allowed=len(distinct),
        )
    return distinct[:count]


def clips(texts: list[str]) -> Iterator[tuple[Speaker, np.ndarray]]:
    """Speaker (in turn) and sound of each text: int16 at RATE_HZ. Raises SpecError if eSpeak NG is not installed."""
    library = _library()
    pieces: list[np.ndarray] = []

    def take(sound: ctypes._Pointer[ctypes.c_short], samples: int, _events: int | None) -> int:
        if sound and samples:
            pieces.append(np.ctypeslib.as_array(sound, (samples,)).copy())
        return 0

    callback = WAVE_CALLBACK(take)
    library.espeak_SetSynthCallback(callback)
    _done(library.espeak_ng_SetRandSeed(ctypes.c_long(SEED)))
    for number, text in enumerate(texts):
        speaker = SPEAKERS[number % len(SPEAKERS)]
        pieces.clear()
        encoded = text.encode()
        _done(library.espeak_SetVoiceByName(speaker.voice.encode()))
        _done(library.espeak_SetParameter(RATE_OF_WORDS, speaker.words_per_minute, 0))
        _done(
            library.espeak_Synth(
                encoded, ctypes.c_size_t(len(encoded) + 1), 0, 1, 0, UTF8, None, None
            )
        )
        yield speaker, np.concatenate(pieces)


def _texts() -> Iterator[str]:
    """`this` prints when it is imported; docstrings are read, nothing else is imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    yield from codecs.decode(this.s, "rot13").splitlines()[2:]  # behind its title
    for name in READ:
        spec = importlib.util.find_spec(name)
        source = Path((spec and spec.origin) or "").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield " ".join((ast.get_docstring(node) or "").split())


def _library() -> ctypes.CDLL:
    """A fresh copy of the library: eSpeak NG's state after a sentence changes the sound of later ones."""
    try:
        import espeakng_loader
    except ImportError:
        hint = "pip install 'orchestrator[audio]'"
        raise SpecError(
            "eSpeak NG is not installed here", path="espeakng_loader", hint=hint
        ) from None
    with tempfile.NamedTemporaryFile(suffix=".so") as own:
        shutil.copyfile(espeakng_loader.get_library_path(), own.name)
        library = ctypes.CDLL(own.name)
    rate_hz = library.espeak_Initialize(SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0)
    assert rate_hz == RATE_HZ, f"espeak_Initialize answered {rate_hz}"
    return library


def _done(code: int) -> None:
    assert code == 0, f"eSpeak NG answered {code}"
