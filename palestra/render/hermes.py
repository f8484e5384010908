"""ChatML with Hermes tool calls: Qwen2.5, Qwen3, SmolLM3, Hermes, and SmolLM2, whose own template knows no tools.

What differs between these families is a `Dialect`. Earlier thinking is never taken out of a conversation, unlike in Qwen3's own
template: a prompt must stay the beginning of all that follows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from palestra.errors import ModelError
from palestra.message import Message, ToolCall
from palestra.render.calls import MAX_CALLS, CallFormat, name_in, refuse_faults, to_json_text
from palestra.render.content import text_of
from palestra.render.thinking import MARKS, joined, take_thinking
from palestra.render.tokenizer import Own, Piece, Tokenizer
from palestra.tool import Schema
from palestra.trajectory import FinishReason

CALL_MARKS = ("<tool_call>", "</tool_call>")

# Qwen and SmolLM3 are trained on these very words.
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

_FORMAT = CallFormat(
    keys=("arguments",),
    example='<tool_call>\n{"name": "tool_name", "arguments": {"key": "value"}}\n</tool_call>',
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a family does in its own way."""

    default_system: str = ""
    """Said when a conversation has no system message."""
    empty_thought: str = ""
    """Put at the start of a reply to keep the model from thinking."""


PLAIN = Dialect()
QWEN2_5 = Dialect(default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
QWEN3 = Dialect(empty_thought="<think>\n\n</think>\n\n")
# SmolLM3's template also states today's date and a reasoning mode. Here its system turn is what `/system_override` gives:
# the given text and no more, so that a run means the same tomorrow.
SMOLLM3 = Dialect(empty_thought="<think>\n\n</think>\n")


class Hermes:
    """A `Renderer`. With thinking "off" a dialect that can think is given an empty thought; with "keep" the model decides."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect = PLAIN, thinking: Literal["keep", "off"] = "off") -> None:
        if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.markers:
            raise ModelError(f"{tokenizer.folder}: no <|im_start|> and <|im_end|> in its tokenizer; use family 'jinja' or 'auto'")
        self._tokenizer = tokenizer
        self._default_system = dialect.default_system
        self._thought = dialect.empty_thought if thinking == "off" else ""
        # A base model may still end with its own end of text; it would otherwise write on to the limit.
        self.stop_ids = tokenizer.ids("<|im_end|>", "<|endoftext|>", "<|end_of_text|>")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        return self._tokenizer.encode([*self._system(messages, tools), *_turns(_after_system(messages)), self._opening])

    def follow(self, finish: FinishReason, messages: Sequence[Message]) -> list[int]:
        closing = Own("\n") if finish == "stop" else Own("<|im_end|>\n")
        return self._tokenizer.encode([closing, *_turns(messages), self._opening])

    def reply(self, message: Message) -> list[int]:
        refuse_faults(message)
        if self._thought and message.thinking is not None:
            raise ModelError(
                "a reply with thinking cannot be learnt while thinking is off; set thinking to 'keep' or leave it out"
            )
        return self._tokenizer.encode([*_written(message), Own("<|im_end|>")])

    def parse(self, tokens: Sequence[int]) -> Message:
        end = next((index for index, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        return read_reply(self._tokenizer.split(tokens[:end], (*MARKS, *CALL_MARKS)))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    @property
    def _opening(self) -> Own:
        return Own("<|im_start|>assistant\n" + self._thought)

    def _system(self, messages: Sequence[Message], tools: Sequence[Schema]) -> Iterator[Piece]:
        given = bool(messages) and messages[0].role == "system"
        text = text_of(messages[0]) if given else self._default_system
        if not (given or text or tools):
            return
        yield Own("<|im_start|>system\n")
        yield text
        if tools:
            yield Own(("\n\n" if given or text else "") + _TOOLS_HEAD)
            for tool in tools:
                yield "\n" + to_json_text(tool)
            yield Own(_TOOLS_TAIL)
        yield Own("<|im_end|>\n")


def read_reply(pieces: Sequence[Piece], opened: bool = False) -> Message:
    """A reply cut at `<think>` and `<tool_call>` and their closings, read from left to right once."""
    thinking, pieces = take_thinking(pieces, opened)
    open_mark, close_mark = map(Own, CALL_MARKS)
    said: list[list[Piece]] = [[]]
    bodies: list[tuple[str, bool]] = []
    body: list[Piece] | None = None
    for piece in pieces:
        if piece == open_mark:
            if body is not None:
                bodies.append((joined(body), False))
            body = []
            said.append([])
        elif piece == close_mark and body is not None:
            bodies.append((joined(body), True))
            body = None
        else:
            (said[-1] if body is None else body).append(piece)
    if body is not None:
        bodies.append((joined(body), False))
    return Message("assistant", _content([joined(part) for part in said]), _calls(bodies), thinking=thinking)


def _content(parts: Sequence[str]) -> str:
    """The text before, between and behind the calls, without the line breaks that only set a call apart."""
    if len(parts) == 1:
        return parts[0]
    return "".join(part for part in (parts[0].removesuffix("\n"), *parts[1:]) if part.strip())


def _calls(bodies: Sequence[tuple[str, bool]]) -> tuple[ToolCall, ...]:
    calls = [_call(body, closed, index) for index, (body, closed) in enumerate(bodies[:MAX_CALLS])]
    if len(bodies) > MAX_CALLS:
        calls.append(_FORMAT.too_many())
    return tuple(calls)


def _call(body: str, closed: bool, index: int) -> ToolCall:
    if not closed:
        return _FORMAT.fault("it was cut off before its </tool_call>", index, name_in(body))
    return _FORMAT.read(body, index)


def _after_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[1:] if messages and messages[0].role == "system" else messages


def _turns(messages: Sequence[Message]) -> Iterator[Piece]:
    """Messages as closed turns. Results that follow one another share one user turn."""
    for index, message in enumerate(messages):
        if message.role == "tool":
            if index == 0 or messages[index - 1].role != "tool":
                yield Own("<|im_start|>user")
            yield Own("\n<tool_response>\n")
            yield text_of(message)
            yield Own("\n</tool_response>")
            if index + 1 == len(messages) or messages[index + 1].role != "tool":
                yield Own("<|im_end|>\n")
        else:
            yield Own(f"<|im_start|>{message.role}\n")
            yield from _written(message)
            yield Own("<|im_end|>\n")


def _written(message: Message) -> Iterator[Piece]:
    """A message as its author writes it, up to the end of its turn."""
    text = text_of(message)
    if message.thinking is not None:
        yield Own("<think>\n")
        yield message.thinking.strip("\n")
        yield Own("\n</think>\n\n")
    yield text
    for index, call in enumerate(message.calls):
        yield Own("\n<tool_call>\n" if text or index else "<tool_call>\n")
        yield _FORMAT.write(call)
        yield Own("\n</tool_call>")
