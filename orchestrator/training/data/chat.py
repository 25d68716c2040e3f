"""Tokenises conversations from JSON-lines files, and marks the tokens that are labels.

A line is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`. Only assistant
messages are labels. The tokenizer's chat template renders a conversation. Without a template each message is `role:
content` and a newline; an assistant's message is followed by the end-of-text token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.specs.errors import SpecError

ASSISTANT = "assistant"

Message = dict[str, str]
Marked = tuple[list[int], list[int]]  # tokens, and for each of them 1 if it is a label, else 0


def read_conversations(files: Sequence[str]) -> Iterator[tuple[str, list[Message]]]:
    """Yield (`file:line`, messages) of every conversation. Raises SpecError, naming file and line."""
    for name in files:
        has_lines = False
        with _open_conversations(name) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    has_lines = True
                    yield f"{name}:{number}", _parse_messages(line, f"{name}:{number}")
        if not has_lines:
            raise SpecError("the file is empty", source=name, path="data.chat")


def _open_conversations(file_path: str) -> Any:
    try:
        return Path(file_path).open("rb")
    except OSError as error:
        raise SpecError(
            f"the file cannot be read: {error.strerror}", source=file_path, path="data.chat"
        ) from None


def _parse_messages(json_line: bytes, file_and_line: str) -> list[Message]:
    try:
        entry = json.loads(json_line.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the line is not JSON: {error}", source=file_and_line, path="data.chat"
        ) from None
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        form = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
        raise SpecError(
            "the line is not a conversation",
            source=file_and_line,
            path="data.chat",
            got=entry,
            allowed=form,
        )
    if not any(message["role"] == ASSISTANT for message in messages):
        raise SpecError(
            "nothing to learn: no message of an assistant", source=file_and_line, path="data.chat"
        )
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def mark_tokens(tokenizer: Any, messages: list[Message], file_and_line: str) -> Marked:
    """Return a conversation's tokens, and which of them are labels: those of assistant messages
    with their end-of-turn tokens.
    """
    if tokenizer.chat_template is None:
        return _render_without_template(tokenizer, messages)
    text, spans = _render_marked(tokenizer, messages, file_and_line)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [first for first, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], [
        int(any(low <= first < high for low, high in spans)) for first in starts
    ]


def _render_without_template(tokenizer: Any, messages: list[Message]) -> Marked:
    tokens: list[int] = []
    learnt: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for message in messages:
        is_learnt = message["role"] == ASSISTANT
        parts = [(f"{message['role']}: ", False), (message["content"], is_learnt)]
        pieces = [
            (tokenizer(text, add_special_tokens=False)["input_ids"], mark) for text, mark in parts
        ]
        if is_learnt:
            pieces.append((end, True))
        pieces.append((tokenizer("\n", add_special_tokens=False)["input_ids"], False))
        for piece, mark in pieces:
            tokens += piece
            learnt += [int(mark)] * len(piece)
    return tokens, learnt


def _render_marked(
    tokenizer: Any, messages: list[Message], file_and_line: str
) -> tuple[str, list[tuple[int, int]]]:
    """Return (text of the conversation by the chat template, spans of its assistant messages)."""
    whole = _render(tokenizer, messages, file_and_line)
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        content = message["content"].strip()  # many templates strip it
        before = (
            _render(tokenizer, messages[:turn], file_and_line, add_generation_prompt=True)
            if turn
            else ""
        )
        if whole.startswith(before):
            opened = len(before)
        elif spans:
            opened = spans[-1][1]
        else:
            opened = 0
        begin = whole.find(content, opened)
        if begin < 0:
            raise SpecError(
                "the chat template changes an assistant message",
                source=file_and_line,
                path="data.chat",
            )
        alone = _render(tokenizer, messages[: turn + 1], file_and_line)
        closing = alone[alone.rfind(content) + len(content) :]
        stop = begin + len(content)
        if whole.startswith(closing, stop):
            stop += len(closing)
        spans.append((opened if whole.startswith(before) and before else begin, stop))
    return whole, spans


def _render(
    tokenizer: Any, messages: list[Message], file_and_line: str, **template_settings: Any
) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **template_settings)
    except Exception as error:  # jinja2's errors, and those that a template raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(
            f"the chat template raised an error: {reason}", source=file_and_line, path="data.chat"
        ) from None


def make_token_pairs(
    tokenizer: Any, messages: list[Message], tokens_max: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (input tokens, target tokens) for each assistant message, for an encoder-decoder; each
    is cut to `tokens_max`.
    """
    for turn, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before = "\n".join(earlier["content"] for earlier in messages[:turn])
            texts = ({"text": before}, {"text_target": message["content"]})
            source, target = (
                tokenizer(**text, truncation=True, max_length=tokens_max)["input_ids"]
                for text in texts
            )
            yield source, target
