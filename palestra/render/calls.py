"""Tool calls as models write them: strict JSON in, `ToolCall` out. What cannot be read becomes a fault that tells the model why.

Where in a reply a call begins and ends is the business of `hermes.py` and `llama3.py`.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

from palestra.errors import ModelError
from palestra.message import JSON, Message, ToolCall

MAX_CALLS = 16
"""A reply's calls beyond these are answered with one fault, so that a model that repeats itself cannot flood its context."""

_MAX_DEPTH = 64  # far below what would exhaust the stack of whoever handles the arguments next
_MAX_DIGITS = 300  # Python refuses to print far longer ones


class Unreadable(ValueError):
    """Why a call cannot be read, in words for the model."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes a call: under which key its arguments stand, and what a right one looks like."""

    keys: tuple[str, ...]
    example: str

    def write(self, call: ToolCall) -> str:
        return f'{{"name": {to_json_text(call.name)}, "{self.keys[0]}": {to_json_text(dict(call.arguments))}}}'

    def read(self, text: str, index: int) -> ToolCall:
        """One call, from text that holds nothing else."""
        body = text.strip()
        if not body:
            return self.fault("it is empty", index)
        try:
            value, end = decode(body)
            if end < len(body):
                raise Unreadable(f"there is more text after its JSON object: {body[end : end + 40]!r}")
        except Unreadable as error:
            return self.fault(str(error), index, name_in(body))
        return self.check(value, index)

    def check(self, value: JSON, index: int) -> ToolCall:
        """One call, from its JSON value."""
        if not isinstance(value, dict):
            return self.fault("it must be a JSON object", index)
        name = value.get("name")
        if not isinstance(name, str) or not name:
            return self.fault('it has no "name" of a tool', index)
        key = next((key for key in self.keys if key in value), None)
        if key is None:
            return self.fault(f'it has no "{self.keys[0]}"; give {{}} when there are none', index, name)
        if not isinstance(value[key], dict):
            return self.fault(f'its "{key}" must be a JSON object', index, name)
        return ToolCall(f"call_{index}", name, value[key])

    def fault(self, reason: str, index: int, name: str = "") -> ToolCall:
        return ToolCall(
            f"call_{index}", name, {}, f"This tool call could not be read: {reason}. The right format is:\n{self.example}"
        )

    def too_many(self) -> ToolCall:
        text = f"A reply may call at most {MAX_CALLS} tools; those behind were left out. Call again for what is still needed."
        return ToolCall(f"call_{MAX_CALLS}", "", {}, text)


def decode(text: str, start: int = 0) -> tuple[JSON, int]:
    """The JSON value at `start`, and where it ends. Only what every JSON reader understands alike is accepted."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise Unreadable("it was cut off, or a quote or bracket is not closed") from None
        if error.msg.startswith("Invalid control character"):
            raise Unreadable("a string in it holds a bare line break or tab; write them as \\n and \\t") from None
        around = text[max(start, error.pos - 20) : error.pos + 20]
        raise Unreadable(f"its JSON is broken at character {error.pos - start}, near {around!r} ({error.msg})") from None
    except RecursionError:
        raise Unreadable("its JSON is nested too deeply") from None
    _refuse_odd(value)
    return value, end


def refuse_faults(message: Message) -> None:
    """What the model should learn to write has no calls that could not be read: their text is lost."""
    for call in message.calls:
        if call.fault is not None:
            raise ModelError(
                f"call {call.id!r} could not be read when it was made, so it is no target for training; leave it out"
            )


def to_json_text(value: JSON) -> str:
    """JSON as the models' templates write it: one line, and letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def name_in(broken: str) -> str:
    """The tool's name in a call that is no JSON, or an empty string."""
    found = _NAME.search(broken)
    return found[1] if found else ""


_NAME = re.compile(r'"name"\s*:\s*"([^"\\\n]{1,64})"')
_SURROGATE = re.compile("[\ud800-\udfff]")


def _refuse_odd(value: JSON) -> None:
    """Refuse what Python's reader takes but others cannot carry further: deep nesting, and half of a surrogate pair."""
    open_values = [(value, 0)]
    while open_values:
        item, depth = open_values.pop()
        if depth > _MAX_DEPTH:
            raise Unreadable("its JSON is nested too deeply")
        if isinstance(item, str) and _SURROGATE.search(item):
            raise Unreadable("a \\u escape in it is only half of a surrogate pair")
        if isinstance(item, dict):
            open_values += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            open_values += [(part, depth + 1) for part in item]


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Unreadable(f"the key {twice[:40]!r} occurs twice in one object")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Unreadable(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise Unreadable(f"a number in it has {len(text)} digits")
    return int(text)


def _constant(text: str) -> NoReturn:
    raise Unreadable(f"{text} is no JSON value; use a number, a string or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_constant)
