"""Laws of the data: every sample once per epoch, in an order by the seed alone, the same in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.specs.errors import SpecError
from orchestrator.training.contract.recipe import IGNORED_LABEL
from orchestrator.training.data.dataset import (
    TextDataset,
    compute_sample_index,
    list_global_batch,
    split_micro_batches,
)


@given(size=st.integers(1, 300), epoch=st.integers(0, 3), seed=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation_of_all_samples(size: int, epoch: int, seed: int) -> None:
    positions = range(epoch * size, (epoch + 1) * size)
    assert sorted(compute_sample_index(position, size, seed) for position in positions) == list(
        range(size)
    )


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(list_global_batch(first, 100, 100, seed))
        for first in (0, 100, 200)
        for seed in (0, 1)
    }
    assert len(orders) == 6
    assert tuple(range(100)) not in orders


@given(first=st.integers(0, 10**9), size=st.integers(1, 10**6), seed=st.integers(0, 10))
def test_a_batch_is_a_function_of_position_and_seed_alone(first: int, size: int, seed: int) -> None:
    whole = list_global_batch(first, 12, size, seed)
    assert (
        list_global_batch(first, 5, size, seed) + list_global_batch(first + 5, 7, size, seed)
        == whole
    )


@given(dp=st.integers(1, 6), micro=st.integers(1, 4), accumulation=st.integers(1, 5))
def test_every_layout_takes_the_same_samples(dp: int, micro: int, accumulation: int) -> None:
    samples = list(range(dp * micro * accumulation))
    shares = [split_micro_batches(samples, rank, micro, accumulation) for rank in range(dp)]
    assert all([len(batch) for batch in share] == [micro] * accumulation for share in shares)
    assert [sample for share in shares for batch in share for sample in batch] == samples


@given(dp=st.integers(1, 6), micro=st.integers(1, 4), accumulation=st.integers(1, 5))
def test_ranks_that_normalise_together_take_consecutive_samples_at_a_time(
    dp: int, micro: int, accumulation: int
) -> None:
    samples = list(range(dp * micro * accumulation))
    shares = [
        split_micro_batches(samples, rank, micro, accumulation, normalised_ranks=dp)
        for rank in range(dp)
    ]
    assert [
        sample for turn in zip(*shares, strict=True) for batch in turn for sample in batch
    ] == samples


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), length=st.integers(2, 9))
def test_every_byte_but_the_first_of_a_file_is_a_label_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    contents = [
        bytes((index * 31 + n) % 256 for n in range(size)) for index, size in enumerate(sizes)
    ]
    files = [_write(folder / str(index), content) for index, content in enumerate(contents)]
    expected = [byte for content in contents for byte in content[1:]]
    if not expected:
        with pytest.raises(SpecError, match="no sample"):
            TextDataset(files, length)
        return
    dataset = TextDataset(files, length)
    tokens, labels = dataset.batch(range(len(dataset)))
    assert tokens.shape == labels.shape == (len(dataset), length)
    assert labels[labels != IGNORED_LABEL].tolist() == expected
    assert [dataset.token_count(index) for index in range(len(dataset))] == (
        labels != IGNORED_LABEL
    ).sum(1).tolist()


def test_a_label_is_the_token_that_follows(tmp_path: Path) -> None:
    dataset = TextDataset([_write(tmp_path / "a", b"abcdefg")], 4)
    tokens, labels = dataset.batch([0, 1])
    assert tokens.tolist() == [list(b"abcd"), [*b"ef", 0, 0]]
    assert labels.tolist() == [list(b"bcde"), [*b"fg", IGNORED_LABEL, IGNORED_LABEL]]
    assert tokens.dtype == torch.int64


def test_a_missing_file_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such text file"):
        TextDataset([str(tmp_path / "gone")], 4)


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)
