"""The data of a transformers model: tokenised once, then memory-mapped by every rank.

The first rank tokenises into the job's folder, which all ranks share as they share its checkpoints. The others wait.
Later attempts reuse the tokens: they continue with the same samples even if the files have changed.

data/about.json     {largest token, count of tokens}
data/tokens.bin     int32; concatenated documents, each with the tokenizer's own start and end tokens
data/learnt.bin     chat only: a byte per token, 1 if it is a label
data/bounds.bin     encoder-decoders only: int64, the end of each input and each target in tokens.bin
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DataSpec
from orchestrator.specs.run import TrainingRun
from orchestrator.training.contract.recipe import IGNORED_LABEL, Dataset
from orchestrator.training.data import chat
from orchestrator.training.data.dataset import BYTE_VOCABULARY, TextDataset, TokenStreams

PIECE_CHARACTERS = 2**20  # size of the pieces, of whole lines, in which text is tokenised
PIECES_AT_ONCE = 16  # a fast tokenizer works on them in parallel
SCANNED_AT_ONCE = 2**24  # tokens in memory during the search for the largest
WAIT_S = 24 * 3600.0  # for the first rank to tokenise; the job's start-up limit is shorter
POLL_S = 0.2


@dataclass(frozen=True, eq=False)
class PairDataset:
    """Encoder-decoder samples: inputs and targets, each truncated and padded to `length` tokens."""

    tokens: np.ndarray
    bounds: np.ndarray
    length: int
    padding: int

    def __len__(self) -> int:
        return len(self.bounds) // 2

    def token_count(self, index: int) -> int:
        """Return the number of tokens in a sample's target."""
        return min(self.length, int(self.bounds[2 * index + 1] - self.bounds[2 * index]))

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (input tokens, target labels), int64 [len(indices), sequence_length], padded by pad token and -100."""
        tokens = torch.full((len(indices), self.length), self.padding, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED_LABEL)
        for row, index in enumerate(indices):
            for into, piece in ((tokens, 2 * index), (labels, 2 * index + 1)):
                first = int(self.bounds[piece - 1]) if piece else 0
                values = self.tokens[first : self.bounds[piece]][: self.length].astype(np.int64)
                into[row, : len(values)] = torch.from_numpy(values)
        return tokens, labels


def load_dataset(run: TrainingRun, *, vocab_size: int, padding_token: int | None) -> Dataset:
    """Return the samples of a run, tokenized if needed. `padding_token` is that of an
    encoder-decoder; None for a decoder.

    Raises SpecError if files cannot be read, hold no sample, or hold tokens outside the model's
    vocabulary.
    """
    data = run.data
    length = run.plan.sequence_length or run.data.sequence_length
    if padding_token is not None and not data.chat:
        raise SpecError(
            "an encoder-decoder needs inputs and targets: running text has none",
            path="data",
            allowed="data.chat",
            hint="write each example as one user and one assistant message",
        )
    if data.tokens:
        return _load_token_files(run, length, vocab_size)
    source = find_tokenizer_source(run)
    if source is None:
        return _load_byte_dataset(data, length, vocab_size)
    folder = Path(run.job_folder) / "data"
    _fill_once(
        folder, lambda into: _tokenise(into, data, source, as_pairs=padding_token is not None)
    )
    _check_vocabulary(folder, vocab_size)
    tokens = _map_file(folder / "tokens.bin", np.int32)
    dataset: Dataset
    if padding_token is not None:
        dataset = PairDataset(
            tokens, np.fromfile(folder / "bounds.bin", np.int64), length, padding_token
        )
    else:
        learnt = [_map_file(folder / "learnt.bin", np.uint8)] if data.chat else None
        dataset = TokenStreams([tokens], length, learnt)
    return _check_not_empty(dataset, data)


def _check_not_empty(dataset: Dataset, data: DataSpec) -> Dataset:
    if not len(dataset):
        raise SpecError(
            "the files hold no sample: a sample needs two tokens", path="data", got=list(data.files)
        )
    return dataset


def find_tokenizer_source(run: TrainingRun) -> str | None:
    """Return the folder or hub name of the tokenizer; None if neither the job nor the model has
    one.
    """
    return run.data.tokenizer or (run.model.hf if isinstance(run.model.hf, str) else None)


def _load_byte_dataset(data: DataSpec, sequence_length: int, vocab_size: int) -> Dataset:
    if data.chat:
        raise SpecError(
            "a conversation needs a tokenizer",
            path="data.tokenizer",
            allowed="a folder, or a hub's name",
        )
    if vocab_size < BYTE_VOCABULARY:
        raise SpecError(
            "text without a tokenizer is bytes",
            path="model.hf.vocab_size",
            got=vocab_size,
            hint="set `data.tokenizer`, or a larger vocabulary",
        )
    return TextDataset(data.text, sequence_length)


def _load_token_files(run: TrainingRun, sequence_length: int, vocab_size: int) -> Dataset:
    streams = [_map_token_file(name) for name in run.data.tokens]
    folder = Path(run.job_folder) / "data"
    _fill_once(
        folder,
        lambda into: _write_token_statistics(
            into, max(map(_find_largest_token, streams)), sum(map(len, streams))
        ),
    )
    _check_vocabulary(folder, vocab_size)
    return _check_not_empty(TokenStreams(streams, sequence_length), run.data)


def _map_token_file(file_path: str) -> np.ndarray:
    try:
        array = np.load(file_path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SpecError(f"not a .npy file: {error}", source=file_path, path="data.tokens") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise SpecError(
            "not token numbers",
            source=file_path,
            path="data.tokens",
            got=f"{array.dtype} {list(array.shape)}",
            allowed="integers [tokens]",
        )
    return array


def _find_largest_token(tokens: np.ndarray) -> int:
    """Return the largest token. Raises SpecError if one is negative."""
    largest = 0
    for start in range(0, len(tokens), SCANNED_AT_ONCE):
        part = tokens[start : start + SCANNED_AT_ONCE]
        if int(part.min()) < 0:
            raise SpecError("a token number is negative", path="data.tokens", got=int(part.min()))
        largest = max(largest, int(part.max()))
    return largest


def _fill_once(folder: Path, fill_folder: Callable[[Path], None]) -> None:
    """Fill `folder` atomically on the first rank, while the other ranks wait until it exists."""
    if dist.is_initialized() and dist.get_rank() > 0:
        deadline_s = time.monotonic() + WAIT_S
        while not folder.is_dir():
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"{folder} did not appear within {WAIT_S:.0f} s: all nodes must share this folder"
                )
            time.sleep(POLL_S)
    elif not folder.is_dir():
        for left in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
        temporary.mkdir(parents=True)
        fill_folder(temporary)
        temporary.rename(folder)


def _check_vocabulary(folder: Path, vocab_size: int) -> None:
    largest = json.loads((folder / "about.json").read_text())["largest"]
    if largest >= vocab_size:
        raise SpecError(
            "the data hold tokens that the model does not know",
            path="data",
            got=largest,
            allowed=f"tokens below {vocab_size}, the model's vocabulary",
            hint="use the tokenizer of this model",
        )


def _write_token_statistics(folder: Path, largest_token: int, token_count: int) -> None:
    (folder / "about.json").write_text(
        json.dumps({"largest": largest_token, "tokens": token_count})
    )


def _tokenise(
    target_folder: Path, data: DataSpec, tokenizer_source: str, *, as_pairs: bool
) -> None:
    tokenizer = read_tokenizer(tokenizer_source)
    largest = count = 0
    with (
        (target_folder / "tokens.bin").open("wb") as tokens,
        (target_folder / "learnt.bin").open("wb") as learnt,
    ):
        bounds = []
        for ids, marks in _list_document_tokens(data, tokenizer, as_pairs=as_pairs):
            np.asarray(ids, np.int32).tofile(tokens)
            np.asarray(marks, np.uint8).tofile(learnt)
            if ids:
                largest = max(largest, *ids)
            count += len(ids)
            bounds.append(count)
    if as_pairs:
        np.asarray(bounds, np.int64).tofile(target_folder / "bounds.bin")
    _write_token_statistics(target_folder, largest, count)


def _list_document_tokens(
    data: DataSpec, tokenizer: Any, *, as_pairs: bool
) -> Iterator[chat.Marked]:
    """Yield each document's tokens in stored order, with label marks for chat.

    For encoder-decoders, inputs and targets alternate.
    """
    if data.text:
        yield from ((ids, []) for ids in _tokenise_texts(data.text, tokenizer))
        return
    for place, messages in chat.read_conversations(data.chat):
        if as_pairs:
            for source, target in chat.make_token_pairs(tokenizer, messages, data.sequence_length):
                yield source, []
                yield target, []
        else:
            yield chat.mark_tokens(tokenizer, messages, place)


def _tokenise_texts(files: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield each file's tokens as one document, with the tokenizer's start tokens and its
    end-of-text token.
    """
    begin = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in files:
        yield begin
        pieces = _read_text_pieces(name)
        while batch := list(islice(pieces, PIECES_AT_ONCE)):
            yield from tokenizer(batch, add_special_tokens=False)["input_ids"]
        yield end


