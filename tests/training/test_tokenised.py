"""Laws of tokenised data: every token once and in order, only assistant messages as labels, tokenised once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DataSpec, ModelSpec
from orchestrator.training.contract.recipe import IGNORED_LABEL
from orchestrator.training.data.dataset import TokenStreams, list_global_batch, split_micro_batches
from orchestrator.training.data.tokenised import load_dataset
from tests.training import gang, tiny_hf

LENGTH = 16
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# opens a turn with what earlier turns do not keep, as templates of reasoning models do
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ m['content'] | trim }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def dataset(
    home: Path, data: DataSpec, *, template: str | None = None, job: str = "job", **where: Any
) -> Any:
    """The samples of a job whose tokenizer has this chat template."""
    tiny_hf.tokenizer(template).save_pretrained(home / "tokenizer")
    model = ModelSpec(hf=str(home / "tokenizer"))
    run = gang.training_run(home, job, gang.torch_plan(), (), model=model, data=data)
    return load_dataset(run, **{"vocab_size": tiny_hf.VOCABULARY, "padding_token": None, **where})


def texts(home: Path, *contents: str) -> DataSpec:
    paths = [home / f"text-{n}" for n in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    return DataSpec(text=tuple(map(str, paths)), sequence_length=LENGTH)


def chats(home: Path, *talks: list[tuple[str, str]]) -> DataSpec:
    lines = (
        json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) for talk in talks
    )
    (home / "chat.jsonl").write_text("\n".join(lines))
    return DataSpec(chat=(str(home / "chat.jsonl"),), sequence_length=LENGTH)


def test_documents_follow_each_other_and_end_in_the_end_of_text(tmp_path: Path) -> None:
    contents = [tiny_hf.text(9), "one line", tiny_hf.text(3) * 2]
    samples = dataset(tmp_path, texts(tmp_path, *contents))
    tokens, labels = samples.batch(range(len(samples)))
    tokenizer = tiny_hf.tokenizer()
    expected = [
        token
        for text in contents
        for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ]
    assert labels[labels != IGNORED_LABEL].tolist() == expected[1:]
    assert tokens.flatten()[: len(expected) - 1].tolist() == expected[:-1]
    assert (labels[:-1] != IGNORED_LABEL).all(), "only the last sample is ragged"


def test_text_in_several_pieces_is_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dataset(tmp_path, texts(tmp_path, tiny_hf.text(40)))
    monkeypatch.setattr("orchestrator.training.data.tokenised.PIECE_CHARACTERS", 50)
    pieces = dataset(tmp_path, texts(tmp_path, tiny_hf.text(40)), job="pieces")
    assert len(whole) == len(pieces) > 3
    decoded = [
        tiny_hf.tokenizer().decode(samples.batch(range(len(samples)))[0].flatten())
        for samples in (whole, pieces)
    ]
    assert [text.rstrip("<s>") for text in decoded] == [
        tiny_hf.text(40)
    ] * 2  # padded by token 0, <s>


@pytest.mark.parametrize(
    "template", [None, tiny_hf.TEMPLATE, CHATML, THINKING], ids=["plain", "tags", "ml", "think"]
)
def test_only_assistant_messages_are_labels(tmp_path: Path, template: str | None) -> None:
    data = DataSpec(
        chat=(str(tiny_hf.chat_file(tmp_path / "chat.jsonl", copies=1)),), sequence_length=LENGTH
    )
    samples = dataset(tmp_path, data, template=template)
    _, labels = samples.batch(range(len(samples)))
    learnt = tiny_hf.tokenizer().decode(labels[labels != IGNORED_LABEL])
    answers = [text.strip() for talk in tiny_hf.TALKS for role, text in talk if role == "assistant"]
    marks = {CHATML: "<|im_end|>\n"}.get(template or "", "</s>")
    assert [text.removeprefix("</think>").strip() for text in learnt.split(marks)] == [*answers, ""]
    assert [samples.token_count(n) for n in range(len(samples))] == (labels != IGNORED_LABEL).sum(
        1
    ).tolist()


def test_samples_without_a_label_are_left_out(tmp_path: Path) -> None:
    long = " ".join(["alpha"] * 200)
    samples = dataset(tmp_path, chats(tmp_path, [("user", long), ("assistant", "beta")]))
    assert 1 <= len(samples) <= 2
    assert all(samples.token_count(n) for n in range(len(samples)))


def test_an_encoder_decoder_has_a_pair_for_every_answer(tmp_path: Path) -> None:
    data = DataSpec(
        chat=(str(tiny_hf.chat_file(tmp_path / "chat.jsonl", copies=1)),), sequence_length=LENGTH
    )
    samples = dataset(tmp_path, data, padding_token=2)
    tokens, labels = samples.batch(range(len(samples)))
    tokenizer = tiny_hf.tokenizer()
    assert tokens.shape == labels.shape == (5, LENGTH)
    assert tokenizer.decode(tokens[0][tokens[0] != 2]) == "what is two and two"
    answers = [tokenizer.decode(row[row != IGNORED_LABEL]) for row in labels]
    assert answers == [text for talk in tiny_hf.TALKS for role, text in talk if role == "assistant"]
    assert [samples.token_count(n) for n in range(5)] == (labels != IGNORED_LABEL).sum(1).tolist()


def test_token_files_are_read_as_they_are(tmp_path: Path) -> None:
    files = [tmp_path / "a.npy", tmp_path / "b.npy"]
    np.save(files[0], np.arange(20, dtype=np.uint16))
    np.save(files[1], np.arange(5, dtype=np.int64))
    data = DataSpec(tokens=tuple(map(str, files)), sequence_length=LENGTH)
    _, labels = dataset(tmp_path, data).batch([0, 1, 2])
    assert labels[labels != IGNORED_LABEL].tolist() == [*range(1, 20), *range(1, 5)]
    assert sorted(path.name for path in (tmp_path / "jobs" / "job" / "data").iterdir()) == [
        "about.json"
    ]


def test_a_job_is_tokenised_once_and_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    data = texts(tmp_path, tiny_hf.text())
    first = dataset(tmp_path, data).batch([0, 1, 2])
    stored = tmp_path / "jobs" / "job" / "data" / "tokens.bin"
    written = stored.stat().st_mtime_ns
    Path(data.text[0]).write_text("changed since")
    again = dataset(tmp_path, data).batch([0, 1, 2])
    assert stored.stat().st_mtime_ns == written
    assert all(torch.equal(batch, other) for batch, other in zip(first, again, strict=True))


def test_a_failed_tokenisation_leaves_no_files(tmp_path: Path) -> None:
    data = texts(tmp_path, tiny_hf.text(), "")
    with pytest.raises(SpecError, match="empty"):
        dataset(tmp_path, data)
    assert not (tmp_path / "jobs" / "job" / "data").exists()
    Path(data.text[1]).write_text("something")
    assert len(dataset(tmp_path, data))
    assert [
        path.name for path in (tmp_path / "jobs" / "job").iterdir() if path.name.startswith(".data")
    ] == []


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_order_of_samples_is_that_of_one_process_and_goes_on_after_a_restart(
    tmp_path: Path, dp: int
) -> None:
    samples = dataset(tmp_path, texts(tmp_path, tiny_hf.text()))
    batches = []
    for step in range(3):  # a restarted process knows only the step
        order = list_global_batch(step * 8, 8, len(samples), seed=3)
        shares = [
            split_micro_batches(order, rank, 8 // dp // 2, 2) if dp < 8 else []
            for rank in range(dp)
        ]
        batches += [samples.batch(batch)[0] for share in shares for batch in share]
    whole = [
        samples.batch(list_global_batch(step * 8, 8, len(samples), seed=3))[0] for step in range(3)
    ]
    assert torch.equal(torch.cat(batches), torch.cat(whole))


@given(
    streams=st.lists(st.lists(st.booleans(), max_size=30), min_size=1, max_size=3),
    length=st.integers(2, 9),
)
def test_marked_tokens_are_labels_exactly_once(streams: list[list[bool]], length: int) -> None:
    tokens = [np.arange(100 * n, 100 * n + len(marks)) for n, marks in enumerate(streams)]
    samples = TokenStreams(tokens, length, [np.array(marks, np.uint8) for marks in streams])
    expected = [
        int(t)
        for part, marks in zip(tokens, streams, strict=True)
        for t in part[1:][np.array(marks[1:], bool)]
    ]
    _, labels = samples.batch(range(len(samples)))
    assert labels[labels != IGNORED_LABEL].tolist() == expected
    assert [samples.token_count(n) for n in range(len(samples))] == (labels != IGNORED_LABEL).sum(
        1
    ).tolist()
    assert all(samples.token_count(n) for n in range(len(samples)))


BAD_LINES = {
    "not JSON": ("{", "bad.jsonl:2: data.chat: the line is not JSON"),
    "no messages": ('{"text": "a"}', "bad.jsonl:2: data.chat: the line is not a conversation"),
    "no content": (
        '{"messages": [{"role": "user"}]}',
        "bad.jsonl:2: data.chat: the line is not a conversation",
    ),
    "no answer": (
        '{"messages": [{"role": "user", "content": "a"}]}',
        "bad.jsonl:2: data.chat: nothing to learn",
    ),
    "not text": ("\\xff", "bad.jsonl:2: data.chat: the line is not JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    good = json.dumps({"messages": [{"role": "assistant", "content": "a"}]})
    (tmp_path / "bad.jsonl").write_bytes(f"{good}\n{line}\n".encode().replace(b"\\xff", b"\xff"))
    with pytest.raises(SpecError) as caught:
        dataset(tmp_path, DataSpec(chat=(str(tmp_path / "bad.jsonl"),), sequence_length=LENGTH))
    assert message in str(caught.value)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty.jsonl").write_text("\n")
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "negative.npy", np.array([1, -1]))
    np.save(tmp_path / "large.npy", np.array([1, tiny_hf.VOCABULARY]))
    (tmp_path / "no.npy").write_text("text")
    cases = {
        "latin:1: data.text: not UTF-8": DataSpec(text=(str(tmp_path / "latin"),)),
        "gone: data.text: the file cannot be read": DataSpec(text=(str(tmp_path / "gone"),)),
        "empty.jsonl: data.chat: the file is empty": DataSpec(
            chat=(str(tmp_path / "empty.jsonl"),)
        ),
        "float.npy: data.tokens: not token numbers": DataSpec(
            tokens=(str(tmp_path / "float.npy"),)
        ),
        "no.npy: data.tokens: not a .npy file": DataSpec(tokens=(str(tmp_path / "no.npy"),)),
        "a token number is negative": DataSpec(tokens=(str(tmp_path / "negative.npy"),)),
        "the model does not know": DataSpec(tokens=(str(tmp_path / "large.npy"),)),
        "no tokenizer": DataSpec(text=(str(tmp_path / "latin"),), tokenizer="/nowhere"),
    }
    for number, (message, data) in enumerate(cases.items()):
        with pytest.raises(SpecError) as caught:
            dataset(tmp_path, data, job=f"job-{number}")
        assert message in str(caught.value)


def test_an_encoder_decoder_takes_conversations_only(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="running text has none"):
        dataset(tmp_path, texts(tmp_path, "a b c"), padding_token=2)


def test_a_chat_template_that_hides_a_message_is_refused(tmp_path: Path) -> None:
    data = chats(tmp_path, [("user", "a"), ("assistant", "beta")])
    with pytest.raises(SpecError, match="changes an assistant message"):
        dataset(tmp_path, data, template="{% for m in messages %}{{ m['role'] }}{% endfor %}")
    with pytest.raises(SpecError, match="raised an error: no"):
        dataset(tmp_path, data, template="{{ raise_exception('no') }}", job="other")
