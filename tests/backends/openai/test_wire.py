"""The chat API's format: what we say is written as it wants, what it says is read or refused by name."""

import json
from contextlib import suppress
from typing import Any

import pytest
from http_server import chat
from hypothesis import given
from hypothesis import strategies as st

from palestra.backends.openai.usage import usage_of
from palestra.backends.openai.wire import outgoing, read_chat, read_completion
from palestra.config import Prices
from palestra.errors import InfrastructureError
from palestra.message import Image, Message, Text, ToolCall, assistant, user


def test_arguments_go_out_as_text_and_what_is_ours_stays_here() -> None:
    said = outgoing(assistant("hm", ToolCall("c1", "look", {"at": "Zürich"}, fault="unreadable")))
    assert said == {
        "role": "assistant",
        "content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Zürich"}'}}],
    }
    assert outgoing(Message("tool", "sun", call_id="c1", name="look")) == {"role": "tool", "content": "sun", "tool_call_id": "c1"}
    shown = outgoing(user((Text("see"), Image(b"png"))))
    assert shown["content"][1]["image_url"]["url"] == "data:image/png;base64,cG5n"


def test_a_reply_is_read_and_goes_back_as_it_came() -> None:
    said = chat("so", [("look", '{"at": "here"}')], finish="tool_calls")
    said.body["choices"][0]["message"] |= {"reasoning": "hmm", "reasoning_details": [{"signature": "abc"}], "audio": None}
    reply = read_chat(said.body)
    assert reply.message == Message("assistant", "so", (ToolCall("id-look-0", "look", {"at": "here"}),), thinking="hmm")
    assert reply.finish == "stop"
    assert reply.raw["reasoning_details"] == [{"signature": "abc"}]
    assert reply.raw["tool_calls"][0]["function"]["arguments"] == '{"at": "here"}'
    assert "audio" not in reply.raw
    assert read_chat(chat("cut", finish="length").body).finish == "length"
    assert "tool_calls" not in read_chat(chat("done").body).raw


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"at": ', "cut off"),
        ("[1]", "must be a JSON object"),
        ('{"at": 1} and', "more text"),
        ('{"a": 1, "a": 2}', "occurs twice"),
        ('{"x": NaN}', "no JSON value"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested too deeply"),
    ],
)
def test_arguments_that_cannot_be_read_are_the_models_to_mend(arguments: str, words: str) -> None:
    reply = read_chat(chat(calls=[("look", arguments)]).body)
    [call] = reply.message.calls
    assert words in str(call.fault)
    # Servers refuse a history with broken arguments, so the text goes back inside of an object.
    assert json.loads(reply.raw["tool_calls"][0]["function"]["arguments"]) == {"unreadable": arguments}


def test_a_call_without_id_or_arguments_is_a_call() -> None:
    body = chat(calls=[("look", "")]).body
    body["choices"][0]["message"]["tool_calls"][0]["id"] = None
    reply = read_chat(body)
    assert reply.message.calls == (ToolCall("call_0", "look", {}),)
    assert reply.raw["tool_calls"][0]["id"] == "call_0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.pop("choices"), "no list 'choices'"),
        (lambda body: body.update(choices=[]), "not one choice but 0"),
        (lambda body: body.update(choices=[None]), "not one choice"),
        (lambda body: body["choices"][0].pop("message"), "has no message"),
        (lambda body: body["choices"][0].update(finish_reason="abort"), "finish_reason is 'abort'"),
        (lambda body: body["choices"][0].update(finish_reason=None), "finish_reason is None"),
        (lambda body: body["choices"][0]["message"].update(content=[1]), "no text"),
        (lambda body: body["choices"][0]["message"].update(tool_calls={"a": 1}), "no list 'tool_calls'"),
        (lambda body: body["choices"][0]["message"].update(tool_calls=[{"function": {}}]), "no name"),
        (lambda body: body.update(prompt_token_ids=["a"]), "no list of numbers"),
        (lambda body: body["choices"][0].update(token_ids=[True]), "no list of numbers"),
    ],
)
def test_nonsense_is_named(change: Any, words: str) -> None:
    body = chat("hello").body
    change(body)
    with pytest.raises(InfrastructureError, match=words):
        read_chat(body)


WORDS = (
    *("choices", "message", "content", "tool_calls", "function", "name", "arguments", "finish_reason", "id", "reasoning"),
    *("logprobs", "token_logprobs", "top_logprobs", "token_ids", "prompt_token_ids"),
    *("usage", "prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"),
)
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "stop", "length", "{}"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["choices", "usage", "prompt_token_ids"]), NONSENSE))
def test_whatever_a_server_answers_is_read_or_refused(body: dict[str, Any]) -> None:
    for read in (read_chat, read_completion):
        with suppress(InfrastructureError):
            read(body)
    assert usage_of(body, 1, Prices(input=1, output=1))["cost"] >= 0


@given(NONSENSE, NONSENSE)
def test_whatever_a_choice_holds_is_read_or_refused(message: Any, logprobs: Any) -> None:
    choice = {"finish_reason": "stop", "message": message, "logprobs": logprobs, "token_ids": [1]}
    for read in (read_chat, read_completion):
        with suppress(InfrastructureError):
            read({"choices": [choice]})


def test_what_an_answer_costs() -> None:
    counted = {"prompt_tokens": 1000, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 600}}
    prices = Prices(input=2.0, cached_input=0.5, output=10.0)
    usage = usage_of({"usage": counted}, 3, prices)
    assert usage == {
        "requests": 1.0,
        "retries": 2.0,
        "uncounted": 0.0,
        "prompt_tokens": 1000.0,
        "cached_tokens": 600.0,
        "completion_tokens": 50.0,
        "cost": pytest.approx((400 * 2.0 + 600 * 0.5 + 50 * 10.0) / 1e6),
    }
    assert usage_of({"usage": counted}, 1, Prices(input=2.0))["cost"] == pytest.approx(0.002)
    assert usage_of({}, 1, prices)["uncounted"] == 1.0