def _read_text_pieces(file_path: str) -> Iterator[str]:
    """Yield the text of a file in pieces of whole lines. Raises SpecError if the file cannot be
    read or is empty.
    """
    lines_read: list[str] = []
    size = number = 0
    try:
        with Path(file_path).open("rb") as lines:
            for line in lines:
                number += 1
                lines_read.append(line.decode("utf-8"))
                size += len(line)
                if size >= PIECE_CHARACTERS:
                    yield "".join(lines_read)
                    lines_read = []
                    size = 0
    except UnicodeDecodeError as error:
        raise SpecError(
            f"not UTF-8 text: {error.reason}", source=f"{file_path}:{number}", path="data.text"
        ) from None
    except OSError as error:
        raise SpecError(
            f"the file cannot be read: {error.strerror}", source=file_path, path="data.text"
        ) from None
    if not number:
        raise SpecError("the file is empty", source=file_path, path="data.text")
    if lines_read:
        yield "".join(lines_read)


def read_tokenizer(folder_or_hub_name: str) -> Any:
    """Return the tokenizer in a folder or of a hub name. Raises SpecError if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder_or_hub_name,
            local_files_only=Path(folder_or_hub_name).is_dir(),
            trust_remote_code=False,
        )
    except (OSError, ValueError, ImportError) as error:
        hint = "set `data.tokenizer` to a folder with tokenizer.json, or to a name on the hub or in its local cache"
        reason = str(error).splitlines()[0]
        raise SpecError(
            f"no tokenizer: {reason}", path="data.tokenizer", got=folder_or_hub_name, hint=hint
        ) from None
    # samples are cut here, so a warning about long texts would mislead
    tokenizer.model_max_length = 2**62
    return tokenizer


def _map_file(path: Path, dtype: Any) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
