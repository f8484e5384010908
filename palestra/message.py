"""What is said: messages, their parts, and the tool calls in them. Tokens live in `trajectory.py`, wire formats in `render/`."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

JSON = Any  # a precise recursive alias costs more casts than it catches errors

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Image:
    data: bytes
    media_type: str = "image/png"


Content = str | tuple[Text | Image, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model wrote. With a `fault` it could not be read: the fault is answered, and no tool runs."""

    id: str
    name: str
    arguments: Mapping[str, JSON]
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: Content = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    """In a tool's message: the call that it answers."""
    name: str | None = None
    """In a tool's message: the tool that answers."""
    thinking: str | None = None

    @property
    def text(self) -> str:
        """The content without its images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, Text))


def system(text: str) -> Message:
    return Message("system", text)


def user(content: Content) -> Message:
    return Message("user", content)


def assistant(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


def to_json(message: Message) -> dict[str, JSON]:
    """The message as OpenAI-style JSON, which the ledger and JSONL files hold. `from_json` reads it back."""
    value: dict[str, JSON] = {"role": message.role, "content": _content_to_json(message.content)}
    if message.calls:
        value["tool_calls"] = [_call_to_json(call) for call in message.calls]
    if message.call_id is not None:
        value["tool_call_id"] = message.call_id
    if message.name is not None:
        value["name"] = message.name
    if message.thinking is not None:
        value["reasoning_content"] = message.thinking
    return value


def from_json(value: Mapping[str, JSON]) -> Message:
    content = value.get("content")
    return Message(
        role=value["role"],
        content="" if content is None else _content_from_json(content),
        calls=tuple(_call_from_json(call, i) for i, call in enumerate(value.get("tool_calls") or ())),
        call_id=value.get("tool_call_id"),
        name=value.get("name"),
        thinking=value.get("reasoning_content"),
    )


def _content_to_json(content: Content) -> JSON:
    if isinstance(content, str):
        return content
    return [_part_to_json(part) for part in content]


def _part_to_json(part: Text | Image) -> JSON:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    url = f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _content_from_json(value: str | Sequence[Mapping[str, JSON]]) -> Content:
    if isinstance(value, str):
        return value
    return tuple(_part_from_json(part) for part in value)


def _part_from_json(value: Mapping[str, JSON]) -> Text | Image:
    if value["type"] == "text":
        return Text(value["text"])
    head, found, data = value["image_url"]["url"].partition(";base64,")
    if not found:
        raise ValueError(f"an image must be a data URL in base64, not {head[:80]!r}")
    return Image(base64.b64decode(data), head.removeprefix("data:"))


def _call_to_json(call: ToolCall) -> JSON:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    value: dict[str, JSON] = {"id": call.id, "type": "function", "function": function}
    if call.fault is not None:
        value["fault"] = call.fault
    return value


def _call_from_json(value: Mapping[str, JSON], index: int) -> ToolCall:
    function, fault = value["function"], value.get("fault")
    arguments = function["arguments"]
    if isinstance(arguments, str):  # OpenAI's wire format nests JSON, as the model wrote it, in a string
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            arguments, fault = {}, f"the arguments of {function['name']} are not valid JSON: {error}"
    if not isinstance(arguments, Mapping):
        arguments, fault = {}, f"the arguments of {function['name']} must be a JSON object"
    return ToolCall(value.get("id") or f"call_{index}", function["name"], arguments, fault)
