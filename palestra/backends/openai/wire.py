"""Messages as the chat API writes them, and its answers as replies. Whatever is not as the API says is an
`InfrastructureError` that names it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.errors import InfrastructureError
from palestra.message import JSON, Message, ToolCall, to_json
from palestra.render.calls import Unreadable, decode
from palestra.rollout import seed_of
from palestra.trajectory import FinishReason

_FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "content_filter": "stop",
    "length": "length",
}


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    finish: FinishReason
    raw: dict[str, JSON]
    """The message as it goes back with the next request: all that the server said, thoughts and signatures included."""
    prompt_ids: list[int] | None
    ids: list[int] | None


@dataclass(frozen=True, slots=True)
class Written:
    """A completion in tokens."""

    prompt_ids: list[int] | None
    ids: list[int] | None
    logprobs: list[float] | None
    top: Mapping[str, float]
    """The likeliest tokens in the first place, where they were asked for."""
    finish: FinishReason


def request_seed(seed: int, turn: int) -> int:
    """A seed for each request of a rollout; some servers take no more than 31 bits."""
    return seed_of(seed, turn) >> 32


def outgoing(message: Message) -> dict[str, JSON]:
    """A message of ours, with arguments as the JSON text that the API wants."""
    value = to_json(message)
    value.pop("name", None)  # the API knows no name of a tool's message
    for call in value.get("tool_calls", ()):
        call.pop("fault", None)
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return value


def read_chat(body: Mapping[str, JSON]) -> Reply:
    choice = _choice(body)
    said = choice.get("message")
    if not isinstance(said, dict):
        raise InfrastructureError(f"the server's choice has no message: {_start(choice)}")
    raw = {key: value for key, value in said.items() if value is not None and value != []} | {"role": "assistant"}
    raw.setdefault("content", "")
    if not isinstance(raw["content"], str):
        raise InfrastructureError(f"the server's message has a content that is no text: {_start(raw['content'])}")
    given = [_given(call, index) for index, call in enumerate(_list(raw.pop("tool_calls", []), "tool_calls"))]
    calls = tuple(_read_call(call) for call in given)
    if given:
        raw["tool_calls"] = [_readable(call, read) for call, read in zip(given, calls, strict=True)]
    thinking = raw.get("reasoning_content", raw.get("reasoning"))
    message = Message("assistant", raw["content"], calls, thinking=thinking if isinstance(thinking, str) else None)
    return Reply(message, _finish(choice), raw, _ids(body.get("prompt_token_ids")), _ids(choice.get("token_ids")))


def read_completion(body: Mapping[str, JSON]) -> Written:
    choice = _choice(body)
    logprobs, top = _logprobs(choice.get("logprobs"))
    prompt_ids = _ids(choice.get("prompt_token_ids", body.get("prompt_token_ids")))
    return Written(prompt_ids, _ids(choice.get("token_ids")), logprobs, top, _finish(choice))


def _logprobs(drawn: JSON) -> tuple[list[float] | None, dict[str, float]]:
    """Those of the tokens that were written, and those of the likeliest in the first place."""
    if drawn is None:
        return None, {}
    try:
        written, top = drawn["token_logprobs"], (drawn.get("top_logprobs") or [{}])[0]
        values = [*written, *top.values()]
    except (KeyError, TypeError, AttributeError):
        raise InfrastructureError(f"the server's logprobs are not as the completions API has them: {_start(drawn)}") from None
    if not all(isinstance(value, int | float) and math.isfinite(value) and value < 1e-3 for value in values):
        raise InfrastructureError(f"the server's logprobs are not logarithms of probabilities: {_start(values)}")
    return list(written), dict(top)


def _choice(body: Mapping[str, JSON]) -> dict[str, Any]:
    choices = _list(body.get("choices"), "choices")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise InfrastructureError(f"the server's answer has not one choice but {len(choices)}: {_start(body)}")
    return choices[0]


def _given(call: JSON, index: int) -> dict[str, JSON]:
    """A call with a name, an id, and arguments as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InfrastructureError(f"the server's tool call has no name: {_start(call)}")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    known = call.get("id")
    name = known if isinstance(known, str) and known else f"call_{index}"
    return {**call, "id": name, "type": "function", "function": {**function, "arguments": arguments}}


def _read_call(call: Mapping[str, JSON]) -> ToolCall:
    name, text = call["function"]["name"], call["function"]["arguments"].strip()
    try:
        arguments, end = decode(text)
        if end < len(text):
            raise Unreadable(f"there is more text after the JSON object: {text[end : end + 40]!r}")
        if not isinstance(arguments, dict):
            raise Unreadable("they must be a JSON object")
    except Unreadable as error:
        return ToolCall(call["id"], name, {}, f"The arguments of {name} could not be read: {error}.")
    return ToolCall(call["id"], name, arguments)


def _readable(call: dict[str, JSON], read: ToolCall) -> dict[str, JSON]:
    """Servers refuse to read back arguments that are no JSON object, though their own model wrote them."""
    if read.fault is None:
        return call
    wrapped = json.dumps({"unreadable": call["function"]["arguments"]})
    return {**call, "function": {**call["function"], "arguments": wrapped}}


def _finish(choice: Mapping[str, JSON]) -> FinishReason:
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or reason not in _FINISHES:
        raise InfrastructureError(f"the server's finish_reason is {reason!r}; known: {', '.join(_FINISHES)}")
    return _FINISHES[reason]


def _ids(value: JSON) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise InfrastructureError(f"the server's token ids are no list of numbers: {_start(value)}")
    return value


def _list(value: JSON, name: str) -> Sequence[JSON]:
    if not isinstance(value, list):
        raise InfrastructureError(f"the server's answer has no list {name!r}: {_start(value)}")
    return value


def _start(value: JSON) -> str:
    return repr(value)[:200]
