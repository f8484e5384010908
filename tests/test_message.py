import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.message import Image, Message, Role, Text, ToolCall, assistant, from_json, system, to_json, user

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)
parts = st.builds(Text, st.text()) | st.builds(Image, st.binary(), st.sampled_from(["image/png", "image/jpeg"]))
calls = st.builds(
    ToolCall,
    id=st.text(min_size=1),
    name=st.text(),
    arguments=st.dictionaries(st.text(), json_values, max_size=3),
    fault=st.none() | st.text(),
)
messages = st.builds(
    Message,
    role=st.sampled_from(get_args(Role)),
    content=st.text() | st.lists(parts, max_size=3).map(tuple),
    calls=st.lists(calls, max_size=2).map(tuple),
    call_id=st.none() | st.text(),
    name=st.none() | st.text(),
    thinking=st.none() | st.text(),
)


@given(messages)
def test_json_brings_every_message_back(message: Message) -> None:
    assert from_json(json.loads(json.dumps(to_json(message)))) == message


def test_the_json_is_openai_s() -> None:
    call = ToolCall("c1", "add", {"a": 1})
    assert to_json(assistant("So:", call)) == {
        "role": "assistant",
        "content": "So:",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert to_json(Message("tool", "2", call_id="c1", name="add")) == {
        "role": "tool",
        "content": "2",
        "tool_call_id": "c1",
        "name": "add",
    }
    assert to_json(user((Text("see"), Image(b"abc", "image/jpeg"))))["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,YWJj"}},
    ]


def test_text_is_the_content_without_images() -> None:
    assert user((Text("a"), Image(b"x"), Text("b"))).text == "ab"
    assert system("plain").text == "plain"


def wire(arguments: object) -> ToolCall:
    """A call as an OpenAI-compatible server sends it."""
    function = {"name": "add", "arguments": arguments}
    (call,) = from_json({"role": "assistant", "content": None, "tool_calls": [{"function": function}]}).calls
    return call


def test_arguments_nested_as_a_string_are_read() -> None:
    assert wire('{"a": 1}') == ToolCall("call_0", "add", {"a": 1})
    assert wire("") == ToolCall("call_0", "add", {})


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [('{"a": 1', "not valid JSON"), ("[" * 100_000, "not valid JSON"), ("[1]", "a JSON object"), ("null", "a JSON object")],
)
def test_arguments_that_the_model_broke_become_the_call_s_fault(arguments: str, fault: str) -> None:
    call = wire(arguments)
    assert call.arguments == {}
    assert call.fault is not None
    assert fault in call.fault
    assert "add" in call.fault


def test_missing_content_is_empty() -> None:
    assert from_json({"role": "assistant", "content": None}).content == ""
    assert from_json({"role": "assistant"}).content == ""


def test_an_image_elsewhere_is_refused_not_emptied() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(ValueError, match=r"example\.org"):
        from_json({"role": "user", "content": [part]})
