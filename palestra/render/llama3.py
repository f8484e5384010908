"""Llama 3.1 and later: header turns, JSON tool calls, results in the `ipython` role.

Tools stand in the first user message, as in Meta's template. That of Llama 3.2 states today's date; here it is always 3.1's,
so that a run means the same tomorrow.
"""

import json
import re
from collections.abc import Iterator, Sequence

from palestra.errors import ModelError
from palestra.message import Message, ToolCall
from palestra.render.calls import MAX_CALLS, CallFormat, Unreadable, decode, name_in, refuse_faults, to_json_text
from palestra.render.content import text_of
from palestra.render.thinking import MARKS, joined, take_thinking
from palestra.render.tokenizer import Own, Piece, Tokenizer
from palestra.tool import Schema
from palestra.trajectory import FinishReason

TAG = "<|python_tag|>"

# The model is trained on these very words, missing space included.
_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_TOOLS_HEAD = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)

_FORMAT = CallFormat(keys=("parameters", "arguments"), example='{"name": "tool_name", "parameters": {"key": "value"}}')

# A call begins a line, so that JSON in the middle of a sentence is only quoted. The next may follow behind a semicolon.
_FIRST = re.compile(r'(?:\A|\n)[ \t]*(?=\{\s*"name"\s*:)')
_NEXT = re.compile(r"\s*(?:;\s*)?(?=\{)")


class Llama3:
    """A `Renderer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        needed = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
        if missing := needed - tokenizer.markers:
            raise ModelError(f"{tokenizer.folder}: no {min(missing)} in its tokenizer, so it is no Llama 3; use family 'auto'")
        self._tokenizer = tokenizer
        self.stop_ids = tokenizer.ids("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        return self._tokenizer.encode([*_conversation(messages, tools), _header("assistant")])

    def follow(self, finish: FinishReason, messages: Sequence[Message]) -> list[int]:
        closing = Own("") if finish == "stop" else Own("<|eot_id|>")
        return self._tokenizer.encode([closing, *_turns(messages), _header("assistant")])

    def reply(self, message: Message) -> list[int]:
        refuse_faults(message)
        return self._tokenizer.encode([*_written(message, text_of(message)), Own("<|eot_id|>")])

    def parse(self, tokens: Sequence[int]) -> Message:
        end = next((index for index, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        return read_reply(self._tokenizer.split(tokens[:end], (*MARKS, TAG)))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)


def read_reply(pieces: Sequence[Piece], opened: bool = False) -> Message:
    """A reply cut at `<think>`, `</think>` and `<|python_tag|>`. Behind the tag all is calls; without it, a call is a line that
    begins with `{"name":`."""
    thinking, pieces = take_thinking(pieces, opened)
    if Own(TAG) in pieces:
        tag = pieces.index(Own(TAG))
        text = joined(pieces[tag + 1 :]).lstrip()
        rest, calls = _scan(text, 0)
        content = joined(pieces[:tag]) + rest
    else:
        text = joined(pieces)
        first = _FIRST.search(text)
        content, calls = _scan(text, first.end()) if first else (text, [])
    return Message("assistant", content, tuple(calls), thinking=thinking)


def _scan(text: str, start: int) -> tuple[str, list[ToolCall]]:
    """The calls from `start` on, and the text around them."""
    said = [text[:start].rstrip(" \t").removesuffix("\n")]
    calls: list[ToolCall] = []
    while True:
        end = _take(text, start, calls)
        following = _NEXT.match(text, end) or _FIRST.search(text, end)
        said.append(text[end : following.start() if following else len(text)])
        if following is None:
            break
        if len(calls) == MAX_CALLS:
            calls.append(_FORMAT.too_many())
            break
        start = following.end()
    return "".join(part for part in said if part.strip()), calls


def _take(text: str, start: int, calls: list[ToolCall]) -> int:
    """Add the call at `start`, and say where it ends. A broken one ends where the next begins."""
    try:
        value, end = decode(text, start)
    except Unreadable as error:
        following = _FIRST.search(text, start + 1)
        end = following.start() if following else len(text)
        calls.append(_FORMAT.fault(str(error), len(calls), name_in(text[start:end])))
        return end
    calls.append(_FORMAT.check(value, len(calls)))
    return end


def _conversation(messages: Sequence[Message], tools: Sequence[Schema]) -> Iterator[Piece]:
    given = bool(messages) and messages[0].role == "system"
    rest = messages[1:] if given else messages
    yield Own("<|begin_of_text|>")
    yield _header("system")
    yield Own(("Environment: ipython\n" if tools else "") + _DATES)
    yield text_of(messages[0]).strip() if given else ""
    yield Own("<|eot_id|>")
    if tools:
        if not rest or rest[0].role != "user":
            raise ModelError("Llama 3 reads its tools in the first user message; begin the conversation with one")
        yield _header("user")
        yield Own(_TOOLS_HEAD)
        for tool in tools:
            yield json.dumps(tool, ensure_ascii=False, indent=4) + "\n\n"
        yield text_of(rest[0]).strip()
        yield Own("<|eot_id|>")
        rest = rest[1:]
    yield from _turns(rest)


def _header(role: str) -> Own:
    return Own(f"<|start_header_id|>{role}<|end_header_id|>\n\n")


def _turns(messages: Sequence[Message]) -> Iterator[Piece]:
    for message in messages:
        text = text_of(message)
        if message.role == "tool":
            yield _header("ipython")
            yield to_json_text(text)
        else:
            yield _header(message.role)
            yield from _written(message, text.strip())
        yield Own("<|eot_id|>")


def _written(message: Message, text: str) -> Iterator[Piece]:
    """A message as its author writes it, up to the end of its turn."""
    if message.thinking is not None:
        yield Own("<think>\n")
        yield message.thinking.strip("\n")
        yield Own("\n</think>\n\n")
    yield text
    if message.calls:
        # The tag tells calls from the text before them; without text Meta's template leaves it out.
        yield Own(TAG if text else "")
        yield "; ".join(_FORMAT.write(call) for call in message.calls)
